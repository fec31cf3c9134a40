//! A request through a prefill and a decode instance, as vLLM's and ours speak.

use crate::common::{LIMIT, Router, fake, quick, start, wait};
use serde_json::{Value, json};
use std::time::Duration;
use twinfer_bench::fake::{
    Dialect, FakeConfig, FakeFault, FakeWorker, FaultKind, RecordedRequest, Role, Script,
};
use twinfer_config::{RouterConfig, WithoutPrefill};

fn inference(worker: &FakeWorker) -> Vec<RecordedRequest> {
    worker
        .requests()
        .into_iter()
        .filter(|r| r.nth > 0)
        .collect()
}

/// The exchange of the public prefill-first proxy with vLLM-Ascend 0.20.2, replayed: each leg gets the
/// body that the proxy sends, the client gets decode's bytes.
#[tokio::test]
async fn both_legs_get_what_the_public_proxy_sends_to_vllm_ascend() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/transcripts/completions-p-first.json"
    );
    let text = std::fs::read_to_string(path).expect("the transcript");
    let transcript: Value = serde_json::from_str(&text).expect("JSON");
    let model = |role| FakeConfig {
        model: "ds_r1".to_owned(),
        ..fake(role, Dialect::VllmAscend)
    };
    let (prefill, decode) = (
        start(model(Role::Prefill)).await,
        start(model(Role::Decode)).await,
    );
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    // With white space, so that a handle that is written anew differs from one that is passed on.
    let prefill_answer = serde_json::to_string_pretty(&transcript["prefill_answer"]).expect("JSON");
    prefill.script([whole("application/json", &prefill_answer)]);
    let events = transcript["decode_events"].as_array().expect("events");
    let mut stream: String = events
        .iter()
        .map(|event| format!("data: {event}\n\n"))
        .collect();
    stream.push_str("data: [DONE]\n\n");
    decode.script([whole("text/event-stream; charset=utf-8", &stream)]);
    let ask = transcript["client_request"].to_string();
    let headers = [
        ("content-type", "application/json"),
        ("authorization", "Bearer of-the-client"),
    ];
    let answer = router
        .send("POST", "/v1/completions", &headers, ask.as_bytes())
        .await;

    let [to_prefill] = inference(&prefill)
        .try_into()
        .expect("one request to prefill");
    let [to_decode] = inference(&decode)
        .try_into()
        .expect("one request to decode");
    let mut expected = transcript["prefill_request"].clone();
    // A list of that release's proxy, empty here; later ones have dropped it.
    expected["kv_transfer_params"]
        .as_object_mut()
        .expect("an object")
        .remove("aborted_request");
    assert_eq!(to_prefill.json(), expected);
    let (_, handle) = prefill_answer
        .split_once("\"kv_transfer_params\": ")
        .expect("a handle");
    let handle = handle
        .trim_end()
        .strip_suffix('}')
        .expect("the end")
        .trim_end();
    let body = String::from_utf8(to_decode.body.to_vec()).expect("UTF-8");
    let rest = ask.strip_suffix('}').expect("an object");
    assert_eq!(body, format!("{rest},\"kv_transfer_params\":{handle}}}"));

    let id = to_prefill.header("x-request-id").expect("an id");
    assert_eq!(to_decode.header("x-request-id"), Some(id));
    let parts: Vec<usize> = id.split('-').map(str::len).collect();
    assert_eq!(parts, [8, 4, 4, 4, 12], "a UUID of the router: {id}");
    for request in [&to_prefill, &to_decode] {
        assert_eq!(
            request.header("authorization"),
            None,
            "the client's key stays here"
        );
        assert_eq!(request.path, "/v1/completions");
        assert_eq!(request.header("content-type"), Some("application/json"));
    }
    assert_eq!(
        (answer.status, answer.whole, answer.text()),
        (200, true, stream)
    );
    assert_eq!(
        answer.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    assert_eq!(answer.header("x-twinfer-request-id"), Some(id));
    assert_eq!(answer.header("x-twinfer-decision"), Some("pair"));
}

fn whole(content_type: &str, body: &str) -> Script {
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    Script::Raw {
        pieces: vec![head.into(), body.to_owned().into()],
        gap: Duration::ZERO,
        close: false,
    }
}

