//! Multi-head latent attention in absorbed form.

mod gqa;
mod task;

use std::ops::Range;

use crate::error::ensure_shape;
use crate::scratch::with_scratch;
use crate::team::SOLO_NANOSECONDS;
use crate::{DType, HeadRows, KernelError, ThreadTeam};
pub use gqa::{GqaParams, GqaSeq, gqa_attention};
use task::{Call, Task, run_task, scratch_length};

/// Absolute positions that are folded into the running softmax together.
pub const TILE: usize = 64;

/// Most query rows of a task.
const TASK_ROWS: usize = 8;
/// Fewest heads of a task, when there are as many: they share each key that is read.
const TASK_HEADS: usize = 12;
/// Tasks per thread, so that threads end together.
const TASKS_PER_THREAD: usize = 4;
/// Most query values of a task: they and as many output values stay in the second-level cache between tiles.
const TASK_VALUES: usize = 1 << 16;

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
pub struct MlaSeq<'a> {
    /// Rows of the query and output buffers.
    pub rows: Range<usize>,
    /// Absolute position of the first of them; the others follow. Row i sees positions 0 ..= first_position + i.
    pub first_position: usize,
    /// The layer's unit of each block from position 0 on. A unit is `block_size` rows `[latent | rope]`, token-major;
    /// bytes behind that are ignored. KV of the rows' own positions is already written.
    pub units: &'a [&'a [u8]],
}

/// Attention of every row and head over one shared key `[c | k_rope]` and value c per position:
/// out[row, h] = Σ_j softmax_j(scale · (q_latent·c_j + q_rope·k_rope_j)) c_j.
///
/// q_latent is `[rows, H, r]`, q_rope `[rows, H, dr]`, out dense `[rows, H, r]`. Output rows of no sequence keep their
/// content.
///
/// Order: tiles of [`TILE`] absolute positions from 0 on. Per tile the scores (one block of lanes over `[c | k_rope]`,
/// then times `scale`), their maximum, p = exp(score − maximum), the sum of p by sixteen lanes, and the values' sum in
/// ascending position by fused multiply-add. Tiles are folded from the first to the last: m' = max(m, m_t),
/// l' = fma(l, exp(m − m'), l_t · exp(m_t − m')), o likewise. The end is o / l. A row's result depends on its own
/// query and positions up to its own only; positions behind it are never part of an operation.
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
    let (tasks, nanoseconds) = plan(team, params, seqs);
    let call = Call {
        params,
        q_latent,
        q_rope,
        seqs,
        out: out.as_mut_ptr(),
    };
    team.run_worth(nanoseconds, tasks.len(), |index, _| {
        let (call, task) = (&call, &tasks[index]);
        with_scratch(scratch_length(params, task), |scratch| {
            // SAFETY: shapes were checked, and tasks write disjoint parts of the output.
            unsafe { run_task(team.isa(), call, task, scratch.as_mut_ptr()) }
        });
    })
}

/// Cuts the rows and heads into tasks, and the time all take on one core. Where it cuts changes no bits.
fn plan(team: &ThreadTeam, params: &MlaParams, seqs: &[MlaSeq<'_>]) -> (Vec<Task>, usize) {
    let per_key =
        params.heads * (2 * params.latent + params.rope) / team.isa().products_per_nanosecond();
    let mut total = 0;
    for seq in seqs {
        let last = seq.first_position + seq.rows.len();
        total += seq.rows.len() * (seq.first_position + last) / 2 * per_key;
    }
    let alone = team.threads() == 1 || total < SOLO_NANOSECONDS;
    let share = if alone {
        total
    } else {
        total / (team.threads() * TASKS_PER_THREAD)
    } + 1;
    let mut tasks = Vec::new();
    for (index, seq) in seqs.iter().enumerate() {
        let mut start = seq.rows.start;
        while start < seq.rows.end {
            let row_time = (seq.first_position + (start - seq.rows.start) + 1) * per_key;
            // As many rows as a share holds, so that they read the KV once; then fewer heads of a single row.
            let rows = (share / row_time.max(1))
                .clamp(1, TASK_ROWS)
                .min(seq.rows.end - start);
            let fair = (row_time * rows)
                .div_ceil(share)
                .min(params.heads.div_ceil(TASK_HEADS));
            let cached =
                (rows * params.heads * (params.latent + params.rope)).div_ceil(TASK_VALUES);
            let parts = fair.max(cached).clamp(1, params.heads);
            for part in 0..parts {
                let heads = params.heads * part / parts..params.heads * (part + 1) / parts;
                tasks.push(Task {
                    seq: index,
                    rows: start..start + rows,
                    heads,
                });
            }
            start += rows;
        }
    }
    (tasks, total)
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
