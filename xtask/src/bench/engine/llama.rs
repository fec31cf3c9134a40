//! llama.cpp through its own benchmarks.

use super::THREADS;
use crate::run::{PEER, capture};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Settings whose best counts: flash attention, and tokens of one step.
const SETTINGS: [(&str, &str); 4] = [("0", "512"), ("1", "512"), ("0", "2048"), ("1", "2048")];

pub(super) struct Llama {
    folder: PathBuf,
    model: PathBuf,
    /// The best setting for each measurement, found in the first round and kept.
    best: RefCell<BTreeMap<String, usize>>,
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
            best: RefCell::default(),
        })
    }

    /// Tokens per second of one prompt.
    pub(super) fn prefill(&self, tokens: usize) -> Result<f64> {
        self.best_of(&format!("prefill {tokens}"), |(flash, step)| {
            let rows = self.rows(
                "llama-bench",
                &[
                    "-t",
                    &THREADS.to_string(),
                    "-p",
                    &tokens.to_string(),
                    "-n",
                    "0",
                    "-r",
                    "1",
                    "-fa",
                    flash,
                    "-ub",
                    step,
                    "-b",
                    "2048",
                    "-o",
                    "jsonl",
                ],
            )?;
            rate(&rows, "avg_ts")
        })
    }

    /// Tokens per second of `sequences` sequences together, 32 tokens each after 128.
    pub(super) fn decode(&self, sequences: usize) -> Result<f64> {
        self.best_of(&format!("decode {sequences}"), |(flash, step)| {
            let rows = self.rows(
                "llama-batched-bench",
                &[
                    "-t",
                    &THREADS.to_string(),
                    "-c",
                    "8192",
                    "-b",
                    "2048",
                    "-ub",
                    step,
                    "-fa",
                    if flash == "1" { "on" } else { "off" },
                    "-npp",
                    "128",
                    "-ntg",
                    "32",
                    "-npl",
                    &sequences.to_string(),
                    "--output-format",
                    "jsonl",
                ],
            )?;
            rate(&rows, "speed_tg")
        })
    }

    fn best_of(&self, what: &str, measure: impl Fn((&str, &str)) -> Result<f64>) -> Result<f64> {
        let known = self.best.borrow().get(what).copied();
        if let Some(setting) = known {
            return measure(SETTINGS[setting]);
        }
        let mut rates = Vec::new();
        for setting in SETTINGS {
            rates.push(measure(setting)?);
        }
        let best = rates.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        let (setting, rate) = best.context("no setting was measured")?;
        self.best.borrow_mut().insert(what.to_owned(), setting);
        Ok(*rate)
    }

    fn rows(&self, program: &str, arguments: &[&str]) -> Result<Vec<Value>> {
        let mut command = Command::new(self.folder.join(program));
        command.arg("-m").arg(&self.model).args(arguments);
        let (code, output) = capture(&mut command, PEER)?;
        if code != Some(0) {
            bail!("{program} failed: {output}");
        }
        Ok(output
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect())
    }
}

fn rate(rows: &[Value], field: &str) -> Result<f64> {
    rows.iter()
        .find_map(|row| row[field].as_f64())
        .with_context(|| format!("no {field} in what it printed"))
}