/// C3.6: values of the client reach decode byte for byte; prefill gets one token by every limit.
#[tokio::test]
async fn bodies_keep_the_clients_values_and_prefill_gets_one_token() {
    let prefill = FakeWorker::prefill(Dialect::Nixl).await.expect("start");
    let decode = FakeWorker::decode(Dialect::Nixl).await.expect("start");
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    let sent = concat!(
        r#"{"model":"fake","prompt":"p","stream":true,"stream_options":{"include_usage":true},"max_tokens":500,"#,
        r#""min_tokens":100,"max_completion_tokens":500,"n":3,"logprobs":2,"prompt_logprobs":1,"echo":true,"tools":[{"type":"function"}],"#,
        r#""x_y":{"a":[1,2]},"big":1e400,"seed":9223372036854775808,"temperature":0.1,"top_p":0.10}"#
    );
    let answer = router.post_raw("/v1/completions", sent.as_bytes()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let bare = r#"{"prompt":"p"}"#;
    assert_eq!(
        router
            .post_raw("/v1/completions", bare.as_bytes())
            .await
            .status,
        200
    );

    let (to_prefill, to_decode) = (inference(&prefill), inference(&decode));
    let text = |request: &RecordedRequest| String::from_utf8(request.body.to_vec()).expect("UTF-8");
    let params = to_decode[0].json();
    assert!(
        params.is_null(),
        "1e400 is no number to this reader: {params}"
    );
    let first = text(&to_decode[0]);
    let (kept, handle) = first
        .split_once(r#","kv_transfer_params":"#)
        .expect("params at the end");
    assert_eq!(format!("{kept}}}"), sent);
    assert!(handle.contains(r#""remote_block_ids":[["#), "{handle}");
    let first = text(&to_prefill[0]);
    for part in [
        r#""stream":false"#,
        r#""max_tokens":1"#,
        r#""max_completion_tokens":1"#,
        r#""min_tokens":1"#,
        r#""n":1"#,
        r#""x_y":{"a":[1,2]}"#,
        r#""big":1e400"#,
        r#""seed":9223372036854775808"#,
        r#""top_p":0.10"#,
        r#""logprobs":2"#,
    ] {
        assert!(first.contains(part), "{part} in {first}");
    }
    for absent in ["stream_options", "prompt_logprobs", "echo"] {
        assert!(!first.contains(absent), "{absent} in {first}");
    }
    for absent in ["max_completion_tokens", "stream_options", "\"n\""] {
        assert!(
            !text(&to_prefill[1]).contains(absent),
            "{absent} in {}",
            text(&to_prefill[1])
        );
    }
    let mut keys: Vec<String> = to_decode[1]
        .json()
        .as_object()
        .expect("an object")
        .keys()
        .cloned()
        .collect();
    keys.sort_unstable();
    assert_eq!(keys, ["kv_transfer_params", "prompt"]);
}

/// C3.7: one token is one token.
#[tokio::test]
async fn one_token_is_one_token() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    for limit in ["max_tokens", "max_completion_tokens"] {
        for stream in [false, true] {
            let mut ask = json!({"messages": [{"role": "user", "content": "hi"}], "stream": stream,
                "stream_options": {"include_usage": true}});
            ask[limit] = json!(1);
            let answer = router.post("/v1/chat/completions", &ask).await;
            let (usage, finish) = if stream {
                let events: Vec<Value> = answer
                    .events()
                    .iter()
                    .filter_map(|e| serde_json::from_str(e).ok())
                    .collect();
                let finish = events
                    .iter()
                    .find_map(|e| e["choices"][0]["finish_reason"].as_str());
                let usage = events.iter().find_map(|e| e["usage"].as_object());
                (
                    usage.expect("usage")["completion_tokens"].clone(),
                    finish.map(str::to_owned),
                )
            } else {
                let body = answer.json();
                let finish = body["choices"][0]["finish_reason"]
                    .as_str()
                    .map(str::to_owned);
                (body["usage"]["completion_tokens"].clone(), finish)
            };
            assert_eq!(
                (usage, finish.as_deref()),
                (json!(1), Some("length")),
                "{limit} {stream}"
            );
        }
    }
}

/// C2.10: ids and handles that clients choose link nothing.
#[tokio::test]
async fn equal_ids_of_clients_do_not_mix_requests() {
    let text = Some("{prompt} end".to_owned());
    let prefill = start(FakeConfig {
        ttft: 0.05,
        ..fake(Role::Prefill, Dialect::Twinfer)
    })
    .await;
    let decode = start(FakeConfig {
        text,
        ..fake(Role::Decode, Dialect::Twinfer)
    })
    .await;
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    let long = "x".repeat(200);
    for id in ["same", &long, "../../a b;\"%00"] {
        let ask = |marker: &str| {
            json!({"prompt": marker, "max_tokens": 2, "request_id": id,
                "kv_transfer_params": {"do_remote_prefill": true, "remote_host": "169.254.169.254", "remote_port": 22,
                    "transfer_id": id, "remote_request_id": id}})
            .to_string()
        };
        let headers = [("content-type", "application/json"), ("x-request-id", id)];
        let (first, second) = (ask("alpha"), ask("omega"));
        let (first, second) = tokio::join!(
            router.send("POST", "/v1/completions", &headers, first.as_bytes()),
            router.send("POST", "/v1/completions", &headers, second.as_bytes()),
        );
        assert_eq!(first.json()["choices"][0]["text"], "alpha end");
        assert_eq!(second.json()["choices"][0]["text"], "omega end");
        let own = |answer: &crate::common::Answer| {
            answer.header("x-twinfer-request-id").map(str::to_owned)
        };
        assert_ne!(own(&first), own(&second));
        let echoed = first.header("x-request-id").expect("the client's id");
        assert!(
            echoed.len() <= 128 && echoed.bytes().all(|b| b.is_ascii_graphic()),
            "{echoed}"
        );
    }
    assert_eq!(prefill.held(), Vec::<String>::new());
    // C9.3: nothing that the client said of a remote has reached an instance.
    for request in inference(&prefill).iter().chain(&inference(&decode)) {
        let body = String::from_utf8_lossy(&request.body).into_owned();
        assert!(
            !body.contains("169.254") && !body.contains("transfer_id"),
            "{body}"
        );
    }
}

/// C9.3: a client's parameters are stripped on every way.
#[tokio::test]
async fn params_of_clients_are_stripped_before_a_colocated_instance_too() {
    let both = start(fake(Role::Both, Dialect::Twinfer)).await;
    let router = Router::ready(RouterConfig {
        worker: vec![both.url()],
        ..quick(&[], &[])
    })
    .await;
    let ask = r#"{"prompt":"p","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"127.0.0.1","remote_port":22},"x":1e400}"#;
    let answer = router.post_raw("/v1/completions", ask.as_bytes()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(inference(&both)[0].body, r#"{"prompt":"p","x":1e400}"#);
    assert_eq!(answer.header("x-twinfer-decision"), Some("both"));
    assert_eq!(answer.header("x-twinfer-prefill"), None);
}

#[tokio::test]
async fn the_answer_names_its_instances_and_prefill_is_free_again() {
    let named = |name: &str, role| FakeConfig {
        name: Some(name.to_owned()),
        ..fake(role, Dialect::Twinfer)
    };
    let prefill = start(named("first-half", Role::Prefill)).await;
    let decode = start(named("second-half", Role::Decode)).await;
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    let answer = router
        .post("/v1/completions", &json!({"prompt": "p"}))
        .await;
    assert_eq!(answer.header("x-twinfer-prefill"), Some("first-half"));
    assert_eq!(answer.header("x-twinfer-decode"), Some("second-half"));
    assert_eq!(
        (prefill.pulls(), prefill.releases(), prefill.held().len()),
        (1, 0, 0)
    );
    wait(|| router.idle()).await;
}

/// C2.4: prefill has finished, decode refuses.
#[tokio::test]
async fn a_request_that_decode_refuses_frees_prefill_at_once() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = start(FakeConfig {
        max_model_len: 20,
        ..fake(Role::Decode, Dialect::Twinfer)
    })
    .await;
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    // Text: how many tokens it has only decode tells.
    let ask = json!({"prompt": "p".repeat(90)});
    for _ in 0..50 {
        let answer = router.post("/v1/completions", &ask).await;
        assert_eq!(answer.status, 400);
        assert!(
            answer.text().contains("maximum context length is 20"),
            "decode's body: {}",
            answer.text()
        );
    }
    assert!(prefill.wait_until(LIMIT, |p| p.held().is_empty()).await);
    assert_eq!((prefill.releases(), prefill.pulls()), (50, 0));
    wait(|| router.idle()).await;
}

/// One of two decode instances is dead: prefill's result is kept, nothing is lost.
#[tokio::test]
async fn decode_that_is_gone_costs_neither_a_request_nor_a_second_prefill() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let dead = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let alive = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let router = Router::ready(RouterConfig {
        health_interval: 60.0,
        ..quick(&[&prefill], &[&dead, &alive])
    })
    .await;
    wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 3.0 }).await;
    dead.stop().await;
    for _ in 0..6 {
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(prefill.served(), 6, "one prefill per request");
    assert_eq!(alive.served(), 6);
}

/// Decode fails at every point before its first byte, in every way.
#[tokio::test]
async fn decode_that_fails_before_its_first_byte_is_replaced() {
    for kind in [
        FaultKind::Cut(0),
        FaultKind::Cut(60),
        FaultKind::Reset(0),
        FaultKind::Empty,
        FaultKind::ErrorEvent(0),
        FaultKind::Status {
            code: 500,
            retry_after: None,
            body: None,
        },
        FaultKind::Status {
            code: 503,
            retry_after: Some(2),
            body: None,
        },
        FaultKind::Status {
            code: 429,
            retry_after: Some(2),
            body: None,
        },
    ] {
        for stream in [false, true] {
            if kind == FaultKind::ErrorEvent(0) && !stream {
                continue;
            }
            let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
            let bad = start(FakeConfig {
                fault: vec![FakeFault::always(kind.clone())],
                ..fake(Role::Decode, Dialect::Twinfer)
            })
            .await;
            let good = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
            let router = Router::ready(quick(&[&prefill], &[&bad, &good])).await;
            wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 3.0 }).await;
            for _ in 0..2 {
                let answer = router
                    .post("/v1/completions", &json!({"prompt": "p", "stream": stream}))
                    .await;
                assert_eq!(answer.status, 200, "{kind} {stream}: {}", answer.text());
                assert!(
                    answer.text().contains("tok15"),
                    "{kind} {stream}: {}",
                    answer.text()
                );
            }
            assert!(bad.served() >= 1, "{kind}: the bad one was tried");
            assert_eq!(
                (prefill.served(), prefill.held().len()),
                (2, 0),
                "{kind} {stream}"
            );
            wait(|| router.idle()).await;
        }
    }
}

