use crate::support::{LONG, Server};
use crate::tracked::{BodyEnd, CancelGuard, TrackedBody};
use axum::Router;
use axum::body::Body;
use axum::routing;
use bytes::Bytes;
use http::{HeaderMap, Method};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::timeout;
use twinfer_http::{
    ClientOptions, Endpoint, PeerClient, ServeOptions, TransportError, collect_body, next_chunk,
};

fn endpoint(addr: SocketAddr) -> Endpoint {
    format!("http://{addr}").parse().unwrap()
}

fn client() -> PeerClient {
    PeerClient::new(ClientOptions {
        connect_timeout: Duration::from_millis(500),
        ..ClientOptions::default()
    })
}

async fn get(client: &PeerClient, peer: &Endpoint) -> Result<Bytes, TransportError> {
    client
        .get(
            peer,
            "/",
            HeaderMap::new(),
            1000,
            Duration::from_millis(500),
        )
        .await
        .map(|(_, body)| body)
}

/// Accepts once, answers with these bytes, keeps the connection for `hold`.
async fn script(answer: &'static [u8], hold: Duration) -> (Endpoint, impl Future<Output = ()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let peer = endpoint(listener.local_addr().unwrap());
    let run = async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; 1024];
        let _ = stream.read(&mut head).await.unwrap();
        stream.write_all(answer).await.unwrap();
        tokio::time::sleep(hold).await;
    };
    (peer, run)
}

#[tokio::test]
async fn connections_are_reused_and_answers_arrive_whole() {
    let ports = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let peer = endpoint(listener.local_addr().unwrap());
    let seen = Arc::clone(&ports);
    let serve = async move {
        loop {
            let (mut stream, from) = listener.accept().await.unwrap();
            seen.lock().push(from.port());
            let mut buffer = [0; 4096];
            while stream.read(&mut buffer).await.is_ok_and(|n| n > 0) {
                stream
                    .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                    .await
                    .unwrap();
            }
        }
    };
    let client = client();
    let ask = async {
        for _ in 0..10 {
            assert_eq!(get(&client, &peer).await.unwrap(), "ok");
        }
    };
    tokio::select! { () = serve => {}, () = ask => {} }
    assert_eq!(ports.lock().len(), 1);
}

#[tokio::test]
async fn a_peer_that_is_not_there_is_refused_and_nothing_was_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let peer = endpoint(listener.local_addr().unwrap());
    drop(listener);
    let error = get(&client(), &peer).await.unwrap_err();
    assert!(
        matches!(error, TransportError::Refused { .. }) && error.nothing_sent(),
        "{error}"
    );
    assert!(error.to_string().contains(&peer.host_port().to_string()));
}

#[tokio::test]
async fn a_name_without_an_address_is_unresolved() {
    let error = get(
        &client(),
        &"http://no-such-host.invalid:80".parse().unwrap(),
    )
    .await
    .unwrap_err();
    assert!(
        matches!(
            error,
            TransportError::Unresolved { .. } | TransportError::ConnectTimeout { .. }
        ) && error.nothing_sent(),
        "{error}"
    );
}

#[tokio::test]
async fn a_full_backlog_is_a_connect_timeout() {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket
        .bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into())
        .unwrap();
    socket.listen(0).unwrap();
    let addr = socket.local_addr().unwrap().as_socket().unwrap();
    // Fills the queue, so that the kernel drops further SYNs.
    let _queued: Vec<_> = (0..4)
        .map(|_| {
            let stream =
                socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            stream.set_nonblocking(true).unwrap();
            let _ = stream.connect(&addr.into());
            stream
        })
        .collect();
    let client = PeerClient::new(ClientOptions {
        connect_timeout: Duration::from_millis(200),
        ..ClientOptions::default()
    });
    let error = client
        .get(&endpoint(addr), "/", HeaderMap::new(), 10, LONG)
        .await
        .unwrap_err();
    assert!(
        matches!(error, TransportError::ConnectTimeout { .. }) && error.nothing_sent(),
        "{error}"
    );
}

#[tokio::test]
async fn a_silent_peer_is_a_timeout_and_may_have_seen_the_request() {
    let (peer, run) = script(b"", LONG).await;
    let ask = async {
        let error = get(&client(), &peer).await.unwrap_err();
        assert!(
            matches!(error, TransportError::Timeout { .. }) && !error.nothing_sent(),
            "{error}"
        );
    };
    tokio::select! { () = run => panic!("the answer should have timed out"), () = ask => {} }
}

#[tokio::test]
async fn answers_that_break_off_or_are_no_http_are_broken() {
    for answer in [
        &b""[..],
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhalf",
        b"\x00\x01\x02\x03garbage\r\n\r\n",
    ] {
        let (peer, run) = script(answer, Duration::ZERO).await;
        let (result, ()) = tokio::join!(timeout(LONG, async { get(&client(), &peer).await }), run);
        let error = result.unwrap().unwrap_err();
        assert!(
            matches!(error, TransportError::Broken { .. }) && !error.nothing_sent(),
            "{answer:?}: {error}"
        );
    }
}

