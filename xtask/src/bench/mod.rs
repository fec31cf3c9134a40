//! Benchmarks: rows of bench/targets.toml, measured beside their floor and the best peer in the same run.

mod engine;
mod handoff;
mod ranks;
mod report;
mod router;
mod row;

use crate::run::{BUILD, cargo, check};
use anyhow::{Context, Result, bail};
use report::Report;
use row::{Row, Target};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use twinfer_it::{profile, repository};

pub(crate) use ranks::{RankArgs, drift, rank};

/// Rounds of a run; ours, peers and floor alternate in each, medians count.
const ROUNDS: usize = 3;

/// For all rounds of a group.
const MEASURING: Duration = Duration::from_secs(3 * 60 * 60);

/// What to measure.
#[derive(clap::Args, Clone)]
pub(crate) struct Args {
    /// Group of rows in bench/targets.toml: `engine`, `handoff`, `ranks` or `router`.
    pub(crate) group: String,
    /// Folder with the peers that `engine` is measured against; docs/benchmarks.md says what it holds.
    #[arg(long)]
    pub(crate) peers: Option<PathBuf>,
    /// Write the figures here as JSON.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
    /// Write the table for docs/benchmarks.md here.
    #[arg(long)]
    pub(crate) table: Option<PathBuf>,
    /// Only rows whose name contains this; for development: targets are compared, and decide nothing.
    #[arg(long)]
    pub(crate) only: Option<String>,
    /// One round of short measurements of this build, whatever its profile; for development, as `--only`.
    #[arg(long)]
    pub(crate) quick: bool,
}

/// What a run is to measure.
struct Plan {
    rounds: usize,
    /// Short measurements.
    quick: bool,
    wanted: Vec<String>,
}

/// Figures of one round of one row.
#[derive(Clone, Copy, Debug)]
struct Sample {
    ours: f64,
    floor: f64,
    /// The best peer.
    peer: Option<f64>,
}

/// Figures of one round, by the row's name.
type Round = BTreeMap<String, Sample>;

/// What a group has measured.
#[derive(Default)]
struct Measured {
    rounds: Vec<Round>,
    /// What the machine could do, name and unit to one value per measurement.
    ceilings: BTreeMap<String, Vec<f64>>,
    /// Worth telling beside the rows.
    notes: Vec<String>,
    /// What could not be measured, and why; the rest is reported all the same.
    failures: Vec<String>,
}

impl Args {
    pub(crate) fn of(group: &str) -> Self {
        Self {
            group: group.to_owned(),
            peers: None,
            json: None,
            table: None,
            only: None,
            quick: false,
        }
    }

    fn is_partial(&self) -> bool {
        self.quick || self.only.is_some()
    }
}

impl Plan {
    fn wants(&self, row: &str) -> bool {
        self.wanted.iter().any(|wanted| wanted == row)
    }

    /// A whole measurement's time, or a tenth of it.
    fn time(&self, whole: Duration) -> Duration {
        if self.quick { whole / 10 } else { whole }
    }
}

impl Measured {
    fn empty(rounds: usize) -> Self {
        Self {
            rounds: (0..rounds).map(|_| Round::new()).collect(),
            ..Self::default()
        }
    }

    fn of(rounds: Vec<Round>) -> Self {
        Self {
            rounds,
            ..Self::default()
        }
    }

    fn insert(&mut self, round: usize, name: impl Into<String>, sample: Sample) {
        if let Some(round) = self.rounds.get_mut(round) {
            round.insert(name.into(), sample);
        }
    }

    fn ceiling(&mut self, name: &str, value: f64) {
        self.ceilings
            .entry(name.to_owned())
            .or_default()
            .push(value);
    }
}

/// The profile of the shipped binary, which is the one to measure.
const PROFILE: &str = "dist";

/// Measures with [`PROFILE`]: a build of another one builds that and hands over to it.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.quick || profile() == PROFILE {
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
    for (flag, path) in [
        ("--json", &args.json),
        ("--peers", &args.peers),
        ("--table", &args.table),
    ] {
        if let Some(path) = path {
            bench.arg(flag).arg(std::path::absolute(path)?);
        }
    }
    if let Some(only) = &args.only {
        bench.args(["--only", only]);
    }
    check(&mut bench, MEASURING)
}

fn measure(args: &Args) -> Result<()> {
    let text = std::fs::read_to_string(repository().join("bench/targets.toml"))
        .context("bench/targets.toml")?;
    let mut groups: BTreeMap<String, Vec<Target>> =
        toml::from_str(&text).context("bench/targets.toml")?;
    let Some(mut targets) = groups.remove(&args.group) else {
        bail!(
            "group is {:?}; there are {:?}",
            args.group,
            groups.keys().collect::<Vec<_>>()
        );
    };
    targets.iter().try_for_each(Target::check)?;
    if let Some(only) = &args.only {
        targets.retain(|target| target.name.contains(only.as_str()));
        if targets.is_empty() {
            bail!("no row of {} has {only:?} in its name", args.group);
        }
    }
    let plan = Plan {
        rounds: if args.quick { 1 } else { ROUNDS },
        quick: args.quick,
        wanted: targets.iter().map(|target| target.name.clone()).collect(),
    };
    let mut measured = match args.group.as_str() {
        "engine" => engine::measure(&plan, args.peers.as_deref())?,
        "handoff" => Measured::of(handoff::measure(plan.rounds)?),
        "ranks" => ranks::measure(&plan)?,
        "router" => Measured::of(router::measure(plan.rounds)?),
        other => bail!("group {other} has targets and no measurement"),
    };
    let mut rows = Vec::new();
    for target in &targets {
        match row(target, &measured, plan.rounds) {
            Ok(row) => rows.push(row),
            Err(error) => measured.failures.push(format!("{error:#}")),
        }
    }
    let failures = std::mem::take(&mut measured.failures);
    let report = Report::new(args, rows, measured);
    report.print();
    report.write(args)?;
    if !failures.is_empty() {
        bail!("not everything was measured:\n{}", failures.join("\n"));
    }
    if args.is_partial() {
        println!("a part of the benchmark: targets decide nothing");
        return Ok(());
    }
    report.verdict()
}

/// The row of a target; a figure that is missing is an error.
fn row(target: &Target, measured: &Measured, rounds: usize) -> Result<Row> {
    let name = &target.name;
    let samples: Vec<Sample> = measured
        .rounds
        .iter()
        .filter_map(|round| round.get(name.as_str()).copied())
        .collect();
    let expected = if target.once { 1 } else { rounds };
    if samples.len() < expected {
        bail!(
            "row {name:?} was measured in {} of {expected} rounds",
            samples.len()
        );
    }
    if target.ratio.is_some() && samples.iter().any(|sample| sample.peer.is_none()) {
        bail!("row {name:?} has a ratio target and no peer in this run");
    }
    let mut figures = samples
        .iter()
        .flat_map(|sample| [sample.ours, sample.floor].into_iter().chain(sample.peer));
    if let Some(odd) = figures.find(|value| !value.is_finite()) {
        bail!("row {name:?} has {odd} among its figures");
    }
    Ok(Row::of(target, &samples))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
