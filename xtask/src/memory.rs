//! What rank processes take: what every rank has, its part of the experts, its KV, and a tenth; and what moving experts
//! sends.

use crate::ranks::{PATIENCE, Ranks, end_with, meet};
use anyhow::{Context, Result, anyhow, bail};
use safetensors::Dtype as StoredType;
use safetensors::tensor::TensorView;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;
use twinfer_comm::Topology;
use twinfer_config::ModelConfig;
use twinfer_engine::eplb::EplbOptions;
use twinfer_engine::exchange::RankLink;
use twinfer_engine::phase::PhasePolicy;
use twinfer_engine::testing::byte_tokenizer;
use twinfer_engine::{
    Engine, EngineConfig, KvMemory, KvSource, LoadOptions, RankEngine, Request, RequestId,
    SamplingParams, generate_together, load,
};
use twinfer_worker::GroupExchange;

/// The rest of a process, over its weights and KV.
const ALLOWANCE: f64 = 1.1;
/// Between two looks at a process.
const EVERY: Duration = Duration::from_millis(10);
const LIMIT: Duration = Duration::from_secs(10 * 60);
const SEQUENCES: u32 = 16;
const LENGTH: u32 = 1024;
const CHUNK: u32 = 128;
const OUTPUT: u32 = 256;
const KV: u64 = 64 << 20;
/// Weights of about 270 MB, three quarters of them in experts.
const EXPERTS: u32 = 32;
const LAYERS: u64 = 4;
/// Steps between two swaps.
const SWAPS: u64 = 50;

/// A rank's process.
#[derive(clap::Args)]
pub(crate) struct RankArgs {
    parent: u32,
    ranks: u32,
    model: PathBuf,
    /// Steps after which all experts change their seats; 0: never.
    swaps: u64,
}

/// What a rank says of itself.
#[derive(Serialize, Deserialize)]
struct Planned {
    weights: u64,
    kv: u64,
    /// Seats that got another expert, and bytes of weights sent for those of others.
    seats: u64,
    sent: u64,
}

/// Runs 1, 2, 4 and 8 ranks until their KV is full.
pub(crate) fn run() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (shared, experts) = write_model(folder.path())?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "MiB: not of experts {:.0}, experts {:.0}",
        mib(shared),
        mib(experts)
    );
    let mut over = Vec::new();
    for ranks in [1, 2, 4, 8] {
        let (planned, most) = measure(folder.path(), ranks, 0)?;
        if planned.iter().any(|rank| rank.seats + rank.sent > 0) {
            bail!("experts moved where none should");
        }
        for (rank, (planned, most)) in planned.iter().zip(&most).enumerate() {
            let needed = shared + experts / u64::from(ranks) + planned.kv;
            println!(
                "rank {rank} of {ranks}: most {:.1}, allowed {:.1} (not of experts {:.1}, experts/{ranks} {:.1}, KV {:.1}, and a tenth); packed weights {:.1}",
                mib(*most),
                ALLOWANCE * mib(needed),
                mib(shared),
                mib(experts / u64::from(ranks)),
                mib(planned.kv),
                mib(planned.weights),
            );
            // With less than that it was not seen at work, or its KV was not filled.
            if *most < planned.weights + planned.kv * 9 / 10 {
                bail!("rank {rank} of {ranks} was seen with less than its weights and KV");
            }
            if *most as f64 > ALLOWANCE * needed as f64 {
                over.push(format!("rank {rank} of {ranks}"));
            }
        }
    }
    if !over.is_empty() {
        bail!("more memory than allowed: {}", over.join(", "));
    }
    moves(folder.path(), experts)
}

/// Experts change their seats every few steps: what is sent for them.
fn moves(model: &Path, experts: u64) -> Result<()> {
    let (planned, most) = measure(model, 4, SWAPS)?;
    let one = experts / (LAYERS * u64::from(EXPERTS));
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    for (rank, (planned, most)) in planned.iter().zip(&most).enumerate() {
        let Planned { seats, sent, .. } = *planned;
        println!(
            "rank {rank} of 4, all experts swapped every {SWAPS} steps: {seats} seats changed, {:.1} MiB of weights sent, most memory {:.1} MiB",
            mib(sent),
            mib(*most),
        );
        // Some come from a seat of the same rank.
        if sent == 0 || sent > seats * one * 11 / 10 {
            bail!("{sent} bytes were sent for {seats} seats of {one} bytes");
        }
    }
    Ok(())
}

/// What the ranks planned, and the most that each was seen to take, in bytes.
fn measure(model: &Path, ranks: u32, swaps: u64) -> Result<(Vec<Planned>, Vec<u64>)> {
    let topology = Topology::one_node(ranks)?;
    let arguments = [
        ranks.to_string(),
        model.display().to_string(),
        swaps.to_string(),
    ];
    let processes = Ranks::start(&topology, "memory-rank", &arguments)?;
    let ids = processes.ids();
    std::thread::scope(|scope| {
        let (stop, stopped) = sync_channel(1);
        let sampler = scope.spawn(move || most(&ids, &stopped));
        let texts = processes.finish(LIMIT);
        drop(stop);
        let most = sampler.join().map_err(|_| anyhow!("a sampler panicked"))?;
        let planned = texts?;
        let planned = planned.iter().map(|text| serde_json::from_str(text));
        Ok((planned.collect::<Result<_, _>>()?, most))
    })
}

