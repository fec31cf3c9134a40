//! The native engine without HTTP, beside llama.cpp and vLLM on the same weights.

mod allocations;
mod cost;
mod isa;
mod llama;
mod memory;
mod mtp;
mod ours;
mod vllm;

use super::{Measured, Plan, Sample};
use anyhow::{Context, Result, bail};
use cost::Cost;
use llama::{Llama, Work};
use ours::{Loaded, options, prompt};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use twinfer_it::demo_model;
use twinfer_kernels::peaks;
use vllm::Vllm;

const THREADS: usize = 2;
/// Time for each measurement of the machine's peaks.
const BUDGET: Duration = Duration::from_millis(150);
/// Ours and vLLM repeat their work for at least so long.
const AT_LEAST: Duration = Duration::from_millis(1500);
/// Tokens before decoding starts.
const CONTEXT: usize = 128;
/// Tokens decoded per sequence.
const STEPS: usize = 32;
const PREFILLS: [usize; 2] = [512, 2048];
const BATCHES: [usize; 3] = [1, 16, 32];
/// Shares of drafts that stand where they are scripted.
const ACCEPTED: [f64; 2] = [0.7, 0.9];
/// A peer whose rate in a round is below this share of the best one's is not measured again.
const NEAR: f64 = 0.8;
/// The same for a setting of llama.cpp beside its best.
const NEAR_SETTING: f64 = 0.95;

/// A model that peers have too. Paths are below the folder given by `--peers`.
struct Shared {
    name: &'static str,
    /// bf16, Hugging Face layout.
    directory: &'static str,
    /// The same weights as Q8_0 and as BF16.
    q8_0: &'static str,
    bf16: &'static str,
    has_mtp: bool,
}

const SHARED: [Shared; 3] = [
    Shared {
        name: "SmolLM2",
        directory: "models/smollm2-hf",
        q8_0: "models/smollm2-q8_0.gguf",
        bf16: "models/smollm2-bf16.gguf",
        has_mtp: false,
    },
    Shared {
        name: "Qwen3-MoE shape",
        directory: "models/qwen3moe-bench-hf",
        q8_0: "models/qwen3moe-bench-q8_0.gguf",
        bf16: "models/qwen3moe-bench-bf16.gguf",
        has_mtp: false,
    },
    Shared {
        name: "DeepSeek shape",
        directory: "models/deepseek2-bench-hf",
        q8_0: "models/deepseek2-bench-q8_0.gguf",
        bf16: "models/deepseek2-bench-bf16.gguf",
        has_mtp: true,
    },
];

/// Peaks of one round: operations and bytes per second.
#[derive(Clone, Copy)]
struct Machine {
    int8: f64,
    bf16: f64,
    read: f64,
}

/// What all measurements of a run share.
struct Bench<'a> {
    plan: &'a Plan,
    measured: Measured,
}

pub(super) fn measure(plan: &Plan, peers: Option<&Path>) -> Result<Measured> {
    let mut bench = Bench {
        plan,
        measured: Measured::empty(plan.rounds),
    };
    let demo = bench.demo().context("demo model");
    bench.note(demo);
    let kernels = bench.kernels().context("products");
    bench.note(kernels);
    for model in &SHARED {
        let wanted = plan.wanted.iter().any(|row| row.contains(model.name));
        if !wanted {
            continue;
        }
        let Some(peers) = peers else {
            bail!(
                "rows have targets against peers: give --peers DIR (docs/benchmarks.md says what it holds)"
            );
        };
        let shared = bench.shared(model, peers).context(model.name);
        bench.note(shared);
    }
    Ok(bench.measured)
}

/// On a thread of its own: an executor pins the thread that calls it, and what is measured or started
/// afterwards would stay on that core.
fn alone<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let done = scope.spawn(work).join();
        done.unwrap_or_else(|_| bail!("a measuring thread panicked"))
    })
}

/// Says how long a part took, so that one sees where a run spends its time.
fn told<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let result = work();
    eprintln!("  {what} took {:.1} s", start.elapsed().as_secs_f64());
    result
}

/// Reads all weights once, so that what is timed finds them in the page cache.
fn warm(directory: &Path) -> Result<()> {
    for entry in std::fs::read_dir(directory)?.flatten() {
        if entry
            .path()
            .extension()
            .is_some_and(|end| end == "safetensors")
        {
            std::io::copy(&mut File::open(entry.path())?, &mut std::io::sink())?;
        }
    }
    Ok(())
}

