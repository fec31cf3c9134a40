//! Fake workers speak as the peers they stand for.

use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use twinfer_bench::fake::{Dialect, FakeConfig, FakeFault, FakeWorker, FaultKind, Role};

const LIMIT: Duration = Duration::from_secs(10);

async fn send(worker: &FakeWorker, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(worker.addr()).await.expect("connect");
    stream.write_all(request.as_bytes()).await.expect("write");
    let mut answer = Vec::new();
    // A reset ends the reading as a close does; the bytes before it count.
    let _ = tokio::time::timeout(LIMIT, stream.read_to_end(&mut answer))
        .await
        .expect("answer in time");
    let text = String::from_utf8(answer).expect("UTF-8");
    text.split_once("\r\n\r\n")
        .map(|(h, b)| (h.to_owned(), b.to_owned()))
        .unwrap_or_default()
}

async fn post(worker: &FakeWorker, path: &str, body: &Value) -> (String, String) {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nx-request-id: 5b0c\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    send(worker, &(head + &body)).await
}

fn prefill_ask() -> Value {
    json!({"model": "ds_r1", "prompt": "Who are you?", "max_tokens": 1, "min_tokens": 1, "temperature": 0, "stream": false,
        "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null}})
}

#[tokio::test]
async fn prefill_answers_as_vllm_ascend_0_20_2() {
    let config = FakeConfig {
        role: Role::Prefill,
        dialect: Dialect::VllmAscend,
        model: "ds_r1".to_owned(),
        text: Some(" I".to_owned()),
        kv_host: "192.0.0.1".to_owned(),
        kv_port: 36008,
        kv_tp_size: 8,
        ..FakeConfig::default()
    };
    let worker = FakeWorker::start(config).await.expect("start");
    let (_, body) = post(&worker, "/v1/completions", &prefill_ask()).await;
    let mut body: Value = serde_json::from_str(&body).expect("JSON");
    let params = &mut body["kv_transfer_params"];
    let id = params["remote_request_id"].as_str().expect("id").to_owned();
    assert!(
        id.starts_with("cmpl-5b0c-0-") && id.len() == "cmpl-5b0c-0-".len() + 8,
        "{id}"
    );
    params["remote_request_id"] = json!("ID");
    params["remote_engine_id"] = json!("ENGINE");
    body["created"] = json!(0);
    let expected = json!({"id": "cmpl-5b0c", "object": "text_completion", "created": 0, "model": "ds_r1",
        "choices": [{"index": 0, "text": " I", "logprobs": null, "finish_reason": "length", "stop_reason": null,
            "token_ids": null, "prompt_logprobs": null, "prompt_token_ids": null}],
        "service_tier": null, "system_fingerprint": null,
        "usage": {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1, "prompt_tokens_details": null},
        "kv_transfer_params": {"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [17],
            "remote_engine_id": "ENGINE", "remote_request_id": "ID", "remote_host": "192.0.0.1", "remote_port": 36008,
            "remote_pcp_size": 1, "remote_dcp_size": 1, "remote_ptp_size": 8, "last_token_id": 306,
            "remote_multi_nodes_meta_mapping": {}, "num_prompt_blocks": 1}});
    assert_eq!(body, expected);
    assert_eq!(worker.held(), vec![id]);
}

#[tokio::test]
async fn decode_streams_as_vllm() {
    let config = FakeConfig {
        role: Role::Decode,
        dialect: Dialect::VllmAscend,
        model: "ds_r1".to_owned(),
        tokens: 2,
        ..FakeConfig::default()
    };
    let worker = FakeWorker::start(config).await.expect("start");
    let ask = json!({"model": "ds_r1", "prompt": "Who are you?", "max_tokens": 64, "stream": true,
        "stream_options": {"include_usage": true}});
    let (head, body) = post(&worker, "/v1/completions", &ask).await;
    assert!(head.contains("content-type: text/event-stream"), "{head}");
    let events: Vec<&str> = body
        .lines()
        .filter_map(|l| l.strip_prefix("data: "))
        .collect();
    let [first, last, usage, done] = events.as_slice() else {
        panic!("{events:?}")
    };
    let mut first: Value = serde_json::from_str(first).expect("JSON");
    first["created"] = json!(0);
    let choice = json!({"index": 0, "text": " tok0", "logprobs": null, "finish_reason": null, "stop_reason": null});
    assert_eq!(
        first,
        json!({"id": "cmpl-5b0c", "object": "text_completion", "created": 0, "model": "ds_r1", "choices": [choice],
            "usage": null})
    );
    let last: Value = serde_json::from_str(last).expect("JSON");
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    let usage: Value = serde_json::from_str(usage).expect("JSON");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 2);
    assert_eq!(*done, "[DONE]");
}

#[tokio::test]
async fn an_end_token_at_once_loses_the_handle_unless_min_tokens_forbids_it() {
    let config = FakeConfig {
        role: Role::Prefill,
        dialect: Dialect::VllmAscend,
        model: "ds_r1".to_owned(),
        ends_at_once: true,
        ..FakeConfig::default()
    };
    let worker = FakeWorker::start(config).await.expect("start");
    let mut ask = prefill_ask();
    let (_, kept) = post(&worker, "/v1/completions", &ask).await;
    ask.as_object_mut().expect("object").remove("min_tokens");
    let (_, lost) = post(&worker, "/v1/completions", &ask).await;
    let read = |body: &str| {
        serde_json::from_str::<Value>(body).expect("JSON")["kv_transfer_params"].clone()
    };
    assert!(read(&kept).is_object());
    assert!(read(&lost).is_null());
}

#[tokio::test]
async fn a_decode_worker_fetches_and_so_frees_what_prefill_holds() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let ask =
        json!({"prompt": "a", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}});
    let (_, body) = post(&prefill, "/v1/completions", &ask).await;
    let body: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(prefill.held().len(), 1);
    let ask =
        json!({"prompt": "a", "max_tokens": 3, "kv_transfer_params": body["kv_transfer_params"]});
    post(&decode, "/v1/completions", &ask).await;
    assert_eq!((prefill.held().len(), prefill.pulls()), (0, 1));
}

