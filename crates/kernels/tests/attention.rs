//! Attention gives the bits of its definition on every instruction set, for any block size, chunking, batch and thread
//! count, and never looks at positions behind a row's own.

#![cfg(test)]

mod common;

use common::{assert_same_bits, teams, values};
use proptest::prelude::*;
use twinfer_kernels::{
    DType, HeadRows, KernelError, MlaParams, MlaSeq, ThreadTeam, mla_attention, reference,
    round_to_bf16, store_f32,
};

/// One sequence: queries and KV rows of every position.
struct Case {
    params: MlaParams,
    positions: usize,
    q_latent: Vec<f32>,
    q_rope: Vec<f32>,
    units: Vec<Vec<u8>>,
}

impl Case {
    fn new(params: MlaParams, positions: usize, seed: u64) -> Self {
        let width = params.latent + params.rope;
        let kv = values(positions * width, seed ^ 1);
        Self {
            params,
            positions,
            q_latent: values(positions * params.heads * params.latent, seed ^ 2),
            q_rope: values(positions * params.heads * params.rope, seed ^ 3),
            units: units(&params, &kv),
        }
    }

    fn with_block_size(&self, block_size: usize) -> Self {
        let rows: Vec<u8> = self.units.concat();
        let params = MlaParams {
            block_size,
            ..self.params
        };
        let row_bytes = (params.latent + params.rope) * params.kv_type.size();
        let units = rows[..self.positions * row_bytes]
            .chunks(block_size * row_bytes)
            .map(|unit| {
                let mut unit = unit.to_vec();
                unit.resize(block_size * row_bytes, 0xff);
                unit
            });
        Self {
            params,
            units: units.collect(),
            q_latent: self.q_latent.clone(),
            q_rope: self.q_rope.clone(),
            ..*self
        }
    }

    fn heads<'a>(&self, q: &'a [f32], width: usize) -> HeadRows<'a> {
        HeadRows::dense(q, self.params.heads, width).unwrap()
    }

    fn row_width(&self) -> usize {
        self.params.heads * self.params.latent
    }

    /// The rows `from .. to` in one call.
    fn chunk(&self, team: &ThreadTeam, from: usize, to: usize) -> Vec<f32> {
        let MlaParams {
            heads,
            latent,
            rope,
            ..
        } = self.params;
        let units: Vec<&[u8]> = self.units.iter().map(Vec::as_slice).collect();
        let seq = MlaSeq {
            rows: 0..to - from,
            first_position: from,
            units: &units,
        };
        let mut out = vec![f32::NAN; (to - from) * self.row_width()];
        let q_latent = self.heads(
            &self.q_latent[from * heads * latent..to * heads * latent],
            latent,
        );
        let q_rope = self.heads(&self.q_rope[from * heads * rope..to * heads * rope], rope);
        mla_attention(team, &self.params, q_latent, q_rope, &[seq], &mut out).unwrap();
        out
    }

    fn reference(&self) -> Vec<f32> {
        let units: Vec<&[u8]> = self.units.iter().map(Vec::as_slice).collect();
        let seq = MlaSeq {
            rows: 0..self.positions,
            first_position: 0,
            units: &units,
        };
        let mut out = vec![f32::NAN; self.positions * self.row_width()];
        let q_latent = self.heads(&self.q_latent, self.params.latent);
        let q_rope = self.heads(&self.q_rope, self.params.rope);
        reference::mla_attention(&self.params, q_latent, q_rope, &[seq], &mut out);
        out
    }
}

/// KV rows cut into blocks, the rest of the last one filled with NaN.
fn units(params: &MlaParams, kv: &[f32]) -> Vec<Vec<u8>> {
    let width = params.latent + params.rope;
    kv.chunks(params.block_size * width)
        .map(|rows| {
            let mut unit = vec![0xff; params.block_size * width * params.kv_type.size()];
            store_f32(
                params.kv_type,
                rows,
                &mut unit[..rows.len() * params.kv_type.size()],
            )
            .unwrap();
            unit
        })
        .collect()
}

fn params(heads: usize, latent: usize, rope: usize, kv_type: DType) -> MlaParams {
    MlaParams {
        heads,
        latent,
        rope,
        block_size: 16,
        kv_type,
        scale: 0.17,
    }
}

