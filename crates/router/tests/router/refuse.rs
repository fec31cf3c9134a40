//! Errors: of clients, of instances, of the router.

use crate::common::{LIMIT, Router, fake, quick, start, wait};
use bytes::Bytes;
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use twinfer_bench::fake::{Dialect, FakeConfig, FakeFault, FakeWorker, FaultKind, Role, Script};
use twinfer_config::RouterConfig;

async fn pair() -> (FakeWorker, FakeWorker, Router) {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    (prefill, decode, router)
}

/// C3.4: an instance's error reaches the client as it is, from either leg.
#[tokio::test]
async fn errors_of_instances_keep_status_body_and_retry_after() {
    for on_prefill in [true, false] {
        for (code, retry_after) in [
            (400, None),
            (404, None),
            (422, None),
            (429, Some(7)),
            (503, Some(9)),
        ] {
            let body = format!(
                "{{\"error\": {{\"message\": \"m{code}\", \"type\": \"t\", \"param\": null, \"code\": {code}}}}}"
            );
            let fault = vec![FakeFault::always(FaultKind::Status {
                code,
                retry_after,
                body: Some(body.clone()),
            })];
            let (p, d) = if on_prefill {
                (fault, vec![])
            } else {
                (vec![], fault)
            };
            let prefill = start(FakeConfig {
                fault: p,
                ..fake(Role::Prefill, Dialect::Twinfer)
            })
            .await;
            let decode = start(FakeConfig {
                fault: d,
                ..fake(Role::Decode, Dialect::Twinfer)
            })
            .await;
            let router = Router::ready(quick(&[&prefill], &[&decode])).await;
            for stream in [false, true] {
                let answer = router
                    .post("/v1/completions", &json!({"prompt": "p", "stream": stream}))
                    .await;
                assert_eq!(
                    (answer.status, answer.text()),
                    (code, body.clone()),
                    "prefill {on_prefill}, stream {stream}"
                );
                assert_eq!(answer.header("content-type"), Some("application/json"));
                assert_eq!(
                    answer.header("content-length"),
                    Some(body.len().to_string().as_str())
                );
                assert_eq!(
                    answer.header("retry-after").map(str::to_owned),
                    retry_after.map(|s| s.to_string())
                );
            }
            if on_prefill {
                assert_eq!(
                    decode.served(),
                    0,
                    "decode is not asked when prefill refuses"
                );
            }
            assert!(prefill.wait_until(LIMIT, |p| p.held().is_empty()).await);
            wait(|| router.idle()).await;
        }
    }
}

/// C3.17: bad bodies are refused before any instance is asked.
#[tokio::test]
async fn bad_bodies_reach_no_instance() {
    let (prefill, decode, router) = pair().await;
    let chat = "/v1/chat/completions";
    let deep = format!(
        "{{\"messages\":{}{}}}",
        "[".repeat(10_000),
        "]".repeat(10_000)
    );
    for (path, body, status) in [
        (chat, &b""[..], 400),
        (chat, b"[]", 400),
        (chat, b"\"a\"", 400),
        (chat, b"{\"messages\":[", 400),
        (chat, b"{\"messages\":\"\xff\"}", 400),
        (chat, b"{}", 400),
        (chat, b"{\"messages\":null}", 400),
        (chat, b"{\"messages\":\"hi\"}", 400),
        (chat, b"{\"messages\":[],\"messages\":[]}", 400),
        (chat, deep.as_bytes(), 400),
        ("/v1/completions", b"{}", 400),
        ("/v1/completions", b"{\"prompt\":\"p\",\"model\":7}", 400),
        (
            "/v1/completions",
            b"{\"prompt\":\"p\",\"model\":\"other\"}",
            404,
        ),
    ] {
        let answer = router.post_raw(path, body).await;
        let shown = String::from_utf8_lossy(body.get(..60).unwrap_or(body)).into_owned();
        assert_eq!(answer.status, status, "{shown}: {}", answer.text());
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert!(
            !answer.code().is_empty() && answer.json()["error"]["message"].is_string(),
            "{shown}"
        );
    }
    let typed = |content_type: &'static str| [("content-type", content_type)];
    let body = br#"{"prompt":"p"}"#;
    let answer = router
        .send("POST", "/v1/completions", &typed("text/plain"), body)
        .await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (415, "unsupported_media_type")
    );
    for path in ["/v1/completions", chat, "/tokenize"] {
        let answer = router.get(path).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (405, "method_not_allowed")
        );
        assert_eq!(answer.header("allow"), Some("POST"));
    }
    assert_eq!(router.post("/health", &json!({})).await.status, 405);
    assert_eq!(router.get("/nothing/here").await.code(), "not_found");
    assert_eq!((prefill.served(), decode.served()), (0, 0));
    assert!(router.idle().await);
}

