//! Model directories as they come: ids at several places, broken and missing files, templates (C6.9).

use crate::common::{dir, tokenizer};
use serde_json::{Value, json};
use std::path::Path;
use twinfer_text::{ChatTemplate, TemplateError, TemplateState, TextError, Tokenizer};

/// A copy of the Qwen directory without template and ids, to be completed by a test.
fn model() -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    std::fs::copy(
        dir("qwen").join("tokenizer.json"),
        out.path().join("tokenizer.json"),
    )
    .unwrap();
    out
}

fn write(dir: &Path, name: &str, value: &Value) {
    std::fs::write(dir.join(name), value.to_string()).unwrap();
}

fn template(dir: &Path) -> ChatTemplate {
    let tokenizer = Tokenizer::from_dir(dir).unwrap();
    ChatTemplate::from_dir(dir, &tokenizer).unwrap()
}

fn render(dir: &Path) -> Result<String, TemplateError> {
    template(dir).render(
        &json!([{"role": "user", "content": "hi"}]),
        false,
        None,
        None,
    )
}

#[test]
fn end_of_sequence_ids_come_from_generation_config_then_config_then_the_tokenizer() {
    let model = model();
    let dir = model.path();
    let eos = || Tokenizer::from_dir(dir).unwrap().eos_ids().to_vec();
    assert_eq!(eos(), [] as [u32; 0]);
    write(
        dir,
        "tokenizer_config.json",
        &json!({"eos_token": {"content": "<|im_end|>"}, "bos_token": null}),
    );
    assert_eq!(eos(), [507]);
    write(
        dir,
        "config.json",
        &json!({"eos_token_id": 5, "vocab_size": 600}),
    );
    assert_eq!(eos(), [5]);
    write(
        dir,
        "generation_config.json",
        &json!({"eos_token_id": [507, 505]}),
    );
    assert_eq!(eos(), [507, 505]);
    for bad in [json!(600), json!([1, -1]), json!("5"), json!(1.5)] {
        write(dir, "generation_config.json", &json!({"eos_token_id": bad}));
        let message = Tokenizer::from_dir(dir).unwrap_err().to_string();
        assert!(
            message.contains("generation_config.json") && message.contains("below 600"),
            "{message}"
        );
    }
}

#[test]
fn ids_of_padded_embedding_rows_decode_to_nothing() {
    let model = model();
    write(model.path(), "config.json", &json!({"vocab_size": 600}));
    let tokenizer = Tokenizer::from_dir(model.path()).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.id_limit()), (512, 600));
    assert_eq!(tokenizer.decode(&[39, 599, 0], false).unwrap(), "H!");
    assert!(matches!(
        tokenizer.decode(&[600], false),
        Err(TextError::UnknownToken {
            id: 600,
            limit: 600
        })
    ));
}

/// The tokenizer may know more than the model.
#[test]
fn ids_without_an_embedding_row_are_refused_but_have_a_text() {
    let model = model();
    write(model.path(), "config.json", &json!({"vocab_size": 508}));
    let tokenizer = Tokenizer::from_dir(model.path()).unwrap();
    assert!(tokenizer.check_ids(&[0, 507]).is_ok());
    for id in [508, 511, 512] {
        assert!(matches!(
            tokenizer.check_ids(&[0, id]),
            Err(TextError::UnknownToken { id: i, limit: 508 }) if i == id
        ));
    }
    assert_eq!(
        tokenizer.decode(&[508], false).unwrap(),
        tokenizer.token_text(508).unwrap()
    );
    assert!(!tokenizer.token_text(508).unwrap().is_empty());
}

/// C9.14: refused before the library builds anything from it.
#[test]
fn a_huge_list_of_added_tokens_is_refused() {
    let model = model();
    let path = model.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    tokenizer["added_tokens"] = json!(vec![0; 65_537]);
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let message = Tokenizer::from_dir(model.path()).unwrap_err().to_string();
    for word in ["tokenizer.json", "added_tokens", "65537", "65536"] {
        assert!(message.contains(word), "{message}");
    }
}

