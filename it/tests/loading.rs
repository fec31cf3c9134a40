//! Model directories that are broken: refused by name before anything is spent, never half served.

use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use twinfer_it::{
    Checkpoint, Instance, chat_body, completion_body, demo_model, refused, shard_name,
};

const INDEX: &str = "model.safetensors.index.json";
const NORM: &str = "model.norm.weight";

/// The demo model in four shards with an index.
fn sharded() -> Checkpoint {
    let model = Checkpoint::demo();
    model.shard(4);
    model
}

async fn serves(model: &Checkpoint) {
    let instance = model.serve(&[]).await;
    let answer = instance
        .client()
        .post(
            "/v1/chat/completions",
            &chat_body("What is the capital of France?"),
        )
        .await;
    assert!(answer.expect("an answer").text().contains("Paris"));
}

/// C6.1: index and shards that do not fit together.
#[tokio::test]
async fn index_and_shards_that_differ_are_refused_by_name() {
    serves(&sharded()).await;

    let removed = sharded();
    fs::remove_file(removed.file(&shard_name(1, 4))).expect("removed");
    removed.refused(&[], &[INDEX, &shard_name(1, 4)]).await;
    fs::remove_file(removed.file(&shard_name(3, 4))).expect("removed");
    let both = [shard_name(1, 4), shard_name(3, 4)];
    removed.refused(&[], &[&both[0], &both[1]]).await;

    let renamed = sharded();
    fs::rename(
        renamed.file(&shard_name(2, 4)),
        renamed.file("other.safetensors"),
    )
    .expect("renamed");
    renamed.refused(&[], &[&shard_name(2, 4)]).await;

    // A tensor that stands in another shard than the index says, then one that stands in none.
    let lacking = Checkpoint::demo();
    let map = lacking.shard(4);
    let mut wrong = map.clone();
    let other = if map[NORM] == shard_name(0, 4) { 1 } else { 0 };
    wrong.insert(NORM.to_owned(), shard_name(other, 4));
    lacking.index(&wrong);
    lacking.refused(&[], &[NORM, &shard_name(other, 4)]).await;
    let mut more = map.clone();
    more.insert("model.norm.bias".to_owned(), shard_name(0, 4));
    lacking.index(&more);
    lacking
        .refused(&[], &["model.norm.bias", &shard_name(0, 4)])
        .await;

    let two = sharded();
    fs::remove_file(two.file(INDEX)).expect("removed");
    two.refused(&[], &["index"]).await;

    // A whole file beside the index of others: whose weights are meant?
    let beside = sharded();
    fs::copy(
        demo_model().join("model.safetensors"),
        beside.file("model.safetensors"),
    )
    .expect("a copy");
    beside.refused(&[], &["model.safetensors", INDEX]).await;

    let outside = Checkpoint::demo();
    let mut map = outside.shard(2);
    map.insert(NORM.to_owned(), "../model.safetensors".to_owned());
    outside.index(&map);
    outside.refused(&[], &[INDEX, NORM]).await;
    fs::write(outside.file(INDEX), "<!DOCTYPE html>").expect("written");
    outside.refused(&[], &[INDEX]).await;
}

/// C6.2: a weight file that is no weight file any more, alone and as one of several.
#[tokio::test]
async fn damaged_weight_files_are_refused_with_their_sizes() {
    let shard = shard_name(2, 4);
    for file in ["model.safetensors", shard.as_str()] {
        let model = || match file {
            "model.safetensors" => Checkpoint::demo(),
            _ => sharded(),
        };
        let bytes = fs::read(model().file(file)).expect("the weights");
        let (size, less) = (bytes.len().to_string(), (bytes.len() - 1).to_string());
        let pointer = format!(
            "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {size}\n",
            "0".repeat(64)
        );
        let mut longer = bytes.clone();
        longer.push(0);
        let longer_size = longer.len().to_string();
        let mut hostile = bytes.clone();
        hostile[..8].copy_from_slice(&(1u64 << 62).to_le_bytes());
        for (content, words) in [
            (bytes[..bytes.len() - 1].to_vec(), vec![&*size, &*less]),
            (longer, vec![&*size, &*longer_size]),
            (bytes[..4].to_vec(), vec!["4"]),
            (Vec::new(), vec!["0"]),
            (pointer.into_bytes(), vec!["LFS", &*size]),
            (
                b"<!DOCTYPE html><html><body>Sign in</body></html>".to_vec(),
                vec!["web page"],
            ),
            (hostile, vec![&*size]),
        ] {
            let damaged = model();
            fs::write(damaged.file(file), content).expect("written");
            let words: Vec<&str> = [file].into_iter().chain(words).collect();
            damaged.refused(&[], &words).await;
        }

        let folder = model();
        fs::remove_file(folder.file(file)).expect("removed");
        fs::create_dir(folder.file(file)).expect("a folder");
        folder.refused(&[], &[file]).await;

        let locked = model();
        let path = locked.file(file);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).expect("mode");
        // The superuser reads it all the same; then the instance must simply work.
        if fs::File::open(&path).is_err() {
            locked.refused(&[], &[file]).await;
        } else {
            serves(&locked).await;
        }
    }
    let missing = Checkpoint::demo();
    fs::remove_file(missing.file("model.safetensors")).expect("removed");
    missing.refused(&[], &["safetensors"]).await;
}