impl Bench<'_> {
    /// Keeps an error for the report, so that the other parts are measured.
    fn note(&mut self, part: Result<()>) {
        if let Err(error) = part {
            eprintln!("{error:#}");
            self.measured.failures.push(format!("{error:#}"));
        }
    }

    /// Peaks of the machine now; the bandwidth over as many bytes as a step touches.
    fn machine(&mut self, touched: f64) -> Machine {
        let budget = self.plan.time(BUDGET);
        let per_second = |peak: peaks::Peak| peak.giga_per_second * 1e9;
        let machine = Machine {
            int8: per_second(peaks::int8_dot(THREADS, budget)),
            bf16: per_second(peaks::bf16_dot(THREADS, budget)),
            read: per_second(peaks::read_bandwidth(
                THREADS,
                budget,
                Some(touched as usize),
            )),
        };
        self.measured.ceiling("int8 GOP/s", machine.int8 / 1e9);
        self.measured.ceiling("bf16 GOP/s", machine.bf16 / 1e9);
        machine
    }

    /// What else people ask of a machine; no floor needs it.
    fn other_ceilings(&mut self) {
        let budget = self.plan.time(BUDGET);
        let others = [
            ("f32 GOP/s", peaks::f32_fma(THREADS, budget)),
            (
                "read GB/s, one core",
                peaks::read_bandwidth(1, budget, None),
            ),
            ("read GB/s", peaks::read_bandwidth(THREADS, budget, None)),
        ];
        for (name, peak) in others {
            self.measured.ceiling(name, peak.giga_per_second);
        }
    }

    fn insert(&mut self, round: usize, name: &str, ours: f64, floor: f64, peer: Option<f64>) {
        let sample = Sample { ours, floor, peer };
        self.measured.insert(round, name, sample);
    }

    fn demo(&mut self) -> Result<()> {
        let speed = [
            "prefill 512, demo model",
            "decode 1, demo model",
            "decode 32, demo model",
        ];
        let mtp = [
            "MTP k = 1, demo model, 200 questions",
            "accepted drafts, demo model, 200 questions",
        ];
        let (plan, at_least) = (self.plan, self.plan.time(AT_LEAST));
        let wanted = |rows: &[&str]| rows.iter().any(|row| plan.wants(row));
        for round in 0..plan.rounds {
            if wanted(&speed) {
                let config = twinfer_engine::check(&demo_model(), &options(false, 64)?)?.config;
                let cost = Cost::of(&config, false);
                let machine = self.machine(cost.bytes(1, CONTEXT));
                let rates = alone(|| {
                    let mut model = Loaded::open(&demo_model(), false, at_least)?;
                    Ok((model.prefill(512)?, model.decode(1)?, model.decode(32)?))
                })?;
                let middle = CONTEXT + STEPS / 2;
                self.insert(
                    round,
                    speed[0],
                    rates.0,
                    cost.prefill_floor(512, &machine),
                    None,
                );
                for (row, batch, rate) in [(speed[1], 1, rates.1), (speed[2], 32, rates.2)] {
                    let floor = cost.decode_floor(batch, middle, &machine);
                    self.insert(round, row, rate, floor, None);
                }
            }
            if wanted(&mtp) {
                let turns = if plan.quick { 1 } else { 2 };
                let (rate, accepted) = alone(|| mtp::Questions::open()?.measure(turns))?;
                self.measured.insert(round, mtp[0], rate);
                self.measured.insert(round, mtp[1], accepted);
            }
        }
        let name = "allocations, 1000 decode steps of 16 sequences";
        for (row, logprobs) in [
            (name.to_owned(), None),
            (format!("{name}, with log-probabilities"), Some(5)),
        ] {
            if plan.wants(&row) {
                let count = alone(|| allocations::measure(logprobs))?;
                self.insert(0, &row, count as f64, 0.0, None);
            }
        }
        Ok(())
    }

    fn kernels(&mut self) -> Result<()> {
        let rows = ["int8 GEMM, AVX2", "int8 GEMM, portable"];
        if !rows.iter().any(|row| self.plan.wants(row)) {
            return Ok(());
        }
        let at_least = self.plan.time(AT_LEAST);
        for round in 0..self.plan.rounds {
            let peak = isa::avx2_peak(at_least / 4)?;
            let (avx2, portable) = alone(|| isa::measure(at_least))?;
            self.insert(round, rows[0], avx2, peak, None);
            self.insert(round, rows[1], portable, avx2, None);
        }
        Ok(())
    }

    /// Everything about one model: W8A8 against the best peer, bf16 against its own peers, in each round
    /// one of ours and of each peer, so that a change of the machine meets all.
    fn shared(&mut self, model: &Shared, peers: &Path) -> Result<()> {
        let find = |path: &str| -> Result<PathBuf> {
            let path = peers.join(path);
            if !path.exists() {
                bail!("{} does not exist", path.display());
            }
            Ok(path)
        };
        let directory = find(model.directory)?;
        let started = Instant::now();
        warm(&directory)?;
        let plan = self.plan;
        let works = |kind: &str| -> Vec<Work> {
            let prompts = PREFILLS.map(|n| (Work::Prefill(n), format!("prefill {n}")));
            let batches = BATCHES.map(|n| (Work::Decode(n), format!("decode {n}")));
            let each = prompts.into_iter().chain(batches);
            each.filter(|(_, what)| plan.wants(&format!("{what}, {}, {kind}", model.name)))
                .map(|(work, _)| work)
                .collect()
        };
        let mut against = Peers {
            model: model.name,
            q8_0: Llama::find(peers, find(model.q8_0)?, works("W8A8"))?,
            bf16: Llama::find(peers, find(model.bf16)?, works("bf16"))?,
            vllm: None,
            prompts: BTreeMap::new(),
            behind: BTreeSet::new(),
            first: Vec::new(),
        };
        if plan.wanted.iter().any(|row| against.vllm_row(row)) {
            against.vllm = Some(told("the start of vLLM", || {
                Vllm::start(peers, &directory, plan.time(AT_LEAST))
            })?);
        }
        for round in 0..plan.rounds {
            self.other_ceilings();
            against.prompts.clear();
            self.round(round, model, &directory, &mut against)?;
        }
        self.measured.notes.append(&mut against.notes());
        drop(against);
        let memory = format!("memory, {}, W8A8", model.name);
        if plan.wants(&memory) {
            let (sample, note) = told("memory", || memory::measure(&directory))?;
            self.measured.notes.push(format!("{}: {note}", model.name));
            self.measured.insert(0, memory, sample);
        }
        eprintln!("{}: {:.0} s", model.name, started.elapsed().as_secs_f64());
        Ok(())
    }

    fn round(
        &mut self,
        round: usize,
        model: &Shared,
        directory: &Path,
        against: &mut Peers,
    ) -> Result<()> {
        let (plan, name) = (self.plan, model.name);
        let at_least = plan.time(AT_LEAST);
        let middle = CONTEXT + STEPS / 2;
        let prefills = |kind: &str| PREFILLS.map(|n| (n, format!("prefill {n}, {name}, {kind}")));
        let decodes = |kind: &str| BATCHES.map(|n| (n, format!("decode {n}, {name}, {kind}")));
        let load = format!("load, {name}, W8A8");
        let config = twinfer_engine::check(directory, &options(true, 64)?)?.config;

        for quantise in [true, false] {
            let kind = if quantise { "W8A8" } else { "bf16" };
            let keep = |rows: &mut Vec<(usize, String)>| rows.retain(|(_, row)| plan.wants(row));
            let (mut prompts, mut batches) = (prefills(kind).to_vec(), decodes(kind).to_vec());
            keep(&mut prompts);
            keep(&mut batches);
            let with_load = quantise && plan.wants(&load);
            if prompts.is_empty() && batches.is_empty() && !with_load {
                continue;
            }
            let mut best = Vec::new();
            for (tokens, row) in &prompts {
                best.push((row, against.prefill(*tokens, quantise)?));
            }
            for (batch, row) in &batches {
                best.push((row, against.decode(*batch, quantise)?));
            }
            let cost = Cost::of(&config, quantise);
            let before = self.machine(cost.bytes(1, CONTEXT));
            let measure = || {
                let mut ours = Loaded::open(directory, quantise, at_least)?;
                let mut rates = Vec::new();
                for (tokens, _) in &prompts {
                    rates.push(ours.prefill(*tokens)?);
                }
                for (batch, _) in &batches {
                    rates.push(ours.decode(*batch)?);
                }
                Ok((rates, ours.load_rate))
            };
            let (rates, load_rate) = told("ours", || alone(measure))?;
            let after = self.machine(cost.bytes(1, CONTEXT));
            let machine = before.mean(after);
            let floors = prompts
                .iter()
                .map(|(tokens, _)| cost.prefill_floor(*tokens, &machine));
            let floors = floors.chain(
                batches
                    .iter()
                    .map(|(batch, _)| cost.decode_floor(*batch, middle, &machine)),
            );
            for (((row, peer), ours), floor) in best.into_iter().zip(rates).zip(floors) {
                self.insert(round, row, ours, floor, Some(peer));
            }
            if with_load {
                self.insert(round, &load, load_rate / 1e9, machine.read / 1e9, None);
            }
        }

        let rows =
            ACCEPTED.map(|share| format!("MTP round, {name}, {:.0} % accepted", share * 100.0));
        if model.has_mtp && rows.iter().any(|row| plan.wants(row)) {
            let cost = Cost::of(&config, true);
            let before = self.machine(cost.bytes(1, CONTEXT));
            let rounds = told("ours with drafts", || {
                alone(|| mtp::rounds(directory, &cost, &ACCEPTED))
            })?;
            let machine = before.mean(self.machine(cost.bytes(1, CONTEXT)));
            for (row, measured) in rows.iter().zip(rounds) {
                let (sample, note) = measured.beside(&machine);
                self.measured.insert(round, row, sample);
                if round + 1 == plan.rounds {
                    self.measured.notes.push(note);
                }
            }
        }
        Ok(())
    }
}

