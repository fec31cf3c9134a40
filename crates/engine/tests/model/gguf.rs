//! The golden checkpoints as GGUF files, made by the gguf package: same tokens in, same tokens out.

use crate::reference::greedy;
use crate::support::{model, tables, testdata};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use twinfer_config::Dtype;
use twinfer_config::gguf::{Gguf, MetaValue};
use twinfer_engine::{Executor, KvMemory, LoadOptions, SeqWork, check, load, model_texts};
use twinfer_text::{ModelTexts, Tokenizer};

fn golden(name: &str) -> Value {
    let path = testdata(&format!("golden/{name}/golden.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().unwrap().iter();
    list.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
        .collect()
}

#[test]
fn golden_gguf_files_give_the_greedy_ids_of_their_checkpoints() {
    for name in ["llama", "qwen2", "qwen3_moe"] {
        let golden = golden(name);
        let options = LoadOptions {
            dtype: Dtype::F32,
            ..LoadOptions::default()
        };
        let path = testdata(&format!("gguf/{name}.gguf"));
        let mut executor = model(&path, &options).executor;
        let prompts = golden["prompts"].as_object().unwrap();
        for (prompt, entry) in prompts {
            let (input, expected) = (ids(&entry["input_ids"]), ids(&entry["greedy_ids"]));
            let ours = greedy(&mut executor, &input, 64, expected.len());
            assert_eq!(ours, expected, "{name} {prompt}");
        }
    }
}

#[test]
fn tokenizers_from_gguf_give_the_ids_of_tokenizer_json() {
    let texts = [
        "Hello, world! 12345 don't  stop",
        "  leading and\n\n\tother  blanks \r\n",
        "Grüße, 你好, \u{1F600} e\u{301}",
        "<|im_start|>user\nhi<|im_end|><|eot_id|><think>",
    ];
    for name in ["llama", "qwen2", "qwen3_moe"] {
        let path = testdata(&format!("gguf/{name}.gguf"));
        let ours = Tokenizer::of(&model_texts(Path::new(&path)).unwrap()).unwrap();
        let reference = Tokenizer::from_dir(&testdata(&format!("golden/{name}"))).unwrap();
        for text in texts {
            for special in [true, false] {
                assert_eq!(
                    ours.encode(text, special).unwrap(),
                    reference.encode(text, special).unwrap(),
                    "{name} {text:?}"
                );
            }
        }
        assert_eq!(ours.eos_ids(), reference.eos_ids(), "{name}");
    }
}

fn vendored(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(testdata(&format!("gguf/{name}"))).unwrap()).unwrap()
}

/// The reference is transformers with the weights as the gguf package decodes them; each expert
/// projection of the file has another storage type.
#[test]
fn a_mixtral_file_with_experts_of_every_type_gives_the_logits_of_transformers() {
    let path = testdata("gguf/mixtral.gguf");
    let kinds: Vec<&str> = Gguf::open(&path)
        .unwrap()
        .tensors()
        .iter()
        .filter(|tensor| tensor.name.contains("_exps."))
        .map(|tensor| tensor.kind.name())
        .collect();
    for kind in [
        "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q6_K",
    ] {
        assert!(kinds.contains(&kind), "{kind}: {kinds:?}");
    }
    let options = LoadOptions {
        dtype: Dtype::F32,
        ..LoadOptions::default()
    };
    let mut executor = model(&path, &options).executor;
    for (name, entry) in vendored("mixtral.json")["prompts"].as_object().unwrap() {
        let (input, expected) = (ids(&entry["input_ids"]), ids(&entry["greedy_ids"]));
        let blocks = tables(&executor, 1, input.len()).remove(0);
        let mut logits = Vec::new();
        let work = SeqWork {
            tokens: &input,
            start: 0,
            blocks: &blocks,
            logits_from: Some(input.len() - 1),
        };
        executor.execute(&[work], &mut logits).unwrap();
        let reference = entry["logits"].as_array().unwrap();
        assert_eq!(logits.len(), reference.len());
        for (id, (ours, theirs)) in logits.iter().zip(reference).enumerate() {
            let error = (f64::from(*ours) - theirs.as_f64().unwrap()).abs();
            assert!(
                error < 1e-3,
                "{name}, logit {id}: {ours} instead of {theirs}"
            );
        }
        let ours = greedy(&mut executor, &input, 16, expected.len());
        assert_eq!(ours, expected, "{name}");
    }
}

/// What stands at the path by the time of reading is not what was checked; the file that was is read.
#[test]
fn a_gguf_file_that_is_replaced_after_the_check_is_read_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::copy(testdata("gguf/llama.gguf"), &path).unwrap();
    let options = LoadOptions {
        kv: KvMemory::Blocks(4),
        ..LoadOptions::default()
    };
    let expected = load(&path, &options).unwrap().fingerprint;
    let checked = check(&path, &options).unwrap();
    let other = dir.path().join("other.gguf");
    std::fs::copy(testdata("gguf/qwen2.gguf"), &other).unwrap();
    std::fs::rename(&other, &path).unwrap();
    assert_eq!(checked.load(&options).unwrap().fingerprint, expected);
    assert_ne!(load(&path, &options).unwrap().fingerprint, expected);
}

