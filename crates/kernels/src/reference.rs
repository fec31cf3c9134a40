//! The definition of every kernel as plain scalar code, without regard to speed.
//!
//! These functions say which bits a kernel must give. Arguments are trusted: lengths that do not fit panic.

use crate::math::{exp, silu};
use crate::{HeadRows, K_BLOCK, Matrix, MlaParams, MlaSeq, TILE};

/// Number of lanes of every sum.
pub const LANES: usize = 16;

/// The tree that adds sixteen lanes: (i, i+8), (i, i+4), (i, i+2), (i, i+1).
pub fn add_lanes(mut lanes: [f32; LANES]) -> f32 {
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

/// Sum of products over one block: sixteen fused chains, the last step padded with zeros.
pub fn dot_block(x: &[f32], w: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for start in (0..x.len()).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            let at = |values: &[f32]| values.get(start + lane).copied().unwrap_or(0.0);
            *sum = at(x).mul_add(at(w), *sum);
        }
    }
    add_lanes(lanes)
}

/// Sum of products: blocks of [`K_BLOCK`], added in order.
pub fn dot(x: &[f32], w: &[f32]) -> f32 {
    let mut blocks = x
        .chunks(K_BLOCK)
        .zip(w.chunks(K_BLOCK))
        .map(|(x, w)| dot_block(x, w));
    let first = blocks.next().unwrap_or(0.0);
    blocks.fold(first, |sum, block| sum + block)
}

/// y = x · wᵀ for x `[m, k]`, w `[n, k]`, y `[m, n]`.
pub fn linear(x: &[f32], w: &Matrix, y: &mut [f32]) {
    let (n, k) = (w.rows(), w.cols());
    let mut row = vec![0.0; k];
    for j in 0..n {
        w.dense_row_f32(j, &mut row)
            .unwrap_or_else(|error| panic!("{error}"));
        for (x, y) in x.chunks(k).zip(y.chunks_mut(n)) {
            y[j] = dot(x, &row);
        }
    }
}

/// x / sqrt(mean(x²) + ε) · w for one row.
pub fn rms_norm_row(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + epsilon).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * w;
    }
}

/// silu(gate) · up, into `gate`.
pub fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = silu(*gate) * up;
    }
}

/// e^x / Σ e^x of one row: largest value subtracted, sum by sixteen lanes.
pub fn softmax_in_place(row: &mut [f32]) {
    let largest = largest(row);
    row.iter_mut().for_each(|x| *x = exp(*x - largest));
    let sum = sum_lanes(row);
    row.iter_mut().for_each(|x| *x /= sum);
}

/// [`crate::mla_attention`]: see there for shapes.
pub fn mla_attention(
    params: &MlaParams,
    q_latent: HeadRows<'_>,
    q_rope: HeadRows<'_>,
    seqs: &[MlaSeq<'_>],
    out: &mut [f32],
) {
    let width = params.latent + params.rope;
    let row_bytes = width * params.kv_type.size();
    for seq in seqs {
        for row in seq.rows.clone() {
            let positions = seq.first_position + (row - seq.rows.start) + 1;
            let mut keys = vec![vec![0.0; width]; positions];
            for (position, key) in keys.iter_mut().enumerate() {
                let unit = seq.units[position / params.block_size];
                let start = position % params.block_size * row_bytes;
                crate::load_f32(params.kv_type, &unit[start..start + row_bytes], key)
                    .unwrap_or_else(|error| panic!("{error}"));
            }
            for head in 0..params.heads {
                let q = [q_latent.head(row, head), q_rope.head(row, head)].concat();
                let start = (row * params.heads + head) * params.latent;
                attend(params, &q, &keys, &mut out[start..start + params.latent]);
            }
        }
    }
}

/// One query row and head over its visible keys.
fn attend(params: &MlaParams, q: &[f32], keys: &[Vec<f32>], out: &mut [f32]) {
    out.fill(0.0);
    let (mut m, mut l) = (f32::NEG_INFINITY, 0.0f32);
    for tile in keys.chunks(TILE) {
        let scores: Vec<f32> = tile
            .iter()
            .map(|key| dot_block(q, key) * params.scale)
            .collect();
        let tile_m = largest(&scores);
        let p: Vec<f32> = scores.iter().map(|score| exp(score - tile_m)).collect();
        let tile_l = sum_lanes(&p);
        let next = if tile_m > m { tile_m } else { m };
        let (keep, take) = (exp(m - next), exp(tile_m - next));
        (m, l) = (next, l.mul_add(keep, tile_l * take));
        for (column, out) in out.iter_mut().enumerate() {
            let sum = p
                .iter()
                .zip(tile)
                .fold(0.0f32, |sum, (p, key)| p.mul_add(key[column], sum));
            *out = out.mul_add(keep, sum * take);
        }
    }
    out.iter_mut().for_each(|out| *out /= l);
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(f32::NEG_INFINITY, |largest, &value| {
        if value > largest { value } else { largest }
    })
}

/// Lane j adds the values j, j + 16, ... in order; then the tree.
fn sum_lanes(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for chunk in values.chunks(LANES) {
        lanes
            .iter_mut()
            .zip(chunk)
            .for_each(|(sum, value)| *sum += value);
    }
    add_lanes(lanes)
}
