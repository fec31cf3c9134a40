//! Faults of ranks under load: every rank in turn is killed, stopped, and cut off from the others.

use crate::topo::{Fault, Running};
use anyhow::{Context, Result, bail};
use std::io::Write;
use twinfer_it::{Nodes, demo_model, enter_namespaces};

/// Nodes, of one rank each: so each can be cut off alone.
const NODES: usize = 4;

/// What is lost, and how often.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// `ranks`: the ranks of one instance on four nodes.
    what: String,
    /// Rounds; each loses one rank by one fault, the next one by the next.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.what != "ranks" {
        bail!("{:?} has no faults here; there is ranks", args.what);
    }
    enter_namespaces().context("cannot make namespaces")?;
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(deployment().as_bytes())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let nodes = Nodes::new(NODES).context("cannot make nodes")?;
        for round in 0..args.rounds {
            let rank = round % NODES as u32;
            // So that within twelve rounds every rank meets every fault.
            let (name, fault) = match (round + round / NODES as u32) % 3 {
                0 => ("killed", Fault::Kill),
                1 => ("stopped", Fault::Stop),
                _ => ("cut off", Fault::Cut(rank as usize)),
            };
            let mut running = Running::start(&nodes, NODES, file.path()).await?;
            let outcome = running.lose(&nodes, rank, &fault).await;
            let outcome = outcome.with_context(|| format!("round {round}: rank {rank} {name}"))?;
            println!("round {:>2}: rank {rank} {name}: {outcome}", round + 1);
        }
        Ok(())
    })
}

fn deployment() -> String {
    let mut text = format!(
        "name: faults\nmodel: {{path: \"{}\", name: demo}}\nnodes:\n",
        demo_model().display()
    );
    for node in 0..NODES {
        text.push_str(&format!(
            "  - {{name: n{node}, host: {}, rank-host: {}, agent: 8900, cores: 0-1, share-cores: true}}\n",
            Nodes::host(node),
            Nodes::rank_host(node)
        ));
    }
    text.push_str(
        "instances:\n  - {name: ranks, role: both, threads: 1, port: 8100, max-model-len: 1024, kv-cache-memory: 32MiB, \
         ranks: {n0: 1, n1: 1, n2: 1, n3: 1}}\nrouter: {port: 8000, drain-settle: 0}\n",
    );
    text
}
