use super::*;
use crate::Dtype;
use serde_json::{Map, json};

fn testdata(path: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(path);
    std::fs::read_to_string(path).unwrap()
}

fn base() -> Map<String, Value> {
    let Value::Object(map) =
        serde_json::from_str(&testdata("golden/deepseek_v3/config.json")).unwrap()
    else {
        panic!("no object");
    };
    map
}

/// The golden config with some fields replaced; null removes one.
fn with(changes: &Value) -> Result<ModelConfig, ModelConfigError> {
    let mut map = base();
    for (key, value) in changes.as_object().unwrap() {
        if value.is_null() {
            map.remove(key);
        } else {
            map.insert(key.clone(), value.clone());
        }
    }
    ModelConfig::parse(&Value::Object(map).to_string())
}

fn message(changes: &Value) -> String {
    with(changes).unwrap_err().to_string()
}

fn yarn(changes: &Value) -> Value {
    let mut yarn = json!({
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0
    });
    for (key, value) in changes.as_object().unwrap() {
        if value.is_null() {
            yarn.as_object_mut().unwrap().remove(key);
        } else {
            yarn[key] = value.clone();
        }
    }
    yarn
}

#[test]
fn the_golden_config_is_read() {
    let config = with(&json!({})).unwrap();
    assert_eq!(
        (config.layers, config.mtp_layers, config.context),
        (3, 1, 1024)
    );
    assert_eq!(
        (config.kv_width(), config.stored_dtype),
        (48, Some(StoredDtype::Bf16))
    );
    assert!(!config.is_moe(0) && config.is_moe(1));
    assert_eq!(config.unread, [""; 0]);
}

#[test]
fn an_unserved_architecture_is_refused_with_the_list_of_served_ones() {
    let text = message(&json!({"architectures": ["GemmaForCausalLM"]}));
    assert!(
        text.contains("GemmaForCausalLM") && text.contains("DeepseekV3ForCausalLM"),
        "{text}"
    );
    for broken in [
        json!([]),
        json!("DeepseekV3ForCausalLM"),
        json!(["A", "B"]),
        json!([1]),
    ] {
        assert!(message(&json!({"architectures": broken})).contains("architectures"));
    }
    assert!(message(&json!({"architectures": null})).contains("lacks architectures"));
}

#[test]
fn values_the_engine_would_compute_otherwise_are_refused_by_name() {
    let cases = [
        (
            json!({"attention_bias": true}),
            "attention_bias",
            "true",
            "false",
        ),
        (json!({"hidden_act": "gelu"}), "hidden_act", "gelu", "silu"),
        (
            json!({"topk_method": "greedy"}),
            "topk_method",
            "greedy",
            "noaux_tc",
        ),
        (
            json!({"scoring_func": "softmax"}),
            "scoring_func",
            "softmax",
            "sigmoid",
        ),
        (
            json!({"rope_interleave": false}),
            "rope_interleave",
            "false",
            "true",
        ),
        (
            json!({"quantization_config": {"quant_method": "awq"}}),
            "quantization_config.quant_method",
            "awq",
            "compressed-tensors, fp8",
        ),
        (
            json!({"torch_dtype": "float16"}),
            "torch_dtype",
            "float16",
            "bfloat16",
        ),
        (
            json!({"sliding_window": 4096}),
            "sliding_window",
            "4096",
            "absent",
        ),
        (
            json!({"model_type": "llama"}),
            "model_type",
            "llama",
            "deepseek_v3",
        ),
        (
            json!({"qk_rope_head_dim": 15}),
            "qk_rope_head_dim",
            "15",
            "even",
        ),
        (json!({"n_group": 5}), "n_group", "5", "divisor"),
        (json!({"n_group": 16}), "n_group", "16", "8"),
        (json!({"topk_group": 5}), "topk_group", "5", "4"),
        (
            json!({"num_experts_per_tok": 9}),
            "num_experts_per_tok",
            "9",
            "8",
        ),
        (json!({"hidden_size": 0}), "hidden_size", "0", "1 to"),
        (json!({"hidden_size": -64}), "hidden_size", "-64", "1 to"),
        (json!({"hidden_size": 64.5}), "hidden_size", "64.5", "1 to"),
        (
            json!({"num_hidden_layers": 18_446_744_073_709_551_615u64}),
            "num_hidden_layers",
            "18446744073709551615",
            "256",
        ),
        (
            json!({"rms_norm_eps": 1e-60}),
            "rms_norm_eps",
            "1e-60",
            "above 0",
        ),
        (json!({"rms_norm_eps": 0}), "rms_norm_eps", "0", "above 0"),
        (
            json!({"routed_scaling_factor": "2.5"}),
            "routed_scaling_factor",
            "2.5",
            "number",
        ),
        (
            json!({"tie_word_embeddings": "no"}),
            "tie_word_embeddings",
            "no",
            "true or false",
        ),
        (
            json!({"rope_scaling": "yarn"}),
            "rope_scaling",
            "yarn",
            "object",
        ),
        (
            json!({"rope_scaling": yarn(&json!({"type": "dynamic"}))}),
            "rope_scaling.type",
            "dynamic",
            "yarn",
        ),
        (
            json!({"rope_scaling": yarn(&json!({"factor": 0}))}),
            "rope_scaling.factor",
            "0",
            "above 0",
        ),
        (
            json!({"rope_scaling": yarn(&json!({"alpha": 2}))}),
            "rope_scaling.alpha",
            "2",
            "absent",
        ),
    ];
    for (change, field, value, allowed) in cases {
        let text = message(&change);
        assert!(
            text.contains(field) && text.contains(value) && text.contains(allowed),
            "{change}: {text}"
        );
    }
}

