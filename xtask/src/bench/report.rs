//! What a benchmark prints and writes, and whether its targets are met or their limits explained.

use super::{Args, Measured, Sample, median};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::Path;
use twinfer_it::repository;

/// Where limits are explained: under `### NAME` below this heading.
const LIMITS: &str = "## What limits the rows that fall short";

/// A row as bench/targets.toml asks for it.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Target {
    pub(super) name: String,
    unit: String,
    better: Better,
    /// What the floor is.
    floor: String,
    /// Least `ratio` against a peer.
    #[serde(default)]
    pub(super) ratio: Option<f64>,
    /// Least share of the floor.
    #[serde(default)]
    share: Option<f64>,
    /// Least value, most where lower is better.
    #[serde(default)]
    bound: Option<f64>,
    /// One round is enough: nothing is timed.
    #[serde(default)]
    pub(super) once: bool,
    /// Heading in docs/benchmarks.md under which the limit is explained, if the row falls short.
    #[serde(default)]
    limit: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Better {
    Higher,
    Lower,
}

/// A row as measured.
#[derive(Serialize)]
pub(super) struct Row {
    name: String,
    unit: String,
    better: Better,
    ours: f64,
    peer: Option<f64>,
    floor: f64,
    floor_is: String,
    /// Times better than the peer.
    ratio: Option<f64>,
    /// Share of the floor.
    share: f64,
    target: Targets,
    met: bool,
    /// How far it falls short of what.
    short: Vec<String>,
    #[serde(skip)]
    limit: Option<String>,
}

#[derive(Serialize)]
struct Targets {
    ratio: Option<f64>,
    share: Option<f64>,
    bound: Option<f64>,
}

#[derive(Serialize)]
struct Ceiling {
    name: String,
    least: f64,
    median: f64,
    most: f64,
}

#[derive(Serialize)]
pub(super) struct Report {
    command: String,
    machine: String,
    rounds: usize,
    rows: Vec<Row>,
    ceilings: Vec<Ceiling>,
    notes: Vec<String>,
}

impl Row {
    pub(super) fn of(target: &Target, samples: &[Sample]) -> Self {
        let ours = median(samples.iter().map(|sample| sample.ours));
        let floor = median(samples.iter().map(|sample| sample.floor));
        let times = |ours: f64, other: f64| match target.better {
            _ if ours == other => 1.0,
            Better::Higher => ours / other,
            Better::Lower => other / ours,
        };
        let share = median(samples.iter().map(|s| times(s.ours, s.floor)));
        let peers: Option<Vec<f64>> = samples.iter().map(|sample| sample.peer).collect();
        let ratios = samples
            .iter()
            .filter_map(|sample| sample.peer.map(|peer| times(sample.ours, peer)));
        let ratio = peers.as_ref().map(|_| median(ratios));
        let mut short = Vec::new();
        let mut require = |what: &str, found: f64, wanted: Option<f64>| {
            if let Some(wanted) = wanted
                && found < wanted
            {
                let by = (1.0 - found / wanted) * 100.0;
                short.push(format!(
                    "{what} {found:.2} of the {wanted:.2} wanted, short by {by:.0} %"
                ));
            }
        };
        require(
            "ratio to the best peer",
            ratio.unwrap_or(0.0),
            target.ratio.filter(|_| ratio.is_some()),
        );
        require("share of the floor", share, target.share);
        if let Some(bound) = target.bound {
            let met = match target.better {
                Better::Higher => ours >= bound,
                Better::Lower => ours <= bound,
            };
            if !met {
                short.push(format!("{ours:.3} {} where {bound} is wanted", target.unit));
            }
        }
        Self {
            name: target.name.clone(),
            unit: target.unit.clone(),
            better: target.better,
            ours,
            peer: peers.map(|peers| median(peers.into_iter())),
            floor,
            floor_is: target.floor.clone(),
            ratio,
            share,
            target: Targets {
                ratio: target.ratio,
                share: target.share,
                bound: target.bound,
            },
            met: short.is_empty(),
            short,
            limit: target.limit.clone(),
        }
    }

    fn verdict(&self) -> String {
        let Targets {
            ratio,
            share,
            bound,
        } = self.target;
        if !self.met {
            self.short.join("; ")
        } else if ratio.is_none() && share.is_none() && bound.is_none() {
            "no target".to_owned()
        } else {
            "met".to_owned()
        }
    }
}

