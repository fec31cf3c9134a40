//! Streams pass as they came, and end with a terminal event whatever happens.

use crate::common::{LIMIT, Router, fake, quick, read_answer, start, wait};
use bytes::Bytes;
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use twinfer_bench::fake::{Dialect, FakeConfig, FakeFault, FakeWorker, FaultKind, Role, Script};
use twinfer_config::RouterConfig;

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

/// One event of every kind that has broken a proxy.
fn recorded() -> Vec<u8> {
    let mut stream = Vec::new();
    for (index, text) in [
        "你好，世界",
        "🦀🚀",
        "data: [DONE]",
        "[DONE]",
        "data: [DONE]\\n\\n",
        "é",
        "",
        "{\\\"error\\\": 1}",
    ]
    .iter()
    .enumerate()
    {
        let end = ["\n\n", "\r\n\r\n"][index % 2];
        stream.extend_from_slice(
            format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{text}\"}}]}}{end}").as_bytes(),
        );
        if index % 3 == 0 {
            stream.extend_from_slice(b": keep-alive\n\n");
        }
    }
    stream.extend_from_slice(b"event: message\nid: 7\ndata: {\"a\":\ndata: 1}\n\n");
    stream.extend_from_slice(b"data: [DONE]\n\n");
    stream
}

fn chunk(data: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat()
}

/// An answer whose body leaves in these pieces, each a chunk and a write of its own.
fn chunked(pieces: &[&[u8]], gap: Duration) -> Script {
    let mut out = vec![Bytes::from_static(HEAD.as_bytes())];
    out.extend(
        pieces
            .iter()
            .filter(|p| !p.is_empty())
            .map(|piece| Bytes::from(chunk(piece))),
    );
    out.push(Bytes::from_static(b"0\r\n\r\n"));
    Script::Raw {
        pieces: out,
        gap,
        close: false,
    }
}

async fn pair() -> (FakeWorker, FakeWorker, Router) {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    (prefill, decode, router)
}

fn ask() -> serde_json::Value {
    json!({"prompt": "p", "stream": true})
}

/// C3.1, C3.2: the bytes are the same wherever the network cuts them.
#[tokio::test]
async fn bytes_are_the_same_whatever_the_splits() {
    let (_prefill, decode, router) = pair().await;
    let stream = recorded();
    let none = Duration::ZERO;
    let mut scripts = vec![chunked(&[&stream], none)];
    scripts.push(chunked(&stream.chunks(1).collect::<Vec<_>>(), none));
    for at in 1..stream.len() {
        let (first, second) = stream.split_at(at);
        scripts.push(chunked(&[first, second], none));
    }
    // Slow enough that each piece is an arrival of its own.
    let end = stream.len() - b"data: [DONE]\n\n".len();
    for at in end..stream.len() {
        let (first, second) = stream.split_at(at);
        scripts.push(chunked(&[first, second], Duration::from_millis(2)));
    }
    // The framing itself is cut too.
    let mut framed = HEAD.as_bytes().to_vec();
    framed.extend(chunk(&stream));
    framed.extend(b"0\r\n\r\n");
    for size in [1, 7, 100] {
        let pieces = framed.chunks(size).map(Bytes::copy_from_slice).collect();
        scripts.push(Script::Raw {
            pieces,
            gap: none,
            close: false,
        });
    }
    for (number, script) in scripts.into_iter().enumerate() {
        decode.script([script]);
        let answer = router.post("/v1/completions", &ask()).await;
        assert!(answer.whole, "script {number}");
        assert_eq!(
            answer.text(),
            String::from_utf8_lossy(&stream),
            "script {number}"
        );
    }
    wait(|| router.idle()).await;
    // The connections were kept: no split was taken for an end.
    assert!(decode.connections().len() < 20 + 2 * decode.served() as usize);
}

/// C3.1: what looks like the terminator inside of text does not end the stream.
#[tokio::test]
async fn only_a_real_terminator_ends_a_stream() {
    let (_prefill, decode, router) = pair().await;
    let before = "data: {\"text\":\"data: [DONE]\"}\n\ndata: \"[DONE]\"\n\n";
    let after = "data: {\"text\":\"more\"}\n\n";
    decode.script([chunked(
        &[
            before.as_bytes(),
            after.as_bytes(),
            b"data: [DO",
            b"NE]\n",
            b"\n",
        ],
        Duration::from_millis(20),
    )]);
    let answer = router.post("/v1/completions", &ask()).await;
    assert_eq!(answer.text(), format!("{before}{after}data: [DONE]\n\n"));
}

