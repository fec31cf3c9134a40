//! Three real tokenizer families against outputs of the reference implementation.

use crate::common::{FAMILIES, dir, tokenizer};
use serde_json::Value;
use std::sync::Arc;
use twinfer_text::{ChatTemplate, IncrementalDetokenizer, TemplateState, TextError, Tokenizer};

fn load(family: &str) -> (Arc<Tokenizer>, ChatTemplate, Value) {
    let tokenizer = tokenizer(family);
    let template = ChatTemplate::from_dir(&dir(family), &tokenizer).unwrap();
    let golden =
        serde_json::from_slice(&std::fs::read(dir(family).join("golden.json")).unwrap()).unwrap();
    (tokenizer, template, golden)
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn encodings_and_decodings_equal_the_reference() {
    for family in FAMILIES {
        let (tokenizer, _, golden) = load(family);
        let cases = golden["encodings"].as_array().unwrap();
        assert!(cases.len() >= 20);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let plain = tokenizer.encode(text, false).unwrap();
            assert_eq!(plain, ids(&case["ids"]), "{family}: {text:?}");
            assert_eq!(
                tokenizer.encode(text, true).unwrap(),
                ids(&case["ids_with_special"]),
                "{family}: {text:?}"
            );
            assert_eq!(
                tokenizer.decode(&plain, false).unwrap(),
                case["decoded"].as_str().unwrap()
            );
            assert_eq!(
                tokenizer.decode(&plain, true).unwrap(),
                case["decoded_skip_special"].as_str().unwrap()
            );
        }
    }
}

#[test]
fn streamed_pieces_equal_the_reference() {
    for family in FAMILIES {
        let (tokenizer, _, golden) = load(family);
        for case in golden["encodings"].as_array().unwrap() {
            let mut stream = IncrementalDetokenizer::new(Arc::clone(&tokenizer), false);
            let mut pieces: Vec<String> = ids(&case["ids"])
                .into_iter()
                .map(|id| stream.push(id).unwrap())
                .collect();
            let rest = stream.finish();
            match pieces.last_mut() {
                Some(last) => last.push_str(&rest),
                None => assert_eq!(rest, ""),
            }
            let expected: Vec<String> =
                serde_json::from_value(case["stream_pieces"].clone()).unwrap();
            assert_eq!(pieces, expected, "{family}: {}", case["text"]);
        }
    }
}

#[test]
fn rendered_chats_equal_the_reference() {
    for family in FAMILIES {
        let (tokenizer, template, golden) = load(family);
        assert_eq!(*template.state(), TemplateState::Ready);
        let cases = golden["chat"].as_array().unwrap();
        assert!(cases.len() >= 20);
        for case in cases {
            let text = template
                .render(
                    &case["messages"],
                    case["add_generation_prompt"].as_bool().unwrap(),
                    Some(&case["tools"]).filter(|t| !t.is_null()),
                    case["template_kwargs"].as_object(),
                )
                .unwrap();
            assert_eq!(
                text,
                case["text"].as_str().unwrap(),
                "{family}: {}",
                case["name"]
            );
            assert_eq!(
                tokenizer.encode(&text, false).unwrap(),
                ids(&case["ids"]),
                "{family}: {}",
                case["name"]
            );
        }
    }
}

#[test]
fn token_bytes_join_to_the_text_and_equal_the_library() {
    for family in FAMILIES {
        let (tokenizer, _, golden) = load(family);
        for case in golden["encodings"].as_array().unwrap() {
            let mut bytes = Vec::new();
            for id in ids(&case["ids"]) {
                bytes.extend_from_slice(tokenizer.token_bytes(id).unwrap());
            }
            assert_eq!(
                bytes,
                case["decoded"].as_str().unwrap().as_bytes(),
                "{family}: {}",
                case["text"]
            );
        }
    }
}

#[test]
fn a_text_of_far_too_many_tokens_is_refused_and_one_that_fits_never() {
    for family in FAMILIES {
        let (tokenizer, _, golden) = load(family);
        let refused = |text: &str, limit| {
            matches!(
                tokenizer.encode_bounded(text, false, limit),
                Err(TextError::TooLong { .. })
            )
        };
        assert!(
            refused(&"a town by the sea ".repeat(100_000), 100),
            "{family}"
        );
        // Longer than the longest tokens could be.
        assert!(refused(&" ".repeat(10_000_000), 100), "{family}");
        let all: String = golden["encodings"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|case| case["text"].as_str())
            .collect();
        for text in [all.as_str(), &all.repeat(50), &" ".repeat(100_000), ""] {
            let ids = tokenizer.encode(text, true).unwrap();
            let bounded = tokenizer.encode_bounded(text, true, ids.len());
            assert_eq!(bounded.unwrap(), ids, "{family}");
        }
    }
}
