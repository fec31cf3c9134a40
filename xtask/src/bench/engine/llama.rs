//! llama.cpp through its own benchmarks.

use super::{CONTEXT, STEPS, THREADS};
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
    /// The best setting for each measurement, found in the first round and kept.
    best: BTreeMap<String, Setting>,
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
            best: BTreeMap::new(),
        })
    }

    /// Tokens per second of one prompt. One thread is tried with 512 tokens only: arithmetic is the limit.
    pub(super) fn prefill(&mut self, tokens: usize) -> Result<f64> {
        let (threads, steps): (&[usize], &[usize]) = if tokens > 512 {
            (&[THREADS], &[512, 2048])
        } else {
            (&[THREADS, 1], &[512])
        };
        let count = tokens.to_string();
        let work = ["-p", &count, "-n", "0"];
        self.best_of(&format!("prefill {tokens}"), |llama, known| {
            llama.bench(known, threads, steps, &work)
        })
    }

    /// Tokens per second of `sequences` sequences together, each after the same number of tokens. Of the
    /// batches one thread is tried with the smaller only.
    pub(super) fn decode(&mut self, sequences: usize) -> Result<f64> {
        let what = format!("decode {sequences}");
        if sequences == 1 {
            let (steps, context) = (STEPS.to_string(), CONTEXT.to_string());
            let work = ["-p", "0", "-n", &steps, "-d", &context];
            return self.best_of(&what, |llama, known| {
                llama.bench(known, &[THREADS, 1], &[512], &work)
            });
        }
        self.best_of(&what, |llama, known| {
            let of = |threads, flash| Setting {
                threads,
                flash,
                step: 512,
            };
            let mut tried = vec![of(THREADS, true), of(THREADS, false)];
            if sequences <= 16 {
                tried.push(of(1, true));
            }
            let tried = known.map_or(tried, |known| vec![known]);
            let measured = tried
                .into_iter()
                .map(|setting| Ok((setting, llama.batched(setting, sequences)?)));
            measured.collect()
        })
    }

    /// What was found best, for the notes.
    pub(super) fn settings(&self) -> String {
        let each = self.best.iter().map(|(what, setting)| {
            format!(
                "{what}: {} threads, flash attention {}, steps of {}",
                setting.threads,
                if setting.flash { "on" } else { "off" },
                setting.step
            )
        });
        each.collect::<Vec<_>>().join("; ")
    }

    /// The best of what `measure` gives: for the setting that is known to be best, or for all that are to
    /// be tried.
    fn best_of(
        &mut self,
        what: &str,
        measure: impl Fn(&Self, Option<Setting>) -> Result<Vec<(Setting, f64)>>,
    ) -> Result<f64> {
        let rates = measure(self, self.best.get(what).copied())?;
        let best = rates.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let (setting, rate) = best.context("no setting was measured")?;
        self.best.entry(what.to_owned()).or_insert(setting);
        Ok(rate)
    }

    /// `llama-bench` with one setting, or with all of these threads and steps, with flash attention and
    /// without. No warm-up, which would be the whole measurement once more; so the file is not mapped but
    /// read.
    fn bench(
        &self,
        known: Option<Setting>,
        threads: &[usize],
        steps: &[usize],
        work: &[&str],
    ) -> Result<Vec<(Setting, f64)>> {
        let list = |values: &[usize]| {
            let texts = values.iter().map(usize::to_string);
            texts.collect::<Vec<_>>().join(",")
        };
        let (threads, steps, flash) = match known {
            Some(one) => (
                one.threads.to_string(),
                one.step.to_string(),
                if one.flash { "1" } else { "0" },
            ),
            None => (list(threads), list(steps), "0,1"),
        };
        let mut command = self.command("llama-bench");
        command
            .args(["-t", &threads, "-ub", &steps, "-fa", flash])
            .args(["-r", "1", "--no-warmup", "-lm", "none", "-o", "jsonl"])
            .args(work);
        let number = |row: &Value, field: &str| {
            let value = row[field].as_u64().and_then(|n| usize::try_from(n).ok());
            value.with_context(|| format!("llama-bench gives no {field}: {row}"))
        };
        rows(&mut command)?
            .iter()
            .map(|row| {
                let setting = Setting {
                    threads: number(row, "n_threads")?,
                    flash: number(row, "flash_attn")? == 1,
                    step: number(row, "n_ubatch")?,
                };
                Ok((setting, rate(row, "avg_ts")?))
            })
            .collect()
    }

    /// `llama-batched-bench`: one prompt, copied to all sequences; what follows is timed.
    fn batched(&self, setting: Setting, sequences: usize) -> Result<f64> {
        let room = 2 * sequences * (CONTEXT + STEPS);
        let flash = if setting.flash { "on" } else { "off" };
        let mut command = self.command("llama-batched-bench");
        command
            .args(["-t", &setting.threads.to_string(), "-fa", flash])
            .args(["-ub", &setting.step.to_string(), "-c", &room.to_string()])
            .args(["-npp", &CONTEXT.to_string(), "-ntg", &STEPS.to_string()])
            .args(["-npl", &sequences.to_string(), "-pps"])
            .args(["--output-format", "jsonl"]);
        let rows = rows(&mut command)?;
        rate(rows.first().context("no row")?, "speed_tg")
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.folder.join(program));
        command.arg("-m").arg(&self.model).args(["-b", "2048"]);
        command
    }
}

/// The rows that the command prints, at least one.
fn rows(command: &mut Command) -> Result<Vec<Value>> {
    let (code, output) = capture(command, PEER)?;
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
