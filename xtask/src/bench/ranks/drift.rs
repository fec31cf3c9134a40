//! Many steps of many ranks: the last must take what the first took, and the ranks hold no more than they did.

use super::steps::{Seen, Spec, Tenth, run_all};
use anyhow::{Context, Result, bail};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60 * 60);
/// Times the median step of the first tenths, for that of the last.
const SLOWER: f64 = 1.25;
/// Bytes of a rank's own memory beyond those after the first tenth and what holds the measured times.
const MORE: u64 = 1 << 20;
/// Bytes that a measured time takes.
const TIME: u64 = size_of::<Duration>() as u64;

/// Runs `steps` steps of `ranks` ranks on this node, over executors that compute nothing.
pub(crate) fn drift(ranks: u32, steps: u32) -> Result<()> {
    if steps < 1000 {
        bail!("--steps is {steps}; at least 1000 are needed to see a drift");
    }
    let all = run_all(&Spec::new(&[ranks], true, steps), LIMIT)?;
    let first = all.first().context("a group without ranks")?;
    for (place, tenth) in first.tenths.iter().enumerate() {
        println!(
            "tenth {}: median {:.1} us, mean {:.1}, 99th percentile {:.1}; rank 0 holds {:.2} MiB",
            place + 1,
            tenth.times.median,
            tenth.times.mean,
            tenth.times.p99,
            tenth.anonymous as f64 / f64::from(1 << 20)
        );
    }
    println!(
        "{steps} steps of {ranks} ranks, {} tokens on each, the same on all",
        first.outputs
    );
    for (rank, seen) in all.iter().enumerate() {
        steady(seen, steps).with_context(|| format!("rank {rank}"))?;
    }
    Ok(())
}

fn steady(seen: &Seen, steps: u32) -> Result<()> {
    let [first, .., last] = seen.tenths.as_slice() else {
        bail!("{} tenths were measured", seen.tenths.len());
    };
    let measured = u64::from(steps) * TIME * 9 / 10;
    if last.anonymous > first.anonymous + measured + MORE {
        bail!(
            "holds {} bytes at the end, {} after the first tenth",
            last.anonymous,
            first.anonymous
        );
    }
    // Of three tenths the fastest: other programs only make one slower.
    let fastest = |tenths: &[Tenth]| {
        let medians = tenths.iter().map(|tenth| tenth.times.median);
        medians.fold(f64::INFINITY, f64::min)
    };
    let few = seen.tenths.len().min(3);
    let before = fastest(&seen.tenths[..few]);
    let after = fastest(&seen.tenths[seen.tenths.len() - few..]);
    if after > SLOWER * before {
        bail!("a step takes {after:.1} us in the last tenths, {before:.1} in the first");
    }
    Ok(())
}
