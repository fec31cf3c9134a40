//! SIGTERM with short and long requests (C8.4), without the signal.

use crate::support::{LONG, Peer, Server, get};
use axum::Router;
use axum::body::Body;
use axum::response::Response;
use axum::routing;
use bytes::Bytes;
use http_body_util::StreamBody;
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use twinfer_http::{Drain, DrainEnd, DrainState, ServeOptions, sse};

const MS: fn(u64) -> Duration = Duration::from_millis;

/// `/ready`, `/health`; `/stream` sends an event and stays open until the test feeds or drops it;
/// `/wait` never answers; `/half` sends half an event.
async fn start() -> (Server, mpsc::Receiver<mpsc::Sender<Bytes>>) {
    let (hand_out, feeds) = mpsc::channel(16);
    let open = move |first: &'static [u8]| {
        let hand_out = hand_out.clone();
        move || async move {
            let (feed, mut events) = mpsc::channel::<Bytes>(8);
            feed.send(Bytes::from_static(first)).await.unwrap();
            hand_out.send(feed).await.unwrap();
            let frames = futures_util::stream::poll_fn(move |cx| {
                events
                    .poll_recv(cx)
                    .map(|b| b.map(|b| Ok::<_, Infallible>(http_body::Frame::data(b))))
            });
            sse::event_stream(Body::new(StreamBody::new(frames)))
        }
    };
    // The drain is the server's, so readiness reads it through a cell.
    let drain = std::sync::Arc::new(std::sync::OnceLock::<Drain>::new());
    let ready = std::sync::Arc::clone(&drain);
    let ready = move || async move {
        let status = if ready.get().unwrap().is_serving() {
            200
        } else {
            503
        };
        Response::builder()
            .status(status)
            .body(Body::empty())
            .unwrap()
    };
    let router = Router::new()
        .route("/ready", routing::get(ready))
        .route("/health", routing::get(|| async {}))
        .route("/ok", routing::get(|| async { "ok" }))
        .route("/stream", routing::get(open(b"data: 1\n\n")))
        .route("/half", routing::get(open(b"data: {\"a")))
        .route("/wait", routing::get(std::future::pending::<()>));
    let server = Server::start(router, ServeOptions::default()).await;
    drain.set(server.drain.clone()).unwrap();
    (server, feeds)
}

async fn open(server: &Server, path: &str) -> Peer {
    let mut peer = server.connect().await;
    peer.send(&get(path)).await;
    peer.until(b"\r\n\r\n").await;
    peer.chunk().await.unwrap();
    peer
}

