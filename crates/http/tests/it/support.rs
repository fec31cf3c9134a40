use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use twinfer_http::{Drain, Listener, ServeOptions, serve};

/// A wait that only a hanging program exhausts.
pub(crate) const LONG: Duration = Duration::from_secs(10);

pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    pub(crate) drain: Drain,
    pub(crate) task: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(router: axum::Router, options: ServeOptions) -> Self {
        let listener = Listener::bind("127.0.0.1", 0).await.unwrap();
        let (addr, drain) = (listener.addr(), Drain::new());
        let router = twinfer_http::with_fallbacks(router);
        #[expect(
            clippy::disallowed_methods,
            reason = "the test ends the task through the drain"
        )]
        let task = tokio::spawn(serve(listener, router, options, drain.clone()));
        Self { addr, drain, task }
    }

    pub(crate) async fn connect(&self) -> Peer {
        Peer(TcpStream::connect(self.addr).await.unwrap())
    }

    /// One request on a connection of its own.
    pub(crate) async fn ask(&self, request: &str) -> Answer {
        let mut peer = self.connect().await;
        peer.send(request).await;
        peer.answer().await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.ask(&get(path)).await
    }
}

pub(crate) fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")
}

pub(crate) fn post(path: &str, content_type: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// The other end of a connection, byte by byte.
pub(crate) struct Peer(pub(crate) TcpStream);

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Peer {
    pub(crate) async fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// Bytes until `end` comes at their end.
    pub(crate) async fn until(&mut self, end: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let read = async {
            while !out.ends_with(end) {
                out.push(self.0.read_u8().await.unwrap());
            }
        };
        timeout(LONG, read).await.unwrap();
        out
    }

    /// Bytes until the connection closes, or breaks.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        let _ = timeout(LONG, self.0.read_to_end(&mut out)).await.unwrap();
        out
    }

    /// One answer with Content-Length or chunked body.
    pub(crate) async fn answer(&mut self) -> Answer {
        let head = String::from_utf8(self.until(b"\r\n\r\n").await)
            .unwrap()
            .to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut answer = Answer {
            status,
            head,
            body: Vec::new(),
        };
        if let Some(length) = answer.header("content-length") {
            answer.body = vec![0; length.parse().unwrap()];
            timeout(LONG, self.0.read_exact(&mut answer.body))
                .await
                .unwrap()
                .unwrap();
        } else if answer.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk().await {
                answer.body.extend(chunk);
            }
        }
        answer
    }

    /// The next chunk of a chunked body, or none at its end.
    pub(crate) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = String::from_utf8(self.until(b"\r\n").await).unwrap();
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        let mut chunk = vec![0; size + 2];
        timeout(LONG, self.0.read_exact(&mut chunk))
            .await
            .unwrap()
            .unwrap();
        chunk.truncate(size);
        (size > 0).then_some(chunk)
    }
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .find_map(|l| l.strip_prefix(name)?.strip_prefix(": "))
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// `error.code` of an answer that must have the one error shape.
    pub(crate) fn error_code(&self) -> String {
        assert_eq!(
            self.header("content-type"),
            Some("application/json"),
            "{}",
            self.head
        );
        let body: twinfer_protocol::ErrorBody = serde_json::from_slice(&self.body).unwrap();
        assert!(!body.error.message.is_empty());
        body.error.code.unwrap()
    }
}
