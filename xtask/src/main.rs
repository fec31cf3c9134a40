//! Chores of the project: `cargo xtask NAME`.
#![forbid(unsafe_code)]

mod bench;
mod cases;
mod faults;
mod hash;
mod memory;
mod ranks;
mod run;
mod show;
mod soak;
mod soak_ranks;
mod split;
mod topo;

use clap::{Parser, Subcommand};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::process::ExitCode;

/// Counts, for the benchmark of allocations.
#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Chores of the project.
#[derive(Parser)]
#[command(name = "cargo xtask", about)]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Show that an issue is resolved: `slice` runs every line of its list, `slice.3` the third.
    Show {
        /// Issue, or issue and line.
        what: String,
    },
    /// Run the cases of an issue, each by the tests named in it/cases.toml.
    Cases {
        /// Issue whose cases are run.
        #[arg(long)]
        issue: String,
    },
    /// Compare the planned processes of examples/seed-* with the seeds' own environment and arguments, and their findings with the golden ones.
    Seeds,
    /// One hash per deployment of the same prompts; all must be equal.
    Hash(hash::Args),
    /// A rank of a cell of `hash`, which starts it.
    #[command(hide = true)]
    HashRank(hash::RankArgs),
    /// Memory of rank processes against their weights and KV, and the bytes of experts that move.
    Memory,
    /// A rank of `memory`, which starts it.
    #[command(hide = true)]
    MemoryRank(memory::RankArgs),
    /// Streams through one prefill and one decode instance, some cut off; then every gauge must be back.
    /// With --ranks: steps of so many ranks, which must take and hold at the end what they did at the beginning; with
    /// --http, too, requests to an instance of them.
    Soak(soak::Args),
    /// Start a topology on nodes that are namespaces, ask it, lose a rank of it.
    Topo(topo::Args),
    /// Lose ranks under load, one a round.
    Faults(faults::Args),
    /// Measure against the floor and the peers.
    Bench(bench::Args),
    /// A rank of a group of `bench ranks`, which starts it.
    #[command(hide = true)]
    BenchRank(bench::RankArgs),
}

/// The comparison is a test of the crate that plans, so that it holds on every landing.
fn seeds() -> anyhow::Result<()> {
    let mut command = run::cargo();
    command.args([
        "test",
        "--release",
        "-p",
        "twinfer-deploy",
        "--test",
        "seeds",
    ]);
    run::check(&mut command, run::TESTS)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.chore {
        Chore::Show { what } => show::run(&what),
        Chore::Cases { issue } => cases::run(&issue),
        Chore::Seeds => seeds(),
        Chore::Hash(args) => hash::run(&args),
        Chore::HashRank(args) => hash::rank(&args),
        Chore::Memory => memory::run(),
        Chore::MemoryRank(args) => memory::rank(&args),
        Chore::Soak(args) => soak::run(&args),
        Chore::Topo(args) => topo::run(&args),
        Chore::Faults(args) => faults::run(&args),
        Chore::Bench(args) => bench::run(&args),
        Chore::BenchRank(args) => bench::rank(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