#[tokio::test]
async fn a_drain_serves_those_who_come_while_it_settles_and_ends_those_who_stay_too_long() {
    let (server, mut feeds) = start().await;
    assert_eq!(server.get("/ready").await.status, 200);
    let mut short = open(&server, "/stream").await;
    let short_feed = feeds.recv().await.unwrap();
    let mut long = open(&server, "/stream").await;
    let _long_feed = feeds.recv().await.unwrap();
    let mut half = open(&server, "/half").await;
    let _half_feed = feeds.recv().await.unwrap();
    let mut waiting = server.connect().await;
    waiting.send(&get("/wait")).await;
    let mut kept = server.connect().await;

    let drain = server.drain.clone();
    let start = Instant::now();
    let run = async { drain.run(MS(1000), MS(3000)).await };
    let observe = async {
        drain.reached(DrainState::Settling).await;
        assert_eq!(server.get("/ready").await.status, 503);
        assert_eq!(server.get("/health").await.status, 200);
        let answer = server.get("/ok").await;
        assert_eq!((answer.status, answer.text()), (200, "ok"));

        drain.reached(DrainState::Draining).await;
        let refused = server.get("/ok").await;
        assert_eq!(
            (refused.status, refused.error_code().as_str()),
            (503, "draining")
        );
        assert_eq!(
            (refused.header("retry-after"), refused.header("connection")),
            (Some("1"), Some("close"))
        );
        kept.send(&get("/ok")).await;
        assert_eq!(kept.answer().await.status, 503);
        assert_eq!(server.get("/ready").await.status, 503);
        assert_eq!(server.get("/health").await.status, 200);

        short_feed.send(sse::DONE).await.unwrap();
        drop(short_feed);
        assert_eq!(short.chunk().await.unwrap(), b"data: [DONE]\n\n");
        assert_eq!(short.chunk().await, None);

        let last = String::from_utf8(long.chunk().await.unwrap()).unwrap();
        let (error, done) = last.split_once("\n\n").unwrap();
        assert_eq!(done, "data: [DONE]\n\n");
        let body: twinfer_protocol::ErrorBody =
            serde_json::from_str(error.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(body.error.code.as_deref(), Some("draining"));
        assert_eq!(long.chunk().await, None);
        assert_eq!(waiting.answer().await.status, 503);
        // Half an event cannot be followed by another: the client sees the stream break.
        assert!(!half.rest().await.ends_with(b"0\r\n\r\n"));
    };
    let (end, ()) = timeout(LONG, async { tokio::join!(run, observe) })
        .await
        .unwrap();
    assert_eq!(end, DrainEnd::Deadline);
    assert!(start.elapsed() >= MS(3000));
    assert_eq!(server.drain.in_flight(), 0);
    timeout(LONG, server.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_drain_ends_when_the_last_request_does() {
    let (server, mut feeds) = start().await;
    let mut peer = open(&server, "/stream").await;
    let feed = feeds.recv().await.unwrap();
    let finish = async {
        server.drain.reached(DrainState::Draining).await;
        drop(feed);
        assert_eq!(peer.chunk().await, None);
    };
    let (end, ()) = timeout(LONG, async {
        tokio::join!(server.drain.run(MS(10), LONG * 10), finish)
    })
    .await
    .unwrap();
    assert_eq!(end, DrainEnd::Complete);
    timeout(LONG, server.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_idle_drain_lasts_as_long_as_it_settles() {
    let (server, _feeds) = start().await;
    let mut idle = server.connect().await;
    idle.send(&get("/ok")).await;
    assert_eq!(idle.answer().await.status, 200);
    let start = Instant::now();
    assert_eq!(
        timeout(LONG, server.drain.run(MS(100), LONG * 10))
            .await
            .unwrap(),
        DrainEnd::Complete
    );
    assert!(start.elapsed() >= MS(100));
    timeout(LONG, server.task).await.unwrap().unwrap();
    assert_eq!(idle.rest().await, b"");
}

#[tokio::test]
async fn a_second_signal_ends_everything_now() {
    let (server, mut feeds) = start().await;
    let mut peer = open(&server, "/stream").await;
    let _feed = feeds.recv().await.unwrap();
    let second = async {
        server.drain.reached(DrainState::Settling).await;
        server.drain.end_now();
    };
    let (end, ()) = timeout(LONG, async {
        tokio::join!(server.drain.run(LONG * 10, LONG * 10), second)
    })
    .await
    .unwrap();
    assert_eq!(
        (end, server.drain.state()),
        (DrainEnd::Forced, DrainState::Closed)
    );
    timeout(LONG, server.task).await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&peer.rest().await).contains("draining"));
    assert_eq!(server.drain.in_flight(), 0);
}

#[tokio::test]
async fn signals_drive_the_drain() {
    let drain = Drain::new();
    let kill = || {
        let pid = std::process::id().to_string();
        assert!(
            std::process::Command::new("kill")
                .args(["-TERM", &pid])
                .status()
                .unwrap()
                .success()
        );
    };
    let twice = async {
        kill();
        drain.reached(DrainState::Settling).await;
        assert!(!drain.is_serving());
        kill();
    };
    // Polled first, it installs the handlers before the first signal comes.
    let signals = drain.on_signals(LONG * 10, LONG * 10);
    let (end, ()) = timeout(LONG, async { tokio::join!(biased; signals, twice) })
        .await
        .unwrap();
    assert_eq!(end.unwrap(), DrainEnd::Forced);
}
