//! Random numbers by counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
//! 1, 2, 3", SC 2011). A number is a function of its key and counter alone, so a draw does not depend on
//! what else runs in the batch or on how often the sequence was computed.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Uniform in [0, 1), 53 bits: the number of a request's `seed`, its `choice`, and the absolute
/// `position` of the token to be drawn.
pub fn uniform(seed: u64, choice: u32, position: u64) -> f64 {
    let [p0, p1] = halves(position);
    let [a, b, _, _] = philox([p0, p1, choice, 0], halves(seed));
    let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
    bits as f64 * (1.0 / (1u64 << 53) as f64)
}

/// One block of four numbers.
pub(crate) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let [low0, high0] = halves(u64::from(MULTIPLIERS[0]) * u64::from(counter[0]));
        let [low1, high1] = halves(u64::from(MULTIPLIERS[1]) * u64::from(counter[2]));
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
    }
    counter
}

/// Low half first.
fn halves(value: u64) -> [u32; 2] {
    [(value & 0xFFFF_FFFF) as u32, (value >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `kat_vectors` of the authors' library Random123.
    #[test]
    fn published_vectors() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([!0; 4], [!0; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_numbers_are_uniform_and_depend_on_each_part_of_the_key() {
        let n = 100_000u32;
        let mean = (0..u64::from(n)).map(|p| uniform(7, 0, p)).sum::<f64>() / f64::from(n);
        assert!((mean - 0.5).abs() < 0.005, "{mean}");
        let mut bins = [0u32; 16];
        for p in 0..u64::from(n) {
            bins[(uniform(7, 0, p) * 16.0) as usize] += 1;
        }
        let expected = f64::from(n) / 16.0;
        let chi2: f64 = bins
            .iter()
            .map(|&b| (f64::from(b) - expected).powi(2) / expected)
            .sum();
        assert!(
            chi2 < 50.0,
            "chi-squared with 15 degrees of freedom is {chi2}"
        );
        let base = uniform(7, 0, 3);
        for other in [
            uniform(8, 0, 3),
            uniform(7 + (1 << 32), 0, 3),
            uniform(7, 1, 3),
            uniform(7, 0, 4),
        ] {
            assert_ne!(base.to_bits(), other.to_bits());
        }
    }
}
