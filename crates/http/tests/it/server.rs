use crate::support::{LONG, Server, get, post};
use crate::tracked::{BodyEnd, TrackedBody};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::Response;
use axum::routing;
use futures_util::stream;
use serde_json::{Map, Value};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;
use twinfer_http::{
    BindError, ClientAddr, HttpError, Listener, ServeOptions, check_content_type, parse_json,
    read_body,
};

const LIMIT: u64 = 1000;

fn options() -> ServeOptions {
    ServeOptions {
        max_header_bytes: 8192,
        max_headers: 50,
        header_timeout: Duration::from_millis(300),
        ..ServeOptions::default()
    }
}

async fn echo(request: Request) -> Result<Response, HttpError> {
    let (parts, body) = request.into_parts();
    check_content_type(&parts.headers)?;
    let raw = read_body(&parts.headers, body, LIMIT, Duration::from_millis(300)).await?;
    parse_json::<Map<String, Value>>(&raw)?;
    Ok(Response::new(Body::from(raw)))
}

async fn start() -> Server {
    Server::start(Router::new().route("/echo", routing::post(echo)), options()).await
}

#[tokio::test]
async fn good_bodies_pass_unchanged_whole_or_in_chunks() {
    let server = start().await;
    let body = r#"{"a": 1e400, "b": 9223372036854775808, "c": "中"}"#;
    // A number beyond f64 is not a value that serde_json can hold.
    assert_eq!(
        server
            .ask(&post("/echo", "application/json", body))
            .await
            .error_code(),
        "invalid_request"
    );
    let body = r#"{"b": 18446744073709551616, "c":"中" }"#;
    for content_type in [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.x+json",
    ] {
        let answer = server.ask(&post("/echo", content_type, body)).await;
        assert_eq!((answer.status, answer.text()), (200, body));
    }
    let (start, end) = body.split_at(10);
    let chunked = format!(
        "POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{start}\r\n{:x}\r\n{end}\r\n0\r\n\r\n",
        start.len(),
        end.len()
    );
    let answer = server.ask(&chunked).await;
    assert_eq!((answer.status, answer.text()), (200, body));
}

#[tokio::test]
async fn compressed_bodies_are_refused_by_name() {
    let server = start().await;
    let post = |encoding: &str| {
        format!(
            "POST /echo HTTP/1.1\r\nhost: x\r\ncontent-encoding: {encoding}\r\ncontent-length: 2\r\n\r\n{{}}"
        )
    };
    for encoding in ["gzip", "identity, br"] {
        let answer = server.ask(&post(encoding)).await;
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (415, "unsupported_media_type")
        );
        let text = answer.text();
        assert!(
            text.contains("content-encoding") && text.contains(encoding),
            "{text}"
        );
    }
    assert_eq!(server.ask(&post("Identity")).await.status, 200);
}

#[tokio::test]
async fn bad_bodies_get_the_one_error_shape() {
    let server = start().await;
    for (content_type, body, status, code) in [
        ("application/json", "", 400, "invalid_request"),
        ("application/json", "  ", 400, "invalid_request"),
        ("application/json", "[]", 400, "invalid_request"),
        ("application/json", "\"a\"", 400, "invalid_request"),
        ("application/json", "null", 400, "invalid_request"),
        ("application/json", "{\"a\": ", 400, "invalid_request"),
        ("application/json", "{\"a\": 1} x", 400, "invalid_request"),
        ("text/plain", "{}", 415, "unsupported_media_type"),
        (
            "application/x-www-form-urlencoded",
            "a=b",
            415,
            "unsupported_media_type",
        ),
        (
            "multipart/form-data; boundary=x",
            "--x",
            415,
            "unsupported_media_type",
        ),
    ] {
        let answer = server.ask(&post("/echo", content_type, body)).await;
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (status, code),
            "{content_type} {body}"
        );
    }
    let mut peer = server.connect().await;
    peer.send("POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n")
        .await;
    peer.0.write_all(b"{\"a\":\"\xff\"").await.unwrap();
    let answer = peer.answer().await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (400, "invalid_request")
    );
    assert!(answer.text().contains("UTF-8"));
}