#[test]
fn odd_shapes_have_the_bits_of_the_definition() {
    let shapes = [
        (1, 1, 1),
        (3, 20, 6),
        (4, 64, 16),
        (5, 24, 8),
        (7, 48, 20),
        (13, 80, 2),
        (2, 176, 24),
    ];
    for (seed, (heads, latent, rope)) in shapes.into_iter().enumerate() {
        for kv_type in [DType::F32, DType::Bf16] {
            for positions in [1, 2, 63, 64, 65, 130] {
                let case = Case::new(params(heads, latent, rope, kv_type), positions, seed as u64);
                let expected = case.reference();
                for team in teams() {
                    let what = format!(
                        "{heads} {latent} {rope} {kv_type:?} {positions} {}",
                        team.isa()
                    );
                    assert_same_bits(&case.chunk(team, 0, positions), &expected, &what);
                }
            }
        }
    }
}

#[test]
fn a_prompt_in_any_chunks_gives_the_same_rows() {
    let case = Case::new(params(6, 48, 16, DType::Bf16), 200, 9);
    let expected = case.reference();
    for team in teams() {
        for chunk in [1, 8, 63, 64, 199] {
            for from in (0..case.positions).step_by(chunk) {
                let to = (from + chunk).min(case.positions);
                let rows = from * case.row_width()..to * case.row_width();
                assert_same_bits(
                    &case.chunk(team, from, to),
                    &expected[rows],
                    &format!("chunk {chunk} at {from}"),
                );
            }
        }
    }
}

#[test]
fn the_block_size_does_not_matter() {
    let case = Case::new(params(4, 64, 16, DType::Bf16), 150, 4);
    let expected = case.reference();
    for block_size in [1, 7, 16, 64, 100, 256] {
        let other = case.with_block_size(block_size);
        for team in teams() {
            assert_same_bits(
                &other.chunk(team, 0, case.positions),
                &expected,
                &format!("block size {block_size}"),
            );
        }
    }
}

#[test]
fn a_batch_gives_every_sequence_what_it_gets_alone() {
    let shape = params(12, 64, 16, DType::Bf16);
    let cases: Vec<Case> = [5, 64, 131, 90]
        .iter()
        .map(|&n| Case::new(shape, n, n as u64))
        .collect();
    // Prefill of the first, a chunk of the second, single rows of the others; one unused row between.
    let parts = [(0, 0, 5), (1, 40, 64), (2, 130, 131), (3, 89, 90)];
    let (mut q_latent, mut q_rope, mut rows, mut tables) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut next = 0;
    for (index, from, to) in parts {
        let case = &cases[index];
        q_latent.extend_from_slice(&case.q_latent[from * 12 * 64..to * 12 * 64]);
        q_rope.extend_from_slice(&case.q_rope[from * 12 * 16..to * 12 * 16]);
        rows.push(next..next + to - from);
        next += to - from;
        if index == 1 {
            q_latent.extend(vec![1.0; 12 * 64]);
            q_rope.extend(vec![1.0; 12 * 16]);
            next += 1;
        }
        tables.push(case.units.iter().map(Vec::as_slice).collect::<Vec<_>>());
    }
    let seqs: Vec<MlaSeq<'_>> = parts
        .iter()
        .zip(&rows)
        .zip(&tables)
        .map(|(((_, from, _), rows), units)| MlaSeq {
            rows: rows.clone(),
            first_position: *from,
            units,
        })
        .collect();
    for team in teams() {
        let mut out = vec![-3.0; next * 12 * 64];
        let q_latent = HeadRows::dense(&q_latent, 12, 64).unwrap();
        let q_rope = HeadRows::dense(&q_rope, 12, 16).unwrap();
        mla_attention(team, &shape, q_latent, q_rope, &seqs, &mut out).unwrap();
        for ((index, from, to), rows) in parts.iter().zip(&rows) {
            let alone = cases[*index].chunk(teams()[0], *from, *to);
            assert_same_bits(
                &out[rows.start * 12 * 64..rows.end * 12 * 64],
                &alone,
                "sequence",
            );
        }
        assert!(
            out[29 * 12 * 64..30 * 12 * 64]
                .iter()
                .all(|&value| value == -3.0)
        );
    }
}

#[test]
fn long_contexts_and_full_sizes_have_the_same_bits() {
    let case = Case::new(params(16, 512, 64, DType::Bf16), 300, 8);
    let expected = case.chunk(teams()[0], 0, 300);
    for team in teams() {
        let row = case.chunk(team, 299, 300);
        assert_same_bits(&row, &expected[299 * case.row_width()..], team.isa().name());
    }
    let few = Case {
        positions: 70,
        ..case
    };
    assert_same_bits(
        &few.reference(),
        &expected[..70 * few.row_width()],
        "reference",
    );
}

#[test]
fn attention_is_accurate() {
    accurate(DType::F32, 2e-5);
    // Queries and probabilities are rounded to eight bits of mantissa.
    accurate(DType::Bf16, 5e-3);
}

