//! Steps of a group of rank processes: the real scheduler, agreement and collectives over executors that compute
//! nothing, so that what is left is what stepping together costs.

use super::LIMIT;
use crate::ranks::{PATIENCE, Ranks, meet};
use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use twinfer_comm::Topology;
use twinfer_engine::exchange::RankLink;
use twinfer_engine::modelled::{ModelledExecutor, ModelledShape};
use twinfer_engine::phase::PhasePolicy;
use twinfer_engine::testing::{BYTE_VOCAB, byte_tokenizer};
use twinfer_engine::{
    Engine, EngineConfig, EventRef, KvSource, RankEngine, Request, RequestId, SamplingParams,
    StepOutput,
};
use twinfer_worker::GroupExchange;
use xxhash_rust::xxh3::Xxh3;

/// A closed loop of requests on every rank, the same on all, so that a step of the group is the step of one rank on
/// each.
#[derive(Serialize, Deserialize)]
pub(super) struct Spec {
    /// Ranks of each node.
    counts: Vec<u32>,
    share_memory: bool,
    steps: u32,
    sequences: u32,
    prompt: u32,
    output: u32,
}

/// Times of calls, in microseconds.
#[derive(Serialize, Deserialize)]
pub(super) struct Times {
    pub(super) mean: f64,
    pub(super) median: f64,
    pub(super) p99: f64,
}

/// A tenth of a run.
#[derive(Serialize, Deserialize)]
pub(super) struct Tenth {
    pub(super) times: Times,
    /// Memory of the rank's own at the end, in bytes.
    pub(super) anonymous: u64,
}

/// What a rank has seen.
#[derive(Serialize, Deserialize)]
pub(super) struct Seen {
    times: Times,
    pub(super) tenths: Vec<Tenth>,
    /// Hash of the tokens that came out, in their order, and how many they were.
    tokens: u64,
    pub(super) outputs: u64,
}

/// Steps of a group, timed by its first rank.
pub(super) struct Steps {
    pub(super) mean: f64,
    pub(super) median: f64,
    pub(super) p99: f64,
    pub(super) tokens: u64,
    pub(super) outputs: u64,
}

impl Times {
    pub(super) fn of(times: &mut [Duration]) -> Self {
        times.sort_unstable();
        let us = |time: &Duration| time.as_secs_f64() * 1e6;
        let at = |percent: usize| times.get(times.len() * percent / 100).map_or(0.0, us);
        Self {
            mean: times.iter().map(us).sum::<f64>() / times.len().max(1) as f64,
            median: at(50),
            p99: at(99),
        }
    }
}

impl Spec {
    pub(super) fn new(counts: &[u32], share_memory: bool, steps: u32) -> Self {
        Self {
            counts: counts.to_vec(),
            share_memory,
            steps,
            sequences: 4,
            prompt: 48,
            output: 128,
        }
    }
}

/// Runs the group, with the times of its first rank.
pub(super) fn run(spec: &Spec) -> Result<Steps> {
    let all = run_all(spec, LIMIT)?;
    let first = all.first().context("a group without ranks")?;
    Ok(Steps {
        mean: first.times.mean,
        median: first.times.median,
        p99: first.times.p99,
        tokens: first.tokens,
        outputs: first.outputs,
    })
}

/// Runs the group; every rank must have the same tokens.
pub(super) fn run_all(spec: &Spec, limit: Duration) -> Result<Vec<Seen>> {
    let topology = Topology::new(&spec.counts)?;
    let arguments = ["steps".to_owned(), serde_json::to_string(spec)?];
    let texts = Ranks::start(&topology, "bench-rank", &arguments)?.finish(limit)?;
    let all = texts.iter().map(|text| serde_json::from_str(text));
    let all: Vec<Seen> = all.collect::<Result<_, _>>()?;
    let first = all.first().context("a group without ranks")?;
    if first.outputs == 0 || all.iter().any(|seen| seen.tokens != first.tokens) {
        bail!("ranks with the same requests have other tokens");
    }
    Ok(all)
}

/// The life of one rank.
pub(super) fn rank(spec: &Spec) -> Result<()> {
    let group = meet(&Topology::new(&spec.counts)?, spec.share_memory)?;
    let exchange = GroupExchange::new(group, PATIENCE, PATIENCE);
    let link = Arc::new(RankLink::new(Box::new(exchange)));
    let mut rank = engine(spec, link)?;
    let mut out = StepOutput::new();
    let (mut hash, mut outputs, mut next) = (Xxh3::new(), 0, 0);
    let warm_up = spec.steps / 10;
    let mut times = Vec::with_capacity(spec.steps as usize);
    let (mut tenth, mut tenths) = (Vec::with_capacity(times.capacity() / 10 + 1), Vec::new());
    let mut open = 0;
    for step in 0..spec.steps + warm_up {
        while open < spec.sequences {
            let request = request(spec, next);
            rank.engine().submit(request).map_err(|e| anyhow!("{e}"))?;
            (next, open) = (next + 1, open + 1);
        }
        let start = Instant::now();
        let turn = rank.turn(u64::from(step), true, &mut out)?;
        if step >= warm_up {
            let time = start.elapsed();
            times.push(time);
            tenth.push(time);
        }
        if tenth.len() as u32 >= (spec.steps / 10).max(1) {
            let times = Times::of(&mut tenth);
            let anonymous = anonymous()?;
            tenths.push(Tenth { times, anonymous });
            tenth.clear();
        }
        if turn.rows == 0 {
            bail!("step {step} had no rows");
        }
        for event in out.events() {
            if let EventRef::Output(output) = event {
                for token in output.tokens() {
                    hash.update(&token.id.to_le_bytes());
                    outputs += 1;
                }
                open -= u32::from(output.finish.is_some());
            }
        }
    }
    let seen = Seen {
        times: Times::of(&mut times),
        tenths,
        tokens: hash.digest(),
        outputs,
    };
    println!("{}", serde_json::to_string(&seen)?);
    Ok(())
}

/// Memory of this process's own, in bytes.
fn anonymous() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.context("no RssAnon in the status")? << 10)
}

fn engine(spec: &Spec, link: Arc<RankLink>) -> Result<RankEngine> {
    let shape = ModelledShape {
        vocab_size: BYTE_VOCAB,
        ..ModelledShape::default()
    };
    let blocks = shape.num_blocks;
    let (executor, _) = ModelledExecutor::new(shape)?;
    let config = EngineConfig {
        max_num_seqs: spec.sequences,
        enable_prefix_caching: false,
        ..EngineConfig::default()
    };
    let tokenizer = byte_tokenizer().map_err(|e| anyhow!("{e}"))?;
    let engine = Engine::new(config, Box::new(executor), tokenizer, blocks);
    let engine = engine.map_err(|e| anyhow!("{e}"))?;
    RankEngine::new(engine, PhasePolicy::DEFAULT, link).map_err(|e| anyhow!("{e}"))
}

fn request(spec: &Spec, id: u64) -> Request {
    // Outputs of different lengths: prompts come one by one, into steps in which the others generate.
    let output = spec.output + (id % 7) as u32 * spec.output / 7;
    Request {
        id: RequestId(id),
        prompt: vec![(id % 200) as u32; spec.prompt as usize].into(),
        params: SamplingParams {
            ignore_eos: true,
            ..SamplingParams::greedy(output)
        },
        kv: KvSource::Compute,
        hold_kv: false,
        cache_salt: None,
        leader: None,
        resumed: 0,
    }
}