/// Events reach the client when they come, not when the stream ends.
#[tokio::test]
async fn events_are_not_held_back() {
    let (_prefill, decode, router) = pair().await;
    let first = b"data: {\"n\":1}\n\n";
    decode.script([chunked(
        &[first, b"data: {\"n\":2}\n\n", b"data: [DONE]\n\n"],
        Duration::from_millis(300),
    )]);
    let start = std::time::Instant::now();
    let mut stream = router
        .open("POST", "/v1/completions", &[], ask().to_string().as_bytes())
        .await;
    let mut seen = Vec::new();
    while !seen.windows(first.len()).any(|w| w == first) {
        assert!(stream.read_buf(&mut seen).await.expect("bytes") > 0);
    }
    assert!(!String::from_utf8_lossy(&seen).contains("\"n\":2"));
    assert!(
        start.elapsed() < Duration::from_millis(600),
        "{:?}",
        start.elapsed()
    );
}

/// Decode dies in the middle of a stream, on and between the borders of events.
#[tokio::test]
async fn a_stream_that_breaks_ends_with_an_error_event_and_done() {
    let (_prefill, decode, router) = pair().await;
    let events = ["data: {\"n\":1}\n\n", "data: {\"n\":2}\n\n"];
    for cut in 0..=events[1].len() {
        let body = format!("{}{}", events[0], &events[1][..cut]);
        let pieces = vec![
            Bytes::from_static(HEAD.as_bytes()),
            Bytes::from(chunk(body.as_bytes())),
        ];
        decode.script([Script::Raw {
            pieces,
            gap: Duration::ZERO,
            close: true,
        }]);
        let answer = router.post("/v1/completions", &ask()).await;
        assert_eq!((answer.status, answer.whole), (200, true), "cut {cut}");
        let got = answer.events();
        let whole = if cut == events[1].len() { 2 } else { 1 };
        assert_eq!(got.len(), whole + 2, "cut {cut}: {got:?}");
        let error: serde_json::Value = serde_json::from_str(&got[whole]).expect("JSON");
        assert_eq!(error["error"]["code"], "decode_failed", "cut {cut}");
        assert_eq!(error["error"]["type"], "server_error");
        assert_eq!(got.last().map(String::as_str), Some("[DONE]"));
    }
    wait(|| router.idle()).await;
    let broken = router
        .metric(
            "twinfer_router_errors_total",
            &["code=\"decode_failed\"", "fault=\"decode\""],
        )
        .await;
    assert_eq!(broken as usize, events[1].len() + 1);
}

/// An end that is properly framed but has no terminal event is a break as well.
#[tokio::test]
async fn a_stream_that_ends_without_done_is_told() {
    let (_prefill, decode, router) = pair().await;
    decode.script([chunked(&[b"data: {\"n\":1}\n\n"], Duration::ZERO)]);
    let answer = router.post("/v1/completions", &ask()).await;
    let events = answer.events();
    assert_eq!(events.len(), 3, "{events:?}");
    assert!(events[1].contains("decode_failed"), "{events:?}");
    // Some servers leave out the blank line behind the terminator.
    let bare = b"data: {\"n\":1}\n\ndata: [DONE]\n";
    decode.script([chunked(&[bare], Duration::ZERO)]);
    assert_eq!(router.post("/v1/completions", &ask()).await.body, bare);
}

/// An error that decode itself puts into the stream reaches the client as it is.
#[tokio::test]
async fn an_error_event_of_decode_passes_and_the_stream_is_ended() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let config = FakeConfig {
        fault: vec![FakeFault::nth(1, FaultKind::ErrorEvent(2))],
        ..fake(Role::Decode, Dialect::Twinfer)
    };
    let decode = start(config).await;
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    let events = router.post("/v1/completions", &ask()).await.events();
    assert_eq!(events.len(), 4, "{events:?}");
    assert!(events[2].contains("engine failed"), "{events:?}");
    assert_eq!(events[3], "[DONE]");
    let error = "data: {\"error\":{\"message\":\"m\",\"code\":500}}\n\n";
    let body = format!("data: {{\"n\":1}}\n\n{error}");
    decode.script([chunked(&[body.as_bytes()], Duration::ZERO)]);
    assert_eq!(
        router.post("/v1/completions", &ask()).await.text(),
        format!("{body}data: [DONE]\n\n")
    );
}