#[tokio::test]
async fn prefill_that_fails_is_replaced() {
    for kind in [
        FaultKind::Cut(0),
        FaultKind::Cut(150),
        FaultKind::Reset(20),
        FaultKind::Empty,
        FaultKind::Status {
            code: 500,
            retry_after: None,
            body: None,
        },
        FaultKind::Status {
            code: 503,
            retry_after: None,
            body: None,
        },
    ] {
        let bad = start(FakeConfig {
            fault: vec![FakeFault::always(kind.clone())],
            ..fake(Role::Prefill, Dialect::Twinfer)
        })
        .await;
        let good = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
        let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
        let router = Router::ready(quick(&[&bad, &good], &[&decode])).await;
        wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 3.0 }).await;
        for _ in 0..2 {
            let answer = router
                .post("/v1/completions", &json!({"prompt": "p"}))
                .await;
            assert_eq!(answer.status, 200, "{kind}: {}", answer.text());
            assert_eq!(answer.header("x-twinfer-decision"), Some("pair"));
        }
        assert!(bad.served() >= 1, "{kind}: the bad one was tried");
        assert_eq!(good.pulls(), 2, "{kind}");
        wait(|| router.idle()).await;
    }
}

#[tokio::test]
async fn prefill_without_handle_lets_decode_compute_and_is_counted() {
    let prefill = start(FakeConfig {
        fault: vec![FakeFault::always(FaultKind::NoParams)],
        ..fake(Role::Prefill, Dialect::Twinfer)
    })
    .await;
    let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    let answer = router
        .post("/v1/completions", &json!({"prompt": "p"}))
        .await;
    assert_eq!(
        (answer.status, answer.header("x-twinfer-decision")),
        (200, Some("no_handle"))
    );
    assert_eq!(inference(&decode)[0].json(), json!({"prompt": "p"}));
    assert_eq!(
        router
            .metric("twinfer_router_pd_decision_total", &["no_handle"])
            .await,
        1.0
    );
}