/// C3.9: long prompts pass, by length and by chunks, and beyond the limit there is an answer.
#[tokio::test]
async fn long_bodies_pass_unchanged_up_to_the_limit() {
    let config = |role| FakeConfig {
        max_model_len: u32::MAX,
        ..fake(role, Dialect::Twinfer)
    };
    let prefill = start(config(Role::Prefill)).await;
    let decode = start(config(Role::Decode)).await;
    let router = Router::ready(RouterConfig {
        max_body_bytes: 17 << 20,
        ..quick(&[&prefill], &[&decode])
    })
    .await;
    for (size, expect) in [(1_900_000, false), (2_100_000, true), (16 << 20, false)] {
        let prompt = "long \u{e9} ".repeat(size / 8);
        let body = json!({"prompt": prompt, "max_tokens": 1}).to_string();
        let headers: &[(&str, &str)] = if expect {
            &[("expect", "100-continue")]
        } else {
            &[]
        };
        let answer = if expect {
            let mut stream = router.open("POST", "/v1/completions", headers, b"").await;
            drop(stream.shutdown().await);
            // By hand: the head with its length, the go-ahead, then the body.
            let mut stream = tokio::net::TcpStream::connect(router.addr)
                .await
                .expect("connect");
            let head = format!(
                "POST /v1/completions HTTP/1.1\r\nhost: r\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            stream.write_all(head.as_bytes()).await.expect("head");
            let mut go = [0; 25];
            tokio::io::AsyncReadExt::read_exact(&mut stream, &mut go)
                .await
                .expect("a go-ahead");
            assert!(go.starts_with(b"HTTP/1.1 100"));
            stream.write_all(body.as_bytes()).await.expect("body");
            crate::common::read_answer(&mut stream).await
        } else {
            router.post_raw("/v1/completions", body.as_bytes()).await
        };
        assert_eq!(answer.status, 200, "{size}: {}", answer.text());
        let last = decode.requests().pop().expect("a request");
        assert_eq!(
            last.json()["prompt"].as_str().map(str::len),
            Some(prompt.len())
        );
        assert!(
            last.json()["prompt"] == json!(prompt),
            "{size}: the prompt changed"
        );
    }
    // Chunked upload.
    let body = json!({"prompt": "x".repeat(2_500_000), "max_tokens": 1}).to_string();
    let mut stream = tokio::net::TcpStream::connect(router.addr)
        .await
        .expect("connect");
    stream
        .write_all(
            b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n",
        )
        .await
        .expect("head");
    for piece in body.as_bytes().chunks(100_000) {
        stream
            .write_all(format!("{:x}\r\n", piece.len()).as_bytes())
            .await
            .expect("size");
        stream.write_all(piece).await.expect("piece");
        stream.write_all(b"\r\n").await.expect("end");
    }
    stream.write_all(b"0\r\n\r\n").await.expect("last");
    assert_eq!(crate::common::read_answer(&mut stream).await.status, 200);

    let served = (prefill.served(), decode.served());
    let body = json!({"prompt": "x".repeat(18 << 20)}).to_string();
    let answer = router.post_raw("/v1/completions", body.as_bytes()).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (413, "payload_too_large")
    );
    assert_eq!((prefill.served(), decode.served()), served);
}

/// More requests than the cap: 429 at once, and room again afterwards.
#[tokio::test]
async fn requests_beyond_the_cap_are_refused_at_once() {
    let prefill = start(FakeConfig {
        ttft: 0.5,
        ..fake(Role::Prefill, Dialect::Twinfer)
    })
    .await;
    let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let router = Router::ready(RouterConfig {
        max_inflight: 4,
        ..quick(&[&prefill], &[&decode])
    })
    .await;
    let ask = json!({"prompt": "p", "stream": true});
    let all =
        futures_util::future::join_all((0..20).map(|_| router.post("/v1/completions", &ask))).await;
    let served = all.iter().filter(|a| a.status == 200).count();
    let refused: Vec<_> = all.iter().filter(|a| a.status == 429).collect();
    assert_eq!((served, refused.len()), (4, 16));
    for answer in refused {
        assert_eq!(
            (answer.code().as_str(), answer.header("retry-after")),
            ("overloaded", Some("1"))
        );
    }
    wait(|| router.idle()).await;
    assert_eq!(router.post("/v1/completions", &ask).await.status, 200);
    assert_eq!(prefill.served(), 5);
}

fn key_file(key: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(key.as_bytes()).expect("write");
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o600)).expect("mode");
    file
}

