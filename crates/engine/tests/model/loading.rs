//! Good checkpoints in their variants, options, memory, fingerprint.

use crate::fixture::{Model, options};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU64, Ordering};
use twinfer_config::Dtype;
use twinfer_engine::{Executor, KvMemory, LoadOptions, SeqWork, check, load};

#[test]
fn shards_with_an_index_give_the_same_model_as_one_file() {
    let (whole, sharded) = (Model::copy(), Model::copy());
    sharded.shard(4);
    assert_eq!(whole.logits(), sharded.logits());
    let fingerprint = |model: &Model| load(model.dir.path(), &options()).unwrap().fingerprint;
    assert_eq!(fingerprint(&whole), fingerprint(&sharded));
}

#[test]
fn a_checkpoint_without_the_mtp_layer_gives_the_same_answers() {
    let (with, without) = (Model::copy(), Model::copy());
    without.edit(|tensors| tensors.retain(|name, _| !name.starts_with("model.layers.3.")));
    assert_eq!(with.logits(), without.logits());
}

#[test]
fn a_tied_head_is_the_embedding_whether_or_not_the_file_has_one() {
    let (absent, equal, other, untied) =
        (Model::copy(), Model::copy(), Model::copy(), Model::copy());
    for model in [&absent, &equal, &other] {
        model.configure("tie_word_embeddings", json!(true));
    }
    absent.edit(|tensors| drop(tensors.remove("lm_head.weight").unwrap()));
    equal.edit(|tensors| {
        let embedding = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".to_owned(), embedding);
    });
    assert_eq!(absent.logits(), equal.logits());
    assert_eq!(absent.logits(), other.logits());
    assert_ne!(absent.logits(), untied.logits());
    let warnings = |model: &Model| load(model.dir.path(), &options()).unwrap().warnings;
    assert!(warnings(&equal).is_empty() && warnings(&absent).is_empty());
    assert!(
        warnings(&other)[0].contains("lm_head.weight"),
        "{:?}",
        warnings(&other)
    );
}

#[test]
fn weights_in_f32_give_the_bits_of_equal_weights_in_bf16() {
    let (narrow, wide) = (Model::copy(), Model::copy());
    wide.edit(|tensors| {
        for (dtype, _, data) in tensors.values_mut() {
            if *dtype == safetensors::Dtype::BF16 {
                *dtype = safetensors::Dtype::F32;
                *data = data
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .flat_map(|[a, b]| [0, 0, *a, *b])
                    .collect();
            }
        }
    });
    assert_eq!(narrow.logits(), wide.logits());
}

#[test]
fn the_fingerprint_tells_apart_what_gives_other_answers() {
    let model = Model::copy();
    let print = |model: &Model, options: &LoadOptions<'_>| {
        load(model.dir.path(), options).unwrap().fingerprint
    };
    let base = print(&model, &options());
    assert_eq!(
        base,
        print(
            &model,
            &LoadOptions {
                threads: 2,
                ..options()
            }
        )
    );
    assert_eq!(base.id.len(), 32);

    let changed = Model::copy();
    changed.edit(|tensors| {
        tensors
            .get_mut("model.layers.2.mlp.experts.9.up_proj.weight")
            .unwrap()
            .2[100] ^= 1
    });
    let changed = print(&changed, &options());
    assert!(
        changed.weights != base.weights && changed.config == base.config && changed.id != base.id
    );

    let scaled = Model::copy();
    scaled.configure("routed_scaling_factor", json!(1.0));
    let scaled = print(&scaled, &options());
    assert!(scaled.config != base.config && scaled.weights == base.weights && scaled.id != base.id);

    for other in [
        LoadOptions {
            dtype: Dtype::F32,
            ..options()
        },
        LoadOptions {
            block_size: 32,
            ..options()
        },
        LoadOptions {
            tokenizer_hash: "x".to_owned(),
            ..options()
        },
    ] {
        assert_ne!(print(&model, &other).id, base.id);
    }
}

