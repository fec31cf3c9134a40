//! Configs of each family, quantisation, architectures of other engines.

use super::*;
use crate::Dtype;
use serde_json::json;

fn testdata(path: &str) -> Value {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(path);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A golden config with some fields replaced; null removes one.
fn with(model: &str, changes: &Value) -> Result<ModelConfig, ModelConfigError> {
    let mut config = testdata(&format!("golden/{model}/config.json"));
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    ModelConfig::parse(&config.to_string())
}

fn message(model: &str, changes: &Value) -> String {
    with(model, changes).unwrap_err().to_string()
}

fn gqa(config: &ModelConfig) -> &GqaConfig {
    match &config.attention {
        AttentionConfig::Gqa(gqa) => gqa,
        AttentionConfig::Mla(_) => panic!("{config:?}"),
    }
}

#[test]
fn every_family_is_read_with_what_sets_it_apart() {
    let llama = with("llama", &json!({})).unwrap();
    assert_eq!((gqa(&llama).kv_heads, llama.kv_width()), (2, 64));
    assert!(llama.moe.is_none() && !gqa(&llama).qkv_bias && !gqa(&llama).head_norms);
    let biased = with("llama", &json!({"attention_bias": true})).unwrap();
    assert!(gqa(&biased).qkv_bias && gqa(&biased).out_bias);
    let qwen2 = with("qwen2", &json!({})).unwrap();
    assert!(gqa(&qwen2).qkv_bias && !gqa(&qwen2).out_bias && qwen2.tied_head);
    let qwen3 = with("qwen3", &json!({})).unwrap();
    assert_eq!((gqa(&qwen3).head_dim, gqa(&qwen3).head_norms), (32, true));
    let moe = with("qwen3_moe", &json!({})).unwrap();
    assert_eq!(moe.moe.unwrap().routing, Routing::SoftmaxOfChosen);
    let lite = with("deepseek_v2_lite", &json!({})).unwrap();
    let greedy = Routing::Softmax {
        groups: 1,
        top_groups: 1,
    };
    assert_eq!(lite.moe.unwrap().routing, greedy);
    let v2 = with("deepseek_v2", &json!({})).unwrap();
    let limited = Routing::Softmax {
        groups: 4,
        top_groups: 2,
    };
    assert_eq!(v2.moe.unwrap().routing, limited);
    for model in [
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "deepseek_v2",
        "deepseek_v2_lite",
        "w8a8/qwen3_moe_compressed",
        "w8a8/deepseek_v3_compressed",
        "fp8/deepseek_v3",
    ] {
        assert_eq!(with(model, &json!({})).unwrap().unread, [""; 0], "{model}");
    }
}

#[test]
fn mixtral_has_experts_of_its_dense_width() {
    let config = with(
        "llama",
        &json!({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "num_local_experts": 8, "num_experts_per_tok": 2}),
    )
    .unwrap();
    let moe = config.moe.clone().unwrap();
    assert_eq!((moe.experts, moe.top_k, moe.intermediate), (8, 2, 176));
    let names: Vec<String> = config
        .tensors(false)
        .tensors
        .into_iter()
        .map(|spec| spec.name)
        .collect();
    for name in [
        "model.layers.2.block_sparse_moe.experts.7.w3.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
    ] {
        assert!(names.iter().any(|n| n == name), "{name}");
    }
}

#[test]
fn sparse_layers_follow_step_and_list() {
    let layers = |changes: Value| with("qwen3_moe", &changes).unwrap().moe.unwrap().layers;
    assert_eq!(
        layers(json!({"decoder_sparse_step": 2})),
        [false, true, false]
    );
    assert_eq!(
        layers(json!({"mlp_only_layers": [0, 2]})),
        [false, true, false]
    );
    let frequency = with("deepseek_v3", &json!({"moe_layer_freq": 2})).unwrap();
    assert_eq!(frequency.moe.unwrap().layers, [false, false, true]);
}

#[test]
fn values_that_a_family_would_compute_otherwise_are_refused_by_name() {
    let cases = [
        (
            "qwen2",
            json!({"use_sliding_window": true}),
            "use_sliding_window",
        ),
        ("llama", json!({"sliding_window": 4096}), "sliding_window"),
        ("llama", json!({"hidden_act": "gelu"}), "hidden_act"),
        ("llama", json!({"mlp_bias": true}), "mlp_bias"),
        (
            "llama",
            json!({"partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
        ),
        (
            "llama",
            json!({"num_key_value_heads": 3}),
            "num_key_value_heads",
        ),
        ("llama", json!({"head_dim": 15}), "head_dim"),
        ("llama", json!({"model_type": "qwen2"}), "model_type"),
        (
            "qwen3",
            json!({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
            "layer_types",
        ),
        (
            "qwen3_moe",
            json!({"num_experts_per_tok": 17}),
            "num_experts_per_tok",
        ),
        (
            "qwen3_moe",
            json!({"mlp_only_layers": ["a"]}),
            "mlp_only_layers",
        ),
        (
            "deepseek_v2",
            json!({"norm_topk_prob": true}),
            "norm_topk_prob",
        ),
        (
            "deepseek_v2",
            json!({"topk_method": "noaux_tc"}),
            "topk_method",
        ),
        ("deepseek_v2", json!({"n_group": 3}), "n_group"),
    ];
    for (model, change, field) in cases {
        let text = message(model, &change);
        assert!(text.contains(field) && text.contains("allowed"), "{text}");
    }
}

#[test]
fn ids_of_first_and_last_token_are_checked_wherever_they_are_taken_from() {
    for change in [
        json!({"eos_token_id": 512}),
        json!({"eos_token_id": -1}),
        json!({"eos_token_id": "</s>"}),
        json!({"eos_token_id": [1, 512]}),
        json!({"eos_token_id": []}),
        json!({"bos_token_id": 1e9}),
        json!({"bos_token_id": true}),
    ] {
        let field = change.as_object().unwrap().keys().next().unwrap();
        let text = message("llama", &change);
        assert!(text.contains(field) && text.contains("512"), "{text}");
    }
    for fine in [
        json!({"eos_token_id": [1, 2]}),
        json!({"bos_token_id": null}),
    ] {
        assert!(with("llama", &fine).is_ok(), "{fine}");
    }
}

#[test]
fn a_context_of_one_token_is_refused_with_the_least_there_must_be() {
    let text = message("llama", &json!({"max_position_embeddings": 1}));
    assert!(
        text.contains("max_position_embeddings is 1") && text.contains("from 2"),
        "{text}"
    );
}

#[test]
fn contexts_follow_the_kind_of_scaling() {
    let context = |scaling: Value| {
        with("llama", &json!({"rope_scaling": scaling}))
            .unwrap()
            .context
    };
    assert_eq!(context(json!(null)), 1024);
    assert_eq!(context(json!({"type": "linear", "factor": 4.0})), 4096);
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    assert_eq!(context(llama3), 1024);
    let turned = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
        "high_freq_factor": 1.0, "original_max_position_embeddings": 64});
    let text = message("llama", &json!({"rope_scaling": turned}));
    assert!(
        text.contains("contradicts") && text.contains("low_freq_factor"),
        "{text}"
    );
}

#[test]
fn grouped_queries_keep_keys_and_values_of_the_published_sizes() {
    let qwen = with(
        "qwen3_moe",
        &json!({"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128}),
    )
    .unwrap();
    let kv = KvShape::of(&qwen, Dtype::Bf16, 16);
    assert_eq!(kv.token_bytes(), 48 * 2 * 4 * 128 * 2);
    assert!((qwen.softmax_scale() - 128f32.powf(-0.5)).abs() < 1e-9);
}

#[test]
fn deepseek_v4_is_read_in_full_and_refused_natively_with_the_engines_that_serve_it() {
    let config = testdata("configs/deepseek_v4.json");
    let text = config.to_string();
    let ModelFile::V4(v4) = ModelFile::parse(&text).unwrap() else {
        panic!("{text}");
    };
    assert_eq!(
        v4.layers,
        [
            V4Layer::Window,
            V4Layer::Indexed(4),
            V4Layer::Compressed(128),
            V4Layer::Indexed(4)
        ]
    );
    assert_eq!((v4.mtp_layers, v4.hash_layers, v4.streams), (1, 1, 4));
    assert!((v4.kv_values_per_token() - (2.0 * 64.0 / 4.0 + 32.0 / 128.0)).abs() < 1e-9);
    let refused = ModelConfig::parse(&text).unwrap_err();
    assert_eq!(
        refused,
        ModelConfigError::OtherEngine {
            name: "DeepseekV4ForCausalLM",
            engines: &["vllm", "vllm-ascend"],
        }
    );
    let words = refused.to_string();
    assert!(
        words.contains("vllm-ascend") && words.contains("DeepseekV3ForCausalLM"),
        "{words}"
    );
    let mut short = config.clone();
    short["compress_ratios"] = json!([0, 4]);
    let error = ModelFile::parse(&short.to_string())
        .unwrap_err()
        .to_string();
    assert!(error.contains("compress_ratios"), "{error}");
    let mut nested = json!({"architectures": ["DeepseekV41ForConditionalGeneration"],
        "model_type": "deepseek_v41", "vision_config": {}});
    nested["text_config"] = config;
    let refused = ModelConfig::parse(&nested.to_string()).unwrap_err();
    assert!(refused.to_string().contains("DeepseekV41"), "{refused}");
}

fn compressed(changes: &[(&str, Value)]) -> Value {
    let mut config = testdata("golden/w8a8/deepseek_v3_compressed/config.json");
    for (pointer, value) in changes {
        let place = config["quantization_config"].pointer_mut(pointer).unwrap();
        *place = value.clone();
    }
    config
}

#[test]
fn compressed_tensors_quantises_what_a_target_matches_and_no_ignore() {
    let parse = |config: &Value| match ModelConfig::parse(&config.to_string())
        .unwrap()
        .quantization
    {
        Some(QuantizationConfig::CompressedTensors(quant)) => quant,
        other => panic!("{other:?}"),
    };
    let quant = parse(&compressed(&[]));
    let dynamic = Some((Strategy::Channel, QuantizedActivations::PerToken));
    assert_eq!(quant.scheme("model.layers.0.self_attn.kv_b_proj"), dynamic);
    assert_eq!(quant.scheme("lm_head"), None);
    assert_eq!(quant.scheme("model.layers.1.mlp.gate"), None);
    assert_eq!(quant.scheme("model.layers.1.mlp.gate_proj"), dynamic);
    assert_eq!(quant.scheme("model.layers.3.eh_proj"), None);
    // Expressions match from the start of the name, names as a whole.
    let quant = parse(&compressed(&[
        (
            "/config_groups/group_0/targets",
            json!(["re:model\\.layers\\.\\d+\\.mlp"]),
        ),
        ("/ignore", json!(["re:layers", "model.layers.0.mlp.up"])),
    ]));
    assert_eq!(quant.scheme("model.layers.0.mlp.up_proj"), dynamic);
    assert_eq!(quant.scheme("model.layers.0.self_attn.o_proj"), None);
}

#[test]
fn quantisation_that_is_not_served_is_refused_by_name() {
    let cases = [
        ("/format", json!("pack-quantized"), "format"),
        ("W/num_bits", json!(4), "num_bits"),
        ("W/symmetric", json!(false), "symmetric"),
        ("W/strategy", json!("group"), "strategy"),
        ("W/group_size", json!(128), "group_size"),
        ("W/type", json!("float"), "type"),
        ("I", json!(null), "input_activations"),
        ("I/symmetric", json!(false), "symmetric"),
        ("I/strategy", json!("tensor"), "strategy"),
        (
            "/kv_cache_scheme",
            json!({"num_bits": 8}),
            "kv_cache_scheme",
        ),
        ("/ignore", json!(["re:(?=x)"]), "ignore"),
        ("/config_groups", json!({}), "config_groups"),
    ];
    for (place, value, field) in cases {
        let place = place
            .replace('W', "/config_groups/group_0/weights")
            .replace('I', "/config_groups/group_0/input_activations");
        let changes = [(place.as_str(), value)];
        let error = ModelConfig::parse(&compressed(&changes).to_string()).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("quantization_config.") && text.contains(field),
            "{changes:?}: {text}"
        );
    }
    let mut rotated = compressed(&[]);
    rotated["quantization_config"]["transform_config"] = json!({"config_groups": {"R1": {}}});
    let text = ModelConfig::parse(&rotated.to_string())
        .unwrap_err()
        .to_string();
    assert!(text.contains("transform_config"), "{text}");
    for (fp8, field) in [
        (json!({"quant_method": "fp8"}), "weight_block_size"),
        (
            json!({"quant_method": "fp8", "weight_block_size": [128]}),
            "weight_block_size",
        ),
        (
            json!({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}),
            "fmt",
        ),
        (
            json!({"quant_method": "fp8", "weight_block_size": [128, 128],
                "activation_scheme": "static"}),
            "activation_scheme",
        ),
    ] {
        let text = message("llama", &json!({"quantization_config": fp8}));
        assert!(text.contains(field), "{text}");
    }
}

/// Whatever parses has sizes that can be computed with.
#[test]
fn no_config_makes_the_arithmetic_overflow_or_panic() {
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let pieces = [
        "0", "1", "2", "9", "99999999", "-", ".", "e9", "null", "true", "\"", "{", "}", "[", "]",
        ",", ":", "NaN",
    ];
    for file in [
        "golden/llama",
        "golden/qwen3_moe",
        "golden/deepseek_v2",
        "golden/deepseek_v3",
        "golden/w8a8/deepseek_v3_compressed",
        "golden/fp8/deepseek_v3",
        "configs",
    ] {
        let name = if file == "configs" {
            "deepseek_v4.json"
        } else {
            "config.json"
        };
        let text = testdata(&format!("{file}/{name}")).to_string();
        let mut parsed = 0;
        for _ in 0..4_000 {
            let mut mutated = text.clone();
            for _ in 0..=random(3) {
                let at = random(mutated.len());
                let end = (at + random(3)).min(mutated.len());
                mutated.replace_range(at..end, pieces[random(pieces.len())]);
            }
            let config = match ModelFile::parse(&mutated) {
                Ok(ModelFile::Served(config)) => config,
                Ok(ModelFile::V4(config)) => {
                    assert!(config.kv_values_per_token().is_finite());
                    parsed += 1;
                    continue;
                }
                Err(_) => continue,
            };
            parsed += 1;
            let step = StepSize {
                tokens: 1 << 20,
                seqs: 1 << 16,
                logits: 1 << 20,
                drafting: true,
                threads: 1024,
            };
            assert!(config.workspace_bytes(&step) > 0);
            assert!(KvShape::of(&config, Dtype::F32, 4096).bytes_for(config.context) > 0);
            let frequencies = config.rope.frequencies(config.rope_dim());
            assert!(frequencies.iter().all(|f| f.is_finite()), "{mutated}");
            assert!(config.softmax_scale().is_finite() && config.rope.cos_sin_factor().is_finite());
            assert!(config.identity().len() < 10_000);
        }
        assert!(parsed > 200, "{file}: {parsed}");
    }
}
