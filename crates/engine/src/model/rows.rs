use std::sync::{Mutex, PoisonError};
use twinfer_kernels::{KernelError, ThreadTeam};

/// Values below which waking threads costs more than the work.
const WORTH_SHARING: usize = 1 << 15;
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
    if team.threads() == 1 || data.len() < WORTH_SHARING || rows < 2 {
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
