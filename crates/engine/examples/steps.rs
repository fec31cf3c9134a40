//! Speed of whole steps on the permitted cores, and the share of what the machine's peaks allow.
//!
//! `steps DIR [--quantize] [--only NAME] [--seconds N]`; NAME is one of the printed workloads. The floor of a step is the
//! larger of the time of its operations at the peaks of int8 and bf16 and its bytes over the read bandwidth. Operations
//! are those of linear layers, in int8 with `--quantize` but for the expansion of latents, of attention, in bf16, and of
//! the head for rows that want logits; bytes those of the weights that the step's rows can reach, and of their KV.

use std::path::PathBuf;
use std::time::{Duration, Instant};
use twinfer_config::model::{AttentionConfig, MoeConfig};
use twinfer_config::{Dtype, ModelConfig};
use twinfer_engine::{CpuExecutor, Executor, KvMemory, LoadOptions, SeqWork, load};
use twinfer_kernels::peaks;

const CONTEXT: usize = 2112;
const BLOCK: usize = 16;
/// Tokens that each sequence has before decode.
const PAST: usize = 128;
/// Steps of decode before it starts again behind them.
const ROUND: usize = 60;

struct Workload {
    name: &'static str,
    seqs: usize,
    /// New tokens per sequence and step.
    tokens: usize,
}

const WORKLOADS: [Workload; 5] = [
    Workload {
        name: "decode-1",
        seqs: 1,
        tokens: 1,
    },
    Workload {
        name: "decode-16",
        seqs: 16,
        tokens: 1,
    },
    Workload {
        name: "decode-32",
        seqs: 32,
        tokens: 1,
    },
    Workload {
        name: "prefill-512",
        seqs: 1,
        tokens: 512,
    },
    Workload {
        name: "prefill-2048",
        seqs: 1,
        tokens: 2048,
    },
];

/// Weights and operations of a model.
struct Cost {
    /// Weight values that every row uses, without the head.
    shared: f64,
    /// The same of matrices that stay in bf16.
    latent: f64,
    /// Weight values of one routed expert in all layers.
    expert: f64,
    experts: f64,
    top_k: f64,
    head: f64,
    /// Operations per row and position attended to.
    attended: f64,
    /// Bytes of a position's KV.
    kv: f64,
}

fn cost(config: &ModelConfig) -> Cost {
    let hidden = config.hidden_size as f64;
    let layers = config.layers as f64;
    let mut values = std::collections::BTreeMap::new();
    for spec in &config.tensors(false).tensors {
        let size: f64 = spec.shape.iter().map(|n| *n as f64).product();
        let kind = if spec.name.contains("kv_b_proj") {
            "latent"
        } else if spec.name.contains(".experts.") {
            "expert"
        } else if spec.name.contains("embed_tokens") || spec.name.contains("lm_head") {
            "ends"
        } else {
            "shared"
        };
        *values.entry(kind).or_insert(0.0) += size;
    }
    let moe: Option<&MoeConfig> = config.moe.as_ref();
    let experts = moe.map_or(1.0, |moe| moe.experts as f64);
    let (attended, kv) = match &config.attention {
        AttentionConfig::Gqa(gqa) => (
            4 * gqa.heads * gqa.head_dim,
            2 * gqa.kv_heads * gqa.head_dim,
        ),
        AttentionConfig::Mla(mla) => {
            let row = mla.kv_lora_rank + mla.qk_rope_head_dim;
            (2 * mla.heads * (mla.kv_lora_rank + row), row)
        }
    };
    Cost {
        shared: values["shared"],
        latent: values.get("latent").copied().unwrap_or(0.0),
        expert: values.get("expert").copied().unwrap_or(0.0) / experts,
        experts,
        top_k: moe.map_or(0.0, |moe| moe.top_k as f64),
        head: hidden * config.vocab_size as f64,
        attended: attended as f64 * layers,
        kv: (2 * kv) as f64 * layers,
    }
}

/// Peaks in operations and bytes per second.
struct Machine {
    linear: f64,
    bf16: f64,
    read: f64,
    /// Bytes of a value of linear layers.
    value: f64,
}

