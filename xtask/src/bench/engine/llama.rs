//! llama.cpp through its own benchmarks.

use super::ours::cores;
use super::{AT_LEAST, CONTEXT, NEAR_SETTING, STEPS, THREADS, alone, told};
use crate::run::{PEER, capture};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Tokens of the prompt before those that are tried: it brings the weights into memory and starts the threads.
const FIRST: usize = 64;

/// What llama.cpp is run with.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Setting {
    threads: usize,
    /// Flash attention.
    flash: bool,
    /// Tokens of one step.
    step: usize,
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Work {
    /// A prompt of so many tokens.
    Prefill(usize),
    /// So many sequences together.
    Decode(usize),
}

/// Settings with their rates, the best first.
type Rates = Vec<(Setting, f64)>;

/// One model file.
pub(super) struct Llama {
    folder: PathBuf,
    model: PathBuf,
    /// What is to be measured.
    works: Vec<Work>,
    /// What each setting gave in the trial.
    tried: BTreeMap<Work, Rates>,
    /// Settings for each measurement that are not far behind the best, the best one first: all are measured in each round,
    /// since one measurement does not tell near ones apart.
    near: BTreeMap<Work, Vec<Setting>>,
}

impl Llama {
    pub(super) fn find(peers: &Path, model: PathBuf, works: Vec<Work>) -> Result<Self> {
        let folder = peers.join("llama.cpp/bin");
        for program in ["llama-bench", "llama-batched-bench"] {
            if !folder.join(program).exists() {
                bail!("{} does not exist", folder.join(program).display());
            }
        }
        Ok(Self {
            folder,
            model,
            works,
            tried: BTreeMap::new(),
            near: BTreeMap::new(),
        })
    }

    /// Tokens per second with the best setting of a short trial, which is made for all works of the same kind together
    /// when the first of them is asked for.
    pub(super) fn trial(&mut self, work: Work) -> Result<f64> {
        if !self.tried.contains_key(&work) {
            match work {
                Work::Prefill(_) => self.try_prompts()?,
                Work::Decode(1) => self.try_one_sequence()?,
                Work::Decode(_) => self.try_batches()?,
            }
        }
        let rates = self.tried.get_mut(&work).context("it was not tried")?;
        rates.sort_by(|a, b| b.1.total_cmp(&a.1));
        let near = near(rates);
        self.near.entry(work).or_insert(near);
        let best = rates.first().context("no setting was tried")?;
        Ok(best.1)
    }

    /// Tokens per second of the best of the settings that are near.
    pub(super) fn measure(&mut self, work: Work) -> Result<f64> {
        let expected = self.trial(work)?;
        let settings = self.near.get(&work).cloned().unwrap_or_default();
        let mut rates = match work {
            Work::Prefill(tokens) => {
                let repeats = repeats(tokens, expected).to_string();
                let prompt = tokens.to_string();
                self.bench(&settings, &["-p", &prompt, "-n", "0", "-r", &repeats])?
                    .into_iter()
                    .map(|(_, setting, rate)| (setting, rate))
                    .collect()
            }
            Work::Decode(1) => self.one_sequence(&settings, 3)?,
            Work::Decode(sequences) => {
                let turns = repeats(sequences * STEPS, expected);
                let batches = vec![sequences; turns];
                let mut rates = Rates::new();
                for setting in settings {
                    let each = self.batched(setting, &batches)?;
                    let seconds: f64 = each.iter().map(|(_, rate)| 1.0 / rate).sum();
                    rates.push((setting, each.len() as f64 / seconds));
                }
                rates
            }
        };
        rates.sort_by(|a, b| b.1.total_cmp(&a.1));
        let near = near(&rates);
        self.near.insert(work, near);
        let best = rates.first().context("no setting was measured")?;
        Ok(best.1)
    }