/// C6.9: where the chat template may stand, and what happens when it is none.
#[tokio::test]
async fn a_missing_or_broken_chat_template_fails_chat_alone() {
    let text = fs::read_to_string(demo_model().join("tokenizer_config.json")).expect("a config");
    let config: Value = serde_json::from_str(&text).expect("JSON");
    let template = config["chat_template"].as_str().expect("a template");
    let set = |model: &Checkpoint, value: Value| {
        model.change("tokenizer_config.json", |config| {
            config["chat_template"] = value
        });
    };

    let named = Checkpoint::demo();
    set(
        &named,
        json!([{"name": "default", "template": template}, {"name": "tool_use", "template": "{{ 1 }}"}]),
    );
    serves(&named).await;

    let alone = Checkpoint::demo();
    alone.change("tokenizer_config.json", |config| {
        drop(
            config
                .as_object_mut()
                .expect("an object")
                .remove("chat_template"),
        );
    });
    fs::write(alone.file("chat_template.jinja"), template).expect("written");
    serves(&alone).await;

    let both = Checkpoint::demo();
    set(&both, json!("{{ raise_exception('the file wins') }}"));
    fs::write(both.file("chat_template.jinja"), template).expect("written");
    serves(&both).await;

    for (bad, logged) in [
        (None, "chat template"),
        (Some("{% if %}"), "chat template"),
        (Some("{{ messages | no_such_filter }}"), "no_such_filter"),
    ] {
        for in_file in [false, true] {
            let dir = Checkpoint::demo();
            dir.change("tokenizer_config.json", |config| {
                let config = config.as_object_mut().expect("an object");
                config.remove("chat_template");
                if let (Some(text), false) = (bad, in_file) {
                    config.insert("chat_template".to_owned(), json!(text));
                }
            });
            if let (Some(text), true) = (bad, in_file) {
                fs::write(dir.file("chat_template.jinja"), text).expect("written");
            }
            let instance = dir.serve(&[]).await;
            let client = instance.client();
            let mut stream = chat_body("Hello!");
            stream["stream"] = json!(true);
            for (path, body) in [
                ("/v1/chat/completions", chat_body("Hello!")),
                ("/v1/chat/completions", stream),
                ("/tokenize", chat_body("Hello!")),
            ] {
                let chat = client.post(path, &body).await.expect("an answer");
                assert_eq!(chat.status, 400, "{}", chat.text());
                assert_eq!(chat.error_code(), "chat_template", "{}", chat.text());
            }
            let completion = client
                .post("/v1/completions", &completion_body("Once upon", 4))
                .await
                .expect("an answer");
            assert_eq!(completion.status, 200, "{}", completion.text());
            let log = instance.process.output().to_lowercase();
            assert!(
                log.contains(logged),
                "the start-up log is silent about {bad:?}:\n{log}"
            );
        }
    }
}

#[tokio::test]
async fn the_instruction_set_of_the_environment_is_taken_or_refused_by_name() {
    refused(
        &demo_model(),
        &[],
        &[("TWINFER_ISA", "sse9")],
        &["isa is \"sse9\"", "portable"],
    )
    .await;

    let mut instance = Instance::serve(&demo_model(), &[], &[("TWINFER_ISA", "portable")]);
    instance.ready().await;
    assert!(
        instance.process.output().contains("isa=portable"),
        "{}",
        instance.process.output()
    );
}