#[tokio::test]
async fn unknown_routes_and_methods_get_the_one_error_shape() {
    let server = start().await;
    let answer = server.get("/echo").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (405, "method_not_allowed")
    );
    assert_eq!(answer.header("allow"), Some("post"));
    let answer = server.get("/nothing").await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (404, "not_found")
    );
}

#[tokio::test]
async fn bodies_beyond_the_limit_are_413_even_while_the_client_still_sends() {
    let server = start().await;
    let fits = format!("{{\"a\": \"{}\"}}", "x".repeat(LIMIT as usize - 9));
    assert_eq!(fits.len() as u64, LIMIT);
    assert_eq!(
        server
            .ask(&post("/echo", "application/json", &fits))
            .await
            .status,
        200
    );
    let big = format!("{{\"a\": \"{}\"}}", "x".repeat(4 << 20));
    let answer = server.ask(&post("/echo", "application/json", &big)).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (413, "payload_too_large")
    );
    let head = "POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    let answer = server
        .ask(&format!("{head}{:x}\r\n{big}\r\n0\r\n\r\n", big.len()))
        .await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (413, "payload_too_large")
    );
    // Asked first, the client is told before it sends anything.
    let head =
        "POST /echo HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1000000\r\n\r\n";
    assert_eq!(server.ask(head).await.status, 413);
}

#[tokio::test]
async fn a_body_that_does_not_come_is_408() {
    let server = start().await;
    let answer = server
        .ask("POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{\"a\"")
        .await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (408, "request_timeout")
    );
}

#[tokio::test]
async fn oversized_heads_are_431_and_slow_ones_are_cut() {
    let server = start().await;
    let long = format!(
        "GET /echo HTTP/1.1\r\nhost: x\r\nlong: {}\r\n\r\n",
        "x".repeat(20_000)
    );
    let answer = server.ask(&long).await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (431, "invalid_request")
    );
    assert!(answer.text().contains("50 headers with 8192 bytes"));
    let many: String = (0..100).map(|i| format!("h{i}: x\r\n")).collect();
    assert_eq!(
        server
            .ask(&format!("GET /echo HTTP/1.1\r\n{many}\r\n"))
            .await
            .status,
        431
    );
    let mut slow = server.connect().await;
    slow.send("GET /echo HTTP/1.1\r\nhost: x\r\n").await;
    slow.rest().await;
    let mut silent = server.connect().await;
    assert_eq!(silent.rest().await, b"");
    assert_eq!(server.get("/echo").await.status, 405);
}

#[tokio::test]
async fn a_head_that_is_no_http_gets_the_one_error_shape() {
    let server = start().await;
    for head in [
        "GET /echo HTTP/1.1\r\nno colon\r\n\r\n",
        "GET  /echo HTTP/1.1\r\n\r\n",
        "POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        "POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: zip\r\n\r\n",
    ] {
        let answer = server.ask(head).await;
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (400, "invalid_request"),
            "{head}"
        );
        assert_eq!(answer.header("content-type"), Some("application/json"));
    }
    // Behind a good request on the same connection, too.
    let mut peer = server.connect().await;
    peer.send(&post("/echo", "application/json", "{}")).await;
    assert_eq!(peer.answer().await.text(), "{}");
    peer.send("nonsense\r\n\r\n").await;
    let answer = peer.answer().await;
    assert_eq!(
        (answer.status, answer.error_code().as_str()),
        (400, "invalid_request")
    );
}

#[tokio::test]
async fn garbage_closes_the_connection_and_nothing_else() {
    let server = start().await;
    for garbage in [
        &b"\x00\x01\x02\xff\xfe"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x80\x04\x95.",
        &[b'x'; 10_000],
    ] {
        let mut peer = server.connect().await;
        let _ = peer.0.write_all(garbage).await;
        peer.rest().await;
    }
    assert_eq!(server.get("/echo").await.status, 405);
}

