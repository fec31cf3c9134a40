//! Row operations give the bits of their definition on every instruction set and are accurate.

#![cfg(test)]

mod common;

use common::{assert_same_bits, teams, values};
use proptest::prelude::*;
use twinfer_kernels::{
    Isa, add, add_scaled, math, reference, rms_norm, rms_norm_row, rms_norm_row_in_place,
    rope_half, rope_interleaved, sigmoid_in_place, silu_mul_halves, softmax_in_place,
};

const WIDTHS: [usize; 14] = [1, 3, 7, 8, 15, 16, 17, 20, 48, 80, 176, 512, 1000, 1537];

#[test]
fn norms_have_the_bits_of_the_definition_for_rows_alone_together_and_in_place() {
    for width in WIDTHS {
        let (x, weight) = (values(width * 5, 1), values(width, 2));
        let mut expected = vec![0.0; x.len()];
        for (x, out) in x.chunks(width).zip(expected.chunks_mut(width)) {
            reference::rms_norm_row(x, &weight, 1e-6, out);
        }
        for team in teams() {
            let mut out = vec![f32::NAN; x.len()];
            rms_norm(team, &x, &weight, 1e-6, &mut out).unwrap();
            assert_same_bits(&out, &expected, "rows");
            rms_norm_row(team.isa(), &x[..width], &weight, 1e-6, &mut out[..width]).unwrap();
            assert_same_bits(&out, &expected, "row");
            let mut row = x[..width].to_vec();
            rms_norm_row_in_place(team.isa(), &mut row, &weight, 1e-6).unwrap();
            assert_same_bits(&row, &expected[..width], "in place");
        }
    }
}

#[test]
fn a_norm_is_accurate() {
    let (x, weight) = (values(7168, 3), values(7168, 4));
    let mut out = vec![0.0; x.len()];
    rms_norm(teams()[0], &x, &weight, 1e-6, &mut out).unwrap();
    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    for ((x, w), out) in x.iter().zip(&weight).zip(&out) {
        let exact = f64::from(*x) / (mean + 1e-6).sqrt() * f64::from(*w);
        assert!(
            (f64::from(*out) - exact).abs() <= 1e-6 * exact.abs(),
            "{out} {exact}"
        );
    }
}

#[test]
fn activations_and_softmax_have_the_bits_of_the_definition() {
    for width in WIDTHS {
        let scaled: Vec<f32> = values(width, 5).iter().map(|x| x * 30.0).collect();
        let up = values(width, 6);
        let (mut gated, mut soft) = (scaled.clone(), scaled.clone());
        reference::silu_mul(&mut gated, &up);
        reference::softmax_in_place(&mut soft);
        let sigmoid: Vec<f32> = scaled.iter().map(|x| math::sigmoid(*x)).collect();
        let joined = [scaled.clone(), up].concat();
        for team in teams() {
            let mut out = vec![f32::NAN; width];
            silu_mul_halves(team, &joined, width, &mut out).unwrap();
            assert_same_bits(&out, &gated, "silu");
            let mut out = scaled.clone();
            softmax_in_place(team.isa(), &mut out);
            assert_same_bits(&out, &soft, "softmax");
            let mut out = scaled.clone();
            sigmoid_in_place(team.isa(), &mut out);
            assert_same_bits(&out, &sigmoid, "sigmoid");
        }
    }
}

#[test]
fn rows_that_are_cut_into_many_tasks_have_the_same_bits() {
    let x = values(300_000, 7);
    let weight = values(1000, 9);
    let mut normed = vec![0.0; x.len()];
    for (x, out) in x.chunks(1000).zip(normed.chunks_mut(1000)) {
        reference::rms_norm_row(x, &weight, 1e-5, out);
    }
    for team in teams() {
        let mut out = x.clone();
        rms_norm(team, &x, &weight, 1e-5, &mut out).unwrap();
        assert_same_bits(&out, &normed, "norm");
    }
}

proptest! {
    #[test]
    fn any_bits_go_through_activations_alike(bits in proptest::collection::vec(any::<u32>(), 1..70)) {
        let x: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let sigmoid: Vec<f32> = x.iter().map(|x| math::sigmoid(*x)).collect();
        let mut soft = x.clone();
        reference::softmax_in_place(&mut soft);
        for isa in Isa::available() {
            let mut out = x.clone();
            sigmoid_in_place(isa, &mut out);
            assert_same_bits(&out, &sigmoid, "sigmoid");
            let mut out = x.clone();
            softmax_in_place(isa, &mut out);
            assert_same_bits(&out, &soft, "softmax");
        }
    }
}