/// The library gives a token another id when its own is taken or leaves a gap: texts would mean other tokens.
#[test]
fn an_added_token_that_cannot_have_its_id_is_refused() {
    let model = model();
    let path = model.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let whole: Value = serde_json::from_str(&text).unwrap();
    for id in [5, 100_000] {
        let mut tokenizer = whole.clone();
        let mut token = whole["added_tokens"][0].clone();
        token["id"] = json!(id);
        token["content"] = json!("<|another|>");
        tokenizer["added_tokens"]
            .as_array_mut()
            .unwrap()
            .push(token);
        std::fs::write(&path, tokenizer.to_string()).unwrap();
        let message = Tokenizer::from_dir(model.path()).unwrap_err().to_string();
        for word in ["added_tokens", "<|another|>", &id.to_string()] {
            assert!(message.contains(word), "{message}");
        }
    }
}

#[test]
fn the_hash_covers_tokenizer_and_template_only() {
    let model = model();
    let dir = model.path();
    let hash = || Tokenizer::from_dir(dir).unwrap().content_hash().to_owned();
    let bare = hash();
    assert_eq!(bare.len(), 32);
    write(dir, "config.json", &json!({"vocab_size": 600}));
    assert_eq!(hash(), bare);
    write(dir, "tokenizer_config.json", &json!({"chat_template": "a"}));
    let first = hash();
    std::fs::write(dir.join("chat_template.jinja"), "b").unwrap();
    let second = hash();
    let mut text = std::fs::read_to_string(dir.join("tokenizer.json")).unwrap();
    text.push('\n');
    std::fs::write(dir.join("tokenizer.json"), text).unwrap();
    let all = [bare, first, second, hash()];
    assert!((1..4).all(|i| !all[..i].contains(&all[i])), "{all:?}");
}

#[test]
fn broken_files_are_named() {
    let model = model();
    let dir = model.path();
    for (name, content) in [
        ("tokenizer_config.json", "{"),
        ("config.json", "<html>"),
        ("generation_config.json", ""),
    ] {
        std::fs::write(dir.join(name), content).unwrap();
        let message = Tokenizer::from_dir(dir).unwrap_err().to_string();
        assert!(message.contains(name), "{message}");
        std::fs::remove_file(dir.join(name)).unwrap();
    }
    for content in [
        "",
        "{}",
        "version https://git-lfs.github.com/spec/v1",
        "{\"model\": {\"type\": \"BPE\"}}",
    ] {
        std::fs::write(dir.join("tokenizer.json"), content).unwrap();
        let message = Tokenizer::from_dir(dir).unwrap_err().to_string();
        assert!(message.contains("tokenizer.json"), "{message}");
    }
    std::fs::remove_file(dir.join("tokenizer.json")).unwrap();
    let missing = Tokenizer::from_dir(dir).unwrap_err();
    assert!(matches!(missing, TextError::Missing { .. }));
    let message = missing.to_string();
    assert!(message.contains("tokenizer.json is missing"), "{message}");
}

#[test]
fn a_pointer_of_git_lfs_tells_the_size_of_the_file() {
    let model = model();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9085657\n";
    std::fs::write(model.path().join("tokenizer.json"), pointer).unwrap();
    let message = Tokenizer::from_dir(model.path()).unwrap_err().to_string();
    assert!(message.contains("expected 9085657 bytes"), "{message}");
    assert!(message.contains("git lfs pull"), "{message}");
}

