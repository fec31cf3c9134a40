//! What config.json and descriptions announce must be what the files hold, or nothing is loaded (C6.4,
//! C9.14): layers, quantisation, architectures.

use crate::fixture::{Model, NORM, options};
use safetensors::Dtype;
use serde_json::json;
use std::fs;
use twinfer_engine::{LoadOptions, check, load};

const DESCRIPTION: &str = "quant_model_description.json";
const SLIM: &str = "w8a8/deepseek_v3_modelslim";
const MIX: &str = "w8a8/deepseek_v3_modelslim_mix";

fn with_mtp() -> LoadOptions<'static> {
    LoadOptions {
        mtp: true,
        ..options()
    }
}

#[test]
fn architectures_of_other_engines_are_refused_by_name_before_any_weight_is_looked_at() {
    let model = Model::copy();
    let config = fs::read(crate::support::testdata("configs/deepseek_v4.json")).unwrap();
    fs::write(model.path("config.json"), config).unwrap();
    fs::remove_file(model.path("model.safetensors")).unwrap();
    model.refused(&["DeepseekV4ForCausalLM", "vllm", "vllm-ascend"]);
}

/// One layer too many would run the MTP layer as a plain one, one too few would drop a layer.
#[test]
fn a_layer_count_that_is_not_that_of_the_files_is_refused_with_a_tensor_that_shows_it() {
    let model = Model::copy();
    model.configure("num_hidden_layers", json!(4));
    model.refused(&["model.layers.3.", "num_hidden_layers is 4", "MTP"]);
    model.configure("num_hidden_layers", json!(2));
    model.refused(&["model.layers.3.", "num_hidden_layers is 2"]);
    model.configure("num_hidden_layers", json!(3));
    model.configure("num_nextn_predict_layers", json!(0));
    model.refused(&["model.layers.3.", "num_nextn_predict_layers 0"]);
    // A plain layer in the place of the MTP layer.
    model.configure("num_hidden_layers", json!(2));
    model.configure("num_nextn_predict_layers", json!(1));
    model.edit(|tensors| tensors.retain(|name, _| !name.starts_with("model.layers.3.")));
    model.refused(&["model.layers.2.", "plain layer", "num_hidden_layers is 2"]);

    let llama = Model::of("llama");
    llama.configure("num_hidden_layers", json!(2));
    llama.refused(&["model.layers.2.", "num_hidden_layers is 2"]);
}

#[test]
fn the_mtp_layer_is_needed_only_where_it_is_used() {
    let whole = Model::copy();
    assert!(load(whole.dir.path(), &with_mtp()).is_ok());
    let gone = Model::copy();
    gone.edit(|tensors| tensors.retain(|name, _| !name.starts_with("model.layers.3.")));
    assert!(load(gone.dir.path(), &options()).is_ok());
    gone.refused_when_read(
        &with_mtp(),
        &[
            "model.layers.3.eh_proj.weight",
            "model.layers.3.enorm.weight",
        ],
    );
    // The copies of embedding and head may be dropped.
    let lean = Model::copy();
    lean.edit(|tensors| {
        tensors.retain(|name, _| {
            !name.contains("layers.3.embed_tokens") && !name.contains("shared_head.head")
        });
    });
    assert!(load(lean.dir.path(), &with_mtp()).is_ok());
}

/// C6.4: every missing part is named, all at once.
#[test]
fn missing_parts_of_every_kind_are_named_at_once() {
    let parts = [
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.0.input_layernorm.weight",
    ];
    let model = Model::copy();
    model.edit(|tensors| tensors.retain(|name, _| !parts.contains(&name.as_str())));
    model.refused(&parts);
    let qwen = Model::of("qwen3_moe");
    let parts = [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.mlp.experts.15.down_proj.weight",
        "model.norm.weight",
    ];
    qwen.edit(|tensors| tensors.retain(|name, _| !parts.contains(&name.as_str())));
    qwen.refused(&parts);
    let biased = Model::of("qwen2");
    biased.edit(|tensors| {
        drop(
            tensors
                .remove("model.layers.1.self_attn.k_proj.bias")
                .unwrap(),
        )
    });
    biased.refused(&["model.layers.1.self_attn.k_proj.bias"]);
}