#[test]
fn kv_memory_that_is_not_there_is_refused_before_anything_is_read() {
    let model = Model::copy();
    let huge = LoadOptions {
        kv: KvMemory::Bytes(1 << 50),
        ..options()
    };
    let text = check(model.dir.path(), &huge).unwrap_err().to_string();
    assert!(
        text.contains("kv-cache-memory") && text.contains(&(1u64 << 50).to_string()),
        "{text}"
    );
    let blocks = LoadOptions {
        kv: KvMemory::Blocks(u32::MAX),
        block_size: 4096,
        ..options()
    };
    assert!(check(model.dir.path(), &blocks).is_err());
    let tiny = LoadOptions {
        kv: KvMemory::Bytes(10),
        ..options()
    };
    assert!(
        check(model.dir.path(), &tiny)
            .unwrap_err()
            .to_string()
            .contains("block")
    );

    // A pool larger than all sequences together can use is not reserved.
    let share = LoadOptions {
        kv: KvMemory::Share(0.25),
        max_num_seqs: 2,
        max_model_len: Some(100),
        ..options()
    };
    assert_eq!(check(model.dir.path(), &share).unwrap().num_blocks, 14);
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let model = Model::copy();
    let cases = [
        (
            LoadOptions {
                threads: 0,
                ..options()
            },
            "threads",
        ),
        (
            LoadOptions {
                block_size: 0,
                ..options()
            },
            "block-size",
        ),
        (
            LoadOptions {
                max_model_len: Some(1025),
                ..options()
            },
            "1025",
        ),
        (
            LoadOptions {
                max_model_len: Some(0),
                ..options()
            },
            "max-model-len",
        ),
        (
            LoadOptions {
                kv: KvMemory::Share(0.0),
                ..options()
            },
            "share",
        ),
        (
            LoadOptions {
                kv: KvMemory::Share(f64::NAN),
                ..options()
            },
            "share",
        ),
        (
            LoadOptions {
                isa: Some("sse9".to_owned()),
                ..options()
            },
            "sse9",
        ),
    ];
    for (options, word) in cases {
        let text = check(model.dir.path(), &options).unwrap_err().to_string();
        assert!(text.contains(word) && text.contains("allowed"), "{text}");
    }
}

#[test]
fn progress_ends_at_all_bytes() {
    let model = Model::copy();
    let (most, totals) = (AtomicU64::new(0), AtomicU64::new(0));
    let progress = |done: u64, total: u64| {
        most.fetch_max(done, Ordering::Relaxed);
        totals.store(total, Ordering::Relaxed);
    };
    let options = LoadOptions {
        threads: 2,
        progress: Some(&progress),
        ..options()
    };
    let bytes = check(model.dir.path(), &options).unwrap().file_bytes;
    load(model.dir.path(), &options).unwrap();
    assert_eq!(most.into_inner(), bytes);
    assert_eq!(totals.into_inner(), bytes);
}

/// Settings that the golden checkpoint does not exercise, against an independent implementation.
#[test]
fn golden_logits_under_other_settings() {
    let text = include_str!("../../../../testdata/golden/deepseek_v3_variants.json");
    let file: Value = serde_json::from_str(text).unwrap();
    let tokens: Vec<u32> = (0..300).map(|i| (37 * i + i * i) % 499).collect();
    for variant in file["variants"].as_array().unwrap() {
        let model = Model::copy();
        for (field, value) in variant["config"].as_object().unwrap() {
            model.configure(field, value.clone());
        }
        if variant["config"].get("q_lora_rank").is_some() {
            model.edit(|tensors| {
                let (dtype, _, head) = &tensors["lm_head.weight"];
                let projection = (*dtype, vec![160, 64], head[..160 * 64 * 2].to_vec());
                for layer in 0..3 {
                    tensors.insert(
                        format!("model.layers.{layer}.self_attn.q_proj.weight"),
                        projection.clone(),
                    );
                }
            });
        }
        let options = LoadOptions {
            dtype: Dtype::F32,
            kv: KvMemory::Blocks(19),
            ..LoadOptions::default()
        };
        let mut executor = load(model.dir.path(), &options).unwrap().executor;
        let (blocks, mut logits): (Vec<u32>, _) = ((0..19).collect(), Vec::new());
        let work = SeqWork {
            tokens: &tokens,
            start: 0,
            blocks: &blocks,
            logits_from: Some(tokens.len() - 1),
        };
        executor.execute(&[work], &mut logits).unwrap();
        let reference = variant["logits"]
            .as_array()
            .unwrap()
            .iter()
            .map(|value| value.as_f64().unwrap());
        let worst = logits
            .iter()
            .zip(reference)
            .map(|(ours, x)| (f64::from(*ours) - x).abs())
            .fold(0.0, f64::max);
        println!("{}: worst logit {worst:.1e}, allowed 1e-3", variant["name"]);
        assert!(worst <= 1e-3, "{}: {worst}", variant["name"]);
    }
}
