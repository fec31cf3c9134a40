//! Products with packed weights give the bits of their definition on every instruction set, for any split of rows and
//! any thread count.

#![cfg(test)]

mod common;

use common::{assert_same_bits, teams, values};
use proptest::prelude::*;
use twinfer_kernels::{
    Activation, Compute, DType, Format, HeadRows, Int8Rows, Isa, Matrix, RowScales, ThreadTeam,
    Weight, bf16, grouped_product, grouped_product_gated, grouped_product_gathered, linear,
    per_head_product, product, product_accumulators, product_gated, quantize_rows, reference,
    silu_mul_halves,
};

fn matrix(n: usize, k: usize, dtype: DType, seed: u64) -> Matrix {
    let values = values(n * k, seed);
    match dtype {
        DType::F32 => Matrix::from_f32(n, k, values),
        DType::Bf16 => Matrix::from_bf16(n, k, values.into_iter().map(bf16::from_f32).collect()),
    }
    .unwrap()
}

fn rows(matrix: &Matrix) -> Vec<Vec<f32>> {
    let mut out = vec![vec![0.0; matrix.cols()]; matrix.rows()];
    for (row, out) in out.iter_mut().enumerate() {
        matrix.dense_row_f32(row, out).unwrap();
    }
    out
}

/// y of the definition, from the plain rows of w.
fn expected(compute: Compute, x: &[f32], w: &[Vec<f32>]) -> Vec<f32> {
    let k = w[0].len();
    let quantized: Vec<_> = w.iter().map(|w| reference::quantize_row(w)).collect();
    let mut y = Vec::new();
    for x in x.chunks(k) {
        match compute {
            Compute::F32 => y.extend(w.iter().map(|w| reference::dot(x, w))),
            Compute::Bf16 => y.extend(w.iter().map(|w| reference::dot_bf16(x, w))),
            Compute::W8A8 => {
                let (q, scale) = reference::quantize_row(x);
                y.extend(
                    quantized
                        .iter()
                        .map(|(w, s)| reference::dot_i8(&q, w) as f32 * (scale * s)),
                );
            }
        }
    }
    y
}

fn product_of(team: &ThreadTeam, x: &[f32], w: &Weight) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len() / w.cols() * w.rows()];
    product(team, x, w, &mut y).unwrap();
    y
}

const COMPUTES: [Compute; 3] = [Compute::F32, Compute::Bf16, Compute::W8A8];