impl Machine {
    fn mean(self, other: Self) -> Self {
        Self {
            int8: self.int8.midpoint(other.int8),
            bf16: self.bf16.midpoint(other.bf16),
            read: self.read.midpoint(other.read),
        }
    }
}

/// The peers on one model.
struct Peers {
    model: &'static str,
    q8_0: Llama,
    bf16: Llama,
    /// Not started where no wanted row needs it.
    vllm: Option<Vllm>,
    /// What vLLM gave for prompts in this round: it computes in bf16 for both of our rows.
    prompts: BTreeMap<usize, f64>,
    /// Peers that are far behind, by measurement.
    behind: BTreeSet<String>,
    /// What each gave in the first round.
    first: Vec<String>,
}

impl Peers {
    fn vllm_row(&self, row: &str) -> bool {
        let speed =
            row.starts_with("prefill") || (row.starts_with("decode") && row.ends_with("W8A8"));
        speed && row.contains(self.model)
    }

    /// The best peer of W8A8; vLLM for bf16.
    fn prefill(&mut self, tokens: usize, quantise: bool) -> Result<f64> {
        if quantise {
            return self.best(Work::Prefill(tokens), &format!("prefill {tokens}"));
        }
        self.vllm(Work::Prefill(tokens))
    }

    /// The best peer of W8A8; llama.cpp in BF16 for bf16.
    fn decode(&mut self, batch: usize, quantise: bool) -> Result<f64> {
        if quantise {
            return self.best(Work::Decode(batch), &format!("decode {batch}"));
        }
        self.bf16.measure(Work::Decode(batch))
    }

