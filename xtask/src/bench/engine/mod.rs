//! The native engine without HTTP, beside llama.cpp and vLLM on the same weights.

mod cost;
mod llama;
mod ours;
mod vllm;

use super::{Round, Sample};
use anyhow::{Context, Result, bail};
use cost::Cost;
use ours::Loaded;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use twinfer_config::Dtype;
use twinfer_it::demo_model;
use twinfer_kernels::peaks;

const THREADS: usize = 2;
/// Time for each measurement of the machine's peaks.
const BUDGET: Duration = Duration::from_millis(300);
const PREFILLS: [usize; 2] = [512, 2048];
const BATCHES: [usize; 3] = [1, 16, 32];

/// A model that peers have too. Paths are below the folder given by `--peers`.
struct Shared {
    name: &'static str,
    /// bf16, Hugging Face layout.
    directory: &'static str,
    /// The same weights as Q8_0.
    q8_0: &'static str,
}

const SHARED: [Shared; 3] = [
    Shared {
        name: "SmolLM2",
        directory: "models/smollm2-hf",
        q8_0: "models/smollm2-q8_0.gguf",
    },
    Shared {
        name: "Qwen3-MoE shape",
        directory: "models/qwen3moe-bench-hf",
        q8_0: "models/qwen3moe-bench-q8_0.gguf",
    },
    Shared {
        name: "DeepSeek shape",
        directory: "models/deepseek2-bench-hf",
        q8_0: "models/deepseek2-bench-q8_0.gguf",
    },
];

pub(super) fn measure(rounds: usize, peers: Option<&Path>) -> Result<Vec<Round>> {
    let Some(peers) = peers else {
        bail!(
            "rows have targets against peers: give --peers DIR (docs/benchmarks.md says what it holds)"
        );
    };
    let mut all: Vec<Round> = (0..rounds).map(|_| Round::new()).collect();
    demo(&mut all)?;
    for model in &SHARED {
        shared(model, peers, &mut all).with_context(|| model.name)?;
    }
    Ok(all)
}

/// Peaks of one round: operations and bytes per second.
struct Machine {
    int8: f64,
    bf16: f64,
    read: f64,
}

impl Machine {
    fn measure(touched: f64) -> Self {
        let per_second = |peak: peaks::Peak| peak.giga_per_second * 1e9;
        Self {
            int8: per_second(peaks::int8_dot(THREADS, BUDGET)),
            bf16: per_second(peaks::bf16_dot(THREADS, BUDGET)),
            read: per_second(peaks::read_bandwidth(
                THREADS,
                BUDGET,
                Some(touched as usize),
            )),
        }
    }
}

fn demo(all: &mut [Round]) -> Result<()> {
    let mut model = Loaded::open(&demo_model(), Dtype::Bf16, false)?;
    let cost = Cost::of(&model.config);
    for round in all {
        let machine = Machine::measure(cost.bytes(1, model.bytes_per_value));
        let sample = |ours: f64, floor: f64| Sample {
            ours,
            floor,
            peer: None,
        };
        round.insert(
            "prefill 512, demo model".to_owned(),
            sample(model.prefill(512)?, machine.bf16 / cost.prefill()),
        );
        for batch in [1, 32] {
            round.insert(
                format!("decode {batch}, demo model"),
                sample(
                    model.decode(batch)?,
                    cost.decode_floor(batch, model.bytes_per_value, machine.read, machine.bf16),
                ),
            );
        }
    }
    Ok(())
}

/// Everything about one model: W8A8 against the best peer, bf16 against its own peers.
fn shared(model: &Shared, peers: &Path, all: &mut [Round]) -> Result<()> {
    let find = |path: &str| -> Result<PathBuf> {
        let path = peers.join(path);
        if !path.exists() {
            bail!("{} does not exist", path.display());
        }
        Ok(path)
    };
    let directory = find(model.directory)?;
    let llama = llama::Llama::find(peers, find(model.q8_0)?)?;
    let vllm = vllm::Vllm::start(peers, &directory)?;
    for round in all {
        // One of ours and of each peer in turn, so that a change of the machine meets all.
        let mut peer: BTreeMap<String, f64> = BTreeMap::new();
        for tokens in PREFILLS {
            let best = llama.prefill(tokens)?.max(vllm.prefill(tokens)?);
            peer.insert(format!("prefill {tokens}"), best);
        }
        for batch in BATCHES {
            let best = llama.decode(batch)?.max(vllm.decode(batch)?);
            peer.insert(format!("decode {batch}"), best);
        }
        let mut ours = Loaded::open(&directory, Dtype::Bf16, true)?;
        let cost = Cost::of(&ours.config);
        let machine = Machine::measure(cost.bytes(1, ours.bytes_per_value));
        let mut insert = |what: String, rate: f64, floor: f64| {
            let peer = peer.get(&what).copied();
            let sample = Sample {
                ours: rate,
                floor,
                peer,
            };
            round.insert(format!("{what}, {}, W8A8", model.name), sample);
        };
        for tokens in PREFILLS {
            insert(
                format!("prefill {tokens}"),
                ours.prefill(tokens)?,
                machine.int8 / cost.prefill(),
            );
        }
        for batch in BATCHES {
            let floor = cost.decode_floor(batch, ours.bytes_per_value, machine.read, machine.int8);
            insert(format!("decode {batch}"), ours.decode(batch)?, floor);
        }
        drop(ours);
        let mut ours = Loaded::open(&directory, Dtype::Bf16, false)?;
        let vllm_rate = vllm.prefill(512)?;
        round.insert(
            format!("prefill 512, {}, bf16", model.name),
            Sample {
                ours: ours.prefill(512)?,
                floor: machine.bf16 / cost.prefill(),
                peer: Some(vllm_rate),
            },
        );
    }
    Ok(())
}
