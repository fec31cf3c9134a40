//! Sequences through an executor, without scheduler: block tables made by hand, activations recorded.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use twinfer_engine::{
    CpuExecutor, Executor, KvMemory, LoadOptions, LoadedModel, Probe, ProbeRows, SeqWork, Tap, load,
};

/// Values by tap, layer and sequence, rows in order of position.
pub(crate) type Recording = BTreeMap<(Tap, usize, u32), Vec<f32>>;

/// Records everything.
#[derive(Clone, Default)]
pub(crate) struct Recorder(Arc<Mutex<Recording>>);

impl Recorder {
    pub(crate) fn take(&self) -> Recording {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Probe for Recorder {
    fn record(&mut self, tap: Tap, layer: usize, rows: ProbeRows<'_>, values: &[f32]) {
        let width = values.len() / rows.works.len();
        let mut recording = self.0.lock().unwrap();
        for (row, work) in rows.works.iter().enumerate() {
            let seen = recording.entry((tap, layer, *work)).or_default();
            assert_eq!(
                seen.len(),
                rows.positions[row] as usize * width,
                "positions come in order"
            );
            seen.extend_from_slice(&values[row * width..][..width]);
        }
    }
}

pub(crate) fn testdata(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(path)
}

pub(crate) fn model(path: &Path, options: &LoadOptions<'_>) -> LoadedModel {
    load(
        path,
        &LoadOptions {
            kv: KvMemory::Blocks(256),
            ..options.clone()
        },
    )
    .unwrap()
}

/// Block tables of `count` sequences of up to `tokens` positions, interleaved so that no table is
/// contiguous.
pub(crate) fn tables(executor: &CpuExecutor, count: usize, tokens: usize) -> Vec<Vec<u32>> {
    let blocks = tokens.div_ceil(executor.geometry().block_size);
    (0..count)
        .map(|seq| {
            (0..blocks)
                .map(|block| (block * count + seq) as u32)
                .collect()
        })
        .collect()
}

/// Prefills all prompts together, each in chunks of `chunk` tokens; returns what was recorded.
pub(crate) fn prefill(
    executor: &mut CpuExecutor,
    prompts: &[&[u32]],
    tables: &[Vec<u32>],
    chunk: usize,
) -> Recording {
    let recorder = Recorder::default();
    let mut logits = Vec::new();
    let mut done = vec![0; prompts.len()];
    loop {
        let mut names = Vec::new();
        let mut batch = Vec::new();
        for (seq, prompt) in prompts.iter().enumerate() {
            let end = prompt.len().min(done[seq] + chunk);
            if done[seq] < end {
                names.push(seq as u32);
                let tokens = &prompt[done[seq]..end];
                batch.push(SeqWork {
                    tokens,
                    start: done[seq],
                    blocks: &tables[seq],
                    logits_from: None,
                });
                done[seq] = end;
            }
        }
        if batch.is_empty() {
            break;
        }
        executor.set_probe(Some(Box::new(Renamed {
            inner: recorder.clone(),
            names,
        })));
        executor.execute(&batch, &mut logits).unwrap();
    }
    executor.set_probe(None);
    recorder.take()
}

/// Tells a recorder of works under the numbers of their sequences.
struct Renamed {
    inner: Recorder,
    names: Vec<u32>,
}

impl Probe for Renamed {
    fn record(&mut self, tap: Tap, layer: usize, rows: ProbeRows<'_>, values: &[f32]) {
        let works: Vec<u32> = rows
            .works
            .iter()
            .map(|work| self.names[*work as usize])
            .collect();
        self.inner.record(
            tap,
            layer,
            ProbeRows {
                works: &works,
                positions: rows.positions,
            },
            values,
        );
    }
}

/// The largest value's first index.
pub(crate) fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = index;
        }
    }
    best as u32
}