#[tokio::test]
async fn a_stream_that_falls_silent_is_ended() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = start(FakeConfig {
        fault: vec![FakeFault::always(FaultKind::Hang(800))],
        ..fake(Role::Decode, Dialect::Twinfer)
    })
    .await;
    let router = Router::ready(RouterConfig {
        idle_timeout: 0.3,
        ..quick(&[&prefill], &[&decode])
    })
    .await;
    let answer = router.post("/v1/completions", &ask()).await;
    assert!(
        answer.whole && answer.text().contains("nothing came for 0.3 s"),
        "{}",
        answer.text()
    );
    assert!(
        decode.wait_until(LIMIT, |d| d.in_flight() == 0).await,
        "decode's connection is closed"
    );
    wait(|| router.idle()).await;
}

/// Time passes between events, but never as long as the limit.
#[tokio::test]
async fn a_slow_stream_is_no_silent_one() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = start(FakeConfig {
        token_time: 0.1,
        tokens: 8,
        ..fake(Role::Decode, Dialect::Twinfer)
    })
    .await;
    let router = Router::ready(RouterConfig {
        idle_timeout: 0.4,
        ..quick(&[&prefill], &[&decode])
    })
    .await;
    let answer = router.post("/v1/completions", &ask()).await;
    assert!(
        answer.text().contains("tok7") && !answer.text().contains("error"),
        "{}",
        answer.text()
    );
}

/// Decode that hangs before its first byte, and prefill that hangs at all.
#[tokio::test]
async fn legs_that_hang_end_at_their_deadline() {
    for (slow_prefill, code) in [(true, "timeout"), (false, "timeout")] {
        let hang = vec![FakeFault::always(FaultKind::Hang(0))];
        let (p, d) = if slow_prefill {
            (hang, vec![])
        } else {
            (vec![], hang)
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
        let config = RouterConfig {
            prefill_timeout: 0.3,
            first_byte_timeout: 0.3,
            ..quick(&[&prefill], &[&decode])
        };
        let router = Router::ready(config).await;
        let answer = router.post("/v1/completions", &ask()).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (504, code),
            "{}",
            answer.text()
        );
        for worker in [&prefill, &decode] {
            assert!(worker.wait_until(LIMIT, |w| w.in_flight() == 0).await);
        }
        assert!(
            prefill.wait_until(LIMIT, |p| p.held().is_empty()).await,
            "released"
        );
        wait(|| router.idle()).await;
    }
}

/// A body that is no stream and breaks off is an error answer, not half a body.
#[tokio::test]
async fn an_answer_that_breaks_off_becomes_an_error() {
    let (_prefill, decode, router) = pair().await;
    for (pieces, said) in [
        (
            vec![
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"half\":",
            ],
            "broken",
        ),
        (
            vec![
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 8\r\n\r\n{\"half\":",
            ],
            "no JSON",
        ),
        (
            vec!["HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 0\r\n\r\n"],
            "empty",
        ),
        (
            vec!["HTTP/1.1 500 Oops\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nOops!"],
            "Oops!",
        ),
        (vec!["SSH-2.0-OpenSSH_9.2\r\n"], "broken"),
    ] {
        let pieces = pieces.into_iter().map(Bytes::from).collect();
        decode.script([Script::Raw {
            pieces,
            gap: Duration::ZERO,
            close: true,
        }]);
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await;
        assert_eq!(answer.status, 502, "{}", answer.text());
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert!(answer.text().contains(said), "{said}: {}", answer.text());
    }
}

/// C3.8: headers and encodings.
#[tokio::test]
async fn headers_of_one_connection_stay_there_and_the_others_pass() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let header = [
        "connection: keep-alive, x-private",
        "keep-alive: timeout=5",
        "x-private: 1",
        "set-cookie: a=b",
        "date: Thu, 01 Jan 1970 00:00:00 GMT",
        "x-own: kept",
    ];
    let decode = start(FakeConfig {
        header: header.iter().map(|&h| h.to_owned()).collect(),
        ..fake(Role::Decode, Dialect::Twinfer)
    })
    .await;
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    for stream in [false, true] {
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p", "stream": stream}))
            .await;
        let count = |name: &str| answer.headers.iter().filter(|(n, _)| n == name).count();
        assert_eq!(
            (
                count("server"),
                count("date"),
                count("set-cookie"),
                count("x-own")
            ),
            (1, 1, 1, 1)
        );
        assert_eq!(
            (count("connection"), count("keep-alive"), count("x-private")),
            (0, 0, 0)
        );
        assert_eq!(count("transfer-encoding") + count("content-length"), 1);
        let expected = if stream {
            "text/event-stream; charset=utf-8"
        } else {
            "application/json"
        };
        assert_eq!(answer.header("content-type"), Some(expected));
        assert!(answer.whole && answer.text().contains("tok15"));
    }
    // Encoded bytes are none of the router's business: they pass with the header that says so.
    for content_type in ["application/json", "text/event-stream"] {
        let encoded = b"\x1f\x8b\x08\x00not really gzip";
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-encoding: gzip\r\ncontent-length: {}\r\n\r\n",
            encoded.len()
        );
        let pieces = vec![Bytes::from(head), Bytes::from_static(encoded)];
        decode.script([Script::Raw {
            pieces,
            gap: Duration::ZERO,
            close: false,
        }]);
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p", "stream": true}))
            .await;
        assert_eq!(
            (answer.header("content-encoding"), &answer.body[..]),
            (Some("gzip"), &encoded[..])
        );
        assert!(answer.whole);
    }
}

