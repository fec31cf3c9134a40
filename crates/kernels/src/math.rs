//! Elementary functions with the same bits everywhere.

/// 1.5 · 2^23: adding and subtracting it rounds to the nearest integer (ties to even) for |x| < 2^22.
pub(crate) const ROUND_MAGIC: f32 = 12_582_912.0;
pub(crate) const EXP_MIN: f32 = -104.0;
pub(crate) const EXP_MAX: f32 = 89.0;
pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts: the first has few bits, so that n · LN2_HIGH is exact.
pub(crate) const LN2_HIGH: f32 = 355.0 / 512.0;
pub(crate) const LN2_LOW: f32 = -2.121_944_4e-4;
/// e^r ≈ 1 + r + r² · P(r) on |r| ≤ ln 2 / 2, coefficients from the highest power down (those of Cephes `expf`).
pub(crate) const EXP_POLYNOMIAL: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_6e-1,
    0.5,
];

/// 2^r ≈ 1 + r · P(r) on |r| ≤ 1/2 to 1.1e-4 relative, coefficients from the highest power down: a twentieth of what
/// rounding to bf16 adds.
pub(crate) const EXP2_POLYNOMIAL: [f32; 3] = [0.055_008_933, 0.242_210_97, 0.693_282_9];
/// Below this 2^x counts as zero, as a bf16 of that size does in products.
pub(crate) const EXP2_ZERO: f32 = -56.0;
/// Numbers are not below this, so that 2^x is normal.
pub(crate) const EXP2_MIN: f32 = -120.0;

/// 2^x for x ≤ 1 with a relative error below 1.1e-4; 0 for x < −56, NaN for NaN, exactly 1 at 0.
#[inline(always)]
pub fn exp2_short(x: f32) -> f32 {
    let clamped = if x < EXP2_MIN { EXP2_MIN } else { x };
    let n = (clamped + ROUND_MAGIC) - ROUND_MAGIC;
    let r = clamped - n;
    let mut p = EXP2_POLYNOMIAL[0];
    for coefficient in &EXP2_POLYNOMIAL[1..] {
        p = p.mul_add(r, *coefficient);
    }
    let p = p.mul_add(r, 1.0) * power_of_two(n);
    if x < EXP2_ZERO { 0.0 } else { p }
}

/// e^x with a relative error below 2 ulp; 0 below −104, infinity above 88.73, NaN for NaN, exactly 1 at 0. Subnormal
/// results are rounded once more.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // A comparison with NaN is false and keeps it.
    let x = if x < EXP_MIN { EXP_MIN } else { x };
    let x = if x > EXP_MAX { EXP_MAX } else { x };
    let n = (x * LOG2_E + ROUND_MAGIC) - ROUND_MAGIC;
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let mut p = EXP_POLYNOMIAL[0];
    for coefficient in &EXP_POLYNOMIAL[1..] {
        p = p.mul_add(r, *coefficient);
    }
    let p = p.mul_add(r * r, r) + 1.0;
    // Two factors reach the subnormals and infinity, where 2^n alone is no normal number.
    let half = (n * 0.5 + ROUND_MAGIC) - ROUND_MAGIC;
    p * power_of_two(half) * power_of_two(n - half)
}

/// 1 / (1 + e^−x).
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x / (1 + e^−x) = x · sigmoid(x).
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// 2^n for an integer n in −126..=127.
#[inline(always)]
fn power_of_two(n: f32) -> f32 {
    f32::from_bits(((n as i32 + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp_over_the_normal_range() {
        let mut worst = 0.0f64;
        let mut x = -87.3f32;
        while x < 88.7 {
            let exact = f64::from(x).exp();
            let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
            worst = worst.max((f64::from(exp(x)) - exact).abs() / ulp);
            x += 1.234e-3;
        }
        assert!(worst < 2.0, "{worst}");
    }

    #[test]
    fn exp2_short_is_close_and_ends_at_its_zero() {
        let mut worst = 0.0f64;
        let mut x = EXP2_ZERO;
        while x <= 1.0 {
            worst = worst.max((f64::from(exp2_short(x)) / f64::from(x).exp2() - 1.0).abs());
            x += 7.3e-4;
        }
        assert!(worst < 1.1e-4, "{worst}");
        assert_eq!((exp2_short(0.0), exp2_short(-0.0)), (1.0, 1.0));
        assert_eq!(exp2_short(EXP2_ZERO), 2f32.powi(-56));
        for low in [EXP2_ZERO.next_down(), -150.0, -1e30, f32::NEG_INFINITY] {
            assert_eq!(exp2_short(low), 0.0, "{low}");
        }
        assert!(exp2_short(f32::NAN).is_nan());
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0).to_bits(), 1.0f32.to_bits());
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(
            (exp(f32::NEG_INFINITY), exp(-110.0), exp(-1e30)),
            (0.0, 0.0, 0.0)
        );
        assert_eq!(
            (exp(f32::INFINITY), exp(88.8), exp(1e30)),
            (f32::INFINITY, f32::INFINITY, f32::INFINITY)
        );
        assert!(exp(88.72).is_finite() && exp(f32::NAN).is_nan());
        let subnormal = exp(-100.0);
        assert!(
            (f64::from(subnormal) / (-100.0f64).exp() - 1.0).abs() < 0.02,
            "{subnormal:e}"
        );
    }

    #[test]
    fn silu_and_sigmoid_saturate_without_nan() {
        assert_eq!(
            (sigmoid(200.0), sigmoid(-200.0), sigmoid(0.0)),
            (1.0, 0.0, 0.5)
        );
        assert_eq!((silu(200.0), silu(-200.0), silu(0.0)), (200.0, 0.0, 0.0));
        assert!(silu(f32::NEG_INFINITY).is_nan());
    }
}
