//! Multi-head latent attention in absorbed form.

mod fold;
mod gqa;
mod plan;
mod task;
mod value;

use std::ops::Range;

use crate::error::ensure_shape;
use crate::{DType, HeadRows, KernelError, ThreadTeam};
pub use gqa::{GqaParams, GqaSeq, gqa_attention};
use task::{Call, Geometry};

/// Absolute positions that are folded into the running softmax together.
pub const TILE: usize = 64;

/// What all sequences of a call have in common.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlaParams {
    /// Query heads H.
    pub heads: usize,
    /// Values of a latent row, r (`kv_lora_rank`).
    pub latent: usize,
    /// Values of the rotated key, dr (`qk_rope_head_dim`).
    pub rope: usize,
    /// Positions per KV block.
    pub block_size: usize,
    /// Element type of the KV units.
    pub kv_type: DType,
    /// Factor on the scores before the softmax.
    pub scale: f32,
}

/// Consecutive query rows of one sequence and the KV they see.
#[derive(Debug, Clone)]
pub struct KvSeq<'a> {
    /// Rows of the query and output buffers.
    pub rows: Range<usize>,
    /// Absolute position of the first of them; the others follow. Row i sees positions 0 ..= first_position + i.
    pub first_position: usize,
    /// The layer's unit of each block from position 0 on. A unit is `block_size` KV rows, token-major; bytes behind that
    /// are ignored. KV of the rows' own positions is already written.
    pub units: &'a [&'a [u8]],
}

/// A sequence whose KV rows are `[latent | rope]`.
pub type MlaSeq<'a> = KvSeq<'a>;

/// Attention of every row and head over one shared key `[c | k_rope]` and value c per position:
/// out[row, h] = Σ_j softmax_j(scale · (q_latent·c_j + q_rope·k_rope_j)) c_j.
///
/// q_latent is `[rows, H, r]`, q_rope `[rows, H, dr]`, out dense `[rows, H, r]`. Output rows of no sequence keep their
/// content.
///
/// Order: tiles of [`TILE`] absolute positions from 0 on, folded from the first to the last. Per tile the scores
/// (q·key) · `scale`, m' = the largest of them and of m, p = exp(score − m'), l_t = the sum of p by sixteen lanes, and
/// o_t = Σ_j p_j v_j, v being c here; then l' = l · exp(m − m') + l_t and o' = o · exp(m − m') + o_t, each rounded once. Before
/// the first tile m = −∞, l = 0, o = 0. The end is o / l.
///
/// With f32 KV, q·key and o_t are one chain of fused multiply-adds each, in ascending order. With bf16 KV they are sums
/// of [`crate::product`] in bf16: q, keys and values count as zero below 2^-56, q and p are rounded to bf16 (l_t sums p
/// before), and pairs are those of neighbours in a row, and of positions 2i and 2i + 1. There the factor is `scale` · log2 e,
/// p = [`crate::math::exp2_short`](score − m'), and o and l are kept by exp((m − m') · ln 2).
///
/// A row's result depends on its own query and positions up to its own only, whatever lies behind.
///
/// # Errors
/// [`KernelError::Shape`] when lengths do not fit, rows overlap or are out of order, or a block table is too short;
/// [`KernelError::Panicked`].
pub fn mla_attention(
    team: &ThreadTeam,
    params: &MlaParams,
    q_latent: HeadRows<'_>,
    q_rope: HeadRows<'_>,
    seqs: &[MlaSeq<'_>],
    out: &mut [f32],
) -> Result<(), KernelError> {
    check(params, q_latent, q_rope, seqs, out.len())?;
    let call = Call {
        geometry: Geometry {
            heads: params.heads,
            kv_heads: 1,
            key: params.latent + params.rope,
            value: params.latent,
            row: params.latent + params.rope,
            values_from: 0,
            block_size: params.block_size,
            kv_type: params.kv_type,
            scale: params.scale,
        },
        q: q_latent,
        q_rope: Some(q_rope),
        seqs,
        out: out.as_mut_ptr(),
    };
    // SAFETY: shapes were checked.
    unsafe { plan::run(team, &call) }
}

fn check(
    params: &MlaParams,
    q_latent: HeadRows<'_>,
    q_rope: HeadRows<'_>,
    seqs: &[MlaSeq<'_>],
    out: usize,
) -> Result<(), KernelError> {
    let MlaParams {
        heads,
        latent,
        rope,
        block_size,
        kv_type,
        ..
    } = *params;
    ensure_shape!(
        heads > 0 && latent > 0 && rope > 0 && block_size > 0,
        "a size of {params:?} is 0"
    );
    let rows = q_latent.rows();
    for (name, q, width) in [("q_latent", q_latent, latent), ("q_rope", q_rope, rope)] {
        ensure_shape!(
            (q.rows(), q.heads(), q.width()) == (rows, heads, width),
            "{name} is [{}, {}, {}], not [{rows}, {heads}, {width}]",
            q.rows(),
            q.heads(),
            q.width()
        );
    }
    ensure_shape!(
        out == rows * heads * latent,
        "output of {out} values for [{rows}, {heads}, {latent}]"
    );
    let unit_bytes = (latent + rope)
        .checked_mul(block_size)
        .and_then(|count| count.checked_mul(kv_type.size()));
    let mut end = 0;
    for seq in seqs {
        check_seq(
            end,
            rows,
            &seq.rows,
            seq.first_position,
            seq.units,
            block_size,
            unit_bytes,
        )?;
        end = seq.rows.end;
    }
    Ok(())
}

/// Checks one sequence whose rows follow those before `end`.
fn check_seq(
    end: usize,
    rows: usize,
    own: &Range<usize>,
    first_position: usize,
    units: &[&[u8]],
    block_size: usize,
    unit_bytes: Option<usize>,
) -> Result<(), KernelError> {
    ensure_shape!(
        end <= own.start && own.start <= own.end && own.end <= rows,
        "query rows {own:?} after {end} of {rows}"
    );
    let needed = first_position.checked_add(own.len());
    let held = units.len().saturating_mul(block_size);
    ensure_shape!(
        needed.is_some_and(|needed| needed <= held),
        "{} rows from position {first_position} need more than {} blocks of {block_size}",
        own.len(),
        units.len()
    );
    for unit in units {
        ensure_shape!(
            unit_bytes.is_some_and(|bytes| bytes <= unit.len()),
            "a KV unit of {} bytes is shorter than the {unit_bytes:?} of a block",
            unit.len()
        );
    }
    Ok(())
}
