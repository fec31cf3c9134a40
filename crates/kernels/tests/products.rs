//! Products give the bits of their definition on every instruction set, for any split of rows and any thread count.

#![cfg(test)]

mod common;

use common::{assert_same_bits, teams, values};
use proptest::prelude::*;
use twinfer_kernels::{
    DType, HeadRows, KernelError, Matrix, ThreadTeam, bf16, grouped_linear, linear,
    per_head_linear, reference,
};

fn matrix(n: usize, k: usize, dtype: DType, seed: u64) -> Matrix {
    let values = values(n * k, seed);
    match dtype {
        DType::F32 => Matrix::from_f32(n, k, values),
        DType::Bf16 => Matrix::from_bf16(n, k, values.into_iter().map(bf16::from_f32).collect()),
    }
    .unwrap()
}

fn linear_of(team: &ThreadTeam, x: &[f32], w: &Matrix) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len() / w.cols() * w.rows()];
    linear(team, x, w, &mut y).unwrap();
    y
}

fn reference_of(x: &[f32], w: &Matrix) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len() / w.cols() * w.rows()];
    reference::linear(x, w, &mut y);
    y
}

#[test]
fn odd_shapes_have_the_bits_of_the_definition() {
    for (seed, &k) in [
        1, 15, 16, 17, 20, 24, 48, 80, 176, 511, 512, 513, 1040, 1537,
    ]
    .iter()
    .enumerate()
    {
        for n in [1, 3, 4, 5, 20, 33] {
            for m in [0, 1, 2, 3, 4, 5, 6, 7, 13, 37] {
                for dtype in [DType::F32, DType::Bf16] {
                    let (x, w) = (
                        values(m * k, seed as u64),
                        matrix(n, k, dtype, 99 + seed as u64),
                    );
                    let expected = reference_of(&x, &w);
                    for team in teams() {
                        let y = linear_of(team, &x, &w);
                        assert_same_bits(
                            &y,
                            &expected,
                            &format!("m {m} n {n} k {k} {dtype:?} {}", team.isa()),
                        );
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
        (300, 100, 130),
    ] {
        let (x, w) = (values(m * k, 5), matrix(n, k, DType::Bf16, 6));
        let expected = reference_of(&x, &w);
        for team in teams() {
            assert_same_bits(
                &linear_of(team, &x, &w),
                &expected,
                &format!("{m} {n} {k} {}", team.isa()),
            );
        }
    }
}

#[test]
fn products_are_accurate() {
    let (k, n) = (4096, 8);
    let (x, w) = (values(k, 1), matrix(n, k, DType::F32, 2));
    let y = linear_of(teams()[0], &x, &w);
    let mut row = vec![0.0; k];
    for (j, y) in y.iter().enumerate() {
        w.dense_row_f32(j, &mut row).unwrap();
        let exact: f64 = x
            .iter()
            .zip(&row)
            .map(|(x, w)| f64::from(*x) * f64::from(*w))
            .sum();
        let scale: f64 = x
            .iter()
            .zip(&row)
            .map(|(x, w)| (f64::from(*x) * f64::from(*w)).abs())
            .sum();
        assert!((f64::from(*y) - exact).abs() < 1e-6 * scale, "{y} {exact}");
    }
}

#[test]
fn grouped_rows_are_the_rows_of_separate_products_and_others_stay() {
    let (n, k, m) = (52, 176, 29);
    let experts: Vec<Matrix> = (0..5).map(|e| matrix(n, k, DType::Bf16, e)).collect();
    let x = values(m * k, 77);
    let groups = [
        (&experts[0], 0..1),
        (&experts[3], 1..1),
        (&experts[1], 2..11),
        (&experts[4], 11..28),
    ];
    for team in teams() {
        let mut y = vec![-7.0; m * n];
        grouped_linear(team, &x, &groups, &mut y).unwrap();
        for (w, rows) in &groups {
            let expected = reference_of(&x[rows.start * k..rows.end * k], w);
            assert_same_bits(&y[rows.start * n..rows.end * n], &expected, "group");
        }
        for row in [1, 28] {
            assert!(y[row * n..(row + 1) * n].iter().all(|&value| value == -7.0));
        }
    }
}

#[test]
fn heads_use_their_own_matrix_and_part_of_the_row() {
    let (rows, heads, width, n) = (7, 5, 44, 48);
    let data = values(rows * heads * width, 3);
    for range in [0..20, 20..44, 0..44] {
        let x = HeadRows::part(&data, heads, width, range.clone()).unwrap();
        let w: Vec<Matrix> = (0..heads)
            .map(|h| matrix(n, range.len(), DType::F32, h as u64))
            .collect();
        for team in teams() {
            let mut y = vec![f32::NAN; rows * heads * n];
            per_head_linear(team, x, &w, &mut y).unwrap();
            for row in 0..rows {
                for (head, w) in w.iter().enumerate() {
                    let start = (row * heads + head) * width;
                    let expected = reference_of(&data[start + range.start..start + range.end], w);
                    let start = (row * heads + head) * n;
                    assert_same_bits(&y[start..start + n], &expected, "head");
                }
            }
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused_before_anything_is_written() {
    let team = teams()[0];
    let w = matrix(3, 4, DType::F32, 0);
    let mut y = [5.0; 6];
    for (x, out) in [(7, 6), (8, 5), (8, 3), (4, 6)] {
        let error = linear(team, &vec![0.0; x], &w, &mut y[..out]).unwrap_err();
        assert!(matches!(error, KernelError::Shape(_)), "{error}");
    }
    let other = matrix(3, 5, DType::F32, 0);
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
            grouped_linear(team, &x, &groups, &mut y).is_err(),
            "{groups:?}"
        );
    }
    let heads = HeadRows::dense(&x, 2, 4).unwrap();
    assert!(per_head_linear(team, heads, std::slice::from_ref(&w), &mut y).is_err());
    assert!(per_head_linear(team, heads, &[w.clone(), other.clone()], &mut y).is_err());
    assert!(per_head_linear(team, heads, &[w.clone(), w.clone()], &mut y[..5]).is_err());
    assert!(HeadRows::dense(&x, 3, 4).is_err() && HeadRows::dense(&x, 0, 4).is_err());
    assert!(HeadRows::part(&x, 2, 4, 2..5).is_err() && HeadRows::part(&x, 2, 4, 2..2).is_err());
    assert_eq!(y, [5.0; 6]);
    linear(team, &[], &w, &mut []).unwrap();
    grouped_linear(team, &[], &[], &mut []).unwrap();
}

#[test]
fn special_values_pass_as_the_definition_says() {
    let k = 40;
    let special = [
        0.0,
        -0.0,
        f32::MIN_POSITIVE,
        -1e-45,
        1e-45,
        -1e-30,
        1e38,
        f32::INFINITY,
        f32::NAN,
        1.0,
    ];
    for seed in 0..40u64 {
        let pick = |i: u64| {
            special[(i.wrapping_mul(seed * 2 + 1) % if seed < 30 { 7 } else { 10 }) as usize]
        };
        let x: Vec<f32> = (0..2 * k).map(|i| pick(i as u64)).collect();
        let w =
            Matrix::from_f32(3, k, (0..3 * k).map(|i| pick(i as u64 * 3 + 1)).collect()).unwrap();
        let expected = reference_of(&x, &w);
        for team in teams() {
            assert_same_bits(&linear_of(team, &x, &w), &expected, "special");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn a_row_does_not_depend_on_the_rows_beside_it(
        m in 1usize..40, n in 1usize..50, k in 1usize..1200, seed in any::<u64>(), cut in 0usize..40, bf16 in any::<bool>(),
    ) {
        let dtype = if bf16 { DType::Bf16 } else { DType::F32 };
        let (x, w) = (values(m * k, seed), matrix(n, k, dtype, seed ^ 1));
        let whole = linear_of(teams()[0], &x, &w);
        let cut = cut.min(m);
        for team in teams() {
            let mut parts = linear_of(team, &x[..cut * k], &w);
            parts.extend(linear_of(team, &x[cut * k..], &w));
            assert_same_bits(&parts, &whole, "cut");
        }
    }
}
