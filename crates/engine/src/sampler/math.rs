//! `exp` and `ln` made of additions, multiplications and one division in a fixed order. The system's
//! differ in the last bit from one C library to the next; these give the same bits everywhere, which
//! log-probabilities and draws are promised to have.

const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// Adding it rounds to an integer, which then stands in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// Smaller arguments give 0: the result would be no normal number.
const EXP_MIN: f64 = -708.0;

/// e^x for x ≤ 0, error below 2 units in the last place; 0 below -708.
pub(crate) fn exp(x: f64) -> f64 {
    let clamped = if x > EXP_MIN { x } else { EXP_MIN };
    let shifted = clamped * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut sum = COEFFICIENTS[0];
    for c in &COEFFICIENTS[1..] {
        sum = sum * r + c;
    }
    let scale = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1023 << 52));
    if x > EXP_MIN { sum * scale } else { 0.0 }
}

/// 1/13!, ..., 1/1!, 1/0!: |r| ≤ ln 2 / 2, so the next term is below 5e-18.
const COEFFICIENTS: [f64; 14] = [
    1.0 / 6_227_020_800.0,
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    1.0 / 2.0,
    1.0,
    1.0,
];

/// Running sums beside each other: a single one is a chain of dependent additions.
const LANES: usize = 8;

/// Sum of the values, those of each eighth place first.
pub(crate) fn sum(values: &[f64]) -> f64 {
    sum_of(values, |value| value)
}

/// `weights` becomes e^((x - max) / temperature) of each value x.
pub(crate) fn exp_all(values: &[f32], max: f32, temperature: f64, weights: &mut Vec<f64>) {
    let max = f64::from(max);
    let weight = |value: f32| exp((f64::from(value) - max) / temperature);
    weights.clear();
    weights.resize(values.len(), 0.0);
    let mut to = weights.chunks_exact_mut(LANES);
    let from = values.chunks_exact(LANES);
    let rest = from.remainder();
    for (to, from) in to.by_ref().zip(from) {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = weight(from);
        }
    }
    for (to, &from) in to.into_remainder().iter_mut().zip(rest) {
        *to = weight(from);
    }
}

/// Sum of e^(x - max), in the order of [`sum`].
pub(crate) fn exp_sum(row: &[f32], max: f32) -> f64 {
    let max = f64::from(max);
    sum_of(row, |x| exp(f64::from(x) - max))
}

fn sum_of<T: Copy>(values: &[T], term: impl Fn(T) -> f64) -> f64 {
    let mut sums = [0.0; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (sum, &value) in sums.iter_mut().zip(chunk) {
            *sum += term(value);
        }
    }
    for (sum, &value) in sums.iter_mut().zip(rest) {
        *sum += term(value);
    }
    sums.into_iter().sum()
}

/// ln x for normal x > 0.
pub(crate) fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln m = 2 artanh t; |t| ≤ 0.172, so the terms after t^21 are below 1e-18.
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let t2 = t * t;
    let mut sum = 0.0;
    for odd in (1..=21).rev().step_by(2) {
        sum = sum * t2 + 1.0 / f64::from(odd);
    }
    let e = exponent as f64;
    e * LN2_HIGH + (2.0 * t * sum + e * LN2_LOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_that_of_the_system_to_the_last_bits() {
        for i in 0..200_000 {
            let x = -f64::from(i) * 0.003_51;
            let (ours, theirs) = (exp(x), x.exp());
            assert!(
                (ours - theirs).abs() <= 4e-16 * theirs || x < EXP_MIN,
                "{x}: {ours} {theirs}"
            );
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-1e9), 0.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
    }

    #[test]
    fn ln_is_that_of_the_system_to_the_last_bits() {
        assert_eq!(ln(1.0), 0.0);
        for i in 1..200_000 {
            let x = f64::from(i) * 0.731;
            assert!(
                (ln(x) - x.ln()).abs() <= 4e-16 * x.ln().abs().max(1.0),
                "{x}"
            );
        }
    }
}
