//! Soak of one prefill and one decode instance behind a router.

use anyhow::{Result, bail};

/// How hard and how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Streams at the same time.
    #[arg(long, default_value_t = 64)]
    pub(crate) streams: u32,
    /// Share of requests whose client leaves midway, 0 to 1.
    #[arg(long, default_value_t = 0.2)]
    pub(crate) disconnect: f64,
    /// Duration.
    #[arg(long, default_value_t = 60)]
    pub(crate) seconds: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    bail!("soak of {} streams, {} leaving, {} s cannot run yet", args.streams, args.disconnect, args.seconds)
}