    /// Prompts of all lengths in one process for each number of threads and length of a step. One thread is tried with the
    /// shortest prompt only: arithmetic is the limit.
    fn try_prompts(&mut self) -> Result<()> {
        let lengths = self.works.iter().filter_map(|work| match work {
            Work::Prefill(tokens) => Some(*tokens),
            Work::Decode(_) => None,
        });
        let lengths: Vec<usize> = lengths.collect();
        let shortest = lengths.iter().min().copied().unwrap_or_default();
        for (threads, step) in [(THREADS, 512), (THREADS, 2048), (1, 512)] {
            // A step of 512 tokens is a step of 2048 that ends with the prompt.
            let fit = |length: &&usize| {
                (step == 512 || **length > 512) && (threads > 1 || **length == shortest)
            };
            let fit: Vec<usize> = lengths.iter().filter(fit).copied().collect();
            if fit.is_empty() {
                continue;
            }
            let flash: &[bool] = if threads > 1 { &[true, false] } else { &[true] };
            let setting = |&flash| Setting {
                threads,
                flash,
                step,
            };
            let settings: Vec<Setting> = flash.iter().map(setting).collect();
            let prompts: Vec<String> = fit.iter().map(usize::to_string).collect();
            let prompts = format!("{FIRST},{}", prompts.join(","));
            let work = ["-p", &prompts, "-n", "0", "-r", "1", "--no-warmup"];
            for (tokens, setting, rate) in self.bench(&settings, &work)? {
                if tokens != FIRST {
                    let rates = self.tried.entry(Work::Prefill(tokens)).or_default();
                    rates.push((setting, rate));
                }
            }
        }
        Ok(())
    }

    fn try_one_sequence(&mut self) -> Result<()> {
        let settings = [(THREADS, true), (THREADS, false), (1, true), (1, false)];
        let settings = settings.map(|(threads, flash)| Setting {
            threads,
            flash,
            step: 512,
        });
        let rates = self.one_sequence(&settings, 2)?;
        self.tried.insert(Work::Decode(1), rates);
        Ok(())
    }

    /// Batches of all sizes in one process for each setting. One thread is not tried: it is no faster where one sequence is
    /// decoded, and a batch has more arithmetic for each weight.
    fn try_batches(&mut self) -> Result<()> {
        let batches = self.works.iter().filter_map(|work| match work {
            Work::Decode(sequences) if *sequences > 1 => Some(*sequences),
            _ => None,
        });
        let batches: Vec<usize> = batches.collect();
        for flash in [true, false] {
            let setting = Setting {
                threads: THREADS,
                flash,
                step: 512,
            };
            for (sequences, rate) in self.batched(setting, &batches)? {
                let rates = self.tried.entry(Work::Decode(sequences)).or_default();
                rates.push((setting, rate));
            }
        }
        Ok(())
    }

    /// What was tried, and which of it was best in the last measurement, for the notes.
    pub(super) fn settings(&self) -> String {
        let each = self.tried.iter().map(|(work, rates)| {
            let rates = rates.iter().map(|(setting, rate)| {
                let best = self.near.get(work).and_then(|near| near.first()) == Some(setting);
                let threads = setting.threads;
                let flash = if setting.flash { "on" } else { "off" };
                let chosen = if best { ", best" } else { "" };
                format!(
                    "{rate:.0} ({threads} threads, flash attention {flash}, steps of {}{chosen})",
                    setting.step
                )
            });
            let what = match work {
                Work::Prefill(tokens) => format!("prefill {tokens}"),
                Work::Decode(sequences) => format!("decode {sequences}"),
            };
            format!("{what} {}", rates.collect::<Vec<_>>().join(", "))
        });
        each.collect::<Vec<_>>().join("; ")
    }

    /// One sequence after [`CONTEXT`] tokens.
    fn one_sequence(&self, settings: &[Setting], repeats: usize) -> Result<Rates> {
        let (steps, context) = (STEPS.to_string(), CONTEXT.to_string());
        let repeats = repeats.to_string();
        let work = ["-p", "0", "-n", &steps, "-d", &context, "-r", &repeats];
        let rows = self.bench(settings, &work)?;
        Ok(rows
            .into_iter()
            .map(|(_, setting, rate)| (setting, rate))
            .collect())
    }

