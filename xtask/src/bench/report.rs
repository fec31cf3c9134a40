//! What a benchmark prints and writes, and whether its targets are met or their limits explained.

use super::row::Row;
use super::{Args, Measured, median};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use twinfer_it::repository;

/// Where limits are explained: under `### NAME` below this heading.
const LIMITS: &str = "## What limits the rows that fall short";

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

    /// The table as docs/benchmarks.md has it. Columns that no row of the group fills are left out; where there are no
    /// peers, a column says what the floor is.
    fn table(&self) -> String {
        let with_peers = self.rows.iter().any(|row| row.peer.is_some());
        let with_targets = self.rows.iter().any(Row::has_target);
        let mut columns = vec!["row", "ours", "floor", "share"];
        if with_peers {
            columns.extend(["best peer", "ratio"]);
        }
        if with_targets {
            columns.push("target");
        }
        if !with_peers {
            columns.push("floor is");
        }
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let text = |column: &&str| (*column).to_owned();
        let aligned = |column: &&str| match *column {
            "row" | "target" | "floor is" => "---".to_owned(),
            _ => "---:".to_owned(),
        };
        let mut table = line(&columns.iter().map(text).collect::<Vec<_>>());
        table.push_str(&line(&columns.iter().map(aligned).collect::<Vec<_>>()));
        for row in &self.rows {
            let mut cells = vec![
                row.name.clone(),
                format!("{} {}", shown(row.ours), row.unit)
                    .trim_end()
                    .to_owned(),
                shown(row.floor),
                format!("{:.2}", row.share),
            ];
            if with_peers {
                cells.push(row.peer.map(shown).unwrap_or_default());
                let ratio = row.ratio.map(|ratio| format!("{ratio:.2}"));
                cells.push(ratio.unwrap_or_default());
            }
            if with_targets {
                cells.push(row.cell());
            }
            if !with_peers {
                cells.push(row.floor_is.clone());
            }
            table.push_str(&line(&cells));
        }
        table
    }

    /// Every row meets its targets, or docs/benchmarks.md explains what limits it, with a profile, and the figures are not
    /// below those that it explains; the explanations are printed.
    pub(super) fn verdict(&self) -> Result<()> {
        let page = std::fs::read_to_string(repository().join("docs/benchmarks.md"))
            .context("docs/benchmarks.md")?;
        let judged = judge(&self.rows, &page);
        println!("\n{}", judged.summary());
        for (limit, text, rows) in &judged.explained {
            println!("\nlimit: {limit}");
            for row in rows {
                println!("  {}: {}", row.name, row.verdict());
            }
            println!("{text}");
        }
        if !judged.unexplained.is_empty() {
            bail!(
                "these rows fall short, and docs/benchmarks.md does not explain it: {}",
                judged.unexplained.join("; ")
            );
        }
        Ok(())
    }
}

/// What became of the rows.
struct Judged<'a> {
    met: usize,
    targeted: usize,
    /// Rows without a target.
    others: usize,
    /// By limit: its name, its explanation and the rows that fall short by it.
    explained: Vec<(&'a str, &'a str, Vec<&'a Row>)>,
    /// Rows that fall short with no explanation or by more than it covers, and by what.
    unexplained: Vec<String>,
}

impl Judged<'_> {
    fn summary(&self) -> String {
        let mut text = format!(
            "{} of {} rows with a target meet it",
            self.met, self.targeted
        );
        if self.others > 0 {
            let _ = write!(text, "; {} have none", self.others);
        }
        text
    }
}

