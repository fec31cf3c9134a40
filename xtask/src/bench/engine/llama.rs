//! llama.cpp through its own benchmarks.

use super::ours::cores;
use super::{CONTEXT, NEAR_SETTING, STEPS, THREADS, alone};
use crate::run::{PEER, capture};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What llama.cpp is run with.
#[derive(Clone, Copy, PartialEq)]
struct Setting {
    threads: usize,
    /// Flash attention.
    flash: bool,
    /// Tokens of one step.
    step: usize,
}

/// One model file.
pub(super) struct Llama {
    folder: PathBuf,
    model: PathBuf,
    /// Settings for each measurement that are not far behind the best, the best one first: all are measured in each round,
    /// since one measurement does not tell near ones apart.
    near: BTreeMap<String, Vec<Setting>>,
}

impl Llama {
    pub(super) fn find(peers: &Path, model: PathBuf) -> Result<Self> {
        let folder = peers.join("llama.cpp/bin");
        for program in ["llama-bench", "llama-batched-bench"] {
            if !folder.join(program).exists() {
                bail!("{} does not exist", folder.join(program).display());
            }
        }
        Ok(Self {
            folder,
            model,
            near: BTreeMap::new(),
        })
    }

    /// Tokens per second of one prompt. One thread is tried with 512 tokens only: arithmetic is the limit.
    pub(super) fn prefill(&mut self, tokens: usize) -> Result<f64> {
        let tried = if tokens > 512 {
            tried(&[512, 2048], false)
        } else {
            tried(&[512], true)
        };
        let count = tokens.to_string();
        self.best_of(
            &format!("prefill {tokens}"),
            tried,
            |llama, setting, known| {
                // Long prompts take seconds each.
                let repeats = if known && tokens <= 512 { "2" } else { "1" };
                llama.bench(setting, &["-p", &count, "-n", "0", "-r", repeats])
            },
        )
    }

    /// Tokens per second of `sequences` sequences together, each after the same number of tokens. Of the
    /// batches one thread is tried with the smaller only.
    pub(super) fn decode(&mut self, sequences: usize) -> Result<f64> {
        let what = format!("decode {sequences}");
        let tried = tried(&[512], sequences <= 16);
        if sequences == 1 {
            let (steps, context) = (STEPS.to_string(), CONTEXT.to_string());
            let work = ["-p", "0", "-n", &steps, "-d", &context, "-r", "3"];
            return self.best_of(&what, tried, |llama, setting, _| {
                llama.bench(setting, &work)
            });
        }
        self.best_of(&what, tried, |llama, setting, known| {
            // Few sequences take less than two seconds.
            let turns = if known && sequences <= 16 { 2 } else { 1 };
            llama.batched(setting, sequences, turns)
        })
    }

    /// What was found best, for the notes.
    pub(super) fn settings(&self) -> String {
        let each = self.near.iter().filter_map(|(what, settings)| {
            let setting = settings.first()?;
            Some(format!(
                "{what}: {} threads, flash attention {}, steps of {}",
                setting.threads,
                if setting.flash { "on" } else { "off" },
                setting.step
            ))
        });
        each.collect::<Vec<_>>().join("; ")
    }

    /// The best of what `measure` gives for those of `tried` that were near the best so far; it is told whether they are
    /// known.
    fn best_of(
        &mut self,
        what: &str,
        tried: Vec<Setting>,
        measure: impl Fn(&Self, Setting, bool) -> Result<f64>,
    ) -> Result<f64> {
        let known = self.near.remove(what);
        let is_known = known.is_some();
        let tried = known.unwrap_or(tried);
        let rates = tried
            .into_iter()
            .map(|setting| Ok((setting, measure(self, setting, is_known)?)));
        let rates = near(rates.collect::<Result<_>>()?);
        let (_, best) = *rates.first().context("no setting was measured")?;
        let settings = rates.into_iter().map(|(setting, _)| setting).collect();
        self.near.insert(what.to_owned(), settings);
        Ok(best)
    }

