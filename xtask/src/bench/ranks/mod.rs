//! Ranks of one instance: what stepping together costs, between processes of this machine over executors that compute
//! nothing; and what the phase policies are worth, in virtual time.

mod barrier;
mod drift;
mod gather;
mod policies;
mod steps;

use super::{Measured, Plan, Sample};
use crate::ranks::end_with;
use anyhow::{Result, bail};
use barrier::Barrier;
pub(crate) use drift::drift;
use std::time::Duration;
use steps::{Spec, Steps};

const SHARED: &str = "coordination per step, 4 ranks, shared memory";
const TCP: &str = "coordination per step, 4 ranks, loopback TCP";
const NODES: &str = "coordination per step, 2 nodes of 2 ranks, shared memory and loopback TCP";
const MANY: &str = "16 ranks on this machine";

/// For a group to end.
const LIMIT: Duration = Duration::from_secs(120);

/// A rank's process.
#[derive(clap::Args)]
pub(crate) struct RankArgs {
    parent: u32,
    #[command(subcommand)]
    life: Life,
}

#[derive(clap::Subcommand)]
enum Life {
    /// Meets the others at a bare barrier.
    Barrier(barrier::Args),
    /// Steps together with the others.
    Steps {
        /// A [`Spec`] as JSON.
        spec: String,
    },
}

/// The life of one rank.
pub(crate) fn rank(args: &RankArgs) -> Result<()> {
    end_with(args.parent)?;
    match &args.life {
        Life::Barrier(args) => barrier::rank(args),
        Life::Steps { spec } => steps::rank(&serde_json::from_str(spec)?),
    }
}

pub(super) fn measure(plan: &Plan) -> Result<Measured> {
    let mut measured = Measured::empty(plan.rounds);
    let is_timed = [SHARED, TCP, NODES, MANY].iter().any(|row| plan.wants(row));
    if is_timed {
        let barrier = Barrier::new()?;
        for round in 0..plan.rounds {
            timed(plan, round, &barrier, &mut measured)?;
        }
    }
    policies::measure(plan, &mut measured)?;
    gather::measure(plan, &mut measured)?;
    Ok(measured)
}

/// One round: floor, one rank, and each group in turn.
fn timed(plan: &Plan, round: usize, barrier: &Barrier, measured: &mut Measured) -> Result<()> {
    let steps = if plan.quick { 1000 } else { 10_000 };
    let floor = barrier.measure(4, steps)?;
    let alone = steps::run(&Spec::new(&[1], true, steps))?;
    for (row, counts, share_memory) in [
        (SHARED, &[4][..], true),
        (TCP, &[4], false),
        (NODES, &[2, 2], true),
    ] {
        if !plan.wants(row) {
            continue;
        }
        let group = steps::run(&Spec::new(counts, share_memory, steps))?;
        check(&alone, &group, row)?;
        let sample = Sample {
            ours: group.mean - alone.mean,
            floor: floor.mean,
            peer: None,
        };
        measured.insert(round, row, sample);
        if round == 0 {
            measured.notes.push(format!(
                "{row}: a step takes {:.1} us (median {:.1}, 99th percentile {:.1}), with one rank {:.1} (median {:.1})",
                group.mean, group.median, group.p99, alone.mean, alone.median
            ));
        }
    }
    if plan.wants(MANY) {
        let steps = steps / 2;
        let floor = barrier.measure(16, steps)?;
        let group = steps::run(&Spec::new(&[16], true, steps))?;
        let alone = steps::run(&Spec::new(&[1], true, steps))?;
        check(&alone, &group, MANY)?;
        let cores = std::thread::available_parallelism()?.get() as f64;
        let sample = Sample {
            ours: 1e6 / group.mean,
            floor: 1e6 / (floor.mean + 16.0 * alone.mean / cores),
            peer: None,
        };
        measured.insert(round, MANY, sample);
    }
    Ok(())
}

/// All ranks had the requests of the one, so they must have the same tokens.
fn check(alone: &Steps, group: &Steps, row: &str) -> Result<()> {
    if alone.tokens != group.tokens || alone.outputs != group.outputs {
        bail!("{row}: other tokens than with one rank");
    }
    Ok(())
}
