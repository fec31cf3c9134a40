//! Angles of rotary embeddings, in arithmetic of our own: a C library's sine differs between
//! versions in the last bit, and with it KV.

use std::f64::consts::FRAC_2_PI;

/// π/2 in three parts; the first two have 33 significant bits, so that products with whole numbers
/// up to 2^20 are exact.
const FRAC_PI_2_HIGH: f64 = f64::from_bits(0x3FF9_21FB_5440_0000);
const FRAC_PI_2_MIDDLE: f64 = f64::from_bits(0x3DD0_B461_1A60_0000);
const FRAC_PI_2_LOW: f64 = f64::from_bits(0x3BA3_198A_2E03_7073);

/// Frequencies of one rotated width.
#[derive(Clone, Debug)]
pub(crate) struct RopeTable {
    frequencies: Vec<f32>,
    factor: f32,
}

impl RopeTable {
    pub(crate) fn new(frequencies: Vec<f32>, factor: f32) -> Self {
        Self {
            frequencies,
            factor,
        }
    }

    /// Half of the rotated width.
    pub(crate) fn half(&self) -> usize {
        self.frequencies.len()
    }

    /// cos and sin of all frequencies at one position, both times the factor. The angle is rounded to
    /// f32, as in the reference implementations that models were trained with.
    pub(crate) fn fill(&self, position: u32, cos: &mut [f32], sin: &mut [f32]) {
        for ((frequency, cos), sin) in self.frequencies.iter().zip(cos).zip(sin) {
            let (s, c) = sin_cos(f64::from(position as f32 * frequency));
            *cos = c as f32 * self.factor;
            *sin = s as f32 * self.factor;
        }
    }
}

/// cos and sin of a step's rows, `[rows, half]` each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Angles<'a> {
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    pub(crate) half: usize,
}

impl<'a> Angles<'a> {
    /// Those of one row.
    pub(crate) fn of(&self, row: usize) -> (&'a [f32], &'a [f32]) {
        let range = row * self.half..(row + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Sine and cosine of an angle in 0..2^19, to about 1e-16.
fn sin_cos(angle: f64) -> (f64, f64) {
    let quarter = (angle * FRAC_2_PI).round();
    let x =
        ((angle - quarter * FRAC_PI_2_HIGH) - quarter * FRAC_PI_2_MIDDLE) - quarter * FRAC_PI_2_LOW;
    let z = x * x;
    // Taylor series; |x| <= π/4, so the first terms left out are below 1e-17.
    let mut sin = -1.0 / 1_307_674_368_000.0;
    for divisor in [
        6_227_020_800.0,
        -39_916_800.0,
        362_880.0,
        -5_040.0,
        120.0,
        -6.0,
    ] {
        sin = sin * z + 1.0 / divisor;
    }
    let sin = x + x * (z * sin);
    let mut cos = 1.0 / 20_922_789_888_000.0;
    for divisor in [
        -87_178_291_200.0,
        479_001_600.0,
        -3_628_800.0,
        40_320.0,
        -720.0,
        24.0,
        -2.0,
    ] {
        cos = cos * z + 1.0 / divisor;
    }
    let cos = 1.0 + z * cos;
    match quarter as i64 & 3 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sine_and_cosine_are_right_over_the_longest_contexts() {
        for step in 0..2_000_000u32 {
            let angle = f64::from(step as f32 * 0.1310_7f32);
            let (s, c) = sin_cos(angle);
            assert!(
                (s - angle.sin()).abs() < 1e-12 && (c - angle.cos()).abs() < 1e-12,
                "{angle}: {s} {c}"
            );
        }
    }
}