/// C3.8: an answer that brings a length which is not its own does not reach the client as whole.
#[tokio::test]
async fn a_stale_length_is_never_passed_on() {
    let (_prefill, decode, router) = pair().await;
    let body = b"data: {\"n\":1}\n\ndata: [DONE]\n\n";
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n",
        body.len() + 50
    );
    let pieces = vec![Bytes::from(head), Bytes::from_static(body)];
    decode.script([Script::Raw {
        pieces,
        gap: Duration::ZERO,
        close: true,
    }]);
    let answer = router.post("/v1/completions", &ask()).await;
    assert_eq!(answer.header("content-length"), None);
    assert_eq!((answer.whole, &answer.body[..]), (true, &body[..]));
}

/// The client's connection serves the next request after a stream.
#[tokio::test]
async fn connections_are_kept_on_both_sides() {
    // The KV channel is elsewhere, so that only the router connects.
    let config = FakeConfig {
        kv_host: "192.0.2.1".to_owned(),
        kv_port: 9,
        ..fake(Role::Prefill, Dialect::Nixl)
    };
    let prefill = start(config).await;
    let decode = FakeWorker::decode(Dialect::Nixl).await.expect("start");
    let router = Router::ready(quick(&[&prefill], &[&decode])).await;
    let body = ask().to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = router.open("GET", "/health", &[], b"").await;
    read_answer(&mut stream).await;
    let before = (prefill.connections().len(), decode.connections().len());
    for _ in 0..20 {
        stream
            .write_all((head.clone() + &body).as_bytes())
            .await
            .expect("write");
        let answer = tokio::time::timeout(LIMIT, read_answer(&mut stream))
            .await
            .expect("in time");
        assert!(answer.whole && answer.text().ends_with("[DONE]\n\n"));
    }
    let opened = |worker: &FakeWorker, before: usize| {
        let events = worker.connections();
        events[before..]
            .iter()
            .filter(|e| matches!(e.what, twinfer_bench::fake::ConnectionWhat::Opened))
            .count()
    };
    // Probes have connections of their own; twenty requests do not open twenty.
    assert!(opened(&prefill, before.0) <= 3 && opened(&decode, before.1) <= 3);
}

/// A client that reads slower than the limit for silence: the instance is not to blame.
#[tokio::test]
async fn a_client_that_pauses_gets_the_whole_stream() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let config = RouterConfig {
        idle_timeout: 0.3,
        ..quick(&[&prefill], &[&decode])
    };
    let router = Router::ready(config).await;
    // More than all buffers on the way hold.
    let big = format!("data: {{\"text\":\"{}\"}}\n\n", "x".repeat(100_000));
    let mut pieces: Vec<&[u8]> = vec![big.as_bytes(); 200];
    pieces.push(b"data: [DONE]\n\n");
    decode.script([chunked(&pieces, Duration::ZERO)]);
    let mut stream = router
        .open("POST", "/v1/completions", &[], ask().to_string().as_bytes())
        .await;
    tokio::time::sleep(Duration::from_millis(900)).await;
    let answer = tokio::time::timeout(LIMIT, read_answer(&mut stream))
        .await
        .expect("in time");
    assert!(answer.whole);
    assert_eq!(
        answer.body.len(),
        200 * big.len() + b"data: [DONE]\n\n".len()
    );
}
