//! Where two cells part.

use super::cells::{Local, Matrix, Model};
use super::{Output, Task, local};
use anyhow::{Result, bail};
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};
use twinfer_engine::{Probe, ProbeRows, Tap};
use xxhash_rust::xxh3::xxh3_64;

/// Hashes of rows of the residual stream by position and layer.
type Rows = BTreeMap<(u32, usize), HashSet<u64>>;

struct RowHashes(Arc<Mutex<Rows>>);

impl Probe for RowHashes {
    fn record(&mut self, tap: Tap, layer: usize, rows: ProbeRows<'_>, values: &[f32]) {
        if tap != Tap::Hidden || rows.positions.is_empty() {
            return;
        }
        let width = values.len() / rows.positions.len();
        let Ok(mut seen) = self.0.lock() else { return };
        for (position, row) in rows.positions.iter().zip(values.chunks_exact(width)) {
            let bytes: Vec<u8> = row
                .iter()
                .flat_map(|value| value.to_bits().to_le_bytes())
                .collect();
            seen.entry((*position, layer))
                .or_default()
                .insert(xxh3_64(&bytes));
        }
    }
}

/// Runs both cells again and compares the residual stream row by row: the first position and layer of
/// the prompt whose row, as computed alone, the other cell never computed.
pub(super) fn first(
    matrix: &Matrix,
    model: &Model,
    tasks: &[Task],
    prompt: usize,
    expected: &[Output],
    cell: &Local,
) -> Result<String> {
    let alone = Arc::new(Mutex::new(Rows::new()));
    local::run(
        matrix,
        model,
        &tasks[prompt..=prompt],
        &matrix.local[0],
        Some(Box::new(RowHashes(Arc::clone(&alone)))),
    )?;
    let other = Arc::new(Mutex::new(Rows::new()));
    local::run(
        matrix,
        model,
        tasks,
        cell,
        Some(Box::new(RowHashes(Arc::clone(&other)))),
    )?;
    let (Ok(alone), Ok(other)) = (alone.lock(), other.lock()) else {
        bail!("a probe panicked")
    };
    let length = tasks[prompt].prompt.len() + expected[prompt].len();
    for ((position, layer), hashes) in alone.iter() {
        let known = other.get(&(*position, *layer));
        if hashes
            .iter()
            .any(|hash| known.is_none_or(|known| !known.contains(hash)))
        {
            return Ok(format!(
                "first divergence: layer {layer}, position {position} of {length}"
            ));
        }
    }
    Ok(
        "the residual stream is equal in a second run: the difference lies in logits or sampling"
            .to_owned(),
    )
}