/// C9.1: the client's key opens every route but health, readiness and metrics; instances get another.
#[tokio::test]
async fn keys_of_clients_and_of_instances_are_two() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let (client, peer) = (key_file("client-key\n"), key_file("peer-key"));
    let router = Router::ready(RouterConfig {
        api_key_file: Some(client.path().to_owned()),
        peer_key_file: Some(peer.path().to_owned()),
        ..quick(&[&prefill], &[&decode])
    })
    .await;
    let body = br#"{"prompt":"p"}"#;
    for path in [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
    ] {
        let method = if path == "/v1/models" { "GET" } else { "POST" };
        for headers in [
            &[][..],
            &[("authorization", "Bearer wrong")],
            &[("authorization", "client-key")],
            &[("x-api-key", "client-key")],
        ] {
            let answer = router.send(method, path, headers, body).await;
            assert_eq!(
                (answer.status, answer.code().as_str()),
                (401, "invalid_api_key"),
                "{path} {headers:?}"
            );
        }
        let answer = router
            .send(method, &format!("{path}?api_key=client-key"), &[], body)
            .await;
        assert_eq!(answer.status, 401);
    }
    assert_eq!((prefill.served(), decode.served()), (0, 0));
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(router.get(path).await.status, 200, "{path}");
    }
    let answer = router
        .send(
            "POST",
            "/v1/completions",
            &[("authorization", "Bearer client-key")],
            body,
        )
        .await;
    assert_eq!(answer.status, 200);
    for request in prefill.requests().iter().chain(&decode.requests()) {
        assert_eq!(
            request.header("authorization"),
            Some("Bearer peer-key"),
            "{}",
            request.path
        );
    }
    let metrics = router.get("/metrics").await.text();
    assert!(!metrics.contains("client-key") && !metrics.contains("peer-key"));
}

/// Prefill answers with nonsense in every form.
#[tokio::test]
async fn nonsense_from_prefill_is_an_error_that_names_it() {
    let (prefill, decode, router) = pair().await;
    for (body, said) in [
        ("", "empty"),
        ("[1]", "object"),
        ("{\"kv_transfer_params\":7}", "no object"),
        ("{\"kv_transfer_params\":\"x\"}", "no object"),
        ("{\"half\":", "JSON"),
        ("<html>", "JSON"),
    ] {
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        prefill.script([Script::Raw {
            pieces: vec![Bytes::from(head)],
            gap: Duration::ZERO,
            close: false,
        }]);
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (502, "prefill_failed"),
            "{body}: {}",
            answer.text()
        );
        assert!(answer.text().contains(said), "{body}: {}", answer.text());
    }
    assert_eq!(decode.served(), 0);
}

/// C8.9: nothing that clients choose makes a series.
#[tokio::test]
async fn labels_do_not_grow_with_what_clients_send() {
    let (_prefill, _decode, router) = pair().await;
    router.get("/x").await;
    router
        .post("/v1/completions", &json!({"prompt": "p", "model": "m"}))
        .await;
    router
        .post("/v1/completions", &json!({"prompt": "p"}))
        .await;
    let series = |text: &str| text.lines().filter(|l| !l.starts_with('#')).count();
    router.get("/metrics").await;
    let before = series(&router.get("/metrics").await.text());
    for i in 0..200 {
        router.get(&format!("/path-{i}")).await;
        router
            .post(
                "/v1/completions",
                &json!({"prompt": "p", "model": format!("m{i}"), "user": i}),
            )
            .await;
    }
    let after = series(&router.get("/metrics").await.text());
    assert_eq!(before, after);
}

/// `/v1/models`, `/tokenize`, `/detokenize`.
#[tokio::test]
async fn other_routes_pass_through() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = start(FakeConfig {
        max_model_len: 8192,
        ..fake(Role::Decode, Dialect::Twinfer)
    })
    .await;
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 2.0 }).await;
    let models = router.get("/v1/models").await.json();
    let [model]: &[Value; 1] = models["data"]
        .as_array()
        .expect("a list")
        .as_slice()
        .try_into()
        .expect("one entry");
    assert_eq!(model["id"], "fake");
    assert_eq!(model["owned_by"], "vllm");
    assert_eq!(model["max_model_len"], 8192, "what holds through the pair");
    assert_eq!(&router.get("/v1/models/fake").await.json(), model);
    assert_eq!(&router.get("/v1/models/%66ake").await.json(), model);
    for (path, name) in [("other", "other"), ("org%2Fa/b", "org/a/b"), ("", "")] {
        let answer = router.get(&format!("/v1/models/{path}")).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (404, "model_not_found")
        );
        let message = answer.text();
        assert!(
            message.contains(name) && message.contains(r#"there is \"fake\""#),
            "{message}"
        );
    }
    let answer = router.post("/tokenize", &json!({"prompt": "abc"})).await;
    assert!(
        answer.json()["count"].as_u64().is_some_and(|n| n > 0),
        "{}",
        answer.text()
    );
    assert_eq!(
        router
            .post("/detokenize", &json!({"tokens": [1]}))
            .await
            .json()["prompt"],
        "fake"
    );
    assert_eq!((prefill.served(), decode.served()), (0, 0));
}
