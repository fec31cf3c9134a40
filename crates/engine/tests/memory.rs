//! What a loaded model takes is what its plan says. A test target of its own, so that the memory of the process is
//! that of one model.
#![cfg(test)]

use safetensors::tensor::TensorView;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use twinfer_engine::testing::byte_tokenizer;
use twinfer_engine::{
    Engine, EngineConfig, KvMemory, KvSource, LoadOptions, Request, RequestId, SamplingParams,
    check, generate,
};

/// One test at a time: each reads the memory of the process.
static ALONE: Mutex<()> = Mutex::new(());

const VOCAB: usize = 64 << 10;
const HIDDEN: usize = 256;
const LAYERS: usize = 2;
const INNER: usize = 512;
const SEQS: usize = 8;
const TOKENS: usize = 512;

/// Anonymous and shared memory of this process, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        kib << 10
    };
    field("RssAnon:") + field("RssShmem:")
}

/// A llama model of small random weights whose logits are large.
fn write_model(dir: &Path) {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": false,
        "eos_token_id": 1,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut shapes = BTreeMap::from([
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ]);
    for layer in 0..LAYERS {
        for (part, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![256, HIDDEN]),
            ("self_attn.k_proj", vec![128, HIDDEN]),
            ("self_attn.v_proj", vec![128, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, 256]),
            ("mlp.gate_proj", vec![INNER, HIDDEN]),
            ("mlp.up_proj", vec![INNER, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INNER]),
        ] {
            shapes.insert(format!("model.layers.{layer}.{part}.weight"), shape);
        }
    }
    let mut state = 1u32;
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let count: usize = shape.iter().product();
            let mut bytes = Vec::with_capacity(2 * count);
            for _ in 0..count {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // bf16 of magnitude 1/64 to 1/32, either sign.
                let value = 0x3c80 | (state >> 25) as u16 | (state >> 9) as u16 & 0x8000;
                bytes.extend_from_slice(&value.to_le_bytes());
            }
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap();
        (name.as_str(), view)
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

#[test]
fn a_model_takes_what_its_plan_says() {
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path());
    let tokenizer = byte_tokenizer().unwrap();
    let before = resident();
    let peak = Arc::new(AtomicU64::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let sampler = std::thread::spawn({
        let (peak, over) = (Arc::clone(&peak), Arc::clone(&over));
        move || {
            while !over.load(Ordering::Relaxed) {
                peak.fetch_max(resident(), Ordering::Relaxed);
                std::thread::park_timeout(Duration::from_millis(1));
            }
        }
    });
    let options = LoadOptions {
        quantize: true,
        threads: 2,
        kv: KvMemory::Blocks(160),
        max_num_batched_tokens: TOKENS,
        max_num_seqs: SEQS,
        ..LoadOptions::default()
    };
    let checked = check(dir.path(), &options).unwrap();
    let (workspace, loading) = (checked.workspace_bytes, checked.loading_bytes);
    let loaded = checked.load(&options).unwrap();
    let (weights, kv) = (loaded.weight_bytes, loaded.kv_bytes);
    let after_load = peak.load(Ordering::Relaxed).max(resident());
    let config = EngineConfig {
        max_model_len: 640,
        max_num_seqs: SEQS as u32,
        max_num_batched_tokens: TOKENS as u32,
        ..EngineConfig::default()
    };
    let blocks = loaded.num_blocks;
    let mut engine = Engine::new(config, Box::new(loaded.executor), tokenizer, blocks).unwrap();
    let requests = (0..4).map(|id| Request {
        id: RequestId(id),
        prompt: (0..500).map(|i| (i * 31 + id as u32) % 256).collect(),
        params: SamplingParams {
            prompt_logprobs: Some(5),
            allowed_token_ids: Some(vec![65]),
            ..SamplingParams::greedy(4)
        },
        kv: KvSource::Compute,
        hold_kv: false,
        cache_salt: None,
        leader: None,
        resumed: 0,
    });
    let results = generate(&mut engine, requests.collect(), SEQS, |_| {}).unwrap();
    over.store(true, Ordering::Relaxed);
    sampler.join().unwrap();
    assert!(
        results
            .iter()
            .all(|result| result.prompt_logprobs.len() == 499)
    );

    // Prompts were scored in rows as large as the plan allows.
    let logits = 4 * VOCAB as u64 * engine.max_logits_rows() as u64;
    let taken = peak.load(Ordering::Relaxed) - before;
    let numbers = format!(
        "peak {taken}, after loading {}; plan: weights {weights}, KV {kv}, workspace {workspace} (logits {logits}), loading {loading}",
        after_load - before
    );
    println!("{numbers}");
    assert!(
        taken > weights + logits * 9 / 10,
        "the test is to reach the limit: {numbers}"
    );
    assert!(taken <= (weights + kv) * 6 / 5 + workspace, "{numbers}");
    assert!(taken <= weights + kv + workspace + (8 << 20), "{numbers}");
    assert!(
        after_load - before <= weights + loading + (8 << 20),
        "{numbers}"
    );
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_numbers() {
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path());
    let fits = LoadOptions {
        kv: KvMemory::Blocks(8),
        max_num_seqs: SEQS,
        ..LoadOptions::default()
    };
    let checked = check(dir.path(), &fits).unwrap();
    let left = checked.available_bytes - checked.weight_bytes - checked.workspace_bytes;
    // More than is there whatever else the machine does meanwhile.
    let asked = left + left / 2 + (1 << 30);
    let error = check(
        dir.path(),
        &LoadOptions {
            kv: KvMemory::Bytes(asked),
            ..fits.clone()
        },
    )
    .unwrap_err()
    .to_string();
    for word in [
        &*asked.to_string(),
        "kv-cache-memory",
        "weights",
        "workspace",
    ] {
        assert!(error.contains(word), "{error}");
    }
    // Rows of logits are part of the workspace: a step of half a million tokens, each with 256 KiB of them.
    let error = check(
        dir.path(),
        &LoadOptions {
            max_num_batched_tokens: 1 << 20,
            max_num_seqs: 1 << 16,
            ..fits
        },
    );
    match error {
        Err(error) => assert!(error.to_string().contains("for workspace"), "{error}"),
        Ok(checked) => assert!(checked.workspace_bytes > (4 * (VOCAB as u64)) << 16),
    }
}
