//! Cells of several ranks: one engine over all, experts spread, each rank with its part of the prompts.

use super::cells::{Matrix, Model, Run, Together};
use super::local::request;
use super::{MATRICES, Output, Task, tasks};
use crate::ranks::{EPOCH, PATIENCE, Ranks, end_with, meet};
use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use twinfer_comm::{Group, Options, Topology, loopback, start_up_test};
use twinfer_engine::exchange::RankLink;
use twinfer_engine::{
    Engine, EngineConfig, KvMemory, LoadOptions, RankEngine, generate_together, load,
};
use twinfer_worker::GroupExchange;

/// For all ranks to read their weights, and for a cell to end.
const LOADING: Duration = Duration::from_secs(300);
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Which cell a process is a rank of.
#[derive(clap::Args)]
pub(crate) struct RankArgs {
    parent: u32,
    matrix: String,
    model: usize,
    cell: usize,
}

/// What a rank has done.
#[derive(Serialize, Deserialize)]
struct Part {
    /// Answers with the places of their prompts.
    answers: Vec<(usize, Output)>,
    /// Steps of the group.
    steps: u64,
    accepted_drafts: u64,
    /// Seats that got another expert.
    moved: u64,
}

/// Answers of a cell, in the order of the tasks.
pub(super) fn run(
    matrix: &Matrix,
    model: &Model,
    number: usize,
    tasks: &[Task],
    cell: usize,
) -> Result<Vec<Output>> {
    let place = cell;
    let cell = &matrix.together[place];
    let topology = Topology::new(cell.counts)?;
    let parts = match cell.run {
        Run::Threads => in_threads(matrix, model, tasks, cell, &topology)?,
        Run::Processes => {
            let arguments = [matrix.name.into(), number.to_string(), place.to_string()];
            let texts = Ranks::start(&topology, "hash-rank", &arguments)?.finish(LIMIT)?;
            let parts = texts.iter().map(|text| serde_json::from_str(text));
            parts.collect::<Result<Vec<Part>, _>>()?
        }
    };
    if parts.iter().any(|part| part.steps != parts[0].steps) {
        bail!("ranks ran different numbers of steps");
    }
    if cell.drafts > 0 && parts.iter().all(|part| part.accepted_drafts == 0) {
        bail!("no draft was accepted");
    }
    if cell.eplb.forced && parts.iter().all(|part| part.moved == 0) {
        bail!("no expert changed its seat");
    }
    let mut outputs: Vec<Option<Output>> = vec![None; tasks.len()];
    for (place, output) in parts.into_iter().flat_map(|part| part.answers) {
        let slot = outputs.get_mut(place).context("an answer to no prompt")?;
        if slot.replace(output).is_some() {
            bail!("prompt {place} has two answers");
        }
    }
    let answers: Option<Vec<Output>> = outputs.into_iter().collect();
    answers.context("a prompt has no answer")
}

fn in_threads(
    matrix: &Matrix,
    model: &Model,
    tasks: &[Task],
    cell: &Together,
    topology: &Topology,
) -> Result<Vec<Part>> {
    let groups = loopback(topology, cell.share_memory, EPOCH, Options::default())?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|mut group| {
                scope.spawn(move || {
                    start_up_test(&mut group, EPOCH)?;
                    live(matrix, model, tasks, cell, group)
                })
            })
            .collect();
        let ends = ranks.into_iter().map(|rank| rank.join());
        // All are waited for: when one fails the others do, too.
        let ends: Vec<_> = ends.collect();
        ends.into_iter()
            .map(|end| end.unwrap_or_else(|_| bail!("a rank panicked")))
            .collect()
    })
}

/// The life of one rank that is a process.
pub(crate) fn rank(args: &RankArgs) -> Result<()> {
    end_with(args.parent)?;
    let matrix = MATRICES.iter().find(|matrix| matrix.name == args.matrix);
    let matrix = matrix.context("no such matrix")?;
    let model = (matrix.models)().into_iter().nth(args.model);
    let model = model.context("no such model")?;
    let cell = matrix.together.get(args.cell).context("no such cell")?;
    let group = meet(&Topology::new(cell.counts)?, cell.share_memory)?;
    let part = live(matrix, &model, &tasks(matrix, model.ids), cell, group)?;
    println!("{}", serde_json::to_string(&part)?);
    Ok(())
}

/// The life of one rank: every Nth prompt is its own.
fn live(
    matrix: &Matrix,
    model: &Model,
    tasks: &[Task],
    cell: &Together,
    group: Group,
) -> Result<Part> {
    let exchange = GroupExchange::new(group, PATIENCE, LOADING);
    let link = Arc::new(RankLink::new(Box::new(exchange)));
    let (rank, ranks) = (link.rank() as usize, link.ranks() as usize);
    let mut engine = engine(model, cell, link, tasks.len())?;
    let own = tasks.iter().enumerate().skip(rank).step_by(ranks);
    let requests = own.map(|(place, task)| request(place, task, matrix.output));
    let most = cell.sequences as usize;
    let results = generate_together(&mut engine, requests.collect(), most, |_| {})?;
    let answers = results.iter().map(|result| {
        let place = usize::try_from(result.id.0)?;
        Ok((place, super::local::output(result)))
    });
    Ok(Part {
        answers: answers.collect::<Result<_>>()?,
        steps: engine.steps(),
        accepted_drafts: engine.engine().stats().speculation.accepted[0],
        moved: engine.link().moves().seats,
    })
}

fn engine(
    model: &Model,
    cell: &Together,
    link: Arc<RankLink>,
    requests: usize,
) -> Result<RankEngine> {
    let options = LoadOptions {
        threads: 1,
        max_num_batched_tokens: cell.chunk as usize,
        max_num_seqs: cell.sequences as usize,
        quantize: model.quantize,
        mtp: cell.drafts > 0,
        max_drafts: cell.drafts as usize,
        kv: KvMemory::Blocks(512),
        ranks: Some(Arc::clone(&link)),
        moe_comm: cell.comm,
        eplb: cell.eplb,
        ..LoadOptions::default()
    };
    let loaded = load(&model.path, &options)?;
    let config = EngineConfig {
        max_model_len: 1024,
        max_num_seqs: cell.sequences,
        max_num_batched_tokens: cell.chunk,
        max_waiting: u32::try_from(requests)?,
        num_speculative_tokens: cell.drafts,
        ..EngineConfig::default()
    };
    let tokenizer = Arc::new(twinfer_text::Tokenizer::from_dir(&model.path)?);
    let executor = Box::new(loaded.executor);
    let engine = Engine::new(config, executor, tokenizer, loaded.num_blocks);
    let engine = engine.map_err(|e| anyhow!("{e}"))?;
    RankEngine::new(engine, cell.policy, link).map_err(|e| anyhow!("{e}"))
}