impl Report {
    pub(super) fn new(args: &Args, rows: Vec<Row>, measured: Measured) -> Self {
        let mut command = format!("cargo xtask bench {}", args.group);
        if args.peers.is_some() {
            command.push_str(" --peers DIR");
        }
        if let Some(only) = &args.only {
            let _ = write!(command, " --only {only:?}");
        }
        if args.quick {
            command.push_str(" --quick");
        }
        let ceilings = measured.ceilings.into_iter().map(|(name, values)| Ceiling {
            name,
            least: values.iter().copied().fold(f64::INFINITY, f64::min),
            median: median(values.iter().copied()),
            most: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        });
        Self {
            command,
            machine: machine(),
            rounds: measured.rounds.len(),
            rows,
            ceilings: ceilings.collect(),
            notes: measured.notes,
        }
    }

    pub(super) fn print(&self) {
        println!("{}; {}; {} rounds", self.command, self.machine, self.rounds);
        for ceiling in &self.ceilings {
            println!(
                "{}: {:.1} ({:.1} to {:.1})",
                ceiling.name, ceiling.median, ceiling.least, ceiling.most
            );
        }
        for note in &self.notes {
            println!("{note}");
        }
        for row in &self.rows {
            println!(
                "{:<58} {:>10.3} {:<8} floor {:>10.3} share {:>5.2}{}  {}",
                row.name,
                row.ours,
                row.unit,
                row.floor,
                row.share,
                match (row.peer, row.ratio) {
                    (Some(peer), Some(ratio)) => format!(" peer {peer:>10.3} ratio {ratio:>5.2}"),
                    _ => String::new(),
                },
                row.verdict(),
            );
            println!("    floor: {}", row.floor_is);
        }
    }

    pub(super) fn write(&self, args: &Args) -> Result<()> {
        let save = |path: &Path, text: String| {
            std::fs::write(path, text).with_context(|| format!("{}", path.display()))
        };
        if let Some(path) = &args.json {
            save(path, serde_json::to_string_pretty(self)? + "\n")?;
        }
        if let Some(path) = &args.table {
            save(path, self.table())?;
        }
        Ok(())
    }

    /// Rows with a letter for each kind of floor, and what the letters stand for.
    fn table(&self) -> String {
        let mut floors: Vec<&str> = Vec::new();
        let mut text = format!(
            "`{}`, {}, medians of {} rounds.",
            self.command, self.machine, self.rounds
        );
        for (place, ceiling) in self.ceilings.iter().enumerate() {
            let _ = write!(
                text,
                "{} {} {:.0} ({:.0} to {:.0})",
                if place == 0 {
                    " What the machine could do, measured between the rounds:"
                } else {
                    ","
                },
                ceiling.name,
                ceiling.median,
                ceiling.least,
                ceiling.most
            );
        }
        text.push_str(if self.ceilings.is_empty() {
            "\n\n"
        } else {
            ".\n\n"
        });
        text.push_str(
            "| row | ours | best peer | ratio (wanted) | floor | share (wanted) | |\n\
             | --- | ---: | ---: | ---: | ---: | ---: | --- |\n",
        );
        let wanted = |value: Option<f64>, wanted: Option<f64>| match (value, wanted) {
            (None, _) => String::new(),
            (Some(value), None) => format!("{value:.2}"),
            (Some(value), Some(wanted)) => format!("{value:.2} ({wanted:.2})"),
        };
        for row in &self.rows {
            let place = match floors.iter().position(|floor| *floor == row.floor_is) {
                Some(place) => place,
                None => {
                    floors.push(&row.floor_is);
                    floors.len() - 1
                }
            };
            let targeted = row.verdict();
            let _ = writeln!(
                text,
                "| {} | {} {} | {} | {} | {} {} | {} | {} |",
                row.name,
                shown(row.ours),
                row.unit,
                row.peer.map(shown).unwrap_or_default(),
                wanted(row.ratio, row.target.ratio),
                shown(row.floor),
                letter(place),
                wanted(Some(row.share), row.target.share),
                if row.met { targeted } else { "short".into() },
            );
        }
        text.push_str("\nFloors:");
        for (place, floor) in floors.iter().enumerate() {
            let end = if place + 1 == floors.len() { "." } else { ";" };
            let _ = write!(text, " {} {floor}{end}", letter(place));
        }
        text.push('\n');
        for note in &self.notes {
            let _ = writeln!(text, "\n{note}");
        }
        text
    }