/// C6.5 with a model whose files are tied, and one whose head is missing.
#[test]
fn a_head_is_needed_unless_it_is_tied() {
    let tied = Model::of("qwen2");
    assert!(!tied.tensors().contains_key("lm_head.weight"));
    let alone = tied.logits();
    tied.edit(|tensors| {
        let embedding = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".to_owned(), embedding);
    });
    assert_eq!(tied.logits(), alone);
    tied.edit(|tensors| tensors.get_mut("lm_head.weight").unwrap().2[9] ^= 1);
    assert_eq!(tied.logits(), alone);
    let warnings = load(tied.dir.path(), &options()).unwrap().warnings;
    assert!(warnings[0].contains("lm_head.weight"), "{warnings:?}");
    let untied = Model::of("llama");
    untied.edit(|tensors| drop(tensors.remove("lm_head.weight").unwrap()));
    untied.refused(&["lm_head.weight"]);
}

#[test]
fn quantised_weights_are_never_loaded_as_plain_ones() {
    // Scales that nothing announces.
    let model = Model::copy();
    model.edit(|tensors| {
        let scale = (Dtype::F32, vec![64, 1], vec![0; 256]);
        tensors.insert(
            "model.layers.0.self_attn.o_proj.weight_scale".to_owned(),
            scale,
        );
    });
    model.refused(&["model.layers.0.self_attn.o_proj.weight_scale", "announces"]);
    // A bias of a projection that has none.
    let model = Model::of("llama");
    model.edit(|tensors| {
        let bias = (Dtype::F32, vec![64], vec![0; 256]);
        tensors.insert("model.layers.0.self_attn.q_proj.bias".to_owned(), bias);
    });
    model.refused(&["model.layers.0.self_attn.q_proj.bias"]);
    // The announcement is lost.
    let model = Model::of("fp8/deepseek_v3");
    model.configure("quantization_config", json!(null));
    model.refused(&["kv_a_proj_with_mqa.weight", "F8_E4M3", "BF16"]);
    let model = Model::of("w8a8/qwen3_moe_compressed");
    model.configure("quantization_config", json!(null));
    model.refused(&["model.layers.0.self_attn.q_proj.weight", "I8", "BF16"]);
    let model = Model::of(SLIM);
    fs::remove_file(model.path(DESCRIPTION)).unwrap();
    model.refused(&["quant_model_weight_w8a8_dynamic.safetensors"]);
    // Both kinds of announcement.
    let model = Model::of(SLIM);
    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    model.configure("quantization_config", fp8);
    model.refused(&[DESCRIPTION, "quantization_config"]);
}

#[test]
fn schemes_that_are_not_served_are_refused_by_name() {
    let tensor = "model.layers.1.mlp.experts.3.up_proj.weight";
    for scheme in ["W8A16", "W4A8_DYNAMIC", "W4A16", "FAKQuant", "W8A8_PDMIX"] {
        let model = Model::of(SLIM);
        model.change(DESCRIPTION, |map| map[tensor] = json!(scheme));
        model.refused(&[tensor, scheme, "W8A8_DYNAMIC"]);
    }
    let model = Model::of(SLIM);
    model.change(DESCRIPTION, |map| {
        map["optional"] = json!({"quarot": {"rotation_map": {"global_rotation": "x"}}});
    });
    model.refused(&["optional", "rotated"]);
    let model = Model::of(SLIM);
    model.edit(|tensors| {
        let offset = "model.layers.1.mlp.experts.3.up_proj.weight_offset";
        tensors.get_mut(offset).unwrap().2[3] = 0x40;
    });
    model.refused_when_read(&options(), &["up_proj.weight_offset", "not zero"]);
    let model = Model::of(SLIM);
    model.edit(|tensors| {
        let scale = "model.layers.1.mlp.experts.3.up_proj.weight_scale";
        drop(tensors.remove(scale).unwrap());
    });
    model.refused(&["up_proj.weight_scale"]);
    // Parts of one product must agree.
    let model = Model::of(SLIM);
    model.edit(|tensors| {
        let float = (Dtype::BF16, vec![32, 64], vec![0; 4096]);
        tensors.insert(tensor.to_owned(), float);
        for part in ["weight_scale", "weight_offset"] {
            let name = tensor.replace("weight", part);
            drop(tensors.remove(&name).unwrap());
        }
    });
    model.change(DESCRIPTION, |map| map[tensor] = json!("FLOAT"));
    model.refused(&[tensor, "not quantised", "the same for both"]);
}

