//! Grouped-query attention gives the bits of its definition on every instruction set, for any chunking, block size and
//! thread count, and never looks at positions behind a row's own.

#![cfg(test)]

mod common;

use common::{assert_same_bits, teams, values};
use proptest::prelude::*;
use twinfer_kernels::{
    DType, GqaParams, GqaSeq, HeadRows, KernelError, ThreadTeam, gqa_attention, reference,
    store_f32,
};

/// One sequence: queries and KV rows of every position.
struct Case {
    params: GqaParams,
    positions: usize,
    q: Vec<f32>,
    units: Vec<Vec<u8>>,
}

impl Case {
    fn new(params: GqaParams, positions: usize, seed: u64) -> Self {
        let kv = values(positions * 2 * params.kv_heads * params.head_dim, seed ^ 1);
        Self::with_kv(params, positions, seed, &kv)
    }

    fn with_kv(params: GqaParams, positions: usize, seed: u64, kv: &[f32]) -> Self {
        let width = 2 * params.kv_heads * params.head_dim;
        let units = kv.chunks(params.block_size * width).map(|rows| {
            let mut unit = vec![0xff; params.block_size * width * params.kv_type.size()];
            let used = rows.len() * params.kv_type.size();
            store_f32(params.kv_type, rows, &mut unit[..used]).unwrap();
            unit
        });
        Self {
            params,
            positions,
            q: values(positions * params.heads * params.head_dim, seed ^ 2),
            units: units.collect(),
        }
    }

    fn width(&self) -> usize {
        self.params.heads * self.params.head_dim
    }

    fn q(&self, from: usize, to: usize) -> HeadRows<'_> {
        let q = &self.q[from * self.width()..to * self.width()];
        HeadRows::dense(q, self.params.heads, self.params.head_dim).unwrap()
    }

    /// The rows `from .. to` in one call.
    fn chunk(&self, team: &ThreadTeam, from: usize, to: usize) -> Vec<f32> {
        let units: Vec<&[u8]> = self.units.iter().map(Vec::as_slice).collect();
        let seq = GqaSeq {
            rows: 0..to - from,
            first_position: from,
            units: &units,
        };
        let mut out = vec![f32::NAN; (to - from) * self.width()];
        gqa_attention(team, &self.params, self.q(from, to), &[seq], &mut out).unwrap();
        out
    }

    fn reference(&self) -> Vec<f32> {
        let units: Vec<&[u8]> = self.units.iter().map(Vec::as_slice).collect();
        let seq = GqaSeq {
            rows: 0..self.positions,
            first_position: 0,
            units: &units,
        };
        let mut out = vec![f32::NAN; self.positions * self.width()];
        reference::gqa_attention(&self.params, self.q(0, self.positions), &[seq], &mut out);
        out
    }
}

fn params(heads: usize, kv_heads: usize, head_dim: usize, kv_type: DType) -> GqaParams {
    GqaParams {
        heads,
        kv_heads,
        head_dim,
        block_size: 16,
        kv_type,
        scale: 0.17,
    }
}

#[test]
fn odd_shapes_have_the_bits_of_the_definition() {
    let shapes = [
        (1, 1, 1),
        (2, 1, 5),
        (9, 3, 20),
        (8, 8, 24),
        (16, 4, 48),
        (6, 2, 80),
        (40, 2, 64),
    ];
    for (seed, (heads, kv_heads, head_dim)) in shapes.into_iter().enumerate() {
        for kv_type in [DType::F32, DType::Bf16] {
            for positions in [1, 2, 17, 63, 64, 65, 130] {
                let shape = params(heads, kv_heads, head_dim, kv_type);
                let case = Case::new(shape, positions, seed as u64);
                let expected = case.reference();
                for team in teams() {
                    let what = format!("{shape:?} {positions} {:?}", team.isa());
                    assert_same_bits(&case.chunk(team, 0, positions), &expected, &what);
                }
            }
        }
    }
}

#[test]
fn a_prompt_in_any_chunks_and_blocks_gives_the_same_rows() {
    for kv_type in [DType::F32, DType::Bf16] {
        let case = Case::new(params(9, 3, 64, kv_type), 200, 9);
        let expected = case.reference();
        for team in teams() {
            for chunk in [1, 8, 63, 64, 199] {
                for from in (0..case.positions).step_by(chunk) {
                    let to = (from + chunk).min(case.positions);
                    let rows = from * case.width()..to * case.width();
                    let what = format!("chunk {chunk} at {from}");
                    assert_same_bits(&case.chunk(team, from, to), &expected[rows], &what);
                }
            }
        }
        let kv = values(200 * 2 * 3 * 64, 9 ^ 1);
        for block_size in [1, 7, 64, 256] {
            let shape = GqaParams {
                block_size,
                ..case.params
            };
            let other = Case::with_kv(shape, 200, 9, &kv);
            let what = format!("block size {block_size}");
            assert_same_bits(&other.chunk(teams()[1], 0, 200), &expected, &what);
        }
    }
}

