//! One hash per deployment over the same prompts.

use anyhow::{Result, bail};

/// Which matrix.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name of the matrix.
    #[arg(long)]
    pub(crate) matrix: String,
}

impl Args {
    pub(crate) fn slice() -> Self {
        Self {
            matrix: "slice".to_owned(),
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    bail!("matrix {:?} cannot run yet", args.matrix)
}