/// A model from a stranger must not make its reader show other files, say as a chat template.
#[test]
fn links_out_of_the_directory_are_refused() {
    let elsewhere = tempfile::tempdir().unwrap();
    let secret = elsewhere.path().join("secret");
    std::fs::write(&secret, "{}").unwrap();
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "config.json",
        "chat_template.jinja",
    ] {
        let model = model();
        let path = model.path().join(name);
        let _ = std::fs::remove_file(&path);
        std::os::unix::fs::symlink(&secret, &path).unwrap();
        let error = match Tokenizer::from_dir(model.path()) {
            Err(error) => error.to_string(),
            Ok(tokenizer) => ChatTemplate::from_dir(model.path(), &tokenizer)
                .err()
                .unwrap()
                .to_string(),
        };
        assert!(
            error.contains(name) && error.contains("out of the model directory"),
            "{error}"
        );
    }
}

#[test]
fn a_template_file_wins_over_the_tokenizer_config() {
    let model = model();
    let dir = model.path();
    write(
        dir,
        "tokenizer_config.json",
        &json!({"chat_template": "config {{ messages[0].content }}"}),
    );
    assert_eq!(render(dir).unwrap(), "config hi");
    std::fs::write(
        dir.join("chat_template.jinja"),
        "file {{ messages[0].content }}\n",
    )
    .unwrap();
    assert_eq!(render(dir).unwrap(), "file hi");
    std::fs::remove_file(dir.join("tokenizer_config.json")).unwrap();
    assert_eq!(render(dir).unwrap(), "file hi");
}

#[test]
fn named_templates_are_chosen_by_tools() {
    let model = model();
    let dir = model.path();
    let list = json!([
        {"name": "tool_use", "template": "tools {{ tools|length }}"},
        {"name": "rag", "template": "{% unknown %}"},
        {"name": "default", "template": "plain {{ tools is none }}"},
    ]);
    write(
        dir,
        "tokenizer_config.json",
        &json!({"chat_template": list}),
    );
    let template = template(dir);
    assert_eq!(*template.state(), TemplateState::Ready);
    let messages = json!([{"role": "user", "content": "hi"}]);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_eq!(
        template
            .render(&messages, true, Some(&tools), None)
            .unwrap(),
        "tools 1"
    );
    assert_eq!(
        template
            .render(&messages, true, Some(&json!([])), None)
            .unwrap(),
        "plain True"
    );
    assert_eq!(
        template
            .render(&messages, true, Some(&Value::Null), None)
            .unwrap(),
        "plain True"
    );
}

#[test]
fn unusable_templates_are_a_state_with_a_reason_and_the_tokenizer_still_works() {
    let model = model();
    let dir = model.path();
    assert_eq!(*template(dir).state(), TemplateState::Missing);
    assert_eq!(render(dir), Err(TemplateError::Missing));
    let cases = [
        (
            json!("{% for m in messages %}{{ m.content }}"),
            "syntax error",
        ),
        (json!("{{ messages | no_such_filter }}"), "no_such_filter"),
        (json!("{{ no_such_function() }}"), "no_such_function"),
        (
            json!("{% if messages is no_such_test %}{% endif %}"),
            "no_such_test",
        ),
        (json!(7), "neither a string nor a list"),
        (json!([{"name": "default"}]), "chat_template[0]"),
        (json!([{"name": "rag", "template": "x"}]), "default"),
    ];
    for (value, reason) in cases {
        write(
            dir,
            "tokenizer_config.json",
            &json!({"chat_template": value}),
        );
        let tokenizer = Tokenizer::from_dir(dir).unwrap();
        assert_eq!(tokenizer.encode("Hi", false).unwrap().len(), 2);
        let template = ChatTemplate::from_dir(dir, &tokenizer).unwrap();
        let TemplateState::Broken(why) = template.state() else {
            panic!("{value} is {:?}", template.state())
        };
        assert!(why.contains(reason), "{value}: {why}");
        let error = twinfer_protocol::ApiError::from(render(dir).unwrap_err());
        assert_eq!(error.kind.status(), 400);
        assert!(error.message.contains(reason), "{value}: {}", error.message);
    }
    std::fs::write(dir.join("chat_template.jinja"), b"\xff").unwrap();
    assert!(matches!(render(dir), Err(TemplateError::Broken(why)) if why.contains("UTF-8")));
}

