//! Checkpoints that lack something, have too much, or bring along what a server must not touch: tiny
//! models of both shapes, served by real processes.

use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use twinfer_it::{Checkpoint, Instance, completion_body};

const DEEPSEEK: &str = "deepseek_v3";
const QWEN: &str = "qwen3_moe";
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";
/// Drafts on: the MTP layer is needed.
const DRAFTS: [&str; 2] = ["--num-speculative-tokens", "1"];

/// Tokens and log-probabilities of a few prompts.
async fn answers(instance: &Instance) -> Vec<Value> {
    let mut all = Vec::new();
    for prompt in [vec![500], vec![1, 2, 3, 4, 5], (0..90).collect()] {
        let mut body = completion_body(prompt, 12);
        body["logprobs"] = json!(3);
        body["return_token_ids"] = json!(true);
        body["ignore_eos"] = json!(true);
        let answer = instance.client().post("/v1/completions", &body).await;
        let answer = answer.expect("an answer");
        assert_eq!(answer.status, 200, "{}", answer.text());
        all.push(answer.json()["choices"].clone());
    }
    all
}

fn without(checkpoint: &str, names: &[&str]) -> Checkpoint {
    let model = Checkpoint::golden(checkpoint);
    model.edit(|tensors| {
        for name in names {
            assert!(tensors.remove(*name).is_some(), "{name}");
        }
    });
    model
}

/// C6.4: what is missing is named, everything at once.
#[tokio::test]
async fn every_missing_tensor_is_named_at_once() {
    let parts = [
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.0.input_layernorm.weight",
        "model.layers.2.mlp.shared_experts.up_proj.weight",
        "model.layers.1.self_attn.kv_b_proj.weight",
        "model.norm.weight",
        EMBEDDING,
    ];
    for part in parts {
        without(DEEPSEEK, &[part]).refused(&[], &[part]).await;
    }
    without(DEEPSEEK, &parts).refused(&[], &parts).await;
    let parts = [
        "model.layers.0.mlp.experts.15.down_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.2.self_attn.q_norm.weight",
        "model.layers.2.post_attention_layernorm.weight",
    ];
    without(QWEN, &parts).refused(&[], &parts).await;
    // Of a quantised file: the weight without its scale.
    let part = "model.layers.1.mlp.experts.3.up_proj.weight_scale";
    let scale = Checkpoint::golden("w8a8/deepseek_v3_compressed");
    let names: Vec<String> = scale.tensors().into_keys().collect();
    assert!(names.iter().any(|name| name == part), "{names:?}");
    scale.edit(|tensors| drop(tensors.remove(part)));
    scale.refused(&[], &[part]).await;
}

/// C6.4: the MTP layer is needed where it is used, whole or in part, and only there.
#[tokio::test]
async fn the_mtp_layer_is_needed_only_with_drafts() {
    let whole = Checkpoint::golden(DEEPSEEK);
    let expected = answers(&whole.serve(&[]).await).await;
    assert_eq!(answers(&whole.serve(&DRAFTS).await).await, expected);
    let gone = Checkpoint::golden(DEEPSEEK);
    gone.edit(|tensors| tensors.retain(|name, _| !name.starts_with("model.layers.3.")));
    let parts = [
        "model.layers.3.eh_proj.weight",
        "model.layers.3.enorm.weight",
        "model.layers.3.mlp.experts.9.down_proj.weight",
    ];
    gone.refused(&DRAFTS, &parts).await;
    assert_eq!(answers(&gone.serve(&[]).await).await, expected);
    let torn = without(DEEPSEEK, &parts);
    torn.refused(&DRAFTS, &parts).await;
    assert_eq!(answers(&torn.serve(&[]).await).await, expected);
}

/// C6.4: what nobody asked for is told and changes nothing.
#[tokio::test]
async fn unknown_tensors_are_told_and_change_nothing() {
    for checkpoint in [DEEPSEEK, QWEN] {
        let plain = Checkpoint::golden(checkpoint);
        let more = Checkpoint::golden(checkpoint);
        more.edit(|tensors| {
            let norm = tensors["model.norm.weight"].clone();
            tensors.insert("model.layers.0.novelty.weight".to_owned(), norm.clone());
            tensors.insert("vision_tower.norm.weight".to_owned(), norm);
        });
        let instance = more.serve(&[]).await;
        assert_eq!(
            answers(&instance).await,
            answers(&plain.serve(&[]).await).await
        );
        let log = instance.process.output();
        assert!(log.contains("WARN"), "{log}");
        assert!(log.contains("model.layers.0.novelty.weight"), "{log}");
    }
}