#[tokio::test]
async fn answers_beyond_the_limit_are_refused() {
    let (peer, run) = script(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", LONG).await;
    let ask = async {
        let response = client()
            .send(
                Method::GET,
                &peer,
                "/",
                HeaderMap::new(),
                Bytes::new(),
                LONG,
            )
            .await
            .unwrap();
        let error = collect_body(response.into_body(), "peer", 4, LONG)
            .await
            .unwrap_err();
        assert!(
            matches!(error, TransportError::TooLarge { limit: 4, .. }),
            "{error}"
        );
    };
    tokio::select! { () = run => panic!("the script ended first"), () = ask => {} }
}

#[tokio::test]
async fn a_stream_that_stalls_times_out_between_pieces() {
    let (peer, run) = script(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
        LONG,
    )
    .await;
    let ask = async {
        let response = client()
            .send(
                Method::GET,
                &peer,
                "/",
                HeaderMap::new(),
                Bytes::new(),
                LONG,
            )
            .await
            .unwrap();
        let mut body = response.into_body();
        assert_eq!(
            next_chunk(&mut body, "peer", LONG).await.unwrap().unwrap(),
            "ab"
        );
        let error = next_chunk(&mut body, "peer", Duration::from_millis(100))
            .await
            .unwrap_err();
        assert!(matches!(error, TransportError::Timeout { .. }), "{error}");
    };
    tokio::select! { () = run => panic!("the script ended first"), () = ask => {} }
}

/// Both ways to give up reach the peer: dropping the call, and dropping the answer's body.
#[tokio::test]
async fn dropping_a_call_or_an_answer_cancels_it_at_the_peer() {
    let (tell, mut told) = mpsc::channel(8);
    let (started_tx, mut started) = mpsc::channel(8);
    let tell_wait = tell.clone();
    let wait = move || {
        let (tell, started) = (tell_wait.clone(), started_tx.clone());
        async move {
            let _guard = CancelGuard::new(move || tell.try_send("call").unwrap());
            started.send(()).await.unwrap();
            std::future::pending::<()>().await;
        }
    };
    let stream = move || {
        let tell = tell.clone();
        async move {
            let first = futures_util::stream::iter([Ok::<_, std::io::Error>(
                http_body::Frame::data(Bytes::from_static(b"x")),
            )]);
            let frames = futures_util::StreamExt::chain(first, futures_util::stream::pending());
            let body = http_body_util::StreamBody::new(frames);
            Body::new(TrackedBody::new(body, move |end| {
                assert_eq!(end, BodyEnd::Abandoned);
                tell.try_send("answer").unwrap();
            }))
        }
    };
    let router = Router::new()
        .route("/wait", routing::get(wait))
        .route("/stream", routing::get(stream));
    let server = Server::start(router, ServeOptions::default()).await;
    let (client, peer) = (client(), endpoint(server.addr));
    for _ in 0..10 {
        tokio::select! {
            _ = client.send(Method::GET, &peer, "/wait", HeaderMap::new(), Bytes::new(), LONG) => panic!("no answer can come"),
            _ = started.recv() => {}
        }
        assert_eq!(timeout(LONG, told.recv()).await.unwrap(), Some("call"));
        let response = client
            .send(
                Method::GET,
                &peer,
                "/stream",
                HeaderMap::new(),
                Bytes::new(),
                LONG,
            )
            .await
            .unwrap();
        let mut body = response.into_body();
        assert_eq!(
            next_chunk(&mut body, "peer", LONG).await.unwrap().unwrap(),
            "x"
        );
        drop(body);
        assert_eq!(timeout(LONG, told.recv()).await.unwrap(), Some("answer"));
    }
    assert_eq!(server.drain.in_flight(), 0);
}

/// A request may meet a connection that the server has just closed for idleness.
#[tokio::test]
async fn idle_connections_that_the_peer_closed_do_no_harm() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    let handler = move || {
        let counter = Arc::clone(&counter);
        async move {
            counter.fetch_add(1, Ordering::SeqCst);
            "ok"
        }
    };
    let options = ServeOptions {
        header_timeout: Duration::from_millis(50),
        ..ServeOptions::default()
    };
    let server = Server::start(Router::new().route("/", routing::get(handler)), options).await;
    let (client, peer) = (client(), endpoint(server.addr));
    for _ in 0..5 {
        assert_eq!(get(&client, &peer).await.unwrap(), "ok");
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert_eq!(calls.load(Ordering::SeqCst), 5);
}

/// Proxy variables point to a black hole in a child process that runs the test below (C1.9).
#[test]
fn proxy_variables_are_ignored() {
    let hole = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    hole.set_nonblocking(true).unwrap();
    let url = format!("http://{}", hole.local_addr().unwrap());
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args([
        "--exact",
        "client::connections_are_reused_and_answers_arrive_whole",
    ]);
    for name in [
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ] {
        child.env(name, &url);
    }
    let output = child
        .env_remove("no_proxy")
        .env_remove("NO_PROXY")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
    assert_eq!(
        hole.accept().unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock
    );
}
