//! Cells whose ranks are processes: one engine over all, experts spread, each rank with its part of the prompts.

use super::cells::{Matrix, Model, Together};
use super::local::request;
use super::{MATRICES, Output, Task, tasks};
use anyhow::{Context, Result, anyhow, bail};
use std::io::Read;
use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use twinfer_comm::{Identity, JoinPlan, Options, Placement, Topology, join, start_up_test};
use twinfer_engine::exchange::RankLink;
use twinfer_engine::phase::PhasePolicy;
use twinfer_engine::{
    Engine, EngineConfig, KvMemory, LoadOptions, RankEngine, generate_together, load,
};
use twinfer_it::free_port;
use twinfer_protocol::{Epoch, Fingerprint};
use twinfer_worker::GroupExchange;

const EPOCH: Epoch = Epoch(1);
/// Sequences and tokens of a rank's step.
const SEQUENCES: u32 = 16;
const CHUNK: u32 = 128;

/// Which rank of which cell a process is. The five variables of the placement tell the rest.
#[derive(clap::Args)]
pub(crate) struct RankArgs {
    matrix: String,
    model: usize,
    cell: usize,
    parent: u32,
}

/// Processes that end with this.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Answers of a cell, in the order of the tasks.
pub(super) fn run(
    matrix: &Matrix,
    model: usize,
    tasks: &[Task],
    cell: usize,
) -> Result<Vec<Output>> {
    let topology = Topology::new(matrix.together[cell].counts)?;
    let (port, parent) = (free_port(), std::process::id());
    let mut ranks = Ranks(Vec::new());
    for rank in 0..topology.world() {
        let placement = Placement::planned(&topology, rank, "127.0.0.1", port);
        let child = Command::new(std::env::current_exe()?)
            .args(["hash-rank", matrix.name])
            .args([model.to_string(), cell.to_string(), parent.to_string()])
            .envs(placement.variables())
            .stdout(Stdio::piped())
            .spawn()?;
        ranks.0.push(child);
    }
    let mut outputs: Vec<Option<Output>> = vec![None; tasks.len()];
    let mut failed = Vec::new();
    for (rank, child) in ranks.0.iter_mut().enumerate() {
        let mut text = String::new();
        let stdout = child.stdout.take().context("a rank without output")?;
        { stdout }.read_to_string(&mut text)?;
        if !child.wait()?.success() {
            failed.push(rank);
            continue;
        }
        for (place, output) in serde_json::from_str::<Vec<(usize, Output)>>(&text)? {
            *outputs.get_mut(place).context("an answer to no prompt")? = Some(output);
        }
    }
    if !failed.is_empty() {
        bail!("ranks {failed:?} failed");
    }
    let answers: Option<Vec<Output>> = outputs.into_iter().collect();
    answers.context("prompts without answer")
}

/// The life of one rank.
pub(crate) fn rank(args: &RankArgs) -> Result<()> {
    twinfer_sys::set_parent_death_signal(args.parent)?;
    let matrix = MATRICES.iter().find(|matrix| matrix.name == args.matrix);
    let matrix = matrix.context("no such matrix")?;
    let model = (matrix.models)().into_iter().nth(args.model);
    let model = model.context("no such model")?;
    let cell = matrix.together.get(args.cell).context("no such cell")?;
    let tasks = tasks(matrix, model.ids);
    let placement = Placement::from_environment(|name| std::env::var(name).ok())?;
    let placement = placement.context("RANK is not set")?;
    let (rank, ranks) = (placement.rank as usize, placement.world_size as usize);
    let link = Arc::new(RankLink::new(Box::new(meet(cell, placement)?)));
    let mut engine = engine(&model, cell, Arc::clone(&link), tasks.len())?;
    let own = tasks.iter().enumerate().skip(rank).step_by(ranks);
    let requests = own.map(|(place, task)| request(place, task, matrix.output));
    let results = generate_together(&mut engine, requests.collect(), SEQUENCES as usize, |_| {})?;
    let outputs: Vec<(u64, Output)> = results
        .iter()
        .map(|result| (result.id.0, super::local::output(result)))
        .collect();
    println!("{}", serde_json::to_string(&outputs)?);
    Ok(())
}

fn meet(cell: &Together, placement: Placement) -> Result<GroupExchange> {
    let plan = JoinPlan {
        identity: Identity {
            instance: "hash".to_owned(),
            epoch: EPOCH,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            fingerprint: Fingerprint::default(),
        },
        topology: Topology::new(cell.counts)?,
        rank: placement.rank,
        master_addr: placement.master_addr,
        master_port: placement.master_port,
        listen: Ipv4Addr::LOCALHOST.into(),
        port: 0,
        advertise: None,
        key: None,
        share_memory: true,
        limit: Duration::from_secs(60),
        options: Options::default(),
    };
    let mut group = join(&plan)?.group;
    start_up_test(&mut group, EPOCH)?;
    let (patience, loading) = (Duration::from_secs(60), Duration::from_secs(300));
    Ok(GroupExchange::new(group, patience, loading))
}

fn engine(
    model: &Model,
    cell: &Together,
    link: Arc<RankLink>,
    requests: usize,
) -> Result<RankEngine> {
    let options = LoadOptions {
        threads: 1,
        max_num_batched_tokens: CHUNK as usize,
        max_num_seqs: SEQUENCES as usize,
        quantize: model.quantize,
        mtp: cell.drafts > 0,
        max_drafts: cell.drafts as usize,
        kv: KvMemory::Blocks(512),
        ranks: Some(Arc::clone(&link)),
        ..LoadOptions::default()
    };
    let loaded = load(&model.path, &options)?;
    let config = EngineConfig {
        max_model_len: 1024,
        max_num_seqs: SEQUENCES,
        max_num_batched_tokens: CHUNK,
        max_waiting: u32::try_from(requests)?,
        num_speculative_tokens: cell.drafts,
        ..EngineConfig::default()
    };
    let tokenizer = Arc::new(twinfer_text::Tokenizer::from_dir(&model.path)?);
    let engine = Engine::new(
        config,
        Box::new(loaded.executor),
        tokenizer,
        loaded.num_blocks,
    );
    let engine = engine.map_err(|e| anyhow!("{e}"))?;
    RankEngine::new(engine, PhasePolicy::DEFAULT, link).map_err(|e| anyhow!("{e}"))
}
