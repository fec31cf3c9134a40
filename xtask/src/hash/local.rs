//! Cells that run in this process.

use super::cells::{Cache, Local, Matrix, Model};
use super::{Output, Task};
use anyhow::Result;
use std::sync::Arc;
use twinfer_engine::{
    Engine, EngineConfig, EngineStats, Generated, KvMemory, KvSource, LoadOptions, Probe, Request,
    RequestId, SamplingParams, generate, load,
};

pub(super) fn request(id: usize, task: &Task, output: u32) -> Request {
    let params = SamplingParams {
        temperature: task.temperature,
        seed: task.seed,
        ignore_eos: true,
        logprobs: Some(0),
        ..SamplingParams::greedy(output)
    };
    Request {
        id: RequestId(id as u64),
        prompt: task.prompt.as_slice().into(),
        params,
        kv: KvSource::Compute,
        hold_kv: false,
        cache_salt: None,
        leader: None,
        resumed: 0,
    }
}

/// Answers of a cell, and what its engine counted.
pub(super) fn run(
    matrix: &Matrix,
    model: &Model,
    tasks: &[Task],
    cell: &Local,
    probe: Option<Box<dyn Probe>>,
) -> Result<(Vec<Output>, EngineStats)> {
    let options = LoadOptions {
        threads: cell.threads,
        max_num_batched_tokens: cell.chunk as usize,
        max_num_seqs: cell.sequences as usize,
        quantize: model.quantize,
        mtp: cell.drafts > 0,
        kv: KvMemory::Blocks(cell.blocks),
        ..LoadOptions::default()
    };
    let tokenizer = twinfer_text::Tokenizer::from_dir(&model.path)?;
    let mut loaded = load(&model.path, &options)?;
    loaded.executor.set_probe(probe);
    let config = EngineConfig {
        max_model_len: 1024,
        max_num_seqs: cell.sequences,
        max_num_batched_tokens: cell.chunk,
        max_waiting: u32::try_from(tasks.len())?,
        enable_prefix_caching: cell.cache != Cache::Off,
        num_speculative_tokens: cell.drafts,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(
        config,
        Box::new(loaded.executor),
        Arc::new(tokenizer),
        loaded.num_blocks,
    )
    .map_err(|e| anyhow::anyhow!("{e}"))?;
    let rounds = if cell.cache == Cache::Hot { 2 } else { 1 };
    let mut results = Vec::new();
    for round in 0..rounds {
        let requests = tasks
            .iter()
            .enumerate()
            .map(|(i, task)| request(round * tasks.len() + i, task, matrix.output))
            .collect();
        results = generate(&mut engine, requests, cell.sequences as usize, |_| {})?;
    }
    let outputs = results.iter().map(output).collect();
    Ok((outputs, engine.stats()))
}

pub(super) fn output(result: &Generated) -> Output {
    let tokens = result.tokens.iter();
    let bits = tokens.map(|token| {
        let own = token.logprobs.as_ref().map(|(own, _)| own);
        (token.id, own.map_or(0, |own| own.logprob.to_bits()))
    });
    bits.collect()
}
