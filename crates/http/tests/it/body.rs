use crate::support::{LONG, Server, get, post};
use crate::tracked::{BodyEnd, CancelGuard, TrackedBody};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use axum::routing;
use bytes::Bytes;
use http_body_util::StreamBody;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;
use tokio::time::timeout;
use twinfer_http::{Drain, ServeOptions, read_body, sse};

/// An event stream fed by a channel.
fn stream(mut events: mpsc::Receiver<Bytes>) -> Body {
    let frames = futures_util::stream::poll_fn(move |cx| events.poll_recv(cx));
    Body::new(StreamBody::new(futures_util::StreamExt::map(frames, |b| {
        Ok::<_, Infallible>(http_body::Frame::data(b))
    })))
}

async fn idle(drain: &Drain) {
    let wait = async {
        while drain.in_flight() > 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, wait).await.unwrap();
}

#[tokio::test]
async fn a_client_that_leaves_while_nothing_is_answered_drops_the_handler() {
    let (tell, mut told) = mpsc::channel(8);
    let (started_tx, mut started) = mpsc::channel(8);
    let handler = move |request: Request| {
        let (tell, started) = (tell.clone(), started_tx.clone());
        async move {
            let (parts, body) = request.into_parts();
            read_body(&parts.headers, body, 1000, LONG).await.unwrap();
            let _guard = CancelGuard::new(move || tell.try_send(()).unwrap());
            started.send(()).await.unwrap();
            std::future::pending::<()>().await;
        }
    };
    let server = Server::start(
        Router::new().route("/", routing::post(handler)),
        ServeOptions::default(),
    )
    .await;
    for _ in 0..20 {
        let mut peer = server.connect().await;
        peer.send(&post("/", "application/json", "{}")).await;
        timeout(LONG, started.recv()).await.unwrap().unwrap();
        assert_eq!(server.drain.in_flight(), 1);
        drop(peer);
        timeout(LONG, told.recv()).await.unwrap().unwrap();
        idle(&server.drain).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_abandons_its_body_even_if_nothing_is_sent() {
    let (ends, mut end) = mpsc::channel(8);
    let handler = move || {
        let ends = ends.clone();
        async move {
            let (feed, events) = mpsc::channel(8);
            feed.send(sse::json_event("first")).await.unwrap();
            let body = TrackedBody::new(stream(events), move |end| {
                drop(feed);
                ends.try_send(end).unwrap();
            });
            sse::event_stream(Body::new(body))
        }
    };
    let server = Server::start(
        Router::new().route("/", routing::get(handler)),
        ServeOptions::default(),
    )
    .await;
    for _ in 0..20 {
        let mut peer = server.connect().await;
        peer.send(&get("/")).await;
        peer.until(b"data: \"first\"\n\n\r\n").await;
        assert_eq!(server.drain.in_flight(), 1);
        drop(peer);
        assert_eq!(
            timeout(LONG, end.recv()).await.unwrap(),
            Some(BodyEnd::Abandoned)
        );
        idle(&server.drain).await;
    }
}

#[tokio::test]
async fn a_stream_that_ends_is_complete_once() {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&count);
    let handler = move || {
        let counter = Arc::clone(&counter);
        async move {
            let (feed, events) = mpsc::channel(8);
            feed.send(sse::json_event(&serde_json::json!({"a": "x\ny"})))
                .await
                .unwrap();
            feed.send(sse::DONE).await.unwrap();
            let body = TrackedBody::new(stream(events), move |end| {
                assert_eq!(end, BodyEnd::Complete);
                counter.fetch_add(1, Ordering::SeqCst);
            });
            drop(feed);
            sse::event_stream(Body::new(body))
        }
    };
    let server = Server::start(
        Router::new().route("/", routing::get(handler)),
        ServeOptions::default(),
    )
    .await;
    let answer = server.get("/").await;
    assert_eq!(answer.text(), "data: {\"a\":\"x\\ny\"}\n\ndata: [DONE]\n\n");
    assert_eq!(
        answer.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    idle(&server.drain).await;
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_source_that_fails_is_reported_and_breaks_the_answer_off() {
    let (ends, mut end) = mpsc::channel(1);
    let handler = move || {
        let ends = ends.clone();
        async move {
            let frames = futures_util::stream::iter([
                Ok(http_body::Frame::data(Bytes::from_static(b"half"))),
                Err(std::io::Error::other("source broke")),
            ]);
            Response::new(Body::new(TrackedBody::new(
                StreamBody::new(frames),
                move |end| ends.try_send(end).unwrap(),
            )))
        }
    };
    let server = Server::start(
        Router::new().route("/", routing::get(handler)),
        ServeOptions::default(),
    )
    .await;
    let mut peer = server.connect().await;
    peer.send(&get("/")).await;
    assert!(!peer.rest().await.ends_with(b"0\r\n\r\n"));
    assert_eq!(
        timeout(LONG, end.recv()).await.unwrap(),
        Some(BodyEnd::Failed)
    );
}