    /// `llama-bench` with its warm-up, which is the same prompt, or one token where it decodes. The file is read, not
    /// mapped, so that its pages are not first met while it is timed.
    fn bench(&self, setting: Setting, work: &[&str]) -> Result<f64> {
        let mut command = self.command("llama-bench", setting);
        command
            .args(["-fa", if setting.flash { "1" } else { "0" }])
            .args(["-lm", "none", "-o", "jsonl"])
            .args(work);
        rate(rows(command)?.first().context("no row")?, "avg_ts")
    }

    /// `llama-batched-bench`, which warms up by itself: one prompt, copied to all sequences; what follows is timed, in so
    /// many turns.
    fn batched(&self, setting: Setting, sequences: usize, turns: usize) -> Result<f64> {
        let room = 2 * sequences * (CONTEXT + STEPS);
        let flash = if setting.flash { "on" } else { "off" };
        let batches = vec![sequences.to_string(); turns].join(",");
        let mut command = self.command("llama-batched-bench", setting);
        command
            .args(["-fa", flash, "-c", &room.to_string()])
            .args(["-npp", &CONTEXT.to_string(), "-ntg", &STEPS.to_string()])
            .args(["-npl", &batches, "-pps"])
            .args(["--output-format", "jsonl"]);
        let rows = rows(command)?;
        let mut seconds = 0.0;
        for row in &rows {
            seconds += 1.0 / rate(row, "speed_tg")?;
        }
        Ok(rows.len() as f64 / seconds)
    }

    fn command(&self, program: &str, setting: Setting) -> Command {
        let mut command = Command::new(self.folder.join(program));
        command
            .arg("-m")
            .arg(&self.model)
            .args(["-b", "2048", "-ub", &setting.step.to_string()])
            .args(["-t", &setting.threads.to_string()]);
        command
    }
}

/// Settings to begin with: these steps with flash attention and without, and perhaps one thread.
fn tried(steps: &[usize], with_one_thread: bool) -> Vec<Setting> {
    let of = |threads, flash, step| Setting {
        threads,
        flash,
        step,
    };
    let mut all = Vec::new();
    for &step in steps {
        all.extend([true, false].map(|flash| of(THREADS, flash, step)));
    }
    if with_one_thread {
        all.extend(steps.iter().map(|&step| of(1, true, step)));
    }
    all
}

/// The best, and those that are not far behind it, in order.
fn near(mut rates: Vec<(Setting, f64)>) -> Vec<(Setting, f64)> {
    rates.sort_by(|a, b| b.1.total_cmp(&a.1));
    let best = rates.first().map_or(0.0, |(_, rate)| *rate);
    rates.retain(|(_, rate)| *rate >= NEAR_SETTING * best);
    rates
}

/// The rows that the command prints, at least one. It gets the cores that ours gets, by those of the thread that starts
/// it.
fn rows(mut command: Command) -> Result<Vec<Value>> {
    let (code, output) = alone(move || {
        twinfer_sys::pin_thread(cores()?)?;
        capture(&mut command, PEER)
    })?;
    let lines = output.lines().filter(|line| line.starts_with('{'));
    let rows: Vec<Value> = lines
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    if code != Some(0) || rows.is_empty() {
        bail!("exit code {code:?} and no rows: {output}");
    }
    Ok(rows)
}

fn rate(row: &Value, field: &str) -> Result<f64> {
    let rate = row[field].as_f64().filter(|rate| *rate > 0.0);
    rate.with_context(|| format!("no {field} above 0 in {row}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_near_the_best_are_kept_in_order() {
        let rates = tried(&[512], true).into_iter().zip([97.0, 100.0, 60.0]);
        let rates = rates.collect();
        let kept: Vec<f64> = near(rates).into_iter().map(|(_, rate)| rate).collect();
        assert_eq!(kept, [100.0, 97.0]);
    }
}