#[test]
fn a_missing_size_is_named() {
    for field in [
        "hidden_size",
        "kv_lora_rank",
        "n_routed_experts",
        "max_position_embeddings",
        "routed_scaling_factor",
    ] {
        assert!(
            message(&json!({ field: null })).contains(&format!("lacks {field}")),
            "{field}"
        );
    }
}

#[test]
fn unknown_fields_are_told_but_do_not_stop() {
    assert_eq!(
        with(&json!({"some_new_thing": 7, "initializer_range": 0.1}))
            .unwrap()
            .unread,
        ["some_new_thing"]
    );
}

#[test]
fn text_that_is_no_json_object_is_an_error() {
    for text in [
        "",
        "[]",
        "null",
        "<html>",
        "{\"a\":",
        "version https://git-lfs.github.com/spec/v1",
    ] {
        assert!(
            matches!(ModelConfig::parse(text), Err(ModelConfigError::Json(_))),
            "{text}"
        );
    }
}

#[test]
fn both_spellings_of_the_file_format_give_the_same_model() {
    let classic = with(&json!({})).unwrap();
    let mut inner = base()["rope_scaling"].clone();
    let kind = inner.as_object_mut().unwrap().remove("type").unwrap();
    inner["rope_type"] = kind;
    let renamed =
        with(&json!({"rope_scaling": inner, "torch_dtype": null, "dtype": "bfloat16"})).unwrap();
    inner["rope_theta"] = json!(10000.0);
    let new =
        with(&json!({"rope_scaling": null, "rope_theta": null, "rope_parameters": inner})).unwrap();
    assert_eq!(classic, renamed);
    assert_eq!(classic, new);
    assert_eq!(classic.identity(), new.identity());

    let none = with(&json!({"rope_scaling": null})).unwrap();
    let default = with(
        &json!({"rope_scaling": null, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    );
    assert_eq!(none, default.unwrap());
}

#[test]
fn contradictions_between_spellings_are_errors() {
    let inner = base()["rope_scaling"].clone();
    let cases = [
        json!({"dtype": "float32"}),
        json!({"rope_scaling": yarn(&json!({"rope_type": "default"}))}),
        json!({"rope_parameters": {"rope_type": "default"}}),
        json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0,
            "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0}}),
        json!({"original_max_position_embeddings": 64}),
        json!({"num_key_value_heads": 2}),
        json!({"qk_head_dim": 41}),
        json!({"max_position_embeddings": 1025}),
        json!({"rope_scaling": yarn(&json!({"beta_fast": 1, "beta_slow": 32}))}),
    ];
    for case in cases {
        let text = message(&case);
        assert!(text.contains("contradicts"), "{case}: {text}");
    }
    let mut agreeing = inner;
    agreeing["rope_theta"] = json!(10000.0);
    assert!(with(&json!({"rope_parameters": agreeing, "dtype": "bfloat16"})).is_ok());
}

/// C6.6: the length is original × factor whichever of the two lengths the file announces.
#[test]
fn the_yarn_factor_is_never_applied_twice_to_the_context() {
    for max_position_embeddings in [163_840, 4_096, 131_072] {
        let config = with(
            &json!({"rope_scaling": yarn(&json!({})), "max_position_embeddings": max_position_embeddings}),
        );
        assert_eq!(config.unwrap().context, 163_840);
    }
    let plain = with(&json!({"rope_scaling": null, "max_position_embeddings": 32_768})).unwrap();
    assert_eq!(plain.context, 32_768);
    let beyond =
        message(&json!({"rope_scaling": yarn(&json!({})), "max_position_embeddings": 6_553_600}));
    assert!(
        beyond.contains("6553600") && beyond.contains("163840"),
        "{beyond}"
    );
    let missing =
        message(&json!({"rope_scaling": yarn(&json!({"original_max_position_embeddings": null}))}));
    assert!(
        missing.contains("rope_scaling.original_max_position_embeddings"),
        "{missing}"
    );
}

/// Frequencies, cos/sin factor and softmax scale of real models against transformers.
#[test]
fn golden_rope_tables() {
    let golden: Value = serde_json::from_str(&testdata("golden/rope.json")).unwrap();
    let close = |ours: f64, reference: f64| (ours - reference).abs() <= 1e-6 * reference.abs();
    let mut served = 0;
    for (name, case) in golden.as_object().unwrap() {
        let mut settings = case["config"].clone();
        let dim = case["dim"].as_u64().unwrap() as usize;
        settings["max_position_embeddings"] = json!(2);
        settings["qk_rope_head_dim"] = json!(dim);
        settings["qk_nope_head_dim"] = json!(128);
        if settings.get("rope_scaling").is_none() {
            settings["rope_scaling"] = Value::Null;
        }
        let config = with(&settings).unwrap();
        let frequencies = config.rope.frequencies(dim);
        let reference = case["inv_freq"].as_array().unwrap();
        assert_eq!(frequencies.len(), reference.len());
        for (ours, reference) in frequencies.iter().zip(reference) {
            assert!(
                close(f64::from(*ours), reference.as_f64().unwrap()),
                "{name}: {ours} {reference}"
            );
        }
        assert!(
            close(
                f64::from(config.rope.cos_sin_factor()),
                case["cos_sin_factor"].as_f64().unwrap()
            ),
            "{name}"
        );
        if let Some(scale) = case["softmax_scale"].as_f64() {
            assert!(
                close(f64::from(config.softmax_scale()), scale),
                "{name}: {}",
                config.softmax_scale()
            );
        }
        served += 1;
    }
    assert_eq!(served, golden.as_object().unwrap().len());
}

#[test]
fn the_identity_tells_apart_what_computes_otherwise_and_nothing_else() {
    let base = with(&json!({})).unwrap().identity();
    let same = [
        json!({"num_nextn_predict_layers": 0}),
        json!({"initializer_range": 0.5}),
        json!({"eos_token_id": 7}),
        json!({"torch_dtype": "float32"}),
    ];
    for change in same {
        assert_eq!(with(&change).unwrap().identity(), base, "{change}");
    }
    let other = [
        json!({"routed_scaling_factor": 2.0}),
        json!({"rms_norm_eps": 1e-5}),
        json!({"norm_topk_prob": false}),
        json!({"rope_theta": 10001.0}),
        json!({"topk_group": 1}),
        json!({"rope_scaling": null}),
        json!({"tie_word_embeddings": true}),
        json!({"q_lora_rank": null}),
        json!({"first_k_dense_replace": 0}),
    ];
    for change in other {
        assert_ne!(with(&change).unwrap().identity(), base, "{change}");
    }
}

#[test]
fn kv_sizes_are_those_of_the_published_models() {
    let v3 = with(&json!({
        "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64
    }))
    .unwrap();
    let kv = KvShape::of(&v3, Dtype::Bf16, 16);
    assert_eq!(kv.token_bytes(), 70_272);
    assert_eq!(
        (kv.unit_bytes(), kv.block_bytes()),
        (16 * 1152, 16 * 70_272)
    );
    assert_eq!(kv.bytes_for(17), 2 * 16 * 70_272);
    assert_eq!(KvShape::of(&v3, Dtype::F32, 16).token_bytes(), 140_544);
}

#[test]
fn memory_that_is_not_there_is_refused_with_both_numbers() {
    let kv = KvShape::of(&with(&json!({})).unwrap(), Dtype::Bf16, 16);
    let block = kv.block_bytes();
    assert_eq!(block, 3 * 48 * 2 * 16);
    let model = ModelBytes {
        weights: 1000,
        workspace: 500,
        loading: 200,
    };
    let plan = |budget, available| kv.plan(budget, available, model);
    assert_eq!(
        plan(KvBudget::Bytes(10 * block + 1), 1500 + 10 * block + 1),
        Ok(10)
    );
    let error = plan(KvBudget::Bytes(10 * block), 1500 + 10 * block - 1).unwrap_err();
    assert_eq!(
        error,
        MemoryError::Kv {
            requested: 10 * block,
            left: 10 * block - 1,
            model,
        }
    );
    let text = error.to_string();
    assert!(
        text.contains(&(10 * block).to_string()) && text.contains(&(10 * block - 1).to_string()),
        "{text}"
    );
    assert!(matches!(
        plan(KvBudget::Bytes(block), 1499),
        Err(MemoryError::Model {
            available: 1499,
            ..
        })
    ));
    // What packing takes is gone before there is KV, but must be there first.
    assert_eq!(
        plan(KvBudget::Bytes(block), 1199),
        Err(MemoryError::Loading {
            weights: 1000,
            loading: 200,
            available: 1199,
        })
    );
    assert!(matches!(
        plan(KvBudget::Bytes(block - 1), u64::MAX),
        Err(MemoryError::TooLittle { .. })
    ));
    let share = |part, useful| plan(KvBudget::Share { part, useful }, 1500 + 100 * block);
    assert_eq!(share(0.25, u64::MAX), Ok(25));
    assert_eq!(share(0.25, 3 * block), Ok(3));
    assert!(share(0.001, u64::MAX).is_err());
}

#[test]
fn the_workspace_grows_with_the_logits_of_a_step() {
    let config = with(&json!({})).unwrap();
    let step = StepSize {
        tokens: 512,
        seqs: 32,
        logits: 32,
        drafting: false,
        threads: 2,
    };
    let bytes = |step: StepSize| config.workspace_bytes(&step);
    let logits = |rows: usize| {
        bytes(StepSize {
            logits: rows,
            ..step
        })
    };
    let row = 4 * (config.vocab_size + 2 * config.hidden_size) as u64;
    assert_eq!(logits(132) - logits(32), 100 * row);
    let drafting = bytes(StepSize {
        drafting: true,
        ..step
    });
    // A row of logits for the draft of each sequence, and the outputs of all rows.
    let least = 4 * (32 * config.vocab_size + 3 * 512 * config.hidden_size) as u64;
    assert!(drafting - bytes(step) >= least);
}

#[test]
fn sizes_are_parsed_with_their_units() {
    let good = [
        ("512MiB", 512 << 20),
        ("4GiB", 4 << 30),
        ("1.5 GiB", 3 << 29),
        ("1000", 1000),
        (" 2KB ", 2000),
        ("0", 0),
        ("7 B", 7),
    ];
    for (text, bytes) in good {
        assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
    }
    for text in [
        "",
        "GiB",
        "4G",
        "-1GiB",
        "1e3",
        "4GiBs",
        "99999999999TiB",
        "1.2.3MiB",
        "NaN",
        "0x10",
        "1٣",
    ] {
        let error = parse_bytes(text).unwrap_err().to_string();
        assert!(error.contains("512MiB"), "{text}: {error}");
    }
    assert_eq!(format_bytes(3 << 29), "1.5 GiB");
    assert_eq!(format_bytes(1023), "1023 B");
}

#[test]
fn the_tensor_list_is_that_of_the_checkpoint() {
    let config = with(&json!({})).unwrap();
    let specs = config.tensors(false);
    let names: Vec<&str> = specs
        .tensors
        .iter()
        .map(|spec| spec.name.as_str())
        .collect();
    assert!(names.contains(&"model.layers.2.mlp.experts.15.down_proj.weight"));
    assert!(!names.iter().any(|name| name.starts_with("model.layers.3.")));
    assert!(
        specs.is_spare("model.layers.3.eh_proj.weight")
            && !specs.is_spare("model.layers.2.eh_proj.weight")
    );
    assert!(!specs.is_spare("lm_head.weight"));
    let tied = with(&json!({"tie_word_embeddings": true}))
        .unwrap()
        .tensors(false);
    assert!(tied.is_spare("lm_head.weight") && tied.tensors.len() == specs.tensors.len() - 1);
    let plain = with(&json!({"q_lora_rank": null})).unwrap().tensors(false);
    assert!(plain.tensors.iter().any(
        |spec| spec.name == "model.layers.0.self_attn.q_proj.weight" && spec.shape == [160, 64]
    ));
}