impl Cost {
    /// Least seconds of a step by its operations, and by its bytes.
    fn of(&self, work: &Workload, machine: &Machine) -> (f64, f64) {
        let (seqs, tokens) = (work.seqs as f64, work.tokens as f64);
        let rows = seqs * tokens;
        // Mean positions that a row sees, and KV rows that a sequence reads.
        let (seen, read) = if work.tokens == 1 {
            let mean = (PAST + ROUND / 2) as f64;
            (mean, mean)
        } else {
            (tokens / 2.0, 0.0)
        };
        let linear = 2.0 * rows * (self.shared + self.expert * self.top_k) + 2.0 * seqs * self.head;
        let bf16 = rows * (2.0 * self.latent + seen * self.attended);
        // Expected number of experts that some row of evenly spread ones goes to.
        let reached = self.experts * (1.0 - (1.0 - self.top_k / self.experts).powf(rows));
        let values = self.shared + self.expert * reached + self.head;
        let bytes = values * machine.value + 2.0 * self.latent + seqs * read * self.kv;
        (
            linear / machine.linear + bf16 / machine.bf16,
            bytes / machine.read,
        )
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut dir = None;
    let (mut quantize, mut only, mut seconds) = (false, None, 3.0);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--quantize" => quantize = true,
            "--only" => only = args.next(),
            "--seconds" => seconds = args.next().ok_or("--seconds needs a number")?.parse()?,
            _ => dir = Some(PathBuf::from(arg)),
        }
    }
    let dir = dir.ok_or("steps DIR [--quantize] [--only NAME] [--seconds N]")?;
    let cpus = twinfer_sys::available_cpus()?;
    let threads = cpus.len();
    let options = LoadOptions {
        dtype: Dtype::Bf16,
        quantize,
        threads,
        cpus: Some(cpus),
        block_size: BLOCK,
        kv: KvMemory::Blocks(32 * (CONTEXT / BLOCK) as u32 / 2),
        max_model_len: Some(CONTEXT),
        max_num_batched_tokens: 2048,
        ..LoadOptions::default()
    };
    let mut loaded = load(&dir, &options)?;
    let budget = Duration::from_millis(400);
    let bf16 = peaks::bf16_dot(threads, budget).giga_per_second;
    let linear = if quantize {
        peaks::int8_dot(threads, budget).giga_per_second
    } else {
        bf16
    };
    let read = peaks::read_bandwidth(threads, budget, None).giga_per_second;
    println!("peaks {linear:.0} and {bf16:.0} GOP/s, read {read:.1} GB/s");
    let machine = Machine {
        linear: linear * 1e9,
        bf16: bf16 * 1e9,
        read: read * 1e9,
        value: if quantize { 1.0 } else { 2.0 },
    };
    let cost = cost(&loaded.config);
    for work in &WORKLOADS {
        if only.as_ref().is_some_and(|only| only != work.name) {
            continue;
        }
        let (operations, bytes) = cost.of(work, &machine);
        let time = measure(&mut loaded.executor, work, seconds)?;
        println!(
            "{:>13} {:>9.2} ms {:>7.0} tok/s {:>4.0}% of the floor {:>4.0}% of operations {:>4.0}% of bytes",
            work.name,
            time * 1e3,
            (work.seqs * work.tokens) as f64 / time,
            operations.max(bytes) / time * 100.0,
            operations / time * 100.0,
            bytes / time * 100.0,
        );
    }
    Ok(())
}

/// The median time of a step.
fn measure(
    executor: &mut CpuExecutor,
    work: &Workload,
    seconds: f64,
) -> Result<f64, Box<dyn std::error::Error>> {
    let vocab = executor.vocab_size();
    let past = if work.tokens == 1 { PAST } else { 0 };
    let blocks = (past + work.tokens + 64).div_ceil(BLOCK);
    let tables: Vec<Vec<u32>> = (0..work.seqs)
        .map(|seq| {
            (0..blocks)
                .map(|block| (block * work.seqs + seq) as u32)
                .collect()
        })
        .collect();
    let token = |seed: usize| (seed.wrapping_mul(2_654_435_761) % vocab) as u32;
    let prompt: Vec<u32> = (0..past.max(work.tokens)).map(token).collect();
    let mut logits = Vec::new();
    let mut works = |executor: &mut CpuExecutor, start: usize, tokens: &[Vec<u32>]| {
        let batch: Vec<SeqWork<'_>> = tables
            .iter()
            .zip(tokens)
            .map(|(blocks, tokens)| SeqWork {
                tokens,
                start,
                blocks,
                logits_from: Some(tokens.len() - 1),
            })
            .collect();
        executor.execute(&batch, &mut logits)
    };
    if past > 0 {
        for position in (0..past).step_by(32) {
            let chunks = vec![prompt[position..(position + 32).min(past)].to_vec(); work.seqs];
            works(executor, position, &chunks)?;
        }
    }
    let mut times = Vec::new();
    let begin = Instant::now();
    let mut step = 0;
    while times.len() < 3 || begin.elapsed().as_secs_f64() < seconds {
        let tokens: Vec<Vec<u32>> = (0..work.seqs)
            .map(|seq| {
                if work.tokens == 1 {
                    vec![token(step * 977 + seq * 31 + 7)]
                } else {
                    prompt.clone()
                }
            })
            .collect();
        let start = if past > 0 { past + step % ROUND } else { 0 };
        let begin = Instant::now();
        works(executor, start, &tokens)?;
        times.push(begin.elapsed().as_secs_f64());
        step += 1;
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