#[test]
fn a_softmax_sums_to_one_and_survives_large_values() {
    for isa in Isa::available() {
        let mut row = vec![1000.0, 999.0, -1e30, 1000.0];
        softmax_in_place(isa, &mut row);
        let sum: f32 = row.iter().sum();
        assert!(
            (sum - 1.0).abs() < 1e-6 && row[2] == 0.0 && row[0] == row[3],
            "{row:?}"
        );
        softmax_in_place(isa, &mut []);
    }
}

#[test]
fn rotation_keeps_lengths_and_adds_angles() {
    let (a, b) = (0.3f32, 0.5f32);
    let original = values(2, 1);
    let mut row = original.clone();
    rope_interleaved(&mut row, &[a.cos()], &[a.sin()]).unwrap();
    rope_interleaved(&mut row, &[b.cos()], &[b.sin()]).unwrap();
    let (sin, cos) = (a + b).sin_cos();
    let expected = [
        original[0] * cos - original[1] * sin,
        original[1] * cos + original[0] * sin,
    ];
    assert!(
        (row[0] - expected[0]).abs() < 1e-6 && (row[1] - expected[1]).abs() < 1e-6,
        "{row:?} {expected:?}"
    );
    assert!(rope_interleaved(&mut row, &[1.0; 2], &[0.0; 2]).is_err());
    assert!(rope_interleaved(&mut row, &[1.0], &[]).is_err());
}

#[test]
fn sums_are_elementwise_and_lengths_are_checked() {
    let mut y = vec![1.0, 2.0];
    add(&mut y, &[0.5, 0.25]).unwrap();
    add_scaled(&mut y, &[2.0, 4.0], 0.5).unwrap();
    assert_eq!(y, [2.5, 4.25]);
    assert!(add(&mut y, &[1.0]).is_err() && add_scaled(&mut y, &[1.0; 3], 1.0).is_err());
    let team = teams()[0];
    let mut out = [0.0; 4];
    assert!(rms_norm(team, &[1.0; 3], &[1.0; 2], 1e-6, &mut out[..3]).is_err());
    assert!(rms_norm(team, &[1.0; 4], &[1.0; 2], 1e-6, &mut out[..2]).is_err());
    assert!(rms_norm(team, &[1.0; 4], &[], 1e-6, &mut out).is_err());
    assert!(rms_norm_row(team.isa(), &[], &[], 1e-6, &mut []).is_err());
    assert!(rms_norm_row_in_place(team.isa(), &mut [1.0], &[1.0; 2], 1e-6).is_err());
}

#[test]
fn halves_are_gated_like_separate_buffers() {
    for (rows, width) in [(1, 1), (3, 20), (5, 176), (70, 513), (300, 1000)] {
        let joined: Vec<f32> = values(rows * 2 * width, 3)
            .iter()
            .map(|x| x * 5.0)
            .collect();
        let mut expected = Vec::new();
        for row in joined.chunks(2 * width) {
            let mut gate = row[..width].to_vec();
            reference::silu_mul(&mut gate, &row[width..]);
            expected.extend(gate);
        }
        for team in teams() {
            let mut out = vec![f32::NAN; rows * width];
            silu_mul_halves(team, &joined, width, &mut out).unwrap();
            assert_same_bits(&out, &expected, "halves");
        }
    }
    let mut out = [0.0; 4];
    assert!(silu_mul_halves(teams()[0], &[0.0; 7], 2, &mut out).is_err());
    assert!(silu_mul_halves(teams()[0], &[0.0; 8], 0, &mut out).is_err());
    assert!(silu_mul_halves(teams()[0], &[0.0; 8], 3, &mut out).is_err());
}

#[test]
fn half_rotation_pairs_values_half_a_row_apart() {
    let angles = [0.3f32, 1.1, -2.0];
    let (cos, sin) = (angles.map(f32::cos), angles.map(f32::sin));
    let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let mut row = x;
    rope_half(&mut row, &cos, &sin).unwrap();
    for i in 0..3 {
        assert_eq!(row[i], x[i] * cos[i] - x[i + 3] * sin[i]);
        assert_eq!(row[i + 3], x[i + 3] * cos[i] + x[i] * sin[i]);
    }
    assert!(rope_half(&mut row[..5], &cos, &sin).is_err());
    assert!(rope_half(&mut row, &cos, &sin[..2]).is_err());
}
