//! Bodies of the public prefill-first proxy, replayed against our prefill and decode instances.

use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use twinfer_it::{Instance, demo_model, repository};

const ID: &str = "5b0c0000-0000-4000-8000-000000000000";

fn transcript() -> Value {
    let path = repository().join("testdata/transcripts/completions-p-first.json");
    serde_json::from_str(&std::fs::read_to_string(path).expect("the transcript")).expect("JSON")
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value
        .as_object()
        .unwrap_or_else(|| panic!("no object: {value}"))
        .keys()
        .map(String::as_str)
        .collect()
}

/// The JSON type, for values that may differ.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Asserts that `ours` has every key of `theirs` with a value of the same type, and no others but `further`.
fn same_shape(what: &str, ours: &Value, theirs: &Value, further: &[&str]) {
    let (have, want) = (keys(ours), keys(theirs));
    let missing: Vec<_> = want.difference(&have).collect();
    assert!(missing.is_empty(), "{what} lacks {missing:?}: {ours}");
    let unknown: Vec<_> = have
        .difference(&want)
        .filter(|key| !further.contains(*key))
        .collect();
    assert!(unknown.is_empty(), "{what} has {unknown:?}: {ours}");
    for key in want {
        assert_eq!(kind(&ours[key]), kind(&theirs[key]), "{what}.{key}: {ours}");
    }
}

fn seconds_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a clock")
        .as_secs()
}

/// Behind the public proxies there is either no key ("Bearer None", loopback) or OPENAI_API_KEY.
async fn replay(environment: &[(&str, &str)], bearer: &str) {
    let script = transcript();
    let name = ["--served-model-name", "ds_r1"];
    let mut prefill = Instance::serve(
        &demo_model(),
        &[&name[..], &["--role", "prefill"]].concat(),
        environment,
    );
    let mut decode = Instance::serve(
        &demo_model(),
        &[&name[..], &["--role", "decode"]].concat(),
        environment,
    );
    prefill.ready().await;
    decode.ready().await;
    let as_proxy = |instance: &Instance| {
        instance
            .client()
            .with_header("authorization", bearer)
            .with_header("x-request-id", ID)
    };

    let answer = as_proxy(&prefill)
        .post("/v1/completions", &script["prefill_request"])
        .await
        .expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.headers["content-type"], "application/json");
    let (ours, theirs) = (answer.json(), &script["prefill_answer"]);
    same_shape("answer", &ours, theirs, &[]);
    same_shape("choice", &ours["choices"][0], &theirs["choices"][0], &[]);
    same_shape("usage", &ours["usage"], &theirs["usage"], &[]);
    // Ours are a superset: what our decode needs beyond it.
    let further = [
        "remote_block_size",
        "remote_num_tokens",
        "remote_prefill_cached_tokens",
        "prompt_token_ids",
        "remote_kv_seal",
        "remote_kv_lease_ms",
    ];
    same_shape(
        "kv_transfer_params",
        &ours["kv_transfer_params"],
        &theirs["kv_transfer_params"],
        &further,
    );
    for key in [
        "id",
        "object",
        "model",
        "service_tier",
        "system_fingerprint",
    ] {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    assert!(
        ours["created"]
            .as_u64()
            .is_some_and(|created| created.abs_diff(seconds_now()) <= 5),
        "{}",
        ours["created"]
    );
    for key in [
        "index",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "token_ids",
        "prompt_logprobs",
        "prompt_token_ids",
    ] {
        assert_eq!(ours["choices"][0][key], theirs["choices"][0][key], "{key}");
    }
    assert_eq!(ours["choices"].as_array().map(Vec::len), Some(1));
    let usage = &ours["usage"];
    assert_eq!(usage["completion_tokens"], json!(1));
    assert_eq!(
        usage["total_tokens"].as_u64(),
        usage["prompt_tokens"].as_u64().map(|n| n + 1)
    );
    let handle = &ours["kv_transfer_params"];
    for key in [
        "do_remote_prefill",
        "do_remote_decode",
        "remote_pcp_size",
        "remote_dcp_size",
        "remote_multi_nodes_meta_mapping",
        "num_prompt_blocks",
    ] {
        assert_eq!(handle[key], theirs["kv_transfer_params"][key], "{key}");
    }
    assert_eq!(handle["remote_host"], json!("127.0.0.1"));
    assert_eq!(handle["remote_port"], json!(prefill.kv_port));
    assert!(
        handle["remote_request_id"]
            .as_str()
            .is_some_and(|id| !id.is_empty()),
        "{handle}"
    );
    assert_eq!(
        handle["remote_block_ids"].as_array().map(Vec::len),
        handle["num_prompt_blocks"].as_u64().map(|n| n as usize)
    );
    // Gauges follow the engine's steps, a moment behind the answer.
    let end = Instant::now() + Duration::from_secs(5);
    while prefill.kv_busy().await == 0.0 {
        assert!(Instant::now() < end, "the prompt's blocks are not kept");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }

    // The proxy hands the object on as it is.
    let mut request: Map<String, Value> = script["client_request"]
        .as_object()
        .expect("an object")
        .clone();
    request.insert("kv_transfer_params".to_owned(), handle.clone());
    let answer = as_proxy(&decode)
        .post("/v1/completions", &Value::Object(request))
        .await
        .expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(
        answer.headers["content-type"]
            .to_str()
            .expect("text")
            .starts_with("text/event-stream")
    );
    let (events, done) = answer.events();
    assert!(done);
    let (chunk, last) = (&script["decode_events"][0], &script["decode_events"][1]);
    let (usage_event, chunks) = events.split_last().expect("events");
    for event in chunks {
        same_shape("event", event, chunk, &[]);
        same_shape(
            "choice",
            &event["choices"][0],
            &json!({"index": 0, "text": "", "logprobs": null}),
            &["finish_reason", "stop_reason", "token_ids"],
        );
        assert!(
            event["choices"][0].get("finish_reason").is_some()
                && event["choices"][0].get("stop_reason").is_some(),
            "{event}"
        );
        for key in ["id", "object", "model", "usage"] {
            assert_eq!(event[key], chunk[key], "{key}");
        }
    }
    let (final_chunk, earlier) = chunks.split_last().expect("chunks");
    assert!(final_chunk["choices"][0]["finish_reason"].is_string());
    assert!(
        earlier
            .iter()
            .all(|event| event["choices"][0]["finish_reason"].is_null())
    );
    for key in ["id", "object", "model", "choices"] {
        assert_eq!(usage_event[key], last[key], "{key}");
    }
    assert_eq!(
        usage_event["usage"]["prompt_tokens"],
        usage["prompt_tokens"]
    );
    let text: String = chunks
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str())
        .collect();
    assert!(!text.is_empty());
    prefill.kv_idle(Duration::from_secs(1)).await;
    decode.kv_idle(Duration::from_secs(1)).await;
    let fetched = decode.metrics().await.sum(
        "vllm:prompt_tokens_by_source_total",
        &["source=\"external_kv_transfer\""],
    );
    assert_eq!(
        Some(fetched as u64),
        usage["prompt_tokens"].as_u64().map(|n| n - 1),
        "all but one token by handoff"
    );
}

#[tokio::test]
async fn public_proxy_without_key_on_loopback() {
    replay(&[], "Bearer None").await;
}

#[tokio::test]
async fn public_proxy_with_its_key() {
    replay(
        &[("OPENAI_API_KEY", "key-of-the-proxy")],
        "Bearer key-of-the-proxy",
    )
    .await;
}