/// Sums of int8 products must fit 32 bits; rows that are too long are seen before anything is read.
#[test]
fn int8_rows_that_are_too_long_are_refused_by_name() {
    let inner = |model: &Model, field: &str| {
        let config = fs::read(model.path("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        config[field].as_u64().unwrap() as usize
    };
    let field = "moe_intermediate_size";
    let model = Model::of("w8a8/qwen3_moe_compressed");
    model.widen(field, inner(&model, field), 131_072);
    let name = "model.layers.0.mlp.experts.0.down_proj.weight";
    model.refused(&[name, "131072", "131071"]);
    // As a static layer it may be half as long.
    let model = Model::of(SLIM);
    let (field, tensor) = ("intermediate_size", "model.layers.0.mlp.down_proj.weight");
    model.widen(field, inner(&model, field), 65_794);
    model.change(DESCRIPTION, |map| map[tensor] = json!("W8A8"));
    model.refused(&[tensor, "65794", "65793"]);
    // What is made int8 while it is read.
    let model = Model::of("llama");
    model.widen(field, inner(&model, field), 131_072);
    let quantize = LoadOptions {
        quantize: true,
        ..options()
    };
    assert!(check(model.dir.path(), &options()).is_ok());
    let error = check(model.dir.path(), &quantize).unwrap_err().to_string();
    for word in [tensor, "131072", "131071"] {
        assert!(error.contains(word), "{word:?} is not named in: {error}");
    }
}

/// Parts of one product are quantised alike, or the model is refused before anything is read (C6.4).
#[test]
fn layers_of_one_input_that_are_stored_differently_are_refused_by_name() {
    let tensor = "model.layers.0.self_attn.k_proj.weight";
    let model = Model::of("w8a8/qwen3_moe_compressed");
    model.edit(|tensors| {
        let shape = tensors[tensor].1.clone();
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        tensors.insert(tensor.to_owned(), (Dtype::BF16, shape, bytes));
        drop(tensors.remove(&tensor.replace("weight", "weight_scale")));
    });
    model.change("config.json", |config| {
        let ignore = &mut config["quantization_config"]["ignore"];
        let list = ignore.as_array_mut().unwrap();
        list.push(json!(tensor.strip_suffix(".weight").unwrap()));
    });
    let q = tensor.replace("k_proj", "q_proj");
    model.refused(&[tensor, "not quantised", &q, "int8", "the same for both"]);
}

/// A product has one input: matrices of one that were calibrated apart are refused before any of them is read.
#[test]
fn fixed_scales_that_differ_inside_a_product_are_refused_at_once() {
    let of = |scale: f32| (Dtype::F32, vec![1], scale.to_le_bytes().to_vec());
    let model = Model::of("w8a8/qwen3_moe_compressed");
    model.change("config.json", |config| {
        let group = &mut config["quantization_config"]["config_groups"]["group_0"];
        group["input_activations"] = json!({
            "num_bits": 8, "type": "int", "symmetric": true, "strategy": "tensor", "dynamic": false,
        });
    });
    model.edit(|tensors| {
        let names: Vec<String> = tensors.keys().cloned().collect();
        for name in names {
            if let Some(module) = name.strip_suffix(".weight_scale") {
                tensors.insert(format!("{module}.input_scale"), of(0.5));
            }
        }
        // Experts have inputs of their own.
        for part in ["gate_proj", "up_proj"] {
            let name = format!("model.layers.0.mlp.experts.3.{part}.input_scale");
            assert!(tensors.insert(name, of(0.125)).is_some());
        }
    });
    assert!(load(model.dir.path(), &options()).is_ok());
    let module = "model.layers.1.self_attn.k_proj";
    model.edit(|tensors| {
        tensors.insert(format!("{module}.input_scale"), of(0.25));
    });
    let k = format!("{module}.weight");
    model.refused(&[&k, "0.25", "q_proj.weight", "0.5", "the same for both"]);
    model.edit(|tensors| {
        tensors.insert(format!("{module}.input_scale"), of(-1.0));
    });
    model.refused(&["k_proj.input_scale is -1", "above 0"]);
}

/// `W8A8_MIX` would be static in decode and dynamic in prefill: it is dynamic in both, and said so.
#[test]
fn a_mixed_scheme_is_computed_one_way_and_said_so() {
    let mixed = Model::of(MIX);
    mixed.change(DESCRIPTION, |map| {
        for scheme in map.as_object_mut().unwrap().values_mut() {
            if *scheme == "W8A8" {
                *scheme = json!("W8A8_MIX");
            }
        }
    });
    let warnings = check(mixed.dir.path(), &options()).unwrap().warnings;
    assert!(
        warnings.len() == 1 && warnings[0].contains("W8A8_MIX"),
        "{warnings:?}"
    );
    // The same tensors announced as dynamic, static ones taken away.
    let dynamic = Model::of(MIX);
    dynamic.edit(|tensors| {
        tensors.retain(|name, _| {
            let fixed = ["input_scale", "input_offset", "quant_bias", "deq_scale"];
            !fixed.iter().any(|part| name.ends_with(part))
        });
    });
    dynamic.change(DESCRIPTION, |map| {
        for scheme in map.as_object_mut().unwrap().values_mut() {
            if *scheme == "W8A8" {
                *scheme = json!("W8A8_DYNAMIC");
            }
        }
    });
    assert_eq!(mixed.logits(), dynamic.logits());
    let fixed = Model::of(MIX);
    assert_ne!(mixed.logits(), fixed.logits());
    // The same bytes computed another way: no KV may go from one to the other.
    assert_ne!(mixed.fingerprint(), fixed.fingerprint());
}

/// Outlier suppression in its older spelling: the changed norm stands beside the old one.
#[test]
fn a_norm_inside_a_wrapper_takes_the_place_of_the_old_one() {
    let (current, older) = (Model::of(MIX), Model::of(MIX));
    older.edit(|tensors| {
        let names: Vec<String> = tensors
            .keys()
            .filter(|name| name.ends_with("layernorm.bias"))
            .cloned()
            .collect();
        assert_eq!(names.len(), 6);
        for bias in names {
            let module = bias.strip_suffix(".bias").unwrap();
            let moved = tensors.remove(&bias).unwrap();
            tensors.insert(format!("{module}.module.bias"), moved);
            let norm = tensors[&format!("{module}.weight")].clone();
            tensors.insert(format!("{module}.module.weight"), norm);
            let untouched = tensors.get_mut(&format!("{module}.weight")).unwrap();
            untouched.2.iter_mut().for_each(|byte| *byte ^= 1);
        }
    });
    assert_eq!(current.logits(), older.logits());
    let plain = Model::of(MIX);
    plain.edit(|tensors| tensors.retain(|name, _| !name.ends_with("layernorm.bias")));
    assert_ne!(current.logits(), plain.logits());
}

/// f16 models keep `deq_scale` as i64 with the bits of an f32.
#[test]
fn dequantisation_scales_may_be_bits_in_wide_integers() {
    let (narrow, wide) = (Model::of(MIX), Model::of(MIX));
    wide.edit(|tensors| {
        for (name, (dtype, _, data)) in tensors.iter_mut() {
            if name.ends_with("deq_scale") {
                *dtype = Dtype::I64;
                let words = data.as_chunks::<4>().0.iter();
                *data = words
                    .flat_map(|[a, b, c, d]| [*a, *b, *c, *d, 0, 0, 0, 0])
                    .collect();
            }
        }
    });
    assert_eq!(narrow.logits(), wide.logits());
}

/// C9.14: nothing in the directory is run, whatever config.json says of code.
#[test]
fn code_beside_a_model_is_not_run() {
    let (plain, coded) = (Model::copy(), Model::copy());
    let trap = coded.path("trap");
    let code = format!("open({:?}, 'w')", trap.display().to_string());
    fs::write(coded.path("modeling_x.py"), &code).unwrap();
    coded.configure(
        "auto_map",
        json!({"AutoModelForCausalLM": "modeling_x.Model"}),
    );
    coded.configure("model_file", json!("modeling_x.py"));
    assert_eq!(plain.logits(), coded.logits());
    assert!(!trap.exists());
    let warnings = check(coded.dir.path(), &options()).unwrap().warnings;
    assert!(warnings[0].contains("model_file"), "{warnings:?}");
    coded.edit(|tensors| drop(tensors.remove(NORM)));
    coded.refused(&[NORM]);
}
