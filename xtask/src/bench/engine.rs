//! The native engine on the demo model, without HTTP.

use super::{Round, Sample};
use anyhow::{Context, Result};
use std::time::{Duration, Instant};
use twinfer_config::ModelConfig;
use twinfer_config::model::TensorKind;
use twinfer_engine::{CpuExecutor, Executor, LoadOptions, SeqWork, load};
use twinfer_it::demo_model;
use twinfer_kernels::peaks;

const THREADS: usize = 2;
const PROMPT: usize = 512;
const PROMPTS: usize = 16;
const DECODE_STEPS: usize = 200;
const BUDGET: Duration = Duration::from_millis(300);

/// Multiply-adds and weight bytes that one token needs.
struct Cost {
    body: f64,
    head: f64,
}

pub(super) fn measure(rounds: usize) -> Result<Vec<Round>> {
    let options = LoadOptions {
        threads: THREADS,
        max_num_batched_tokens: PROMPT,
        max_num_seqs: 32,
        ..LoadOptions::default()
    };
    let loaded = load(&demo_model(), &options)?;
    let cost = cost(&loaded.config);
    let value_bytes = loaded.weight_bytes as f64 / loaded.config.tensors(false).values() as f64;
    let mut executor = loaded.executor;
    let mut all = Vec::new();
    for _ in 0..rounds {
        let fma = peaks::f32_fma(THREADS, BUDGET).giga_per_second * 1e9;
        let touched = (cost.body + cost.head) * value_bytes;
        let bandwidth =
            peaks::read_bandwidth(THREADS, BUDGET, Some(touched as usize)).giga_per_second * 1e9;
        let mut round = Round::new();
        let prefill = prefill_rate(&mut executor)?;
        round.insert(
            "prefill, demo model, 512-token prompts, two threads",
            Sample {
                ours: prefill,
                floor: fma / (2.0 * cost.body),
            },
        );
        let one = decode_rate(&mut executor, 1)?;
        round.insert(
            "decode, demo model, one sequence, two threads",
            Sample {
                ours: one,
                floor: bandwidth / touched,
            },
        );
        let many = decode_rate(&mut executor, 32)?;
        round.insert(
            "decode, demo model, 32 sequences, two threads",
            Sample {
                ours: many,
                floor: fma / (2.0 * (cost.body + cost.head)),
            },
        );
        all.push(round);
    }
    Ok(all)
}

/// From the shapes of the weights: every matrix is used once per token, of the experts `top_k`.
fn cost(config: &ModelConfig) -> Cost {
    let (mut body, mut head) = (0.0, 0.0);
    let active = config
        .moe
        .as_ref()
        .map_or(1.0, |moe| moe.top_k as f64 / moe.experts as f64);
    for tensor in config.tensors(false).tensors {
        let values = tensor.len() as f64;
        if config.tied_head && tensor.kind == TensorKind::Embedding {
            head = values;
        }
        if tensor.shape.len() != 2 || tensor.name == "model.embed_tokens.weight" {
            continue;
        }
        if tensor.name == "lm_head.weight" {
            head = values;
        } else if tensor.name.contains(".experts.") {
            body += values * active;
        } else {
            body += values;
        }
    }
    Cost { body, head }
}

fn prefill_rate(executor: &mut CpuExecutor) -> Result<f64> {
    let tokens: Vec<u32> = (0..PROMPT as u32).map(|i| 6 + i * 37 % 1500).collect();
    let blocks: Vec<u32> = (0..(PROMPT / executor.geometry().block_size) as u32).collect();
    let mut logits = Vec::new();
    let work = SeqWork {
        tokens: &tokens,
        start: 0,
        blocks: &blocks,
        logits_from: Some(tokens.len() - 1),
    };
    executor.execute(&[work], &mut logits)?;
    let start = Instant::now();
    for _ in 0..PROMPTS {
        executor.execute(&[work], &mut logits)?;
    }
    Ok((PROMPTS * PROMPT) as f64 / start.elapsed().as_secs_f64())
}

fn decode_rate(executor: &mut CpuExecutor, sequences: usize) -> Result<f64> {
    const CONTEXT: usize = 64;
    let block_size = executor.geometry().block_size;
    let each = (CONTEXT + DECODE_STEPS).div_ceil(block_size) as u32;
    let tables: Vec<Vec<u32>> = (0..sequences as u32)
        .map(|i| (i * each..(i + 1) * each).collect())
        .collect();
    let prompt: Vec<u32> = (0..CONTEXT as u32).map(|i| 6 + i * 37 % 1500).collect();
    let mut logits = Vec::new();
    for table in &tables {
        executor.execute(
            &[SeqWork {
                tokens: &prompt,
                start: 0,
                blocks: table,
                logits_from: None,
            }],
            &mut logits,
        )?;
    }
    let vocab = executor.vocab_size();
    let mut last: Vec<u32> = (0..sequences as u32).map(|i| 10 + i).collect();
    let start = Instant::now();
    for step in 0..DECODE_STEPS {
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
        executor.execute(&batch, &mut logits)?;
        last = logits
            .chunks_exact(vocab)
            .map(best)
            .collect::<Option<Vec<u32>>>()
            .context("logits are empty")?;
    }
    Ok((sequences * DECODE_STEPS) as f64 / start.elapsed().as_secs_f64())
}

fn best(row: &[f32]) -> Option<u32> {
    row.iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1))
        .map(|(i, _)| i as u32)
}
