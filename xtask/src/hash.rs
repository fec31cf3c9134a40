//! One hash per way to deploy, over the same prompts: contract 1 of the architecture page.

use anyhow::{Context, Result, bail};
use serde_json::json;
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};
use twinfer_engine::{
    Engine, EngineConfig, KvSource, LoadOptions, Probe, ProbeRows, Request, RequestId,
    SamplingParams, Tap, generate, load,
};
use twinfer_it::{Client, Cluster, ClusterOptions, Instance, demo_model};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const PROMPTS: u64 = 200;
const LONGEST: u64 = 600;
const OUTPUT: u32 = 40;

/// Which matrix.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name of the matrix: `slice`.
    #[arg(long)]
    pub(crate) matrix: String,
}

/// One prompt with its sampling.
#[derive(Clone)]
struct Task {
    prompt: Vec<u32>,
    temperature: f32,
    seed: u64,
}

/// Tokens with the bits of their log-probabilities.
type Output = Vec<(u32, u32)>;

/// A cell that runs in this process.
struct Local {
    name: &'static str,
    threads: usize,
    sequences: u32,
    chunk: u32,
    /// Blocks of the pool; few of them force preemption.
    blocks: u32,
}

const LOCAL: &[Local] = &[
    Local {
        name: "alone, prompt whole, 1 thread",
        threads: 1,
        sequences: 1,
        chunk: 1024,
        blocks: 2048,
    },
    Local {
        name: "alone, prompt whole, 2 threads",
        threads: 2,
        sequences: 1,
        chunk: 1024,
        blocks: 2048,
    },
    Local {
        name: "alone, chunks of 8, 1 thread",
        threads: 1,
        sequences: 1,
        chunk: 8,
        blocks: 2048,
    },
    Local {
        name: "alone, chunks of 64, 2 threads",
        threads: 2,
        sequences: 1,
        chunk: 64,
        blocks: 2048,
    },
    Local {
        name: "batch of 8, prompt whole, 1 thread",
        threads: 1,
        sequences: 8,
        chunk: 1024,
        blocks: 2048,
    },
    Local {
        name: "batch of 32, prompt whole, 2 threads",
        threads: 2,
        sequences: 32,
        chunk: 1024,
        blocks: 2048,
    },
    Local {
        name: "batch of 32, chunks of 64, 1 thread",
        threads: 1,
        sequences: 32,
        chunk: 64,
        blocks: 2048,
    },
    Local {
        name: "batch of 16, chunks of 8, 2 threads",
        threads: 2,
        sequences: 16,
        chunk: 8,
        blocks: 2048,
    },
    Local {
        name: "batch of 32, preempted, 1 thread",
        threads: 1,
        sequences: 32,
        chunk: 256,
        blocks: 90,
    },
];