    /// Tokens of the prompt, setting and tokens per second for each row of `llama-bench`: one process for the settings that
    /// differ in flash attention only. Unless told otherwise it warms up by the same prompt, or by one token where it decodes. The
    /// file is read, not mapped, so that its pages are not first met while it is timed.
    fn bench(&self, settings: &[Setting], work: &[&str]) -> Result<Vec<(usize, Setting, f64)>> {
        let mut all = Vec::new();
        let mut rest = settings.to_vec();
        while let Some(&first) = rest.first() {
            let with = |flash| Setting { flash, ..first };
            let group: Vec<Setting> = [true, false]
                .map(with)
                .into_iter()
                .filter(|setting| rest.contains(setting))
                .collect();
            rest.retain(|setting| !group.contains(setting));
            let flash: Vec<&str> = group
                .iter()
                .map(|setting| if setting.flash { "1" } else { "0" })
                .collect();
            let mut command = self.command("llama-bench", first);
            command
                .args(["-fa", &flash.join(",")])
                .args(["-lm", "none", "-o", "jsonl"])
                .args(work);
            for row in rows(command)? {
                let tokens = row["n_prompt"].as_u64().context("no n_prompt in a row")?;
                let flash = on(&row["flash_attn"])?;
                all.push((usize::try_from(tokens)?, with(flash), rate(&row, "avg_ts")?));
            }
        }
        Ok(all)
    }

    /// Sequences and tokens per second for each of these batches by `llama-batched-bench`, which warms up by itself: one
    /// prompt, copied to all sequences; what follows is timed.
    fn batched(&self, setting: Setting, batches: &[usize]) -> Result<Vec<(usize, f64)>> {
        let most = batches.iter().max().copied().unwrap_or_default();
        let room = 2 * most * (CONTEXT + STEPS);
        let flash = if setting.flash { "on" } else { "off" };
        let batches: Vec<String> = batches.iter().map(usize::to_string).collect();
        let mut command = self.command("llama-batched-bench", setting);
        command
            .args(["-fa", flash, "-c", &room.to_string()])
            .args(["-npp", &CONTEXT.to_string(), "-ntg", &STEPS.to_string()])
            .args(["-npl", &batches.join(","), "-pps"])
            .args(["--output-format", "jsonl"]);
        let each = rows(command)?.into_iter().map(|row| {
            let sequences = row["pl"].as_u64().context("no pl in a row")?;
            Ok((usize::try_from(sequences)?, rate(&row, "speed_tg")?))
        });
        each.collect()
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

/// How often so many tokens must be computed to be measured for long enough.
fn repeats(tokens: usize, rate: f64) -> usize {
    let seconds = tokens as f64 / rate.max(f64::MIN_POSITIVE);
    ((AT_LEAST.as_secs_f64() / seconds).ceil() as usize).clamp(1, 8)
}

/// The first of these sorted rates, and those that are not far behind it.
fn near(rates: &[(Setting, f64)]) -> Vec<Setting> {
    let best = rates.first().map_or(0.0, |(_, rate)| *rate);
    let near = rates
        .iter()
        .filter(|(_, rate)| *rate >= NEAR_SETTING * best);
    near.map(|(setting, _)| *setting).collect()
}

/// A switch as a row has it, which is a truth value or a number.
fn on(value: &Value) -> Result<bool> {
    let number = value.as_i64().map(|number| number == 1);
    let known = value.as_bool().or(number);
    known.with_context(|| format!("flash attention is {value} in a row"))
}

/// The rows that the command prints, at least one. It gets the cores that ours gets, by those of the thread that starts
/// it.
fn rows(mut command: Command) -> Result<Vec<Value>> {
    let (code, output) = told("it", || {
        alone(move || {
            twinfer_sys::pin_thread(cores()?)?;
            capture(&mut command, PEER)
        })
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
        let of = |flash, step| Setting {
            threads: 2,
            flash,
            step,
        };
        let rates = [
            (of(false, 512), 100.0),
            (of(true, 512), 97.0),
            (of(true, 2048), 60.0),
        ];
        assert_eq!(near(&rates), [of(false, 512), of(true, 512)]);
    }

    #[test]
    fn short_work_is_repeated_until_it_takes_long_enough() {
        assert_eq!(repeats(512, 100.0), 1);
        assert_eq!(repeats(512, 600.0), 2);
        assert_eq!(repeats(1, 1e9), 8);
    }
}