/// C6.4: counts of config.json that are not those of the files.
#[tokio::test]
async fn counts_that_are_not_those_of_the_files_are_refused() {
    for (checkpoint, field, count, words) in [
        (
            DEEPSEEK,
            "n_routed_experts",
            32,
            ["experts.16.", "[32, 64]"],
        ),
        (
            DEEPSEEK,
            "n_routed_experts",
            8,
            ["mlp.gate.weight", "[8, 64]"],
        ),
        (QWEN, "num_experts", 32, ["experts.16.", "[32, 64]"]),
        (QWEN, "num_experts", 8, ["mlp.gate.weight", "[8, 64]"]),
        (
            DEEPSEEK,
            "num_hidden_layers",
            2,
            ["layers.3.", "num_hidden_layers"],
        ),
        (
            DEEPSEEK,
            "num_hidden_layers",
            4,
            ["layers.3.", "num_hidden_layers"],
        ),
        (
            QWEN,
            "num_hidden_layers",
            2,
            ["layers.2.", "num_hidden_layers"],
        ),
        (
            QWEN,
            "num_hidden_layers",
            4,
            ["layers.3.", "input_layernorm"],
        ),
        (QWEN, "vocab_size", 510, [EMBEDDING, "[510, 64]"]),
        (QWEN, "moe_intermediate_size", 64, ["down_proj", "[64, 64]"]),
        (
            DEEPSEEK,
            "kv_lora_rank",
            48,
            ["kv_a_proj_with_mqa", "[64, 64]"],
        ),
    ] {
        let model = Checkpoint::golden(checkpoint);
        model.configure(field, json!(count));
        model.refused(&[], &words).await;
    }
}

/// C6.5: tied heads in all their forms.
#[tokio::test]
async fn a_tied_head_is_the_embedding_and_an_untied_one_must_be_there() {
    for checkpoint in [QWEN, DEEPSEEK] {
        let tied = || {
            let model = Checkpoint::golden(checkpoint);
            model.configure("tie_word_embeddings", json!(true));
            model
        };
        let (absent, equal, different) = (tied(), tied(), tied());
        absent.edit(|tensors| drop(tensors.remove(HEAD)));
        equal.edit(|tensors| {
            let embedding = tensors[EMBEDDING].clone();
            tensors.insert(HEAD.to_owned(), embedding);
        });
        let (absent, equal) = (absent.serve(&[]).await, equal.serve(&[]).await);
        let different = different.serve(&[]).await;
        let expected = answers(&absent).await;
        assert_eq!(answers(&equal).await, expected);
        assert_eq!(answers(&different).await, expected);
        // Only where head and embedding differ is there something to tell.
        let told = |instance: &Instance| {
            let log = instance.process.output();
            log.lines()
                .any(|line| line.contains("WARN") && line.contains(HEAD))
        };
        assert!(told(&different), "{}", different.process.output());
        assert!(!told(&equal) && !told(&absent));

        let untied = Checkpoint::golden(checkpoint);
        assert_ne!(answers(&untied.serve(&[]).await).await, expected);
        without(checkpoint, &[HEAD]).refused(&[], &[HEAD]).await;
        // A missing setting is no tie.
        let silent = without(checkpoint, &[HEAD]);
        silent.change("config.json", |config| {
            drop(
                config
                    .as_object_mut()
                    .expect("an object")
                    .remove("tie_word_embeddings"),
            );
        });
        silent.refused(&[], &[HEAD]).await;
    }
}

/// C9.14: code beside a model is not run, whatever its files say.
#[tokio::test]
async fn code_in_a_model_directory_is_not_run() {
    let plain = Checkpoint::golden(DEEPSEEK);
    let coded = Checkpoint::golden(DEEPSEEK);
    let trap = coded.file("trap");
    let code = format!("open({:?}, 'w')\n", trap.display().to_string());
    for name in [
        "configuration_x.py",
        "modeling_x.py",
        "tokenization_x.py",
        "__init__.py",
        "setup.py",
        "sitecustomize.py",
    ] {
        fs::write(coded.file(name), &code).expect("written");
    }
    coded.change("config.json", |config| {
        config["auto_map"] = json!({"AutoConfig": "configuration_x.Config", "AutoModelForCausalLM": "modeling_x.Model"});
        config["model_file"] = json!("modeling_x.py");
        config["trust_remote_code"] = json!(true);
    });
    coded.change("tokenizer_config.json", |config| {
        config["auto_map"] = json!({"AutoTokenizer": ["tokenization_x.Tokenizer", null]});
    });
    let instance = coded.serve(&[]).await;
    assert_eq!(
        answers(&instance).await,
        answers(&plain.serve(&[]).await).await
    );
    assert!(!trap.exists(), "code of the model was run");
    let log = instance.process.output();
    assert!(log.contains("model_file"), "{log}");
    // There is no switch for it.
    coded
        .refused(&["--trust-remote-code"], &["trust-remote-code"])
        .await;
}