/// One handle covers one prompt.
#[tokio::test]
async fn several_prompts_go_to_one_instance() {
    let prefill = FakeWorker::prefill(Dialect::VllmAscend)
        .await
        .expect("start");
    let decode = FakeWorker::decode(Dialect::VllmAscend)
        .await
        .expect("start");
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    let answer = router
        .post("/v1/completions", &json!({"prompt": ["a", "b"]}))
        .await;
    assert_eq!(
        (answer.status, answer.header("x-twinfer-decision")),
        (200, Some("several_prompts"))
    );
    assert_eq!((prefill.served(), decode.served()), (0, 1));
}

/// No prefill instance is up.
#[tokio::test]
async fn without_prefill_requests_are_refused_or_served_by_decode_as_configured() {
    for (without_prefill, status) in [(WithoutPrefill::Refuse, 503), (WithoutPrefill::Decode, 200)]
    {
        let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
        let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
        let router = Router::ready(RouterConfig {
            without_prefill,
            ..quick(&[&prefill], &[&decode])
        })
        .await;
        assert_eq!(
            router
                .post("/v1/completions", &json!({"prompt": "p"}))
                .await
                .status,
            200
        );
        prefill.stop().await;
        for round in 0..2 {
            // The first meets the refused connection, the second knows.
            let answer = router
                .post("/v1/completions", &json!({"prompt": "p"}))
                .await;
            if status == 200 {
                assert_eq!(answer.status, 200, "{}", answer.text());
            } else {
                let expected = if round == 0 { 502 } else { 503 };
                assert_eq!(answer.status, expected, "{}", answer.text());
                let code = if round == 0 {
                    "prefill_unreachable"
                } else {
                    "no_instance"
                };
                assert_eq!(answer.code(), code);
                assert_eq!(answer.header("retry-after").is_some(), round == 1);
            }
        }
        let degraded = router
            .metric("twinfer_router_pd_decision_total", &["without_prefill"])
            .await;
        assert_eq!(degraded > 0.0, status == 200);
        wait(|| router.idle()).await;
    }
}

