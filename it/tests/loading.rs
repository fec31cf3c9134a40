//! Model directories that are broken: refused by name before anything is spent, never half served.

use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};
use twinfer_it::{Instance, Process, chat_body, completion_body, demo_model};

/// Longest time until a broken directory is refused.
const REFUSED_WITHIN: Duration = Duration::from_secs(5);

fn copy(model: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for entry in fs::read_dir(model).expect("the model") {
        let path = entry.expect("an entry").path();
        if path.is_file() {
            fs::copy(&path, dir.path().join(path.file_name().expect("a name"))).expect("a copy");
        }
    }
    dir
}

/// Header of a safetensors file and where its data begins.
fn header(bytes: &[u8]) -> (serde_json::Map<String, Value>, usize) {
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
    (header.as_object().expect("an object").clone(), 8 + length)
}

/// Writes tensors as one safetensors file.
fn write_shard(path: &Path, tensors: &[(String, Value, Vec<u8>)]) {
    let mut map = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, entry, bytes) in tensors {
        let start = data.len();
        data.extend_from_slice(bytes);
        map.insert(name.clone(), json!({"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [start, data.len()]}));
    }
    let header = Value::Object(map).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    fs::write(path, file).expect("a shard");
}

/// The demo model in four shards with an index.
fn sharded() -> tempfile::TempDir {
    let dir = copy(&demo_model());
    let whole = dir.path().join("model.safetensors");
    let bytes = fs::read(&whole).expect("the weights");
    let (header, start) = header(&bytes);
    let mut shards: Vec<Vec<(String, Value, Vec<u8>)>> = vec![Vec::new(); 4];
    let mut weight_map = serde_json::Map::new();
    for (i, (name, entry)) in header
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
        .enumerate()
    {
        let at = |k: usize| start + entry["data_offsets"][k].as_u64().expect("an offset") as usize;
        shards[i % 4].push((name.clone(), entry.clone(), bytes[at(0)..at(1)].to_vec()));
        weight_map.insert(name.clone(), json!(shard_name(i % 4)));
    }
    for (i, tensors) in shards.iter().enumerate() {
        write_shard(&dir.path().join(shard_name(i)), tensors);
    }
    fs::remove_file(whole).expect("gone");
    let index = json!({"metadata": {}, "weight_map": weight_map});
    fs::write(
        dir.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .expect("an index");
    dir
}

fn shard_name(i: usize) -> String {
    format!("model-{:05}-of-00004.safetensors", i + 1)
}

/// Starts it, expects that it ends by itself in time with an error that contains all `words`, and was never ready.
async fn refused(model: &Path, words: &[&str]) {
    refused_in(&[], model, words).await;
}

/// [`refused`] in an environment.
async fn refused_in(environment: &[(&str, &str)], model: &Path, words: &[&str]) {
    twinfer_it::binary();
    let port = twinfer_it::free_port();
    let start = Instant::now();
    let model = model.display().to_string();
    let mut process = Process::start(&["serve", &model, "--port", &port.to_string()], environment);
    let client = twinfer_it::Client::new(format!("127.0.0.1:{port}"));
    let status = loop {
        if let Some(status) = process.ended() {
            break status;
        }
        if let Ok(ready) = client.get("/ready").await {
            assert_ne!(ready.status, 200, "a broken model is never ready");
        }
        assert!(
            start.elapsed() < REFUSED_WITHIN,
            "still runs:\n{}",
            process.output()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let output = process.output();
    assert!(!status.success(), "{output}");
    assert!(!output.contains("panicked"), "{output}");
    for word in words {
        assert!(output.contains(word), "{word:?} is not named in:\n{output}");
    }
}

async fn serves(model: &Path) {
    let mut instance = Instance::serve(model, &[], &[]);
    instance.ready().await;
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
    serves(sharded().path()).await;

    let removed = sharded();
    fs::remove_file(removed.path().join(shard_name(1))).expect("removed");
    refused(removed.path(), &[&shard_name(1)]).await;

    let renamed = sharded();
    fs::rename(
        renamed.path().join(shard_name(2)),
        renamed.path().join("other.safetensors"),
    )
    .expect("renamed");
    refused(renamed.path(), &[&shard_name(2)]).await;

    let lacking = sharded();
    let path = lacking.path().join("model.safetensors.index.json");
    let mut index: Value =
        serde_json::from_str(&fs::read_to_string(&path).expect("an index")).expect("JSON");
    index["weight_map"]["model.norm.weight"] =
        if index["weight_map"]["model.norm.weight"] == json!(shard_name(0)) {
            json!(shard_name(1))
        } else {
            json!(shard_name(0))
        };
    fs::write(&path, index.to_string()).expect("an index");
    refused(lacking.path(), &["model.norm.weight"]).await;

    let two = sharded();
    fs::remove_file(two.path().join("model.safetensors.index.json")).expect("removed");
    refused(two.path(), &["index"]).await;
}

/// C6.2: a weight file that is no weight file any more.
#[tokio::test]
async fn damaged_weight_files_are_refused_with_their_sizes() {
    let file = "model.safetensors";
    let size = fs::metadata(demo_model().join(file))
        .expect("the weights")
        .len();

    let truncated = copy(&demo_model());
    let bytes = fs::read(truncated.path().join(file)).expect("the weights");
    fs::write(truncated.path().join(file), &bytes[..bytes.len() - 1]).expect("written");
    refused(
        truncated.path(),
        &[file, &size.to_string(), &(size - 1).to_string()],
    )
    .await;

    let empty = copy(&demo_model());
    fs::write(empty.path().join(file), b"").expect("written");
    refused(empty.path(), &[file, "0"]).await;

    let pointer = copy(&demo_model());
    let text = format!(
        "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {size}\n",
        "0".repeat(64)
    );
    fs::write(pointer.path().join(file), text).expect("written");
    refused(pointer.path(), &[file]).await;

    let page = copy(&demo_model());
    fs::write(
        page.path().join(file),
        "<!DOCTYPE html><html><body>Sign in</body></html>",
    )
    .expect("written");
    refused(page.path(), &[file]).await;

    let missing = copy(&demo_model());
    fs::remove_file(missing.path().join(file)).expect("removed");
    refused(missing.path(), &["safetensors"]).await;

    let locked = copy(&demo_model());
    let path = locked.path().join(file);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).expect("mode");
    // The superuser reads it all the same; then the instance must simply work.
    if fs::File::open(&path).is_err() {
        refused(locked.path(), &[file]).await;
    } else {
        serves(locked.path()).await;
    }
}

/// C6.9: where the chat template may stand, and what happens when it is none.
#[tokio::test]
async fn a_missing_or_broken_chat_template_fails_chat_alone() {
    let config_of = |dir: &Path| -> Value {
        serde_json::from_str(
            &fs::read_to_string(dir.join("tokenizer_config.json")).expect("a config"),
        )
        .expect("JSON")
    };
    let write_config = |dir: &Path, config: &Value| {
        fs::write(dir.join("tokenizer_config.json"), config.to_string()).expect("written");
    };
    let template = config_of(&demo_model())["chat_template"]
        .as_str()
        .expect("a template")
        .to_owned();

    let named = copy(&demo_model());
    let mut config = config_of(named.path());
    config["chat_template"] = json!([{"name": "default", "template": template}, {"name": "tool_use", "template": "{{ 1 }}"}]);
    write_config(named.path(), &config);
    serves(named.path()).await;

    let alone = copy(&demo_model());
    let mut config = config_of(alone.path());
    config
        .as_object_mut()
        .expect("an object")
        .remove("chat_template");
    write_config(alone.path(), &config);
    fs::write(alone.path().join("chat_template.jinja"), &template).expect("written");
    serves(alone.path()).await;

    let both = copy(&demo_model());
    let mut config = config_of(both.path());
    config["chat_template"] = json!("{{ raise_exception('the file wins') }}");
    write_config(both.path(), &config);
    fs::write(both.path().join("chat_template.jinja"), &template).expect("written");
    serves(both.path()).await;

    for (bad, logged) in [
        (None, "chat template"),
        (Some("{% if %}"), "chat template"),
        (Some("{{ messages | no_such_filter }}"), "no_such_filter"),
    ] {
        let dir = copy(&demo_model());
        let mut config = config_of(dir.path());
        match bad {
            None => drop(
                config
                    .as_object_mut()
                    .expect("an object")
                    .remove("chat_template"),
            ),
            Some(text) => config["chat_template"] = json!(text),
        }
        write_config(dir.path(), &config);
        let mut instance = Instance::serve(dir.path(), &[], &[]);
        instance.ready().await;
        let chat = instance
            .client()
            .post("/v1/chat/completions", &chat_body("Hello!"))
            .await
            .expect("an answer");
        assert_eq!(chat.status, 400, "{}", chat.text());
        assert_eq!(chat.error_code(), "chat_template", "{}", chat.text());
        let completion = instance
            .client()
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

#[tokio::test]
async fn the_instruction_set_of_the_environment_is_taken_or_refused_by_name() {
    refused_in(
        &[("TWINFER_ISA", "sse9")],
        &demo_model(),
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