#[tokio::test]
async fn faults_hit_the_requests_they_name() {
    let config = FakeConfig {
        fault: vec![
            FakeFault::nth(
                1,
                FaultKind::Status {
                    code: 429,
                    retry_after: Some(7),
                    body: None,
                },
            ),
            FakeFault::nth(2, FaultKind::Cut(20)),
            FakeFault::nth(3, FaultKind::Reset(20)),
            FakeFault::nth(4, FaultKind::ErrorEvent(1)),
        ],
        ..FakeConfig::default()
    };
    let worker = FakeWorker::start(config).await.expect("start");
    let ask = json!({"prompt": "a", "max_tokens": 3, "stream": true});
    let (head, body) = post(&worker, "/v1/completions", &ask).await;
    assert!(
        head.starts_with("HTTP/1.1 429") && head.contains("retry-after: 7"),
        "{head}"
    );
    assert!(body.contains("\"code\":429"), "{body}");
    for _ in 0..2 {
        let (head, _) = post(&worker, "/v1/completions", &ask).await;
        assert_eq!(head, "", "twenty bytes are no head");
    }
    let (_, body) = post(&worker, "/v1/completions", &ask).await;
    assert!(
        body.contains("tok0") && !body.contains("tok1") && body.contains("engine failed"),
        "{body}"
    );
    let (_, body) = post(&worker, "/v1/completions", &ask).await;
    assert!(body.contains("tok2") && body.contains("[DONE]"), "{body}");
}

#[tokio::test]
async fn a_client_that_leaves_is_seen_and_remembered() {
    let config = FakeConfig {
        token_time: 0.05,
        tokens: 1000,
        ..FakeConfig::default()
    };
    let worker = FakeWorker::start(config).await.expect("start");
    let body = json!({"prompt": "a", "stream": true}).to_string();
    let mut stream = TcpStream::connect(worker.addr()).await.expect("connect");
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream
        .write_all((head + &body).as_bytes())
        .await
        .expect("write");
    let mut byte = [0];
    stream.read_exact(&mut byte).await.expect("first byte");
    assert_eq!(worker.in_flight(), 1);
    drop(stream);
    assert!(
        worker
            .wait_until(LIMIT, |w| w.abandoned() == 1 && w.open_connections() == 0)
            .await
    );
    assert_eq!(worker.in_flight(), 0);
    assert_eq!(worker.requests()[0].json()["prompt"], "a");
    worker.stop().await;
    assert!(
        TcpStream::connect(worker.addr()).await.is_err(),
        "the port is free again"
    );
}