impl Args {
    pub(crate) fn slice() -> Self {
        Self {
            matrix: "slice".to_owned(),
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.matrix != "slice" {
        bail!("--matrix is {:?}; there is slice", args.matrix);
    }
    let tasks = tasks();
    let mut reference: Option<Vec<Output>> = None;
    let mut differing = Vec::new();
    let mut judge = |name: &str, outputs: Vec<Output>, local: Option<&Local>| -> Result<()> {
        println!("{:016x}  {name}", hash_of(&outputs));
        let Some(expected) = &reference else {
            reference = Some(outputs);
            return Ok(());
        };
        if let Some(prompt) = (0..tasks.len()).find(|&i| expected[i] != outputs[i]) {
            let token = expected[prompt]
                .iter()
                .zip(&outputs[prompt])
                .take_while(|(a, b)| a == b)
                .count();
            let at = tasks[prompt].prompt.len() + token;
            println!(
                "  differs first in prompt {prompt} ({} tokens) at position {at}",
                tasks[prompt].prompt.len()
            );
            match local {
                Some(local) => println!("  {}", first_divergence(&tasks, prompt, expected, local)?),
                None => {
                    println!("  the layer is seen only in cells of one process; compare them above")
                }
            }
            differing.push(name.to_owned());
        }
        Ok(())
    };
    for local in LOCAL {
        let (outputs, preemptions) = run_local(&tasks, local, None)?;
        if local.blocks < 1024 && preemptions == 0 {
            bail!("{}: nothing was preempted", local.name);
        }
        judge(local.name, outputs, Some(local))?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    for (name, prefill, decode) in [
        ("colocated, HTTP", 0, 0),
        ("1 prefill, 1 decode", 1, 1),
        ("2 prefill, 2 decode", 2, 2),
    ] {
        let outputs = runtime
            .block_on(run_served(&tasks, prefill, decode))
            .with_context(|| name.to_owned())?;
        judge(name, outputs, None)?;
    }
    if !differing.is_empty() {
        bail!(
            "cells differ from {:?}: {}",
            LOCAL[0].name,
            differing.join("; ")
        );
    }
    println!(
        "{} cells, {PROMPTS} prompts of 1 to {LONGEST} tokens, {OUTPUT} tokens each with log-probabilities: all equal",
        LOCAL.len() + 3
    );
    Ok(())
}

/// Prompts of lengths 1 to 600, half greedy, half sampled.
fn tasks() -> Vec<Task> {
    (0..PROMPTS)
        .map(|i| {
            let length = 1 + i * (LONGEST - 1) / (PROMPTS - 1);
            let prompt = (0..length)
                .map(|k| 6 + (xxh3_64(&[i.to_le_bytes(), k.to_le_bytes()].concat()) % 1500) as u32)
                .collect();
            Task {
                prompt,
                temperature: (i % 2) as f32,
                seed: i,
            }
        })
        .collect()
}

fn hash_of(outputs: &[Output]) -> u64 {
    let mut hash = Xxh3::new();
    for output in outputs {
        hash.update(&(output.len() as u64).to_le_bytes());
        for (token, logprob) in output {
            hash.update(&token.to_le_bytes());
            hash.update(&logprob.to_le_bytes());
        }
    }
    hash.digest()
}

fn request(id: usize, task: &Task) -> Request {
    let params = SamplingParams {
        temperature: task.temperature,
        seed: task.seed,
        ignore_eos: true,
        logprobs: Some(0),
        ..SamplingParams::greedy(OUTPUT)
    };
    Request {
        id: RequestId(id as u64),
        prompt: task.prompt.as_slice().into(),
        params,
        kv: KvSource::Compute,
        hold_kv: false,
        cache_salt: None,
        leader: None,
    }
}

fn run_local(
    tasks: &[Task],
    local: &Local,
    probe: Option<Box<dyn Probe>>,
) -> Result<(Vec<Output>, u64)> {
    let options = LoadOptions {
        threads: local.threads,
        max_num_batched_tokens: local.chunk as usize,
        max_num_seqs: local.sequences as usize,
        ..LoadOptions::default()
    };
    let tokenizer = twinfer_text::Tokenizer::from_dir(&demo_model())?;
    let mut loaded = load(&demo_model(), &options)?;
    loaded.executor.set_probe(probe);
    let config = EngineConfig {
        max_model_len: 1024,
        max_num_seqs: local.sequences,
        max_num_batched_tokens: local.chunk,
        max_waiting: PROMPTS as u32,
        ..EngineConfig::default()
    };
    let blocks = local.blocks.min(loaded.num_blocks);
    let mut engine = Engine::new(
        config,
        Box::new(loaded.executor),
        Arc::new(tokenizer),
        blocks,
    )
    .map_err(|e| anyhow::anyhow!("{e}"))?;
    let requests = tasks
        .iter()
        .enumerate()
        .map(|(i, task)| request(i, task))
        .collect();
    let results = generate(&mut engine, requests, local.sequences as usize, |_| {})?;
    let outputs = results
        .iter()
        .map(|result| {
            result
                .tokens
                .iter()
                .map(|token| {
                    (
                        token.id,
                        token
                            .logprobs
                            .as_ref()
                            .map_or(0, |(own, _)| own.logprob.to_bits()),
                    )
                })
                .collect()
        })
        .collect();
    Ok((outputs, engine.stats().preemptions))
}

async fn run_served(tasks: &[Task], prefill: usize, decode: usize) -> Result<Vec<Output>> {
    let serve: Vec<String> = ["--max-model-len", "1024", "--max-num-batched-tokens", "256"]
        .map(String::from)
        .to_vec();
    let mut colocated = None;
    let mut cluster = None;
    let client = if prefill == 0 {
        let arguments: Vec<&str> = serve.iter().map(String::as_str).collect();
        let instance = colocated.insert(Instance::serve(&demo_model(), &arguments, &[]));
        instance.ready().await;
        instance.client()
    } else {
        cluster
            .insert(
                Cluster::start(&ClusterOptions {
                    prefill,
                    decode,
                    serve,
                    ..ClusterOptions::default()
                })
                .await,
            )
            .client()
    };
    let mut outputs = vec![Output::new(); tasks.len()];
    let mut open = tokio::task::JoinSet::new();
    let mut next = 0;
    while next < tasks.len() || !open.is_empty() {
        while next < tasks.len() && open.len() < 16 {
            let (client, task) = (client.clone(), tasks[next].clone());
            let place = next;
            open.spawn(async move {
                one_served(&client, &task)
                    .await
                    .map(|output| (place, output))
            });
            next += 1;
        }
        if let Some(done) = open.join_next().await {
            let (place, output) = done??;
            outputs[place] = output;
        }
    }
    if let Some(cluster) = &cluster {
        let mut fetched = 0.0;
        for instance in &cluster.decode {
            fetched += instance.metrics().await.sum(
                "vllm:prompt_tokens_by_source_total",
                &["source=\"external_kv_transfer\""],
            );
        }
        let expected: usize = tasks.iter().map(|task| task.prompt.len() - 1).sum();
        if fetched as usize != expected {
            bail!("{fetched} prompt tokens came by handoff; expected {expected}");
        }
    }
    Ok(outputs)
}

async fn one_served(client: &Client, task: &Task) -> Result<Output> {
    let body = json!({"model": "demo", "prompt": task.prompt, "max_tokens": OUTPUT, "temperature": task.temperature, "seed": task.seed,
        "ignore_eos": true, "logprobs": 0, "return_token_ids": true});
    let answer = client
        .post("/v1/completions", &body)
        .await
        .map_err(|e| anyhow::anyhow!("{e}"))?;
    if answer.status != 200 {
        bail!("status {}: {}", answer.status, answer.text());
    }
    let answer = answer.json();
    let choice = &answer["choices"][0];
    let tokens = choice["token_ids"]
        .as_array()
        .context("no token_ids in the answer")?;
    let logprobs = choice["logprobs"]["token_logprobs"]
        .as_array()
        .context("no token_logprobs in the answer")?;
    if tokens.len() != logprobs.len() {
        bail!(
            "{} tokens, {} log-probabilities",
            tokens.len(),
            logprobs.len()
        );
    }
    tokens
        .iter()
        .zip(logprobs)
        .map(|(token, logprob)| {
            let token = token.as_u64().context("a token id is no number")? as u32;
            let logprob = logprob.as_f64().context("a log-probability is no number")? as f32;
            Ok((token, logprob.to_bits()))
        })
        .collect()
}

/// Hashes of rows of the residual stream by position and layer.
type Rows = BTreeMap<(u32, usize), HashSet<u64>>;

struct RowHashes(Arc<Mutex<Rows>>);

impl Probe for RowHashes {
    fn record(&mut self, tap: Tap, layer: usize, rows: ProbeRows<'_>, values: &[f32]) {
        if tap != Tap::Hidden || rows.positions.is_empty() {
            return;
        }
        let width = values.len() / rows.positions.len();
        let Ok(mut seen) = self.0.lock() else { return };
        for (position, row) in rows.positions.iter().zip(values.chunks_exact(width)) {
            let bytes: Vec<u8> = row
                .iter()
                .flat_map(|value| value.to_bits().to_le_bytes())
                .collect();
            seen.entry((*position, layer))
                .or_default()
                .insert(xxh3_64(&bytes));
        }
    }
}

/// Runs both cells again and compares the residual stream row by row: the first position and layer of
/// the prompt whose row, as computed alone, the other cell never computed.
fn first_divergence(
    tasks: &[Task],
    prompt: usize,
    expected: &[Output],
    local: &Local,
) -> Result<String> {
    let alone = Arc::new(Mutex::new(Rows::new()));
    run_local(
        &tasks[prompt..=prompt],
        &LOCAL[0],
        Some(Box::new(RowHashes(Arc::clone(&alone)))),
    )?;
    let other = Arc::new(Mutex::new(Rows::new()));
    run_local(tasks, local, Some(Box::new(RowHashes(Arc::clone(&other)))))?;
    let (Ok(alone), Ok(other)) = (alone.lock(), other.lock()) else {
        bail!("a probe panicked")
    };
    let length = tasks[prompt].prompt.len() + expected[prompt].len();
    for ((position, layer), hashes) in alone.iter() {
        let known = other.get(&(*position, *layer));
        if hashes
            .iter()
            .any(|hash| known.is_none_or(|known| !known.contains(hash)))
        {
            return Ok(format!(
                "first divergence: layer {layer}, position {position} of {length}"
            ));
        }
    }
    Ok(
        "the residual stream is equal in a second run: the difference lies in logits or sampling"
            .to_owned(),
    )
}