#[tokio::test]
async fn instances_of_different_fingerprints_are_never_paired() {
    let of = |model: &str, role| FakeConfig {
        model: model.to_owned(),
        ..fake(role, Dialect::Twinfer)
    };
    let (p1, d1) = (
        start(of("one", Role::Prefill)).await,
        start(of("one", Role::Decode)).await,
    );
    let (p2, d2) = (
        start(of("two", Role::Prefill)).await,
        start(of("two", Role::Decode)).await,
    );
    let router = Router::ready(quick(&[&p1, &p2], &[&d1, &d2])).await;
    wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 4.0 }).await;
    for _ in 0..4 {
        for model in ["one", "two"] {
            let answer = router
                .post("/v1/completions", &json!({"prompt": "p", "model": model}))
                .await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }
    assert_eq!(
        [p1.pulls(), p2.pulls(), d1.served(), d2.served()],
        [4, 4, 4, 4]
    );
    let unknown = router
        .post("/v1/completions", &json!({"prompt": "p", "model": "three"}))
        .await;
    assert_eq!(
        (unknown.status, unknown.code().as_str()),
        (404, "model_not_found")
    );
    assert_eq!(unknown.json()["error"]["param"], "model");
    let unnamed = router
        .post("/v1/completions", &json!({"prompt": "p"}))
        .await;
    assert_eq!(
        (unnamed.status, unnamed.json()["error"]["param"].as_str()),
        (400, Some("model"))
    );
    let list = router.get("/v1/models").await.json();
    let ids: Vec<&str> = list["data"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|m| m["id"].as_str())
        .collect();
    assert_eq!(ids, ["one", "two"]);
}

