//! Benchmarks: rows of bench/targets.toml.

use anyhow::{Result, bail};
use std::path::PathBuf;

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Group of rows in bench/targets.toml.
    pub(crate) group: String,
    /// Write the rows here as JSON.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    bail!(
        "group {:?} cannot run yet (json {:?})",
        args.group,
        args.json
    )
}
