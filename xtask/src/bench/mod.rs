//! Benchmarks: rows of bench/targets.toml, measured beside their floor in the same run.

mod engine;
mod handoff;
mod router;

use crate::run::{BUILD, cargo, check};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use twinfer_it::{profile, repository};

/// Rounds of a run; ours and floor alternate in each, medians count.
const ROUNDS: usize = 3;

/// For all rounds of a group.
const MEASURING: Duration = Duration::from_secs(3 * 60 * 60);

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Group of rows in bench/targets.toml: `engine`, `handoff` or `router`.
    pub(crate) group: String,
    /// Folder with the peers that `engine` is measured against; docs/benchmarks.md says what it holds.
    #[arg(long)]
    pub(crate) peers: Option<PathBuf>,
    /// Write the rows here as JSON.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
}

/// A row as bench/targets.toml asks for it.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Target {
    name: String,
    unit: String,
    better: Better,
    /// What the floor is.
    floor: String,
    /// Least `ratio` against a peer.
    #[serde(default)]
    ratio: Option<f64>,
    /// Least share of the floor.
    #[serde(default)]
    share: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Better {
    Higher,
    Lower,
}

/// Figures of one round of one row.
#[derive(Clone, Copy)]
struct Sample {
    ours: f64,
    floor: f64,
    /// The best peer.
    peer: Option<f64>,
}

/// Figures of one round, by the row's name.
type Round = BTreeMap<String, Sample>;

/// A row as measured.
#[derive(Serialize)]
struct Row {
    name: String,
    unit: String,
    better: Better,
    ours: f64,
    peer: Option<f64>,
    floor: f64,
    /// Times better than the peer.
    ratio: Option<f64>,
    /// Share of the floor.
    share: f64,
    /// Least share.
    target: Option<f64>,
    /// Least ratio.
    target_ratio: Option<f64>,
    met: bool,
}

/// The profile of the shipped binary, which is the one to measure.
const PROFILE: &str = "dist";

/// Measures with [`PROFILE`]: a build of another one builds that and hands over to it.
pub(crate) fn run(args: &Args) -> Result<()> {
    if profile() == PROFILE {
        return measure(args);
    }
    let with_profile = |command: &[&str]| {
        let mut cargo = cargo();
        cargo
            .args(command)
            .args(["--quiet", "--profile", PROFILE, "--package"]);
        cargo
    };
    check(with_profile(&["build"]).arg("xtask"), BUILD)?;
    check(with_profile(&["build"]).args(["twinfer-cli"]), BUILD)?;
    let mut bench = with_profile(&["run"]);
    bench.args(["xtask", "--", "bench", &args.group]);
    for (flag, path) in [("--json", &args.json), ("--peers", &args.peers)] {
        if let Some(path) = path {
            bench.arg(flag).arg(std::path::absolute(path)?);
        }
    }
    check(&mut bench, MEASURING)
}

fn measure(args: &Args) -> Result<()> {
    let text = std::fs::read_to_string(repository().join("bench/targets.toml"))
        .context("bench/targets.toml")?;
    let mut groups: BTreeMap<String, Vec<Target>> =
        toml::from_str(&text).context("bench/targets.toml")?;
    let Some(targets) = groups.remove(&args.group) else {
        bail!(
            "group is {:?}; there are {:?}",
            args.group,
            groups.keys().collect::<Vec<_>>()
        );
    };
    let rounds = match args.group.as_str() {
        "engine" => engine::measure(ROUNDS, args.peers.as_deref())?,
        "handoff" => handoff::measure(ROUNDS)?,
        "router" => router::measure(ROUNDS)?,
        other => bail!("group {other} has targets and no measurement"),
    };
    let mut rows = Vec::new();
    for target in &targets {
        let samples: Vec<Sample> = rounds
            .iter()
            .filter_map(|round| round.get(target.name.as_str()).copied())
            .collect();
        if samples.len() != ROUNDS {
            bail!(
                "row {:?} was measured in {} of {ROUNDS} rounds",
                target.name,
                samples.len()
            );
        }
        if target.ratio.is_some() && samples.iter().any(|sample| sample.peer.is_none()) {
            bail!(
                "row {:?} has a ratio target and no peer in this run",
                target.name
            );
        }
        rows.push(row(target, &samples));
    }
    for (row, target) in rows.iter().zip(&targets) {
        println!(
            "{:<60} {:>10.3} {:<10} floor {:>10.3} share {:>5.2}{}{}",
            row.name,
            row.ours,
            row.unit,
            row.floor,
            row.share,
            match (row.peer, row.ratio) {
                (Some(peer), Some(ratio)) => format!(" peer {peer:>10.3} ratio {ratio:>5.2}"),
                _ => String::new(),
            },
            if row.met { "" } else { "  NOT MET" },
        );
        println!("    floor: {}", target.floor);
    }
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)? + "\n")
            .with_context(|| format!("{}", path.display()))?;
    }
    if rows.iter().any(|row| !row.met) {
        bail!("a target is not met");
    }
    Ok(())
}

fn row(target: &Target, samples: &[Sample]) -> Row {
    let ours = median(samples.iter().map(|sample| sample.ours));
    let floor = median(samples.iter().map(|sample| sample.floor));
    let share = median(samples.iter().map(|sample| match target.better {
        Better::Higher => sample.ours / sample.floor,
        Better::Lower => sample.floor / sample.ours,
    }));
    let peers: Option<Vec<f64>> = samples.iter().map(|sample| sample.peer).collect();
    let ratios = samples.iter().filter_map(|sample| {
        sample.peer.map(|peer| match target.better {
            Better::Higher => sample.ours / peer,
            Better::Lower => peer / sample.ours,
        })
    });
    let ratio = peers.as_ref().map(|_| median(ratios));
    Row {
        name: target.name.clone(),
        unit: target.unit.clone(),
        better: target.better,
        ours,
        peer: peers.map(|peers| median(peers.into_iter())),
        floor,
        ratio,
        share,
        target: target.share,
        target_ratio: target.ratio,
        met: target.share.is_none_or(|least| share >= least)
            && target
                .ratio
                .is_none_or(|least| ratio.is_some_and(|ratio| ratio >= least)),
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