/// The most private and shared memory of each process until `stopped` is closed.
fn most(ids: &[u32], stopped: &Receiver<()>) -> Vec<u64> {
    let mut most = vec![0; ids.len()];
    while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
        for (most, id) in most.iter_mut().zip(ids) {
            // One that has ended has no memory.
            let text = std::fs::read_to_string(format!("/proc/{id}/smaps_rollup"));
            let text = text.unwrap_or_default();
            let field = |name: &str| -> u64 {
                let line = text.lines().find_map(|line| line.strip_prefix(name));
                line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
                    .unwrap_or(0)
            };
            *most = (*most).max((field("Anonymous:") + field("Pss_Shmem:")) << 10);
        }
    }
    most
}

/// The life of one rank: as many requests as its KV has room for, all of which generate for so long that they end together.
pub(crate) fn rank(args: &RankArgs) -> Result<()> {
    end_with(args.parent)?;
    let group = meet(&Topology::one_node(args.ranks)?, true)?;
    let exchange = GroupExchange::new(group, PATIENCE, LIMIT);
    let link = Arc::new(RankLink::new(Box::new(exchange)));
    let options = LoadOptions {
        threads: 1,
        max_num_batched_tokens: CHUNK as usize,
        max_num_seqs: SEQUENCES as usize,
        kv: KvMemory::Bytes(KV),
        ranks: Some(Arc::clone(&link)),
        eplb: EplbOptions {
            interval: args.swaps,
            forced: args.swaps > 0,
            ..EplbOptions::default()
        },
        ..LoadOptions::default()
    };
    let loaded = load(&args.model, &options)?;
    let config = EngineConfig {
        max_model_len: LENGTH,
        max_num_seqs: SEQUENCES,
        max_num_batched_tokens: CHUNK,
        enable_prefix_caching: false,
        ..EngineConfig::default()
    };
    let (weights, kv) = (loaded.weight_bytes, loaded.kv_bytes);
    let tokenizer = byte_tokenizer().map_err(|e| anyhow!("{e}"))?;
    let executor = Box::new(loaded.executor);
    let engine = Engine::new(config, executor, tokenizer, loaded.num_blocks);
    let engine = engine.map_err(|e| anyhow!("{e}"))?;
    let mut engine =
        RankEngine::new(engine, PhasePolicy::AT_ONCE, link).map_err(|e| anyhow!("{e}"))?;
    let requests = (0..SEQUENCES).map(|id| Request {
        id: RequestId(id.into()),
        prompt: (0..LENGTH - OUTPUT - 16)
            .map(|at| (at * 31 + id) % 256)
            .collect(),
        params: SamplingParams {
            ignore_eos: true,
            // The tokenizer has only these.
            allowed_token_ids: Some((0..256).collect()),
            ..SamplingParams::greedy(OUTPUT)
        },
        kv: KvSource::Compute,
        hold_kv: false,
        cache_salt: None,
        leader: None,
        resumed: 0,
    });
    let generated = generate_together(&mut engine, requests.collect(), SEQUENCES as usize, |_| {})?;
    if let Some(short) = generated
        .iter()
        .find(|one| one.tokens.len() != OUTPUT as usize)
    {
        bail!(
            "request {} ended with {} of {OUTPUT} tokens: {:?}",
            short.id.0,
            short.tokens.len(),
            short.finish
        );
    }
    let link = engine.link();
    let planned = Planned {
        weights,
        kv,
        seats: link.moves().seats,
        sent: link.sent().weights,
    };
    println!("{}", serde_json::to_string(&planned)?);
    Ok(())
}

/// A model of random weights; the bytes of its tensors that are not of experts, and of those that are.
fn write_model(folder: &Path) -> Result<(u64, u64)> {
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "vocab_size": 32 << 10, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 512,
        "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "num_experts": EXPERTS, "num_experts_per_tok": 4, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_theta": 1e6, "rope_scaling": null, "attention_bias": false, "use_sliding_window": false,
        "tie_word_embeddings": false, "eos_token_id": 1,
    });
    std::fs::write(folder.join("config.json"), config.to_string())?;
    let specs = ModelConfig::parse(&config.to_string())?.tensors(false);
    let mut state = 1u32;
    let (mut shared, mut experts) = (0, 0);
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = specs
        .tensors
        .iter()
        .map(|spec| {
            let count: usize = spec.shape.iter().product();
            let mut bytes = Vec::with_capacity(2 * count);
            for _ in 0..count {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // bf16 of magnitude 1/64 to 1/32, either sign.
                let value = 0x3c80 | (state >> 25) as u16 | (state >> 9) as u16 & 0x8000;
                bytes.extend_from_slice(&value.to_le_bytes());
            }
            let sum = match spec.name.contains(".experts.") {
                true => &mut experts,
                false => &mut shared,
            };
            *sum += bytes.len() as u64;
            (spec.name.clone(), spec.shape.clone(), bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(StoredType::BF16, shape.clone(), bytes)?;
        Ok((name.as_str(), view))
    });
    let views = views.collect::<Result<Vec<_>>>()?;
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors"))
        .context("model.safetensors")?;
    Ok((shared, experts))
}