    /// Every row meets its targets, or docs/benchmarks.md explains what limits it, with a profile; the
    /// explanations are printed.
    pub(super) fn verdict(&self) -> Result<()> {
        let page = std::fs::read_to_string(repository().join("docs/benchmarks.md"))
            .context("docs/benchmarks.md")?;
        let mut unexplained = Vec::new();
        let mut explained: Vec<(&str, &str, Vec<&Row>)> = Vec::new();
        for row in self.rows.iter().filter(|row| !row.met) {
            let limit = row.limit.as_deref().unwrap_or_default();
            match explanation(&page, limit) {
                Some(text) => match explained.iter_mut().find(|(name, ..)| *name == limit) {
                    Some((.., rows)) => rows.push(row),
                    None => explained.push((limit, text, vec![row])),
                },
                None => unexplained.push(row.name.as_str()),
            }
        }
        let met = self.rows.iter().filter(|row| row.met).count();
        println!("\n{met} of {} rows meet their targets", self.rows.len());
        for (limit, text, rows) in &explained {
            println!("\nlimit: {limit}");
            for row in rows {
                println!("  {}: {}", row.name, row.verdict());
            }
            println!("{text}");
        }
        if !unexplained.is_empty() {
            bail!(
                "these rows fall short, and docs/benchmarks.md explains no limit of theirs: {}",
                unexplained.join("; ")
            );
        }
        Ok(())
    }
}

/// The text under `### NAME` in the part on limits, if it has words and a profile, which is a table.
fn explanation<'a>(page: &'a str, name: &str) -> Option<&'a str> {
    let limits = page.split_once(LIMITS)?.1;
    let limits = limits.split("\n## ").next()?;
    let section = limits
        .split("\n### ")
        .skip(1)
        .find(|section| section.lines().next().map(str::trim) == Some(name))?;
    let text = section.split_once('\n')?.1.trim();
    let is_profile = |line: &str| line.starts_with('|');
    let words = text.lines().filter(|line| !is_profile(line));
    let has_words = words.map(str::len).sum::<usize>() >= 100;
    (has_words && text.lines().any(is_profile)).then_some(text)
}

fn letter(place: usize) -> char {
    char::from(b'a' + u8::try_from(place % 26).unwrap_or(0))
}

/// Three digits that count, or all before the point.
fn shown(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if size < 10.0 => format!("{value:.2}"),
        size if size < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Processor, cores and memory.
fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(':'))
            .map(|(_, value)| value.trim().to_owned())
    };
    let model = field(&read("/proc/cpuinfo"), "model name");
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = field(&read("/proc/meminfo"), "MemTotal")
        .and_then(|value| value.split(' ').next().and_then(|kib| kib.parse().ok()))
        .map_or(0, |kib: u64| (kib + (1 << 19)) >> 20);
    format!(
        "{cores} cores of {}, {memory} GiB",
        model.as_deref().unwrap_or("an unnamed processor")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# B\n\n## What limits the rows that fall short\n\n### attention\n\nPacking of \
        keys takes half of a step of 32 sequences, since every head's keys are brought into panels \
        again in every step.\n\n| pack | 45 % |\n| --- | --- |\n\n### bare\n\nNo profile.\n\n## Other\n\n\
        ### elsewhere\n\n| a |\n";

    fn target(toml: &str) -> Target {
        toml::from_str(&format!(
            "name = \"row\"\nunit = \"tok/s\"\nfloor = \"what\"\n{toml}"
        ))
        .unwrap()
    }

    fn sample(ours: f64, floor: f64, peer: Option<f64>) -> Sample {
        Sample { ours, floor, peer }
    }

    #[test]
    fn a_limit_is_words_and_a_profile_under_its_heading() {
        assert!(explanation(PAGE, "attention").unwrap().contains("45 %"));
        assert_eq!(explanation(PAGE, "bare"), None);
        assert_eq!(explanation(PAGE, "elsewhere"), None);
        assert_eq!(explanation(PAGE, ""), None);
    }

    #[test]
    fn medians_of_ratios_and_shares_are_compared() {
        let wanted = target("better = \"higher\"\nratio = 2.0\nshare = 0.6");
        let rounds = [
            sample(100.0, 150.0, Some(40.0)),
            sample(90.0, 180.0, Some(50.0)),
            sample(110.0, 160.0, Some(50.0)),
        ];
        let row = Row::of(&wanted, &rounds);
        assert!(row.met, "{:?}", row.short);
        assert_eq!(
            (row.ours, row.peer, row.ratio),
            (100.0, Some(50.0), Some(2.2))
        );
        let row = Row::of(&wanted, &[sample(90.0, 180.0, Some(50.0))]);
        assert_eq!(row.short.len(), 2, "{:?}", row.short);
    }

    #[test]
    fn lower_is_better_and_bounds_hold_both_ways() {
        let most = target("better = \"lower\"\nbound = 0");
        assert!(Row::of(&most, &[sample(0.0, 0.0, None)]).met);
        assert!(!Row::of(&most, &[sample(1.0, 0.0, None)]).met);
        let share = target("better = \"lower\"\nshare = 0.8");
        assert!(Row::of(&share, &[sample(1.2, 1.0, None)]).met);
        assert!(!Row::of(&share, &[sample(1.3, 1.0, None)]).met);
        let least = target("better = \"higher\"\nbound = 0.5");
        assert!(!Row::of(&least, &[sample(0.4, 9.0, None)]).met);
    }
}
