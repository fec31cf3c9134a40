//! Our own executor, steps made by hand.

use super::THREADS;
use anyhow::{Context, Result};
use std::path::Path;
use std::time::{Duration, Instant};
use twinfer_config::{Dtype, ModelConfig};
use twinfer_engine::{CpuExecutor, Executor, KvMemory, LoadOptions, SeqWork, load};

/// Tokens before decoding starts, as in llama-batched-bench with `-npp 128`.
const CONTEXT: usize = 128;
/// Tokens decoded per sequence.
const STEPS: usize = 32;
/// A measurement repeats its work for at least so long.
const AT_LEAST: Duration = Duration::from_millis(1500);
const LONGEST: usize = 2048;
const MOST_SEQUENCES: usize = 32;

pub(super) struct Loaded {
    pub(super) config: ModelConfig,
    pub(super) bytes_per_value: f64,
    executor: CpuExecutor,
}

impl Loaded {
    pub(super) fn open(path: &Path, dtype: Dtype, quantize: bool) -> Result<Self> {
        let block_size = LoadOptions::default().block_size;
        let decode = MOST_SEQUENCES * (CONTEXT + STEPS).div_ceil(block_size);
        let cpus = twinfer_sys::available_cpus()?;
        let options = LoadOptions {
            dtype,
            quantize,
            threads: THREADS,
            // As the plan does: an instance has cores of its own, and its threads may spin on them.
            cpus: Some(cpus.into_iter().take(THREADS).collect()),
            max_num_batched_tokens: LONGEST,
            max_num_seqs: MOST_SEQUENCES,
            kv: KvMemory::Blocks(u32::try_from(decode.max(LONGEST / block_size))?),
            ..LoadOptions::default()
        };
        let loaded = load(path, &options)?;
        let values = loaded.config.tensors(false).values() as f64;
        Ok(Self {
            bytes_per_value: loaded.weight_bytes as f64 / values,
            config: loaded.config,
            executor: loaded.executor,
        })
    }

    /// Tokens per second of a prompt in one step.
    pub(super) fn prefill(&mut self, tokens: usize) -> Result<f64> {
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
        let start = Instant::now();
        let mut done = 0;
        while done == 0 || start.elapsed() < AT_LEAST {
            self.executor.execute(&[work], &mut logits)?;
            done += tokens;
        }
        Ok(done as f64 / start.elapsed().as_secs_f64())
    }

    /// Tokens per second of `sequences` sequences together.
    pub(super) fn decode(&mut self, sequences: usize) -> Result<f64> {
        let block_size = self.executor.geometry().block_size;
        let each = (CONTEXT + STEPS).div_ceil(block_size) as u32;
        let tables: Vec<Vec<u32>> = (0..sequences as u32)
            .map(|i| (i * each..(i + 1) * each).collect())
            .collect();
        let mut logits = Vec::new();
        for (index, table) in tables.iter().enumerate() {
            let work = SeqWork {
                tokens: &prompt(CONTEXT, index),
                start: 0,
                blocks: table,
                logits_from: None,
            };
            self.executor.execute(&[work], &mut logits)?;
        }
        let vocab = self.executor.vocab_size();
        let mut last: Vec<u32> = (0..sequences as u32).map(|i| 10 + i).collect();
        let start = Instant::now();
        let mut done = 0;
        while done == 0 || start.elapsed() < AT_LEAST {
            for step in 0..STEPS {
                let batch: Vec<SeqWork<'_>> = last
                    .iter()
                    .zip(&tables)
                    .map(|(token, table)| SeqWork {
                        tokens: std::slice::from_ref(token),
                        start: CONTEXT + step,
                        blocks: table,
                        logits_from: Some(0),
                    })
                    .collect();
                self.executor.execute(&batch, &mut logits)?;
                last = logits
                    .chunks_exact(vocab)
                    .map(best)
                    .collect::<Option<Vec<u32>>>()
                    .context("logits are empty")?;
            }
            done += sequences * STEPS;
        }
        Ok(done as f64 / start.elapsed().as_secs_f64())
    }
}

/// Ids that every vocabulary here has, different for every sequence, so that experts are met as by
/// different texts.
pub(super) fn prompt(tokens: usize, sequence: usize) -> Vec<u32> {
    (0..tokens as u32)
        .map(|i| 6 + (i * 37 + sequence as u32 * 101) % 1500)
        .collect()
}

fn best(row: &[f32]) -> Option<u32> {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map(|(i, _)| i as u32)
}