    fn vllm(&mut self, work: Work) -> Result<f64> {
        let server = self.vllm.as_mut().context("vLLM is not running")?;
        match work {
            Work::Prefill(tokens) => {
                if let Some(&known) = self.prompts.get(&tokens) {
                    return Ok(known);
                }
                let rate = told("vLLM, a prompt", || server.prefill(tokens))?;
                self.prompts.insert(tokens, rate);
                Ok(rate)
            }
            Work::Decode(batch) => told("vLLM, decode", || server.decode(batch)),
        }
    }

    /// The better peer. One that is far behind is not measured again; llama.cpp not once if its trial is.
    fn best(&mut self, work: Work, what: &str) -> Result<f64> {
        let key = |peer: &str| format!("{what}, {peer}");
        let (llama_key, vllm_key) = (key("llama.cpp Q8_0"), key("vLLM bf16"));
        let mut rates = Vec::new();
        if !self.behind.contains(&vllm_key) {
            rates.push((self.vllm(work)?, vllm_key));
        }
        if !self.behind.contains(&llama_key) {
            let trial = self.q8_0.trial(work)?;
            let is_behind = rates.iter().any(|(rate, _)| trial < NEAR * rate);
            let rate = if is_behind {
                trial
            } else {
                self.q8_0.measure(work)?
            };
            rates.push((rate, llama_key));
        }
        let best = rates.iter().map(|(rate, _)| *rate).fold(0.0, f64::max);
        for (rate, key) in rates {
            if !self.first.iter().any(|seen| seen.starts_with(&key)) {
                self.first.push(format!("{key} {rate:.0}"));
            }
            if rate < NEAR * best {
                self.behind.insert(key);
            }
        }
        Ok(best)
    }

    fn notes(&self) -> Vec<String> {
        vec![
            format!(
                "Peers on {}, tok/s in the first round: {}",
                self.model,
                self.first.join("; ")
            ),
            format!(
                "llama.cpp on {}, tok/s of each setting in its trial, and the one that was best in the last round: Q8_0 {}; BF16 {}",
                self.model,
                self.q8_0.settings(),
                self.bf16.settings()
            ),
        ]
    }
}
