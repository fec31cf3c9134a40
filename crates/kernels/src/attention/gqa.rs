//! Grouped-query attention.

use super::task::{Call, Geometry};
use super::{KvSeq, plan};
use crate::error::ensure_shape;
use crate::{DType, HeadRows, KernelError, ThreadTeam};

/// What all sequences of a call have in common.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GqaParams {
    /// Query heads H.
    pub heads: usize,
    /// Key/value heads, a divisor of H: query head h uses the KV head h / (H / kv_heads).
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Positions per KV block.
    pub block_size: usize,
    /// Element type of the KV units.
    pub kv_type: DType,
    /// Factor on the scores before the softmax.
    pub scale: f32,
}

/// A sequence whose KV rows are `[k of all KV heads | v of all KV heads]`.
pub type GqaSeq<'a> = KvSeq<'a>;

/// Causal attention of every row and head over its KV head's keys and values: q `[rows, H, head_dim]`, out dense
/// `[rows, H, head_dim]`. Output rows of no sequence keep their content.
///
/// The order of sums is that of [`crate::mla_attention`] with a head's key and value in place of the latent row.
///
/// # Errors
/// [`KernelError::Shape`] when lengths do not fit, rows overlap or are out of order, or a block table is too short;
/// [`KernelError::Panicked`].
pub fn gqa_attention(
    team: &ThreadTeam,
    params: &GqaParams,
    q: HeadRows<'_>,
    seqs: &[GqaSeq<'_>],
    out: &mut [f32],
) -> Result<(), KernelError> {
    let GqaParams {
        heads,
        kv_heads,
        head_dim,
        block_size,
        kv_type,
        ..
    } = *params;
    ensure_shape!(
        heads > 0 && kv_heads > 0 && head_dim > 0 && block_size > 0,
        "a size of {params:?} is 0"
    );
    ensure_shape!(
        heads.is_multiple_of(kv_heads),
        "{heads} heads over {kv_heads} KV heads"
    );
    let rows = q.rows();
    ensure_shape!(
        (q.heads(), q.width()) == (heads, head_dim),
        "q is [{rows}, {}, {}], not [{rows}, {heads}, {head_dim}]",
        q.heads(),
        q.width()
    );
    ensure_shape!(
        out.len() == rows * heads * head_dim,
        "output of {} values for [{rows}, {heads}, {head_dim}]",
        out.len()
    );
    let unit_bytes = (2 * kv_heads * head_dim)
        .checked_mul(block_size)
        .and_then(|count| count.checked_mul(kv_type.size()));
    let mut end = 0;
    for seq in seqs {
        super::check_seq(
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
    let call = Call {
        geometry: Geometry {
            heads,
            kv_heads,
            key: head_dim,
            value: head_dim,
            row: 2 * kv_heads * head_dim,
            values_from: kv_heads * head_dim,
            block_size,
            kv_type,
            scale: params.scale,
        },
        q,
        q_rope: None,
        seqs,
        out: out.as_mut_ptr(),
    };
    // SAFETY: shapes were checked.
    unsafe { plan::run(team, &call) }
}
