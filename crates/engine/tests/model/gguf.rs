//! The golden checkpoints as GGUF files, made by the gguf package: same tokens in, same tokens out.

use crate::reference::greedy;
use crate::support::{model, testdata};
use serde_json::Value;
use std::path::Path;
use twinfer_config::Dtype;
use twinfer_engine::{LoadOptions, model_texts};
use twinfer_text::Tokenizer;

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