#[test]
fn any_factor_on_scores_gives_the_bits_of_the_definition() {
    for kv_type in [DType::F32, DType::Bf16] {
        for scale in [0.0, -0.17, 30.0] {
            let shape = GqaParams {
                scale,
                ..params(9, 3, 64, kv_type)
            };
            let case = Case::new(shape, 90, 4);
            let expected = case.reference();
            for team in teams() {
                let what = format!("{shape:?} {:?}", team.isa());
                assert_same_bits(&case.chunk(team, 0, 90), &expected, &what);
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_do_not_reach_rows_before_them() {
    for kv_type in [DType::F32, DType::Bf16] {
        let shape = params(4, 2, 20, kv_type);
        let mut kv = values(100 * 80, 3);
        let clean = Case::with_kv(shape, 100, 7, &kv).reference();
        for (bad, place) in [(f32::NAN, 70), (f32::INFINITY, 33)] {
            kv[place * 80 + 61] = bad;
            let case = Case::with_kv(shape, 100, 7, &kv);
            let expected = case.reference();
            let before = 33.min(place) * case.width();
            assert_same_bits(&expected[..before], &clean[..before], "definition");
            for team in teams() {
                assert_same_bits(&case.chunk(team, 0, 100), &expected, "bad values");
            }
        }
    }
}

#[test]
fn a_batch_gives_every_sequence_what_it_gets_alone() {
    let shape = params(9, 3, 64, DType::Bf16);
    let cases: Vec<Case> = [300, 64, 131, 90]
        .map(|n| Case::new(shape, n, n as u64))
        .into();
    let parts = [(250, 300), (40, 64), (130, 131), (89, 90)];
    let tables: Vec<Vec<&[u8]>> = cases
        .iter()
        .map(|case| case.units.iter().map(Vec::as_slice).collect())
        .collect();
    let (mut q, mut seqs, mut next) = (Vec::new(), Vec::new(), 0);
    for ((case, units), (from, to)) in cases.iter().zip(&tables).zip(parts) {
        q.extend_from_slice(&case.q[from * case.width()..to * case.width()]);
        seqs.push(GqaSeq {
            rows: next..next + to - from,
            first_position: from,
            units,
        });
        next += to - from;
    }
    for team in teams() {
        let width = 9 * 64;
        let mut out = vec![f32::NAN; next * width];
        let q = HeadRows::dense(&q, 9, 64).unwrap();
        gqa_attention(team, &shape, q, &seqs, &mut out).unwrap();
        for ((case, seq), (from, to)) in cases.iter().zip(&seqs).zip(parts) {
            let rows = seq.rows.start * width..seq.rows.end * width;
            assert_same_bits(&out[rows], &case.chunk(teams()[0], from, to), "sequence");
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused_before_anything_is_written() {
    let case = Case::new(params(4, 2, 8, DType::F32), 20, 1);
    let units: Vec<&[u8]> = case.units.iter().map(Vec::as_slice).collect();
    let short: Vec<&[u8]> = vec![&case.units[0][..1], &case.units[1]];
    let mut out = vec![-1.0; 20 * 32];
    let good = case.params;
    let refused = [
        (good, 0..21, 0, &units[..]),
        (good, 0..20, 13, &units[..]),
        (good, 0..20, usize::MAX, &units[..]),
        (good, 0..20, 0, &units[..1]),
        (good, 0..20, 0, &short[..]),
        (
            GqaParams {
                kv_heads: 3,
                ..good
            },
            0..20,
            0,
            &units[..],
        ),
        (
            GqaParams {
                kv_heads: 0,
                ..good
            },
            0..20,
            0,
            &units[..],
        ),
        (GqaParams { heads: 2, ..good }, 0..20, 0, &units[..]),
        (
            GqaParams {
                block_size: usize::MAX,
                ..good
            },
            0..20,
            0,
            &units[..],
        ),
    ];
    for (place, (shape, rows, first_position, units)) in refused.into_iter().enumerate() {
        let seq = GqaSeq {
            rows,
            first_position,
            units,
        };
        let error = gqa_attention(teams()[0], &shape, case.q(0, 20), &[seq], &mut out).unwrap_err();
        assert!(matches!(error, KernelError::Shape(_)), "{place}: {error}");
    }
    gqa_attention(teams()[0], &good, case.q(0, 20), &[], &mut out).unwrap();
    assert!(out.iter().all(|&value| value == -1.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_cut_gives_the_rows_of_the_whole(
        kv_heads in 1usize..5, group in 1usize..7, head_dim in 1usize..70, positions in 1usize..180,
        cut in 0usize..180, bf16 in any::<bool>(), seed in any::<u64>(),
    ) {
        let kv_type = if bf16 { DType::Bf16 } else { DType::F32 };
        let case = Case::new(params(kv_heads * group, kv_heads, head_dim, kv_type), positions, seed);
        let whole = case.chunk(teams()[0], 0, positions);
        let cut = cut.min(positions);
        for team in teams() {
            let mut parts = case.chunk(team, 0, cut);
            parts.extend(case.chunk(team, cut, positions));
            assert_same_bits(&parts, &whole, "cut");
        }
    }
}