/// C9.14: pickles run code when read, so they are not.
#[tokio::test]
async fn pickled_weights_are_refused_unread() {
    for name in ["pytorch_model.bin", "model.pt", "consolidated.00.pth"] {
        let model = Checkpoint::golden(QWEN);
        let trap = model.file("trap");
        let pickle = format!("cposix\nsystem\n(S'touch {}'\ntR.", trap.display());
        fs::write(model.file(name), pickle).expect("written");
        // Beside weights that can be read it does not matter.
        let _ = answers(&model.serve(&[]).await).await;
        fs::remove_file(model.file("model.safetensors")).expect("removed");
        model.refused(&[], &[name, "pickle", "safetensors"]).await;
        fs::write(
            model.file("pytorch_model.bin.index.json"),
            json!({"weight_map": {"model.norm.weight": name}}).to_string(),
        )
        .expect("written");
        model.refused(&[], &[name, "pickle"]).await;
        assert!(!trap.exists(), "the pickle was run");
    }
}

/// C9.14: links that leave the directory are not followed, whatever they are named.
#[tokio::test]
async fn files_outside_of_the_directory_are_not_read() {
    let outside = Checkpoint::golden(QWEN);
    for file in [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        let model = Checkpoint::golden(QWEN);
        fs::remove_file(model.file(file)).expect("removed");
        symlink(outside.file(file), model.file(file)).expect("a link");
        model.refused(&[], &[file, "link"]).await;
    }
    let sharded = Checkpoint::golden(QWEN);
    let map = sharded.shard(3);
    let shard = map["model.norm.weight"].clone();
    fs::rename(sharded.file(&shard), outside.file("elsewhere.safetensors")).expect("moved");
    symlink(outside.file("elsewhere.safetensors"), sharded.file(&shard)).expect("a link");
    sharded.refused(&[], &[&shard, "link"]).await;
    // Inside of the directory a link is a file like others.
    fs::remove_file(sharded.file(&shard)).expect("removed");
    fs::copy(outside.file("elsewhere.safetensors"), sharded.file("blob")).expect("a copy");
    symlink("blob", sharded.file(&shard)).expect("a link");
    let _ = answers(&sharded.serve(&[]).await).await;
}

/// C9.14: a tokenizer cannot make the server grow or stand still.
#[tokio::test]
async fn a_tokenizer_with_a_huge_list_of_added_tokens_is_refused() {
    let model = Checkpoint::golden(QWEN);
    let more = |count: u32| {
        model.change("tokenizer.json", |tokenizer| {
            let list = tokenizer["added_tokens"].as_array_mut().expect("a list");
            let next = list.len() as u32 + 505;
            list.extend((next..next + count).map(|id| {
                json!({"id": id, "content": format!("<extra_{id}>"), "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false, "special": true})
            }));
        });
    };
    // A few of them, without a row of the embedding: texts that name one are refused, others served.
    more(20);
    let instance = model.serve(&[]).await;
    let _ = answers(&instance).await;
    let text = instance
        .client()
        .post("/v1/completions", &completion_body("a <extra_515> b", 2))
        .await
        .expect("an answer");
    assert_eq!(text.status, 400, "{}", text.text());
    drop(instance);
    more(600_000);
    model
        .refused(&[], &["tokenizer.json", "added_tokens", "600"])
        .await;
}

/// What a description announces and the files do not hold is missing, as what an index announces is.
#[tokio::test]
async fn a_described_weight_that_is_not_there_is_named() {
    let model = Checkpoint::golden("w8a8/qwen3_moe_modelslim");
    let name = "model.layers.9.self_attn.q_proj.weight";
    model.change("quant_model_description.json", |description| {
        description[name] = json!("W8A8_DYNAMIC");
    });
    model.refused(&[], &[name, "W8A8_DYNAMIC"]).await;
}

/// A length that was asked for is never cut silently.
#[tokio::test]
async fn a_context_that_kv_has_no_room_for_is_refused_with_numbers() {
    let arguments = ["--max-model-len", "4096", "--kv-cache-memory", "224KiB"];
    let words = ["max-model-len", "4096", "225280"];
    Checkpoint::demo().refused(&arguments, &words).await;
}
