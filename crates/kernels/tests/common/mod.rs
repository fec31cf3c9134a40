//! Made-up inputs and the teams every result must be equal on.

use std::sync::LazyLock;
use std::time::Duration;

use twinfer_kernels::{Isa, ThreadTeam};

/// Every instruction set of this processor with 1 thread and with more.
pub(crate) fn teams() -> Vec<&'static ThreadTeam> {
    static TEAMS: LazyLock<Vec<ThreadTeam>> = LazyLock::new(|| {
        let mut teams = Vec::new();
        for (place, isa) in Isa::available().into_iter().enumerate() {
            for threads in if place == 0 { 1..=4 } else { place..=place + 1 } {
                teams.push(ThreadTeam::new(threads, None, isa).unwrap());
            }
        }
        let plain = Isa::available()[0].without_bf16();
        teams.push(ThreadTeam::with_spin(2, None, plain, Duration::from_micros(20)).unwrap());
        teams
    });
    TEAMS.iter().collect()
}

/// Reproducible values around 0, of several magnitudes (SplitMix64).
pub(crate) fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    (0..count)
        .map(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut bits = state;
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            bits ^= bits >> 31;
            let unit = (bits >> 40) as f32 / (1u32 << 24) as f32 * 2.0 - 1.0;
            unit * [1.0, 1.0, 0.25, 3.0][(bits & 3) as usize]
        })
        .collect()
}

/// Equal bits; any NaN equals any NaN, since hardware may choose another one's payload.
pub(crate) fn assert_same_bits(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (place, (a, e)) in actual.iter().zip(expected).enumerate() {
        let same = a.to_bits() == e.to_bits() || a.is_nan() && e.is_nan();
        assert!(
            same,
            "{what}: value {place} is {a:e} ({:08x}), not {e:e} ({:08x})",
            a.to_bits(),
            e.to_bits()
        );
    }
}