/// Ids of llama.cpp, with which sentencepiece agreed.
#[test]
fn a_sentencepiece_tokenizer_from_gguf_gives_the_ids_of_sentencepiece() {
    let texts = model_texts(&testdata("gguf/mixtral.gguf")).unwrap();
    let tokenizer = Tokenizer::of(&texts).unwrap();
    let golden = vendored("mixtral.json");
    let cases = golden["encodings"].as_array().unwrap();
    assert!(cases.len() > 80);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{text:?}");
        if let Some(decoded) = case["decoded"].as_str() {
            assert_eq!(tokenizer.decode(&expected, false).unwrap(), decoded);
        }
        let begun = tokenizer.encode(text, true).unwrap();
        assert_eq!(begun[0], 1, "{text:?} begins with BOS");
        assert_eq!(begun[1..], expected);
    }
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_ids()),
        (Some(1), &[2][..])
    );
}

/// The ids of llama.cpp over the vocabulary of testdata/tokenizers/qwen, for each name of
/// `tokenizer.ggml.pre`.
#[test]
fn every_kind_of_byte_level_tokenizer_cuts_as_llama_cpp_does() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kind.gguf");
    for (kind, cases) in vendored("kinds.json").as_object().unwrap() {
        write_byte_level(&path, kind);
        let text = Gguf::open(&path).unwrap().tokenizer_json().unwrap();
        let texts = BTreeMap::from([("tokenizer.json", text)]);
        let tokenizer = Tokenizer::of(&ModelTexts::given(&path, texts)).unwrap();
        for case in cases.as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let ours = tokenizer.encode(text, true).unwrap();
            assert_eq!(ours, ids(&case["ids"]), "{kind}: {text:?}");
        }
    }
    write_byte_level(&path, "command-r");
    let refused = Gguf::open(&path).unwrap().tokenizer_json().unwrap_err();
    let refused = refused.to_string();
    assert!(
        refused.contains("tokenizer.ggml.pre is \"command-r\""),
        "{refused}"
    );
    assert!(refused.contains("deepseek-v3"), "{refused}");
}

/// A GGUF file with nothing but a tokenizer.
fn write_byte_level(path: &Path, kind: &str) {
    let source = std::fs::read(testdata("tokenizers/qwen/tokenizer.json")).unwrap();
    let source: Value = serde_json::from_slice(&source).unwrap();
    let mut tokens: BTreeMap<u64, (String, i32)> = BTreeMap::new();
    for (token, id) in source["model"]["vocab"].as_object().unwrap() {
        tokens.insert(id.as_u64().unwrap(), (token.clone(), 1));
    }
    for added in source["added_tokens"].as_array().unwrap() {
        let kind = if added["special"] == json!(true) {
            3
        } else {
            4
        };
        let content = added["content"].as_str().unwrap().to_owned();
        tokens.insert(added["id"].as_u64().unwrap(), (content, kind));
    }
    let merges = source["model"]["merges"].as_array().unwrap().iter();
    let merges = merges.map(|merge| match merge.as_array() {
        Some(pair) => format!(
            "{} {}",
            pair[0].as_str().unwrap(),
            pair[1].as_str().unwrap()
        ),
        None => merge.as_str().unwrap().to_owned(),
    });
    let texts =
        |list: Vec<String>| MetaValue::List(list.into_iter().map(MetaValue::Text).collect());
    let (names, kinds): (Vec<String>, Vec<i32>) = tokens.into_values().unzip();
    let kinds = kinds
        .into_iter()
        .map(|kind| MetaValue::Signed(i64::from(kind)));
    let entries = [
        ("tokenizer.ggml.model", MetaValue::Text("gpt2".to_owned())),
        ("tokenizer.ggml.pre", MetaValue::Text(kind.to_owned())),
        ("tokenizer.ggml.tokens", texts(names)),
        (
            "tokenizer.ggml.token_type",
            MetaValue::List(kinds.collect()),
        ),
        ("tokenizer.ggml.merges", texts(merges.collect())),
        ("tokenizer.ggml.add_bos_token", MetaValue::Bool(false)),
    ];
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend(0u64.to_le_bytes());
    file.extend((entries.len() as u64).to_le_bytes());
    for (key, value) in &entries {
        put_text(&mut file, key);
        file.extend(type_of(value).to_le_bytes());
        put(&mut file, value);
    }
    std::fs::write(path, file).unwrap();
}

fn put_text(file: &mut Vec<u8>, text: &str) {
    file.extend((text.len() as u64).to_le_bytes());
    file.extend(text.as_bytes());
}

fn type_of(value: &MetaValue) -> u32 {
    match value {
        MetaValue::Bool(_) => 7,
        MetaValue::Text(_) => 8,
        MetaValue::List(_) => 9,
        MetaValue::Signed(_) => 11,
        other => panic!("{other:?}"),
    }
}

fn put(file: &mut Vec<u8>, value: &MetaValue) {
    match value {
        MetaValue::Bool(flag) => file.push(u8::from(*flag)),
        MetaValue::Text(text) => put_text(file, text),
        MetaValue::Signed(number) => file.extend(number.to_le_bytes()),
        MetaValue::List(list) => {
            file.extend(type_of(&list[0]).to_le_bytes());
            file.extend((list.len() as u64).to_le_bytes());
            list.iter().for_each(|value| put(file, value));
        }
        other => panic!("{other:?}"),
    }
}