#[test]
fn the_demo_model_is_ready_for_chats() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let tokenizer = Tokenizer::from_dir(&dir).unwrap();
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_ids()),
        (Some(0), &[1][..])
    );
    let template = ChatTemplate::from_dir(&dir, &tokenizer).unwrap();
    let messages = json!([{"role": "user", "content": "12+7?"}]);
    let text = template.render(&messages, true, None, None).unwrap();
    assert_eq!(text, "<|begin|><|user|>12+7?<|assistant|>");
    let ids = tokenizer.encode(&text, false).unwrap();
    assert_eq!(ids[0], 0);
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "12+7?");
    let odd = json!([{"role": "robot", "content": "x"}]);
    let refused = template.render(&odd, true, None, None);
    assert_eq!(
        refused,
        Err(TemplateError::Refused("unknown role robot".to_owned()))
    );
}

/// A pipe in place of a file would make the reader wait for ever.
#[test]
fn files_that_are_no_regular_files_are_refused_at_once() {
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ] {
        let model = model();
        let path = model.path().join(name);
        let _ = std::fs::remove_file(&path);
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let error = match Tokenizer::from_dir(model.path()) {
            Err(error) => error.to_string(),
            Ok(tokenizer) => ChatTemplate::from_dir(model.path(), &tokenizer)
                .err()
                .unwrap()
                .to_string(),
        };
        assert!(
            error.contains(name) && error.contains("is not a regular file"),
            "{error}"
        );
    }
}

/// C9.14: a model from a stranger cannot make the server read other files.
#[test]
fn links_out_of_the_directory_are_refused_and_those_of_the_hub_are_followed() {
    use std::os::unix::fs::symlink;
    let load = |dir: &Path| {
        let tokenizer = Tokenizer::from_dir(dir).map_err(|error| error.to_string())?;
        ChatTemplate::from_dir(dir, &tokenizer).map_err(|error| error.to_string())
    };
    let outside = model();
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "config.json",
        "chat_template.jinja",
    ] {
        let target = outside.path().join(name);
        if name != "tokenizer.json" {
            std::fs::write(&target, "{}").unwrap();
        }
        let model = model();
        let path = model.path().join(name);
        let _ = std::fs::remove_file(&path);
        symlink(&target, &path).unwrap();
        let error = load(model.path()).err().unwrap();
        assert!(error.contains(name) && error.contains("link"), "{error}");
        std::fs::copy(&target, model.path().join("blob")).unwrap();
        std::fs::remove_file(&path).unwrap();
        symlink("blob", &path).unwrap();
        load(model.path()).unwrap();
    }

    // The hub's cache keeps files under their hashes beside the snapshots.
    let cache = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/c"));
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::copy(model().path().join("tokenizer.json"), blobs.join("hash")).unwrap();
    symlink("../../blobs/hash", snapshot.join("tokenizer.json")).unwrap();
    load(&snapshot).unwrap();
}

/// What `bad_words` forbids: vLLM's rule.
#[test]
fn word_forms_are_the_word_and_the_word_behind_a_space_where_that_is_as_many_tokens() {
    let tokenizer = tokenizer("llama3");
    let id = |name: &str| tokenizer.token_id(name).unwrap();
    let forms = |word: &str| tokenizer.word_forms(&[word.to_owned()]).unwrap();
    let single = [vec![id("a")], vec![id("\u{120}a")]];
    assert_eq!(forms("a"), single);
    assert_eq!(forms(" \na"), single, "white space in front does not count");
    // Behind a space it is one token more: what spells "7" ends it there too.
    assert_eq!(tokenizer.encode(" 7", false).unwrap().len(), 2);
    assert_eq!(forms("7"), [vec![id("7")]]);
    let several = forms("a7");
    assert_eq!(
        several,
        [vec![id("a"), id("7")], vec![id("\u{120}a"), id("7")]]
    );
    assert!(forms(" ").is_empty());
}