/// C2.5 and C2.7 at the router: decode could not get the KV. Another pair computes the prompt again; where
/// there is none the client learns the reason.
#[tokio::test]
async fn a_lost_handoff_is_tried_on_another_pair_and_its_reason_is_kept() {
    for code in [
        "kv_stale",
        "kv_corrupt",
        "kv_mismatch",
        "kv_transfer_failed",
    ] {
        let body = format!(
            "{{\"error\":{{\"message\":\"m\",\"type\":\"server_error\",\"param\":null,\"code\":\"{code}\"}}}}"
        );
        let lost = |first| FakeFault {
            first,
            last: first,
            kind: FaultKind::Status {
                code: 502,
                retry_after: None,
                body: Some(body.clone()),
            },
        };
        let (p1, p2) = (
            FakeWorker::prefill(Dialect::Twinfer).await.expect("start"),
            FakeWorker::prefill(Dialect::Twinfer).await.expect("start"),
        );
        let decode = start(FakeConfig {
            fault: vec![lost(1)],
            ..fake(Role::Decode, Dialect::Twinfer)
        })
        .await;
        let router = Router::ready(quick(&[&p1, &p2], &[&decode])).await;
        wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 3.0 }).await;
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await;
        assert_eq!(answer.status, 200, "{code}: {}", answer.text());
        assert_eq!(
            (p1.served(), p2.served()),
            (1, 1),
            "the prompt was computed again elsewhere"
        );
        for prefill in [&p1, &p2] {
            assert!(prefill.wait_until(LIMIT, |p| p.held().is_empty()).await);
        }

        let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
        let decode = start(FakeConfig {
            fault: vec![lost(1)],
            ..fake(Role::Decode, Dialect::Twinfer)
        })
        .await;
        let router = Router::ready(quick(&[&prefill], &[&decode])).await;
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p", "stream": true}))
            .await;
        assert_eq!((answer.status, answer.text()), (502, body.clone()));
        assert_eq!(
            router.metric("twinfer_router_errors_total", &[code]).await,
            1.0
        );
        assert!(
            prefill
                .wait_until(LIMIT, |p| p.held().is_empty() && p.releases() == 1)
                .await
        );
    }
}

/// Instances that all have no room: the client gets their answer, not that of a broken one.
#[tokio::test]
async fn no_room_anywhere_says_when_to_come_back() {
    let busy = |seconds| {
        vec![FakeFault::always(FaultKind::Status {
            code: 429,
            retry_after: Some(seconds),
            body: None,
        })]
    };
    let broken = vec![FakeFault::always(FaultKind::Cut(0))];
    let p1 = start(FakeConfig {
        fault: busy(3),
        ..fake(Role::Prefill, Dialect::Twinfer)
    })
    .await;
    let p2 = start(FakeConfig {
        fault: broken,
        ..fake(Role::Prefill, Dialect::Twinfer)
    })
    .await;
    let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let router = Router::ready(quick(&[&p1, &p2], &[&decode])).await;
    wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 3.0 }).await;
    for _ in 0..2 {
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await;
        assert_eq!(
            (answer.status, answer.header("retry-after")),
            (429, Some("3")),
            "{}",
            answer.text()
        );
    }
    assert_eq!(decode.served(), 0);
}

#[tokio::test]
async fn an_instance_of_role_both_serves_what_a_busy_pair_refuses() {
    let busy = || {
        vec![FakeFault::always(FaultKind::Status {
            code: 429,
            retry_after: Some(3),
            body: None,
        })]
    };
    for role in [Role::Prefill, Role::Decode] {
        let of = |own| FakeConfig {
            fault: if own == role { busy() } else { Vec::new() },
            ..fake(own, Dialect::Twinfer)
        };
        let (prefill, decode) = (
            start(of(Role::Prefill)).await,
            start(of(Role::Decode)).await,
        );
        let both = start(fake(Role::Both, Dialect::Twinfer)).await;
        let router = Router::ready(RouterConfig {
            worker: vec![both.url()],
            ..quick(&[&prefill], &[&decode])
        })
        .await;
        wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 3.0 }).await;
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await;
        assert_eq!(
            (answer.status, answer.header("x-twinfer-decision")),
            (200, Some("both")),
            "{role}: {}",
            answer.text()
        );
        assert_eq!(both.served(), 1);
        wait(|| router.idle()).await;
    }
}

#[tokio::test]
async fn a_prompt_that_decode_is_too_short_for_is_not_computed() {
    let of = |role, max_model_len| FakeConfig {
        max_model_len,
        ..fake(role, Dialect::Twinfer)
    };
    let prefill = start(of(Role::Prefill, 64)).await;
    let decode = start(of(Role::Decode, 16)).await;
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    let ask = |prompt: usize, output: u32| {
        let ids = vec![7; prompt];
        let router = &router;
        async move {
            let body = json!({"prompt": ids, "max_tokens": output});
            router.post("/v1/completions", &body).await
        }
    };
    assert_eq!(ask(12, 4).await.status, 200);
    let served = prefill.served();
    for (prompt, output) in [(16, 1), (30, 1), (12, 5)] {
        let answer = ask(prompt, output).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (400, "context_length_exceeded")
        );
    }
    assert_eq!(prefill.served(), served);
}