#[test]
fn odd_shapes_have_the_bits_of_the_definition() {
    for (seed, &k) in [1, 2, 3, 4, 5, 20, 24, 48, 63, 64, 65, 80, 176, 301]
        .iter()
        .enumerate()
    {
        for n in [1, 15, 16, 17, 20, 24, 48, 80] {
            let w = matrix(n, k, DType::F32, 99 + seed as u64);
            let plain = rows(&w);
            for compute in COMPUTES {
                let packed = Weight::pack(compute, &[&w]).unwrap();
                for m in [0, 1, 2, 3, 4, 5, 7, 12, 13, 24, 25, 37] {
                    let x = values(m * k, seed as u64);
                    let expected = expected(compute, &x, &plain);
                    for team in teams() {
                        let what = format!("{compute:?} m {m} n {n} k {k} {:?}", team.isa());
                        assert_same_bits(&product_of(team, &x, &packed), &expected, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn shapes_that_are_cut_into_many_tasks_have_the_same_bits() {
    for (m, n, k) in [
        (1, 1000, 1300),
        (9, 700, 600),
        (131, 260, 520),
        (600, 100, 1030),
    ] {
        let w = matrix(n, k, DType::Bf16, 6);
        let (x, plain) = (values(m * k, 5), rows(&w));
        for compute in [Compute::Bf16, Compute::W8A8] {
            let packed = Weight::pack(compute, &[&w]).unwrap();
            let expected = expected(compute, &x, &plain);
            for team in teams() {
                let what = format!("{compute:?} {m} {n} {k} {:?}", team.isa());
                assert_same_bits(&product_of(team, &x, &packed), &expected, &what);
            }
        }
    }
}

#[test]
fn gated_products_have_the_bits_of_both_steps() {
    for (k, n) in [(5, 20), (64, 16), (301, 100)] {
        let matrices = [9, 10].map(|seed| matrix(n, k, DType::Bf16, seed));
        for compute in COMPUTES {
            let w = matrices
                .each_ref()
                .map(|w| Weight::pack(compute, &[w]).unwrap());
            for m in [0, 1, 3, 8, 16, 17, 45] {
                let x = values(m * 2 * k, m as u64);
                let mut gated = vec![0.0; m * k];
                let single = ThreadTeam::single(Isa::available()[0]);
                silu_mul_halves(&single, &x, k, &mut gated).unwrap();
                let whole = product_of(&single, &gated, &w[0]);
                let mut parts = whole.clone();
                parts[m / 3 * n..].copy_from_slice(&product_of(
                    &single,
                    &gated[m / 3 * k..],
                    &w[1],
                ));
                for team in teams() {
                    let what = format!("{compute:?} m {m} n {n} k {k} {:?}", team.isa());
                    let (mut y, mut room) = (vec![f32::NAN; m * n], Vec::new());
                    product_gated(team, &x, &w[0], &mut room, &mut y).unwrap();
                    assert_same_bits(&y, &whole, &what);
                    let groups = [(&w[0], 0..m / 3), (&w[1], m / 3..m)];
                    grouped_product_gated(team, &x, &groups, &mut room, &mut y).unwrap();
                    assert_same_bits(&y, &parts, &what);
                }
            }
        }
    }
    let w = Weight::pack(Compute::W8A8, &[&matrix(16, 8, DType::Bf16, 1)]).unwrap();
    let (team, mut room) = (teams()[0], Vec::new());
    assert!(product_gated(team, &[0.0; 8], &w, &mut room, &mut [0.0; 16]).is_err());
}

#[test]
fn parts_below_each_other_are_one_weight_and_a_bias_comes_last() {
    let (k, m) = (44, 5);
    let parts = [
        matrix(20, k, DType::Bf16, 1),
        matrix(3, k, DType::F32, 2),
        matrix(24, k, DType::Bf16, 3),
    ];
    let plain: Vec<_> = parts.iter().flat_map(rows).collect();
    let (x, bias) = (values(m * k, 4), values(47, 5));
    for compute in COMPUTES {
        let w = Weight::pack(compute, &parts.each_ref()).unwrap();
        assert_eq!((w.rows(), w.cols(), w.compute()), (47, k, compute));
        let mut expected = expected(compute, &x, &plain);
        for row in expected.chunks_mut(47) {
            row.iter_mut().zip(&bias).for_each(|(y, bias)| *y += bias);
        }
        let w = w.with_bias(bias.clone()).unwrap();
        for team in teams() {
            assert_same_bits(
                &product_of(team, &x, &w),
                &expected,
                &format!("{compute:?}"),
            );
        }
    }
    let other = matrix(2, k + 1, DType::F32, 1);
    assert!(Weight::pack(Compute::Bf16, &[&parts[0], &other]).is_err());
    assert!(Weight::pack(Compute::W8A8, &[]).is_err());
    let w = Weight::pack(Compute::Bf16, &[&parts[0]]).unwrap();
    assert!(w.with_bias(vec![0.0; 19]).is_err());
}

#[test]
fn packing_into_given_memory_is_read_back_the_same() {
    let w = matrix(21, 37, DType::Bf16, 3);
    let x = values(2 * 37, 4);
    for compute in COMPUTES {
        let format = Format::of(compute, DType::Bf16);
        let bytes = Weight::packed_bytes(format, 21, 37).unwrap();
        let mut memory = vec![0xa5; bytes + 7];
        Weight::pack_into(compute, &[&w], &mut memory[7..]).unwrap();
        assert!(Weight::pack_into(compute, &[&w], &mut memory).is_err());
        let read = Weight::from_packed(format, 21, 37, std::sync::Arc::new(memory.clone()), 7);
        let read = read.unwrap();
        assert_eq!(read.size_bytes(), bytes);
        let packed = Weight::pack(compute, &[&w]).unwrap();
        let team = teams()[0];
        assert_same_bits(
            &product_of(team, &x, &read),
            &product_of(team, &x, &packed),
            "read",
        );
        let owner = std::sync::Arc::new(memory);
        assert!(Weight::from_packed(format, 21, 37, owner.clone(), 8).is_err());
        assert!(Weight::from_packed(format, 0, 37, owner.clone(), 0).is_err());
        assert!(Weight::from_packed(format, usize::MAX / 2, 37, owner, 0).is_err());
    }
    assert_eq!(Weight::packed_bytes(Format::Bf16, usize::MAX, 1), None);
}

#[test]
fn rows_can_be_read_back() {
    let w = matrix(19, 23, DType::Bf16, 3);
    let plain = rows(&w);
    let mut out = vec![0.0; 23];
    for compute in COMPUTES {
        let packed = Weight::pack(compute, &[&w]).unwrap();
        for (row, plain) in plain.iter().enumerate() {
            packed.dense_row_f32(row, &mut out).unwrap();
            if compute == Compute::W8A8 {
                let (q, scale) = reference::quantize_row(plain);
                let back: Vec<f32> = q.iter().map(|q| f32::from(*q) * scale).collect();
                assert_same_bits(&out, &back, "int8");
            } else {
                assert_same_bits(&out, plain, "exact");
            }
        }
        assert!(packed.dense_row_f32(19, &mut out).is_err());
        assert!(packed.dense_row_f32(0, &mut out[1..]).is_err());
    }
}

#[test]
fn integers_and_sums_of_checkpoint_rows_are_exact_at_the_edges_of_int8() {
    let (n, k, m) = (20, 75, 6);
    let extreme = |seed: u64| -> Vec<i8> {
        let picks = [-128i8, 127, -127, 0, 1, -1, -128, 127];
        (0..n * k)
            .map(|i| picks[((i as u64).wrapping_mul(seed * 2 + 1) >> 1) as usize % 8])
            .collect()
    };
    let scales: Vec<f32> = values(n, 8).iter().map(|s| s.abs() + 0.01).collect();
    let bias: Vec<i32> = (0..n as i32).map(|i| i * 1_000_003 - 7_000_000).collect();
    let channel = RowScales::Channel(&scales);
    let dequant = RowScales::Dequant {
        scale: &scales,
        bias: &bias,
    };
    let (scale, offset) = (0.013, -17);
    let fixed = Activation::Static { scale, offset };
    let x: Vec<f32> = values(m * k, 3).iter().map(|x| x * 4.0).collect();
    for seed in 0..4 {
        let data = extreme(seed);
        for (activation, scales_of) in [
            (Activation::PerToken, channel),
            (fixed, channel),
            (fixed, dequant),
        ] {
            let part = Int8Rows {
                values: &data,
                scales: scales_of,
            };
            let w = Weight::pack_int8(k, &[part], activation).unwrap();
            let mut sums = Vec::new();
            let mut y = Vec::new();
            for x in x.chunks(k) {
                let (q, s) = match activation {
                    Activation::PerToken => reference::quantize_row(x),
                    Activation::Static { .. } => {
                        (reference::quantize_row_static(x, scale, offset), 1.0)
                    }
                };
                for (row, data) in data.chunks(k).enumerate() {
                    let sum = reference::dot_i8(&q, data);
                    sums.push(sum);
                    let whole: i32 = data.iter().map(|&q| i32::from(q)).sum();
                    y.push(match (activation, scales_of) {
                        (_, RowScales::Dequant { .. }) => (sum + bias[row]) as f32 * scales[row],
                        (Activation::PerToken, _) => sum as f32 * (s * scales[row]),
                        _ => (sum - offset * whole) as f32 * (scale * scales[row]),
                    });
                }
            }
            for team in teams() {
                let mut found = vec![0; m * n];
                product_accumulators(team, &x, &w, &mut found).unwrap();
                assert_eq!(found, sums, "{activation:?} {:?}", team.isa());
                assert_same_bits(&product_of(team, &x, &w), &y, &format!("{activation:?}"));
            }
        }
    }
}

#[test]
fn checkpoint_rows_that_do_not_fit_are_refused() {
    let part = |scales| Int8Rows {
        values: &[1, 2, 3, 4, 5, 6],
        scales,
    };
    let two = RowScales::Channel(&[1.0, 1.0]);
    let fixed = |scale, offset| Activation::Static { scale, offset };
    assert!(Weight::pack_int8(3, &[part(two)], Activation::PerToken).is_ok());
    assert!(Weight::pack_int8(2, &[part(two)], Activation::PerToken).is_err());
    assert!(Weight::pack_int8(0, &[part(two)], Activation::PerToken).is_err());
    assert!(Weight::pack_int8(3, &[], Activation::PerToken).is_err());
    for (scale, offset) in [(0.0, 0), (-1.0, 0), (f32::NAN, 0), (1.0, 128), (1.0, -129)] {
        assert!(Weight::pack_int8(3, &[part(two)], fixed(scale, offset)).is_err());
    }
    let dequant = |bias| RowScales::Dequant {
        scale: &[1.0, 1.0],
        bias,
    };
    assert!(Weight::pack_int8(3, &[part(dequant(&[1, 2]))], fixed(1.0, 0)).is_ok());
    assert!(Weight::pack_int8(3, &[part(dequant(&[1]))], fixed(1.0, 0)).is_err());
    assert!(Weight::pack_int8(3, &[part(dequant(&[1, 2]))], Activation::PerToken).is_err());
}

#[test]
fn grouped_rows_are_the_rows_of_separate_products_and_others_stay() {
    let (n, k, m) = (52, 176, 29);
    let plain: Vec<Matrix> = (0..5).map(|e| matrix(n, k, DType::Bf16, e)).collect();
    let x = values(m * k, 77);
    let source: Vec<u32> = (0..m as u32).map(|i| i * 7 % 11).collect();
    for compute in COMPUTES {
        let experts: Vec<_> = plain
            .iter()
            .map(|w| Weight::pack(compute, &[w]).unwrap())
            .collect();
        let groups = [
            (&experts[0], 0..1),
            (&experts[3], 1..1),
            (&experts[1], 2..11),
            (&experts[4], 11..28),
        ];
        for team in teams() {
            let mut y = vec![-7.0; m * n];
            grouped_product(team, &x, &groups, &mut y).unwrap();
            let mut z = vec![-7.0; m * n];
            grouped_product_gathered(team, &x[..11 * k], &source, &groups, &mut z).unwrap();
            for (w, rows) in &groups {
                let range = rows.start * n..rows.end * n;
                let own = product_of(team, &x[rows.start * k..rows.end * k], w);
                assert_same_bits(&y[range.clone()], &own, "group");
                let gathered: Vec<f32> = source[rows.clone()]
                    .iter()
                    .flat_map(|&row| x[row as usize * k..][..k].to_vec())
                    .collect();
                assert_same_bits(&z[range], &product_of(team, &gathered, w), "gathered");
            }
            for row in [1, 28] {
                for y in [&y, &z] {
                    assert!(y[row * n..(row + 1) * n].iter().all(|&value| value == -7.0));
                }
            }
        }
    }
}

#[test]
fn heads_use_their_own_weight_and_part_of_the_row() {
    let (rows, heads, width, n) = (7, 5, 44, 48);
    let data = values(rows * heads * width, 3);
    for range in [0..20, 20..44, 0..44] {
        let x = HeadRows::part(&data, heads, width, range.clone()).unwrap();
        for compute in [Compute::Bf16, Compute::W8A8] {
            let w: Vec<Weight> = (0..heads)
                .map(|h| matrix(n, range.len(), DType::F32, h as u64))
                .map(|w| Weight::pack(compute, &[&w]).unwrap())
                .collect();
            for team in teams() {
                let mut y = vec![f32::NAN; rows * heads * n];
                per_head_product(team, x, &w, &mut y).unwrap();
                for row in 0..rows {
                    for (head, w) in w.iter().enumerate() {
                        let start = (row * heads + head) * width;
                        let x = &data[start + range.start..start + range.end];
                        let start = (row * heads + head) * n;
                        assert_same_bits(&y[start..start + n], &product_of(team, x, w), "head");
                    }
                }
            }
        }
    }
}

#[test]
fn calls_that_do_not_fit_are_refused_before_anything_is_written() {
    let team = teams()[0];
    let w = Weight::pack(Compute::W8A8, &[&matrix(3, 4, DType::F32, 0)]).unwrap();
    let other = Weight::pack(Compute::Bf16, &[&matrix(3, 4, DType::F32, 0)]).unwrap();
    let mut y = [5.0; 6];
    for (x, out) in [(7, 6), (8, 5), (8, 3), (4, 6)] {
        assert!(product(team, &vec![0.0; x], &w, &mut y[..out]).is_err());
    }
    let x = [0.0; 8];
    let reversed = std::ops::Range { start: 1, end: 0 };
    for groups in [
        vec![(&w, 0..1), (&other, 1..2)],
        vec![(&w, 0..2), (&w, 1..2)],
        vec![(&w, 1..2), (&w, 0..1)],
        vec![(&w, 0..3)],
        vec![(&w, reversed)],
    ] {
        assert!(
            grouped_product(team, &x, &groups, &mut y).is_err(),
            "{groups:?}"
        );
        let gathered = grouped_product_gathered(team, &x, &[0, 1], &groups, &mut y);
        assert!(gathered.is_err(), "{groups:?}");
    }
    assert!(grouped_product_gathered(team, &x, &[0, 2], &[(&w, 0..2)], &mut y).is_err());
    assert!(product_accumulators(team, &x, &other, &mut [0; 6]).is_err());
    let heads = HeadRows::dense(&x, 2, 4).unwrap();
    assert!(per_head_product(team, heads, std::slice::from_ref(&w), &mut y).is_err());
    assert!(per_head_product(team, heads, &[w.clone(), other.clone()], &mut y).is_err());
    let plain = Weight::pack(Compute::F32, &[&matrix(3, 4, DType::F32, 0)]).unwrap();
    assert!(per_head_product(team, heads, &[plain.clone(), plain], &mut y).is_err());
    assert_eq!(y, [5.0; 6]);
    product(team, &[], &w, &mut []).unwrap();
    grouped_product(team, &[], &[], &mut []).unwrap();
}

#[test]
fn quantised_activations_are_those_of_the_definition() {
    let specials = [0.0, -0.0, 1e-45, -1e-30, 1e-12, 0.5, -1.5, 2.5, 3e38, -3e38];
    let mut x = specials.to_vec();
    x.extend([0.0; 10]);
    x.extend([1e-20; 10]);
    x.extend([1.0, f32::NAN, -2.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    x.extend([1.0, f32::INFINITY, -2.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    // Halves: with a largest value of 127 the scale is 1.
    x.extend([
        127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, 0.49999997,
    ]);
    let fixed = Activation::Static {
        scale: 0.5,
        offset: 3,
    };
    let mut all: Vec<(Vec<i8>, Vec<f32>)> = Vec::new();
    for isa in Isa::available() {
        let (mut q, mut scales) = (vec![0; x.len()], vec![0.0; x.len() / 10]);
        quantize_rows(isa, Activation::PerToken, &x, 10, &mut q, &mut scales).unwrap();
        for (row, x) in x.chunks(10).enumerate() {
            let (expected, scale) = reference::quantize_row(x);
            assert!(
                scale.to_bits() == scales[row].to_bits() || scale.is_nan() && scales[row].is_nan()
            );
            if scale.is_finite() {
                assert_eq!(q[row * 10..][..10], expected, "{isa} row {row}");
            }
        }
        assert_eq!(q[50..], [127, 0, 2, 2, 0, -2, -2, 126, -126, 0]);
        let mut fixed_q = vec![0; x.len()];
        quantize_rows(isa, fixed, &x, 10, &mut fixed_q, &mut scales).unwrap();
        assert_eq!(
            fixed_q[..10],
            reference::quantize_row_static(&x[..10], 0.5, 3)
        );
        q.extend(fixed_q);
        all.push((q, scales));
        assert!(quantize_rows(isa, fixed, &x, 9, &mut vec![0; x.len()], &mut [0.0; 6]).is_err());
    }
    for (q, _) in &all {
        assert_eq!(*q, all[0].0);
    }
}

#[test]
fn a_row_that_is_not_finite_gives_nan_and_its_neighbours_do_not() {
    let (n, k) = (20, 33);
    let w = Weight::pack(Compute::W8A8, &[&matrix(n, k, DType::F32, 2)]).unwrap();
    let mut x = values(3 * k, 1);
    for bad in [f32::NAN, f32::INFINITY] {
        x[k + 5] = bad;
        for team in teams() {
            let y = product_of(team, &x, &w);
            assert!(y[n..2 * n].iter().all(|y| y.is_nan()));
            assert!(y[..n].iter().chain(&y[2 * n..]).all(|y| y.is_finite()));
        }
    }
}

#[test]
fn small_values_are_zero_in_bf16_and_sums_are_never_subnormal() {
    let tiny = 2f32.powi(-57);
    let small = 2f32.powi(-56);
    let w = Matrix::from_f32(2, 3, vec![small, tiny, -small, 1.0, 1e30, small]).unwrap();
    let w = Weight::pack(Compute::Bf16, &[&w]).unwrap();
    let x = [small, 1e38, small * 1.0078125, tiny, tiny, -small];
    for team in teams() {
        let y = product_of(team, &x, &w);
        // small² − small² · 1.0078125, small · 1 + 1e38 · 1e30, −small², ...
        assert_eq!(y[0], small * small * (1.0 - 1.0078125));
        assert_eq!(y[1], f32::INFINITY);
        assert_eq!((y[2], y[3]), (small * small, -small * small));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn a_row_does_not_depend_on_the_rows_beside_it(
        m in 1usize..40, n in 1usize..70, k in 1usize..700, seed in any::<u64>(), cut in 0usize..40, int8 in any::<bool>(),
    ) {
        let compute = if int8 { Compute::W8A8 } else { Compute::Bf16 };
        let w = Weight::pack(compute, &[&matrix(n, k, DType::F32, seed ^ 1)]).unwrap();
        let x = values(m * k, seed);
        let whole = product_of(teams()[0], &x, &w);
        let cut = cut.min(m);
        for team in teams() {
            let mut parts = product_of(team, &x[..cut * k], &w);
            parts.extend(product_of(team, &x[cut * k..], &w));
            assert_same_bits(&parts, &whole, "cut");
        }
    }

    #[test]
    fn f32_weights_are_those_of_linear(n in 1usize..30, k in 1usize..90, seed in any::<u64>()) {
        let w = matrix(n, k, DType::Bf16, seed);
        let packed = Weight::pack(Compute::F32, &[&w]).unwrap();
        let x = values(2 * k, seed ^ 7);
        let mut y = vec![0.0; 2 * n];
        linear(teams()[0], &x, &w, &mut y).unwrap();
        assert_same_bits(&product_of(teams()[0], &x, &packed), &y, "linear");
    }
}