#[tokio::test]
async fn a_connection_serves_many_requests() {
    let server = start().await;
    let mut peer = server.connect().await;
    for _ in 0..3 {
        peer.send(&post("/echo", "application/json", "{}")).await;
        assert_eq!(peer.answer().await.text(), "{}");
    }
    peer.send(&(get("/echo") + &get("/nothing"))).await;
    assert_eq!(peer.answer().await.status, 405);
    assert_eq!(peer.answer().await.status, 404);
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_for_their_turn() {
    let router = Router::new().route("/", routing::get(|| async { Bytes::from_static(b"ok") }));
    let options = ServeOptions {
        max_connections: 1,
        header_timeout: LONG,
        ..ServeOptions::default()
    };
    let server = Server::start(router, options).await;
    let mut first = server.connect().await;
    first.send(&get("/")).await;
    assert_eq!(first.answer().await.status, 200);
    let mut second = server.connect().await;
    second.send(&get("/")).await;
    let early = tokio::time::timeout(Duration::from_millis(100), second.0.readable()).await;
    assert!(early.is_err(), "served beside the first");
    drop(first);
    assert_eq!(second.answer().await.status, 200);
}

#[tokio::test]
async fn idle_connections_make_room_for_others() {
    let router = Router::new().route("/", routing::get(|| async { Bytes::from_static(b"ok") }));
    let options = ServeOptions {
        max_connections: 2,
        header_timeout: LONG,
        ..ServeOptions::default()
    };
    let server = Server::start(router, options).await;
    let (mut silent, mut served) = (server.connect().await, server.connect().await);
    served.send(&get("/")).await;
    assert_eq!(served.answer().await.status, 200);
    for _ in 0..5 {
        let mut next = server.connect().await;
        next.send(&get("/")).await;
        assert_eq!(next.answer().await.status, 200);
    }
    assert!(silent.rest().await.is_empty());
}

#[tokio::test]
async fn a_client_that_stops_reading_is_let_go() {
    let gone = Arc::new(Semaphore::new(0));
    let told = Arc::clone(&gone);
    let handler = move || {
        let told = Arc::clone(&told);
        let endless = stream::repeat_with(|| Ok::<_, Infallible>(Bytes::from(vec![0; 1 << 16])));
        let body = TrackedBody::new(Body::from_stream(endless), move |end| {
            assert_eq!(end, BodyEnd::Abandoned);
            told.add_permits(1);
        });
        async move { Response::new(Body::new(body)) }
    };
    let options = ServeOptions {
        write_timeout: Duration::from_millis(200),
        ..ServeOptions::default()
    };
    let router = Router::new().route("/", routing::get(handler));
    let server = Server::start(router, options).await;
    let mut peer = server.connect().await;
    peer.send(&get("/")).await;
    let ended = tokio::time::timeout(LONG, gone.acquire()).await;
    assert!(ended.is_ok(), "the body is still there");
    let counted_out = async {
        while server.drain.in_flight() > 0 {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(LONG, counted_out).await.is_ok());
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let listener = Listener::bind("127.0.0.1", 0).await.unwrap();
    let port = listener.addr().port();
    let error = Listener::bind("127.0.0.1", port).await.unwrap_err();
    assert!(matches!(&error, BindError::InUse { addr } if *addr == format!("127.0.0.1:{port}")));
    assert!(error.to_string().contains(&port.to_string()));
    drop(listener);
    Listener::bind("127.0.0.1", port).await.unwrap();
    // TEST-NET-1 is nobody's.
    assert!(matches!(
        Listener::bind("192.0.2.1", 0).await,
        Err(BindError::NotHere { .. })
    ));
    assert!(
        Listener::bind("[::1]", 0)
            .await
            .is_ok_and(|l| l.addr().is_ipv6())
    );
}

#[tokio::test]
async fn handlers_know_the_other_end_of_the_connection() {
    let handler = |request: Request| async move {
        request
            .extensions()
            .get::<ClientAddr>()
            .unwrap()
            .0
            .to_string()
    };
    let router = Router::new().route("/", routing::get(handler));
    let server = Server::start(router, ServeOptions::default()).await;
    let mut peer = server.connect().await;
    peer.send(&get("/")).await;
    let own = peer.0.local_addr().unwrap().to_string();
    assert_eq!(peer.answer().await.text(), own);
}
