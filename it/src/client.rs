use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{HeaderMap, Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// Longest wait for an answer or the next piece of one.
const LIMIT: Duration = Duration::from_secs(60);

/// A plain HTTP/1.1 client, a connection per request, so that a test sees what the wire carries.
#[derive(Clone, Debug)]
pub struct Client {
    address: String,
    headers: Vec<(String, String)>,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub bytes: Bytes,
}

/// An answer whose body still comes; dropping it closes the connection.
#[derive(Debug)]
pub struct Stream {
    /// Status code.
    pub status: u16,
    /// Headers.
    pub headers: HeaderMap,
    body: Incoming,
    connection: JoinHandle<()>,
}

/// Body of a request.
pub type Body = Value;

/// Greedy completion of a prompt (text or token ids).
pub fn completion_body(prompt: impl Into<Value>, max_tokens: u32) -> Body {
    json!({"model": "demo", "prompt": prompt.into(), "max_tokens": max_tokens, "temperature": 0})
}

/// Greedy answer to one question.
pub fn chat_body(question: &str) -> Body {
    json!({"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0})
}

impl Client {
    /// A client of `host:port`.
    pub fn new(address: impl Into<String>) -> Self {
        Self {
            address: address.into(),
            headers: Vec::new(),
        }
    }

    /// Sends a header with every request.
    #[must_use]
    pub fn with_header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// GET, whole answer.
    ///
    /// # Errors
    /// When the connection fails.
    pub async fn get(&self, path: &str) -> Result<Answer, String> {
        self.send(Method::GET, path, None).await?.whole().await
    }

    /// DELETE, whole answer.
    ///
    /// # Errors
    /// When the connection fails.
    pub async fn delete(&self, path: &str) -> Result<Answer, String> {
        self.send(Method::DELETE, path, None).await?.whole().await
    }

    /// POST of JSON, whole answer.
    ///
    /// # Errors
    /// When the connection fails.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer, String> {
        self.stream(path, body).await?.whole().await
    }

    /// POST of JSON, answer as it comes.
    ///
    /// # Errors
    /// When the connection fails.
    pub async fn stream(&self, path: &str, body: &Value) -> Result<Stream, String> {
        self.send(
            Method::POST,
            path,
            Some((Bytes::from(body.to_string()), "application/json")),
        )
        .await
    }

    /// POST of any bytes under any content type.
    ///
    /// # Errors
    /// When the connection fails.
    pub async fn post_bytes(
        &self,
        path: &str,
        body: impl Into<Bytes>,
        content_type: &str,
    ) -> Result<Answer, String> {
        self.send(Method::POST, path, Some((body.into(), content_type)))
            .await?
            .whole()
            .await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<(Bytes, &str)>,
    ) -> Result<Stream, String> {
        let limited = tokio::time::timeout(LIMIT, self.exchange(method, path, body)).await;
        limited.map_err(|_| format!("no answer from {} within {LIMIT:?}", self.address))?
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<(Bytes, &str)>,
    ) -> Result<Stream, String> {
        let socket = TcpStream::connect(&self.address)
            .await
            .map_err(|e| format!("connect {}: {e}", self.address))?;
        socket.set_nodelay(true).map_err(|e| e.to_string())?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(socket))
            .await
            .map_err(|e| e.to_string())?;
        #[expect(
            clippy::disallowed_methods,
            reason = "ended with the stream that owns its handle"
        )]
        let connection = tokio::task::spawn(async move {
            // Its error reaches the caller through the body.
            let _ = connection.await;
        });
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", &self.address);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let bytes = match body {
            Some((bytes, content_type)) => {
                request = request.header("content-type", content_type);
                bytes
            }
            None => Bytes::new(),
        };
        let request = request.body(Full::new(bytes)).map_err(|e| e.to_string())?;
        let response = sender
            .send_request(request)
            .await
            .map_err(|e| e.to_string())?;
        let (parts, body) = response.into_parts();
        Ok(Stream {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body,
            connection,
        })
    }
}

impl Answer {
    /// Body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// Body as JSON.
    ///
    /// # Panics
    /// When it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes)
            .unwrap_or_else(|e| panic!("not JSON ({e}): {}", self.text()))
    }

    /// `error.code` of the body.
    pub fn error_code(&self) -> String {
        self.json()["error"]["code"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }

    /// The JSON of each SSE event but `[DONE]`, and whether `[DONE]` came, once and last.
    ///
    /// # Panics
    /// When an event is no JSON.
    pub fn events(&self) -> (Vec<Value>, bool) {
        let text = self.text();
        let mut events = Vec::new();
        let mut done = false;
        for data in text
            .split("\n\n")
            .filter_map(|event| event.trim_start().strip_prefix("data: "))
        {
            assert!(!done, "an event after [DONE]: {data}");
            if data == "[DONE]" {
                done = true;
            } else {
                events.push(
                    serde_json::from_str(data).unwrap_or_else(|e| panic!("not JSON ({e}): {data}")),
                );
            }
        }
        (events, done)
    }
}

impl Stream {
    /// The next piece of the body; none at its end.
    ///
    /// # Errors
    /// When the connection breaks or nothing comes in time.
    pub async fn piece(&mut self) -> Result<Option<Bytes>, String> {
        loop {
            let frame = tokio::time::timeout(LIMIT, self.body.frame())
                .await
                .map_err(|_| "no piece in time".to_owned())?;
            match frame {
                None => return Ok(None),
                Some(Err(error)) => return Err(error.to_string()),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// The rest of the body.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn whole(mut self) -> Result<Answer, String> {
        let mut bytes = Vec::new();
        while let Some(piece) = self.piece().await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(Answer {
            status: self.status,
            headers: self.headers.clone(),
            bytes: bytes.into(),
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.connection.abort();
    }
}