fn accurate(kv_type: DType, tolerance: f64) {
    let case = Case::new(params(4, 64, 16, kv_type), 200, 6);
    let out = case.chunk(teams()[0], 0, 200);
    let mut kv = values(200 * 80, 6 ^ 1);
    if kv_type == DType::Bf16 {
        round_to_bf16(&mut kv);
    }
    for row in [0, 63, 64, 199] {
        for head in 0..4 {
            let q_latent = &case.q_latent[(row * 4 + head) * 64..][..64];
            let q_rope = &case.q_rope[(row * 4 + head) * 16..][..16];
            let scores: Vec<f64> = (0..=row)
                .map(|j| {
                    let key = &kv[j * 80..(j + 1) * 80];
                    let q = q_latent.iter().chain(q_rope);
                    q.zip(key)
                        .map(|(a, b)| f64::from(*a) * f64::from(*b))
                        .sum::<f64>()
                        * f64::from(0.17f32)
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let p: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = p.iter().sum();
            for column in 0..64 {
                let exact: f64 = (0..=row)
                    .map(|j| p[j] * f64::from(kv[j * 80 + column]))
                    .sum::<f64>()
                    / sum;
                let got = f64::from(out[(row * 4 + head) * 64 + column]);
                assert!(
                    (got - exact).abs() < tolerance,
                    "{row} {head} {column}: {got} {exact}"
                );
            }
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused_before_anything_is_written() {
    let case = Case::new(params(2, 8, 4, DType::F32), 20, 1);
    let units: Vec<&[u8]> = case.units.iter().map(Vec::as_slice).collect();
    let short: Vec<&[u8]> = vec![&case.units[0][..1], &case.units[1]];
    let mut out = vec![-1.0; 20 * 16];
    let run = |shape: MlaParams, q_width: usize, seqs: &[MlaSeq<'_>], out: &mut [f32]| {
        let q_latent = case.heads(&case.q_latent, q_width);
        mla_attention(
            teams()[0],
            &shape,
            q_latent,
            case.heads(&case.q_rope, 4),
            seqs,
            out,
        )
    };
    let seq = |rows, first_position, units| MlaSeq {
        rows,
        first_position,
        units,
    };
    let good = case.params;
    let refused = [
        (good, 8, vec![seq(0..21, 0, &units[..])]),
        (good, 8, vec![seq(0..20, 13, &units[..])]),
        (good, 8, vec![seq(0..20, usize::MAX, &units[..])]),
        (good, 8, vec![seq(0..20, 0, &units[..1])]),
        (good, 8, vec![seq(0..20, 0, &short[..])]),
        (
            good,
            8,
            vec![seq(5..10, 0, &units[..]), seq(9..12, 0, &units[..])],
        ),
        (
            good,
            8,
            vec![seq(5..10, 0, &units[..]), seq(0..2, 0, &units[..])],
        ),
        (good, 4, vec![seq(0..20, 0, &units[..])]),
        (
            MlaParams {
                block_size: 0,
                ..good
            },
            8,
            vec![seq(0..20, 0, &units[..])],
        ),
        (
            MlaParams {
                block_size: usize::MAX,
                ..good
            },
            8,
            vec![seq(0..20, 0, &units[..])],
        ),
        (
            MlaParams { heads: 1, ..good },
            8,
            vec![seq(0..20, 0, &units[..])],
        ),
        (
            MlaParams { latent: 0, ..good },
            8,
            vec![seq(0..20, 0, &units[..])],
        ),
    ];
    for (place, (shape, q_width, seqs)) in refused.iter().enumerate() {
        let error = run(*shape, *q_width, seqs, &mut out).unwrap_err();
        assert!(matches!(error, KernelError::Shape(_)), "{place}: {error}");
    }
    assert!(run(good, 8, &[seq(0..20, 0, &units[..])], &mut out[1..]).is_err());
    assert!(out.iter().all(|&value| value == -1.0));
    run(good, 8, &[], &mut out).unwrap();
    run(good, 8, &[seq(3..3, 0, &units[..])], &mut out).unwrap();
    assert!(out.iter().all(|&value| value == -1.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_cut_gives_the_rows_of_the_whole(
        heads in 1usize..20, latent in 1usize..100, rope in 1usize..20, positions in 1usize..180,
        cut in 0usize..180, bf16 in any::<bool>(), seed in any::<u64>(),
    ) {
        let kv_type = if bf16 { DType::Bf16 } else { DType::F32 };
        let case = Case::new(params(heads, latent, rope, kv_type), positions, seed);
        let whole = case.chunk(teams()[0], 0, positions);
        let cut = cut.min(positions);
        for team in teams() {
            let mut parts = case.chunk(team, 0, cut);
            parts.extend(case.chunk(team, cut, positions));
            assert_same_bits(&parts, &whole, "cut");
        }
    }
}
