//! Connections that break: what was read by an instance is not sent to it again.

use crate::common::{Router, quick, wait};
use parking_lot::Mutex;
use serde_json::json;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use twinfer_config::RouterConfig;

/// What the scripted instance does with a POST that it has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reply {
    /// Answers, and keeps the connection open.
    Good,
    /// Closes the connection.
    Close,
    /// Closes it within the head of the answer.
    CloseInHead,
    /// Closes it within the body of the answer.
    CloseInBody,
}

/// An instance that follows a script, one entry per POST; the last one holds for all others.
struct Scripted {
    url: String,
    /// For each POST: was its connection used before?
    posts: Arc<Mutex<Vec<bool>>>,
    stop: CancellationToken,
}

impl Scripted {
    async fn start(script: Vec<Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let posts = Arc::new(Mutex::new(Vec::new()));
        let stop = CancellationToken::new();
        let (seen, stopped) = (Arc::clone(&posts), stop.clone().cancelled_owned());
        let tracker = TaskTracker::new();
        let connections = tracker.clone();
        tracker.spawn(async move {
            let accept = async {
                while let Ok((stream, _)) = listener.accept().await {
                    connections.spawn(serve(stream, script.clone(), Arc::clone(&seen)));
                }
            };
            tokio::select! { () = accept => {} () = stopped => {} }
        });
        Self { url, posts, stop }
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn serve(mut stream: TcpStream, script: Vec<Reply>, posts: Arc<Mutex<Vec<bool>>>) {
    let mut used = false;
    while let Some(path) = read_request(&mut stream).await {
        let reply = if path.starts_with("/v1/completions") {
            let mut posts = posts.lock();
            posts.push(used);
            script[(posts.len() - 1).min(script.len() - 1)]
        } else {
            Reply::Good
        };
        used = true;
        let (status, body) = match path.as_str() {
            "/twinfer/instance" => ("404 Not Found", String::new()),
            "/v1/models" => ("200 OK", json!({"data": [{"id": "m"}]}).to_string()),
            _ => ("200 OK", json!({"choices": []}).to_string()),
        };
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let answer = head + &body;
        let part = match reply {
            Reply::Good => answer.len(),
            Reply::Close => 0,
            Reply::CloseInHead => 20,
            Reply::CloseInBody => answer.len() - 5,
        };
        if stream.write_all(&answer.as_bytes()[..part]).await.is_err() || reply != Reply::Good {
            return;
        }
    }
}

/// Reads one request whole; its path.
async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length: usize = head
                .lines()
                .filter_map(|line| line.split_once(": "))
                .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
                .map_or(0, |(_, value)| value.parse().expect("a length"));
            if body.len() >= length {
                return head.split(' ').nth(1).map(str::to_owned);
            }
        }
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return None;
        }
    }
}

async fn router(instances: &[&Scripted]) -> Router {
    Router::ready(RouterConfig {
        worker: instances.iter().map(|i| i.url.clone()).collect(),
        // Few probes: they must not lie between two requests on the pooled connection.
        health_interval: 60.0,
        ..quick(&[], &[])
    })
    .await
}

#[tokio::test]
async fn a_request_that_was_read_before_a_kept_connection_broke_is_not_sent_again() {
    for reply in [Reply::Close, Reply::CloseInHead, Reply::CloseInBody] {
        let instance = Scripted::start(vec![Reply::Good, reply, Reply::Good]).await;
        let router = router(&[&instance]).await;
        let ask = json!({"prompt": "p"});
        assert_eq!(router.post("/v1/completions", &ask).await.status, 200);
        let answer = router.post("/v1/completions", &ask).await;
        let posts = instance.posts.lock().clone();
        assert_eq!(posts.len(), 2, "{reply:?}: one request was read twice");
        assert!(posts[1], "{reply:?}: the connection was not kept");
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (502, "decode_failed"),
            "{reply:?}: {}",
            answer.text()
        );
        // The instance stays in use: one broken connection says little.
        assert_eq!(router.post("/v1/completions", &ask).await.status, 200);
        wait(|| router.idle()).await;
        router.stop().await;
    }
}

#[tokio::test]
async fn another_instance_serves_what_one_broke_off() {
    let first = Scripted::start(vec![Reply::Good, Reply::Close, Reply::Good]).await;
    let second = Scripted::start(vec![Reply::Good]).await;
    let router = router(&[&first, &second]).await;
    wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 2.0 }).await;
    for _ in 0..6 {
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let (first, second) = (first.posts.lock().len(), second.posts.lock().len());
    assert!(first >= 2, "the break was met");
    assert_eq!(first + second, 7, "six requests, one of them tried twice");
}
