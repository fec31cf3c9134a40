//! A router in front of fake workers, and a client that sees bytes.

use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use twinfer_bench::fake::{Dialect, FakeConfig, FakeWorker, Role};
use twinfer_config::RouterConfig;

/// For anything that must happen.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// A router in this process.
pub(crate) struct Router {
    pub(crate) addr: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<Result<(), twinfer_router::RouterError>>,
}

/// An answer, body dechunked.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Did the body end as its framing says?
    pub(crate) whole: bool,
}

/// Fast times, free port.
pub(crate) fn quick(prefill: &[&FakeWorker], decode: &[&FakeWorker]) -> RouterConfig {
    RouterConfig {
        port: 0,
        prefill: prefill.iter().map(|w| w.url()).collect(),
        decode: decode.iter().map(|w| w.url()).collect(),
        health_interval: 0.1,
        connect_timeout: 1.0,
        prefill_timeout: 5.0,
        first_byte_timeout: 5.0,
        idle_timeout: 5.0,
        drain_settle: 0.0,
        drain_timeout: 1.0,
        ..RouterConfig::default()
    }
}

pub(crate) fn fake(role: Role, dialect: Dialect) -> FakeConfig {
    FakeConfig {
        role,
        dialect,
        ..FakeConfig::default()
    }
}

pub(crate) async fn start(config: FakeConfig) -> FakeWorker {
    FakeWorker::start(config).await.expect("a fake worker")
}

impl Router {
    /// Starts, and waits until it says that it can serve.
    pub(crate) async fn ready(config: RouterConfig) -> Self {
        let router = Self::start(config).await;
        router.wait_ready(true).await;
        router
    }

    pub(crate) async fn start(config: RouterConfig) -> Self {
        let stop = CancellationToken::new();
        let (tell, told) = oneshot::channel();
        let stopped = stop.clone().cancelled_owned();
        let task = TaskTracker::new().spawn(twinfer_router::run(config, stopped, move |addr| {
            let _ = tell.send(addr);
        }));
        let addr = tokio::time::timeout(LIMIT, told)
            .await
            .expect("in time")
            .expect("the router starts");
        Self { addr, stop, task }
    }

    pub(crate) async fn wait_ready(&self, ready: bool) {
        let wanted = if ready { 200 } else { 503 };
        wait(|| async { self.get("/ready").await.status == wanted }).await;
    }

    /// As SIGTERM does.
    pub(crate) fn drain(&self) {
        self.stop.cancel();
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(LIMIT, self.task)
            .await
            .expect("ends in time")
            .expect("no panic")
            .expect("no error");
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], b"").await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_raw(path, body.to_string().as_bytes()).await
    }

    pub(crate) async fn post_raw(&self, path: &str, body: &[u8]) -> Answer {
        self.send("POST", path, &[("content-type", "application/json")], body)
            .await
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Answer {
        let mut stream = self.open(method, path, headers, body).await;
        tokio::time::timeout(LIMIT, read_answer(&mut stream))
            .await
            .expect("an answer in time")
    }

    /// Sends a request and leaves the connection open.
    pub(crate) async fn open(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> TcpStream {
        open(self.addr, method, path, headers, body).await
    }

    /// Sum of a metric over its series that carry all the labels.
    pub(crate) async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let text = String::from_utf8(self.get("/metrics").await.body).expect("UTF-8");
        text.lines()
            .filter(|line| line.starts_with(name) && line[name.len()..].starts_with(['{', ' ']))
            .filter(|line| labels.iter().all(|label| line.contains(label)))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// All counts of requests in flight are back to zero.
    pub(crate) async fn idle(&self) -> bool {
        self.metric("twinfer_router_in_flight", &[]).await == 0.0
            && self.metric("twinfer_router_requests_in_flight", &[]).await == 0.0
    }
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }

    /// Data of the events.
    pub(crate) fn events(&self) -> Vec<String> {
        self.text()
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .map(str::to_owned)
            .collect()
    }
}

/// Sends a request and leaves the connection open.
pub(crate) async fn open(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.expect("connect");
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nhost: router\r\ncontent-length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    stream
        .write_all(&[head.as_bytes(), body].concat())
        .await
        .expect("write");
    stream
}

/// A port that is free.
pub(crate) fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Waits for a condition.
pub(crate) async fn wait<F: Future<Output = bool>>(mut condition: impl FnMut() -> F) {
    let waiting = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("the condition holds in time");
}

/// Reads an answer to its end.
pub(crate) async fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(at) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break at + 4;
        }
        let read = stream.read_buf(&mut bytes).await.unwrap_or(0);
        assert!(
            read > 0,
            "closed within the head: {}",
            String::from_utf8_lossy(&bytes)
        );
    };
    let rest = bytes.split_off(head_end);
    let head = String::from_utf8(bytes).expect("an ASCII head");
    let mut lines = head.lines();
    let status = lines
        .next()
        .and_then(|l| l.split(' ').nth(1))
        .and_then(|s| s.parse().ok())
        .expect("a status");
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let header = |name: &str| {
        headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    };
    let (body, whole) = if header("transfer-encoding") == Some("chunked") {
        read_chunked(stream, rest).await
    } else {
        let length: usize = header("content-length").map_or(0, |v| v.parse().expect("a length"));
        let mut body = rest;
        while body.len() < length && stream.read_buf(&mut body).await.unwrap_or(0) > 0 {}
        let whole = body.len() == length;
        (body, whole)
    };
    Answer {
        status,
        headers,
        body,
        whole,
    }
}

async fn read_chunked(stream: &mut TcpStream, mut buffer: Vec<u8>) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    loop {
        let line_end = loop {
            if let Some(at) = buffer.windows(2).position(|w| w == b"\r\n") {
                break at;
            }
            if stream.read_buf(&mut buffer).await.unwrap_or(0) == 0 {
                return (body, false);
            }
        };
        let size = std::str::from_utf8(&buffer[..line_end]).expect("a chunk size");
        let size = usize::from_str_radix(size.trim(), 16).expect("a chunk size");
        while buffer.len() < line_end + 2 + size + 2 {
            if stream.read_buf(&mut buffer).await.unwrap_or(0) == 0 {
                body.extend_from_slice(buffer.get(line_end + 2..).unwrap_or_default());
                return (body, false);
            }
        }
        body.extend_from_slice(&buffer[line_end + 2..line_end + 2 + size]);
        buffer.drain(..line_end + 2 + size + 2);
        if size == 0 {
            return (body, true);
        }
    }
}
