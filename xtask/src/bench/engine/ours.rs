//! Our own executor, steps made by hand.

use super::{CONTEXT, STEPS, THREADS};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use twinfer_config::Dtype;
use twinfer_engine::{
    CpuExecutor, Executor, KvMemory, LoadOptions, LoadedModel, SeqWork, check, load,
};
use xxhash_rust::xxh3::xxh3_64;

const LONGEST: usize = 2048;
const MOST_SEQUENCES: usize = 32;
/// Sequences that begin in one step.
const TOGETHER: usize = 4;

pub(super) struct Loaded {
    /// Bytes of the checkpoint read per second of loading.
    pub(super) load_rate: f64,
    executor: CpuExecutor,
    /// A measurement repeats its work for at least so long.
    at_least: Duration,
    /// Sequences whose first tokens lie in their blocks.
    begun: usize,
    /// Hash of the logits of the first sequence after each step of decode.
    seen: Vec<u64>,
}

/// The cores to measure on, as they were before the first measurement: an executor pins the thread that calls it, which
/// would leave a second one in that thread a single core.
pub(super) fn cores() -> Result<&'static [usize]> {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    if let Some(cores) = CORES.get() {
        return Ok(cores);
    }
    let cores = twinfer_sys::available_cpus()?;
    if cores.len() < THREADS {
        bail!("{} cores; {THREADS} are needed", cores.len());
    }
    Ok(CORES.get_or_init(|| cores.into_iter().take(THREADS).collect()))
}

/// As the plan does: an instance has cores of its own, and its threads may spin on them.
pub(super) fn options(quantize: bool, blocks: u32) -> Result<LoadOptions<'static>> {
    Ok(LoadOptions {
        dtype: Dtype::Bf16,
        quantize,
        threads: THREADS,
        cpus: Some(cores()?.to_vec()),
        max_num_batched_tokens: LONGEST,
        max_num_seqs: MOST_SEQUENCES,
        kv: KvMemory::Blocks(blocks),
        ..LoadOptions::default()
    })
}

/// A model and the checkpoint bytes per second that it was loaded at.
pub(super) fn timed_load(path: &Path, options: &LoadOptions<'_>) -> Result<(LoadedModel, f64)> {
    let bytes = check(path, options)?.file_bytes as f64;
    let start = Instant::now();
    let loaded = load(path, options)?;
    Ok((loaded, bytes / start.elapsed().as_secs_f64()))
}

impl Loaded {
    pub(super) fn open(path: &Path, quantize: bool, at_least: Duration) -> Result<Self> {
        let block_size = LoadOptions::default().block_size;
        let decode = MOST_SEQUENCES * (CONTEXT + STEPS).div_ceil(block_size);
        let blocks = u32::try_from(decode.max(LONGEST / block_size))?;
        let (loaded, load_rate) = timed_load(path, &options(quantize, blocks)?)?;
        Ok(Self {
            load_rate,
            executor: loaded.executor,
            at_least,
            begun: 0,
            seen: Vec::new(),
        })
    }

    /// Tokens per second of a prompt in one step.
    pub(super) fn prefill(&mut self, tokens: usize) -> Result<f64> {
        // It takes the blocks from the first on.
        self.begun = 0;
        let prompt = prompt(tokens, 0);
        let blocks: Vec<u32> =
            (0..u32::try_from(tokens / self.executor.geometry().block_size)?).collect();
        let work = SeqWork {
            tokens: &prompt,
            start: 0,
            blocks: &blocks,
            logits_from: Some(tokens - 1),
        };
        let mut logits = Vec::new();
        self.executor.execute(&[work], &mut logits)?;
        let first = logits.clone();
        if first.iter().any(|value| !value.is_finite()) {
            bail!("prefill of {tokens} tokens gives logits that are not finite");
        }
        let start = Instant::now();
        let mut done = 0;
        while done == 0 || start.elapsed() < self.at_least {
            self.executor.execute(&[work], &mut logits)?;
            done += tokens;
        }
        let rate = done as f64 / start.elapsed().as_secs_f64();
        if logits != first {
            bail!("two prefills of the same {tokens} tokens give different logits");
        }
        Ok(rate)
    }

    /// Tokens per second of `sequences` sequences together, whose tokens are given: which experts they
    /// meet must not depend on what a model of random weights repeats. The first sequence's logits must
    /// be the same in every batch.
    pub(super) fn decode(&mut self, sequences: usize) -> Result<f64> {
        let block_size = self.executor.geometry().block_size;
        let each = (CONTEXT + STEPS).div_ceil(block_size) as u32;
        let tables: Vec<Vec<u32>> = (0..sequences as u32)
            .map(|i| (i * each..(i + 1) * each).collect())
            .collect();
        let mut logits = Vec::new();
        let begun = self.begun.min(sequences);
        let prompts: Vec<Vec<u32>> = (0..sequences).map(|i| prompt(CONTEXT, i)).collect();
        let new: Vec<SeqWork<'_>> = prompts
            .iter()
            .zip(&tables)
            .skip(begun)
            .map(|(tokens, blocks)| SeqWork {
                tokens,
                start: 0,
                blocks,
                logits_from: None,
            })
            .collect();
        for together in new.chunks(TOGETHER) {
            self.executor.execute(together, &mut logits)?;
        }
        self.begun = self.begun.max(sequences);
        let vocab = self.executor.vocab_size();
        let tokens: Vec<Vec<u32>> = (0..sequences).map(|i| continuation(i, vocab)).collect();
        let start = Instant::now();
        let mut done = 0;
        let mut hashes = Vec::with_capacity(STEPS);
        while done == 0 || start.elapsed() < self.at_least {
            hashes.clear();
            for step in 0..STEPS {
                let batch: Vec<SeqWork<'_>> = tokens
                    .iter()
                    .zip(&tables)
                    .map(|(tokens, table)| SeqWork {
                        tokens: &tokens[step..=step],
                        start: CONTEXT + step,
                        blocks: table,
                        logits_from: Some(0),
                    })
                    .collect();
                self.executor.execute(&batch, &mut logits)?;
                let row = logits.get(..vocab).context("a row of logits is missing")?;
                hashes.push(xxh3_64(bytemuck::cast_slice(row)));
            }
            done += sequences * STEPS;
        }
        let rate = done as f64 / start.elapsed().as_secs_f64();
        if self.seen.is_empty() {
            self.seen.clone_from(&hashes);
        }
        if self.seen != hashes {
            bail!("in a batch of {sequences} the first sequence's logits are others");
        }
        Ok(rate)
    }
}

/// Ids that every vocabulary here has, different for every sequence, so that experts are met as by
/// different texts.
pub(super) fn prompt(tokens: usize, sequence: usize) -> Vec<u32> {
    (0..tokens as u32)
        .map(|i| 6 + (i * 37 + sequence as u32 * 101) % 1500)
        .collect()
}

/// Tokens that follow in decode.
fn continuation(sequence: usize, vocab: usize) -> Vec<u32> {
    let mixed = |step: usize| (sequence * 8191 + step + 1).wrapping_mul(2_654_435_761) >> 7;
    (0..STEPS)
        .map(|step| (mixed(step) % vocab) as u32)
        .collect()
}
