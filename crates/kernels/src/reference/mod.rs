//! The definition of every kernel as plain scalar code, without regard to speed.
//!
//! These functions say which bits a kernel must give. Arguments are trusted: lengths that do not fit panic.

pub mod int4;

use crate::math::{exp, exp2_short, silu};
use crate::{DType, GqaParams, GqaSeq, HeadRows, K_BLOCK, Matrix, MlaParams, MlaSeq, TILE};

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
                let out = &mut out[start..start + params.latent];
                attend(params.kv_type, params.scale, &q, &keys, &keys, out);
            }
        }
    }
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

/// [`crate::product`] in bf16 for one row: x and w `[k]`, any k.
pub fn dot_bf16(x: &[f32], w: &[f32]) -> f32 {
    let at = |values: &[f32], k: usize| values.get(k).map_or(0.0, |value| small_bf16(*value));
    let mut sum = 0.0f32;
    for k in (0..x.len()).step_by(2) {
        sum = at(x, k + 1).mul_add(at(w, k + 1), sum);
        sum = at(x, k).mul_add(at(w, k), sum);
    }
    sum
}

/// The nearest bf16, 0 for magnitudes below 2^-56.
pub fn small_bf16(value: f32) -> f32 {
    if value.abs() < 2f32.powi(-56) {
        0.0
    } else {
        half::bf16::from_f32(value).to_f32()
    }
}

/// One row quantised per token: values and scale, see [`crate::quantize_rows`].
pub fn quantize_row(x: &[f32]) -> (Vec<i8>, f32) {
    let largest = x.iter().fold(1e-10f32, |largest, x| largest.max(x.abs()));
    let scale = largest / 127.0;
    let q = x
        .iter()
        .map(|x| (x / scale).round_ties_even().clamp(-127.0, 127.0) as i8);
    let finite = x.iter().all(|x| x.is_finite());
    (q.collect(), if finite { scale } else { f32::NAN })
}

/// One row quantised with a static scale and offset.
pub fn quantize_row_static(x: &[f32], scale: f32, offset: i32) -> Vec<i8> {
    x.iter()
        .map(|x| {
            (x / scale + offset as f32)
                .round_ties_even()
                .clamp(-128.0, 127.0) as i8
        })
        .collect()
}

/// Σ q·Q.
pub fn dot_i8(q: &[i8], w: &[i8]) -> i32 {
    q.iter()
        .zip(w)
        .map(|(q, w)| i32::from(*q) * i32::from(*w))
        .sum()
}

/// [`crate::gqa_attention`]: see there for shapes.
pub fn gqa_attention(params: &GqaParams, q: HeadRows<'_>, seqs: &[GqaSeq<'_>], out: &mut [f32]) {
    let GqaParams {
        heads,
        kv_heads,
        head_dim,
        ..
    } = *params;
    let row_bytes = 2 * kv_heads * head_dim * params.kv_type.size();
    for seq in seqs {
        for row in seq.rows.clone() {
            let positions = seq.first_position + (row - seq.rows.start) + 1;
            let mut kv = vec![vec![0.0; 2 * kv_heads * head_dim]; positions];
            for (position, kv) in kv.iter_mut().enumerate() {
                let unit = seq.units[position / params.block_size];
                let start = position % params.block_size * row_bytes;
                crate::load_f32(params.kv_type, &unit[start..start + row_bytes], kv)
                    .unwrap_or_else(|error| panic!("{error}"));
            }
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads);
                let part = |kv: &[f32], from: usize| kv[from * head_dim..][..head_dim].to_vec();
                let keys: Vec<_> = kv.iter().map(|kv| part(kv, kv_head)).collect();
                let values: Vec<_> = kv.iter().map(|kv| part(kv, kv_heads + kv_head)).collect();
                let start = (row * heads + head) * head_dim;
                attend(
                    params.kv_type,
                    params.scale,
                    q.head(row, head),
                    &keys,
                    &values,
                    &mut out[start..start + head_dim],
                );
            }
        }
    }
}

/// One query row and head over its visible keys and values, tile by tile.
fn attend(
    kv_type: DType,
    scale: f32,
    q: &[f32],
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
    out: &mut [f32],
) {
    out.fill(0.0);
    let (scale, power): (f32, fn(f32) -> f32) = match kv_type {
        DType::Bf16 => (scale * std::f32::consts::LOG2_E, exp2_short),
        DType::F32 => (scale, exp),
    };
    let (mut m, mut l) = (f32::NEG_INFINITY, 0.0f32);
    for (keys, values) in keys.chunks(TILE).zip(values.chunks(TILE)) {
        let scores: Vec<f32> = keys
            .iter()
            .map(|key| dot_of(kv_type, q, key) * scale)
            .collect();
        let tile_m = largest(&scores);
        let next = if tile_m > m { tile_m } else { m };
        let p: Vec<f32> = scores.iter().map(|score| power(score - next)).collect();
        let keep = match kv_type {
            DType::Bf16 => exp((m - next) * std::f32::consts::LN_2),
            DType::F32 => exp(m - next),
        };
        (m, l) = (next, l.mul_add(keep, sum_lanes(&p)));
        for (column, out) in out.iter_mut().enumerate() {
            let column: Vec<f32> = values.iter().map(|value| value[column]).collect();
            *out = out.mul_add(keep, dot_of(kv_type, &p, &column));
        }
    }
    out.iter_mut().for_each(|out| *out /= l);
}

/// The chain of a kind of KV: pairs of bf16, or single f32.
fn dot_of(kv_type: DType, x: &[f32], w: &[f32]) -> f32 {
    match kv_type {
        DType::Bf16 => dot_bf16(x, w),
        DType::F32 => x
            .iter()
            .zip(w)
            .fold(0.0f32, |sum, (x, w)| x.mul_add(*w, sum)),
    }
}