fn judge<'a>(rows: &'a [Row], page: &'a str) -> Judged<'a> {
    let targeted = rows.iter().filter(|row| row.has_target());
    let mut judged = Judged {
        met: targeted.clone().filter(|row| row.met).count(),
        targeted: targeted.count(),
        others: rows.iter().filter(|row| !row.has_target()).count(),
        explained: Vec::new(),
        unexplained: Vec::new(),
    };
    for row in rows.iter().filter(|row| !row.met) {
        let limit = row.limit.as_deref().unwrap_or_default();
        let Some(text) = explanation(page, limit) else {
            let verdict = row.verdict();
            judged
                .unexplained
                .push(format!("{}: {verdict}, no limit explained", row.name));
            continue;
        };
        let beyond = row.beyond_explanation();
        if !beyond.is_empty() {
            let beyond = beyond.join("; ");
            judged.unexplained.push(format!("{}: {beyond}", row.name));
            continue;
        }
        match judged
            .explained
            .iter_mut()
            .find(|(name, ..)| *name == limit)
        {
            Some((.., rows)) => rows.push(row),
            None => judged.explained.push((limit, text, vec![row])),
        }
    }
    judged
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
    use super::super::Sample;
    use super::super::row::target;
    use super::*;

    const PAGE: &str = "# B\n\n## What limits the rows that fall short\n\n### attention\n\nPacking of \
        keys takes half of a step of 32 sequences, since every head's keys are brought into panels \
        again in every step.\n\n| pack | 45 % |\n| --- | --- |\n\n### bare\n\nNo profile.\n\n## Other\n\n\
        ### elsewhere\n\n| a |\n";

    fn row(toml: &str, ours: f64, floor: f64, peer: Option<f64>) -> Row {
        Row::of(&target(toml), &[Sample { ours, floor, peer }])
    }

    #[test]
    fn a_limit_is_words_and_a_profile_under_its_heading() {
        assert!(explanation(PAGE, "attention").unwrap().contains("45 %"));
        assert_eq!(explanation(PAGE, "bare"), None);
        assert_eq!(explanation(PAGE, "elsewhere"), None);
        assert_eq!(explanation(PAGE, ""), None);
    }

    #[test]
    fn only_rows_with_a_target_are_counted() {
        let rows = [
            row("share = 0.6", 70.0, 100.0, None),
            row("", 1.0, 100.0, None),
            row("share = 0.6", 50.0, 100.0, None),
        ];
        let judged = judge(&rows, PAGE);
        assert_eq!(
            judged.summary(),
            "1 of 2 rows with a target meet it; 1 have none"
        );
    }

    #[test]
    fn an_explanation_covers_a_shortfall_down_to_its_figure_and_no_further() {
        let asked =
            "share = 0.6\nratio = 2.0\nlimit = \"attention\"\nexplained_down_to = { share = 0.5 }";
        let fails = |ours, peer| {
            let rows = [row(asked, ours, 100.0, Some(peer))];
            judge(&rows, PAGE).unexplained
        };
        assert_eq!(fails(55.0, 20.0), Vec::<String>::new());
        assert!(fails(49.0, 20.0)[0].contains("share of the floor 0.49"));
        // Of the ratio nothing is explained.
        assert!(fails(55.0, 40.0)[0].contains("ratio"));
        let bare = asked.replace("attention", "bare");
        let rows = [row(&bare, 55.0, 100.0, Some(20.0))];
        assert_eq!(judge(&rows, PAGE).unexplained.len(), 1);
    }

    #[test]
    fn the_table_has_the_columns_of_the_page() {
        let page = std::fs::read_to_string(repository().join("docs/benchmarks.md")).unwrap();
        let table = |rows: Vec<Row>| {
            let report = Report {
                command: String::new(),
                machine: String::new(),
                rounds: 1,
                rows,
                ceilings: Vec::new(),
                notes: Vec::new(),
            };
            report.table()
        };
        let asked = "share = 0.6\nratio = 2.0";
        let engine = table(vec![
            row(asked, 57.0, 100.0, Some(30.0)),
            row("", 10.0, 100.0, None),
        ]);
        let lines: Vec<&str> = engine.lines().collect();
        assert_eq!(
            lines[2..],
            [
                "| row | 57.0 tok/s | 100 | 0.57 | 30.0 | 1.90 | ratio 2.00 wanted, short by 5 %; share 0.60 wanted, short by 5 % |",
                "| row | 10.0 tok/s | 100 | 0.10 |  |  |  |",
            ]
        );
        let router = table(vec![row("", 10.0, 100.0, None)]);
        assert!(router.ends_with("| row | 10.0 tok/s | 100 | 0.10 | what |\n"));
        for table in [&engine, &router] {
            let head: Vec<&str> = table.lines().take(2).collect();
            assert!(page.contains(&head.join("\n")), "{head:?}");
        }
    }
}
