use std::sync::{Mutex, PoisonError};
use twinfer_kernels::{KernelError, ThreadTeam};

/// Rough time of a value that is copied, rotated or added, in picoseconds.
const VALUE_PICOSECONDS: usize = 400;
/// Most shares of one call; they lie on the stack.
const MAX_SHARES: usize = 32;

/// Calls `body(row, values)` for every row of `data`, on all threads when there is enough to do.
pub(crate) fn for_rows<T: Send>(
    team: &ThreadTeam,
    data: &mut [T],
    width: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) -> Result<(), KernelError> {
    let rows = data.len() / width.max(1);
    let nanoseconds = data.len() * VALUE_PICOSECONDS / 1000;
    if rows < 2 || !team.is_worth(nanoseconds) {
        data.chunks_exact_mut(width)
            .enumerate()
            .for_each(|(row, values)| body(row, values));
        return Ok(());
    }
    let share = rows.div_ceil((team.threads() * 4).min(MAX_SHARES));
    let mut chunks = data.chunks_mut(share * width);
    let shares: [Mutex<Option<&mut [T]>>; MAX_SHARES] =
        std::array::from_fn(|_| Mutex::new(chunks.next()));
    team.run(rows.div_ceil(share), |task, _| {
        // Each share is locked once, by the one thread that claims it.
        let mut values = shares[task].lock().unwrap_or_else(PoisonError::into_inner);
        let values = values.as_deref_mut().unwrap_or_default();
        for (row, values) in values.chunks_exact_mut(width).enumerate() {
            body(task * share + row, values);
        }
    })
}

/// Calls `body(row, a, b)` for every row of two buffers of as many rows, each row taking some
/// `row_nanoseconds`, on all threads when there is enough to do.
pub(crate) fn for_row_pairs<A: Send, B: Send>(
    team: &ThreadTeam,
    row_nanoseconds: usize,
    (a, a_width): (&mut [A], usize),
    (b, b_width): (&mut [B], usize),
    body: impl Fn(usize, &mut [A], &mut [B]) + Sync,
) -> Result<(), KernelError> {
    let rows = a.len() / a_width.max(1);
    let pairs = a.chunks_exact_mut(a_width).zip(b.chunks_exact_mut(b_width));
    if rows < 2 || !team.is_worth(rows * row_nanoseconds) {
        pairs.enumerate().for_each(|(row, (a, b))| body(row, a, b));
        return Ok(());
    }
    let share = rows.div_ceil((team.threads() * 4).min(MAX_SHARES));
    let mut chunks = a
        .chunks_mut(share * a_width)
        .zip(b.chunks_mut(share * b_width));
    let shares: [_; MAX_SHARES] = std::array::from_fn(|_| Mutex::new(chunks.next()));
    team.run(rows.div_ceil(share), |task, _| {
        // Each share is locked once, by the one thread that claims it.
        let mut pair = shares[task].lock().unwrap_or_else(PoisonError::into_inner);
        let Some((a, b)) = pair.as_mut() else { return };
        let pairs = a.chunks_exact_mut(a_width).zip(b.chunks_exact_mut(b_width));
        for (row, (a, b)) in pairs.enumerate() {
            body(task * share + row, a, b);
        }
    })
}
