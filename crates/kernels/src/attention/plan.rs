//! How attention is cut into tasks. Where it is cut changes no bits.

use std::cell::RefCell;

use super::task::{Call, Geometry, Task, run_task, scratch_length};
use crate::scratch::with_scratch;
use crate::{DType, Isa, KernelError, ThreadTeam};

/// Most packed rows (query rows by heads) of a task: enough to repay packing the KV for them.
const TASK_ROWS: usize = 256;
/// Most output values of a task: they stay in the second-level cache between tiles.
const TASK_VALUES: usize = 1 << 16;
/// Rough time to fetch and pack one element of keys or values. With few query rows this is most of the work.
const PACKING_PICOSECONDS: usize = 150;
/// Most packed rows of a KV head for a task to take all heads.
const TOGETHER_ROWS: usize = 16;
/// Tasks per thread, so that threads end together.
const TASKS_PER_THREAD: usize = 4;

thread_local! {
    static KEPT: RefCell<Vec<Task>> = const { RefCell::new(Vec::new()) };
}

/// # Safety
/// The call's lengths were checked.
pub(super) unsafe fn run(team: &ThreadTeam, call: &Call<'_>) -> Result<(), KernelError> {
    let mut tasks = KEPT.take();
    tasks.clear();
    let nanoseconds = plan(team, call, &mut tasks);
    let result = team.run_worth(nanoseconds, tasks.len(), |index, _| {
        let task = &tasks[index];
        // Threads that take tasks in turn.
        let next = tasks.get(index + team.threads());
        with_scratch(scratch_length(&call.geometry, task), |scratch| {
            // SAFETY: the caller checked shapes, and tasks write disjoint parts of the output.
            unsafe { run_task(team.isa(), call, task, next, scratch.as_mut_ptr()) }
        });
    });
    KEPT.set(tasks);
    result
}

/// Adds the tasks of all sequences and returns the time all take on one core.
fn plan(team: &ThreadTeam, call: &Call<'_>, tasks: &mut Vec<Task>) -> usize {
    let geometry = &call.geometry;
    let per_key = picoseconds_per_key(team.isa(), geometry);
    let per_position = geometry.kv_heads * (geometry.key + geometry.value) * PACKING_PICOSECONDS;
    let (mut total, mut packing) = (0, 0);
    for seq in call.seqs {
        let last = seq.first_position + seq.rows.len();
        packing += last * per_position;
        total += seq.rows.len() * (seq.first_position + last) / 2 * per_key * geometry.heads;
    }
    let whole = (total + packing) / 1000;
    let alone = !team.is_worth(whole);
    let share = if alone {
        total
    } else {
        total / (team.threads() * TASKS_PER_THREAD)
    } + 1;
    let group = geometry.heads / geometry.kv_heads;
    // With many short works a task takes all heads, so that KV is read as it lies in memory.
    let many = alone || call.seqs.len() >= team.threads() * TASKS_PER_THREAD;
    for (index, seq) in call.seqs.iter().enumerate() {
        if many && (1..=TOGETHER_ROWS).contains(&(seq.rows.len() * group)) {
            tasks.push(Task {
                seq: index,
                rows: (seq.rows.start, seq.rows.end),
                heads: (0, geometry.heads),
            });
            continue;
        }
        let mut start = seq.rows.start;
        while start < seq.rows.end {
            let row_time = (seq.first_position + (start - seq.rows.start) + 1) * per_key * group;
            let most = (TASK_ROWS / group).min(TASK_VALUES / (group * geometry.value));
            let rows = (share / row_time.max(1))
                .clamp(1, most.max(1))
                .min(seq.rows.end - start);
            // One row for several threads: each takes some of the heads.
            let parts = if alone || call.seqs.len() * geometry.kv_heads >= team.threads() {
                1
            } else {
                (row_time * rows)
                    .div_ceil(share)
                    .clamp(1, group.min(team.threads()))
            };
            for kv_head in 0..geometry.kv_heads {
                for part in 0..parts {
                    let head = |part: usize| kv_head * group + group * part / parts;
                    tasks.push(Task {
                        seq: index,
                        rows: (start, start + rows),
                        heads: (head(part), head(part + 1)),
                    });
                }
            }
            start += rows;
        }
    }
    whole
}

/// A rough time of one query row and head with one key and value.
fn picoseconds_per_key(isa: Isa, geometry: &Geometry) -> usize {
    let bf16 = geometry.kv_type == DType::Bf16;
    let values = geometry.key + geometry.value;
    let lines = if bf16 { values / 2 } else { values } + 32;
    lines * 1_000_000 / (isa.lines_per_microsecond(bf16) * 16)
}
