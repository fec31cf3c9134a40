use crate::connect::Connector;
use crate::{BoxError, Endpoint};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use std::error::Error as _;
use std::pin::pin;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};

/// Settings of a [`PeerClient`].
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    /// To resolve the name and connect.
    pub connect_timeout: Duration,
    /// An idle connection is closed after this: sooner than servers close it (ours after 30 s, those
    /// of vLLM after 5 s), so that no request meets a connection that is being closed.
    pub idle_timeout: Duration,
    /// Idle connections kept per peer.
    pub max_idle_per_peer: usize,
}

/// An HTTP/1.1 client for peers: pooled connections, no proxies, no redirects. Clones share the pool.
///
/// A request is cancelled by dropping its future, an answer by dropping its body: the connection is
/// closed then, which the peer notices.
#[derive(Clone, Debug)]
pub struct PeerClient {
    inner: Client<Connector, Full<Bytes>>,
}

/// Why a peer gave no (whole) answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TransportError {
    /// Nobody listens at the address.
    #[error("{peer}: connection refused")]
    Refused {
        /// Host and port.
        peer: String,
    },
    /// The name has no address.
    #[error("{peer}: the name cannot be resolved: {reason}")]
    Unresolved {
        /// Host and port.
        peer: String,
        /// What the resolver said.
        reason: String,
    },
    /// No connection in time.
    #[error("{peer}: no connection within {seconds} s")]
    ConnectTimeout {
        /// Host and port.
        peer: String,
        /// The limit.
        seconds: f64,
    },
    /// Nothing left here to connect with: descriptors, ports, memory. It says nothing of the peer.
    #[error("{peer}: this process cannot connect: {reason}")]
    Exhausted {
        /// Host and port.
        peer: String,
        /// What the system said.
        reason: String,
    },
    /// No connection for another reason (no route).
    #[error("{peer}: cannot connect: {reason}")]
    Connect {
        /// Host and port.
        peer: String,
        /// What the system said.
        reason: String,
    },
    /// Connected, but no answer (or no further piece of it) in time.
    #[error("{peer}: no answer within {seconds} s")]
    Timeout {
        /// Host and port, or what was read.
        peer: String,
        /// The limit.
        seconds: f64,
    },
    /// The connection broke or the peer does not speak HTTP.
    #[error("{peer}: connection broken: {reason}")]
    Broken {
        /// Host and port, or what was read.
        peer: String,
        /// What happened.
        reason: String,
    },
    /// The answer is larger than allowed.
    #[error("{peer}: the answer has more than {limit} bytes")]
    TooLarge {
        /// What was read.
        peer: String,
        /// Allowed bytes.
        limit: usize,
    },
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(4),
            max_idle_per_peer: 64,
        }
    }
}

impl TransportError {
    /// Is it certain that the peer has not seen the request? Then it may be sent elsewhere in any case.
    pub fn nothing_sent(&self) -> bool {
        matches!(
            self,
            Self::Refused { .. }
                | Self::Unresolved { .. }
                | Self::ConnectTimeout { .. }
                | Self::Exhausted { .. }
                | Self::Connect { .. }
        )
    }
}

impl PeerClient {
    /// A client with its own pool.
    pub fn new(options: ClientOptions) -> Self {
        let inner = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(options.idle_timeout)
            .pool_max_idle_per_host(options.max_idle_per_peer)
            .build(Connector {
                timeout: options.connect_timeout,
            });
        Self { inner }
    }

    /// Sends a request and returns when the head of the answer is there, at most `limit` from now.
    /// The answer's status is not judged. A POST needs its Content-Type in `headers`.
    ///
    /// # Errors
    /// [`TransportError`] names the peer.
    pub async fn send(
        &self,
        method: Method,
        peer: &Endpoint,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
        limit: Duration,
    ) -> Result<Response<Incoming>, TransportError> {
        let name = || peer.host_port().to_string();
        let built = Request::builder()
            .method(method)
            .uri(format!("{peer}{path}"))
            .body(Full::new(body));
        let mut request = built.map_err(|e| TransportError::Broken {
            peer: name(),
            reason: format!("bad request: {e}"),
        })?;
        *request.headers_mut() = headers;
        match timeout(limit, self.inner.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(classify(&error, name())),
            Err(_) => Err(TransportError::Timeout {
                peer: name(),
                seconds: limit.as_secs_f64(),
            }),
        }
    }

    /// GET of a small answer: status and whole body.
    ///
    /// # Errors
    /// Those of [`Self::send`] and [`collect_body`].
    pub async fn get(
        &self,
        peer: &Endpoint,
        path: &str,
        headers: HeaderMap,
        max_bytes: usize,
        limit: Duration,
    ) -> Result<(http::StatusCode, Bytes), TransportError> {
        let deadline = Instant::now() + limit;
        let response = self
            .send(Method::GET, peer, path, headers, Bytes::new(), limit)
            .await?;
        let status = response.status();
        let left = deadline.saturating_duration_since(Instant::now());
        let name = peer.host_port().to_string();
        Ok((
            status,
            collect_body(response.into_body(), &name, max_bytes, left).await?,
        ))
    }
}

/// Reads a peer's answer whole: at most `max_bytes`, within `limit`. `peer` is named in errors.
///
/// # Errors
/// [`TransportError::TooLarge`], [`TransportError::Timeout`] or [`TransportError::Broken`].
pub async fn collect_body<B>(
    body: B,
    peer: &str,
    max_bytes: usize,
    limit: Duration,
) -> Result<Bytes, TransportError>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let deadline = Instant::now() + limit;
    let mut body = pin!(body);
    let mut out = BytesMut::new();
    loop {
        match timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => {
                let Ok(data) = frame.into_data() else {
                    continue;
                };
                if out.len() + data.len() > max_bytes {
                    return Err(TransportError::TooLarge {
                        peer: peer.to_owned(),
                        limit: max_bytes,
                    });
                }
                out.extend_from_slice(&data);
            }
            Ok(Some(Err(error))) => return Err(broken(peer, error)),
            Ok(None) => return Ok(out.freeze()),
            Err(_) => {
                return Err(TransportError::Timeout {
                    peer: peer.to_owned(),
                    seconds: limit.as_secs_f64(),
                });
            }
        }
    }
}

/// The next piece of a peer's answer, or none at its end, within `limit`.
///
/// # Errors
/// [`TransportError::Timeout`] or [`TransportError::Broken`].
pub async fn next_chunk<B>(
    body: &mut B,
    peer: &str,
    limit: Duration,
) -> Result<Option<Bytes>, TransportError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    let deadline = Instant::now() + limit;
    loop {
        return match timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => Ok(Some(data)),
                Err(_) => continue,
            },
            Ok(Some(Err(error))) => Err(broken(peer, error)),
            Ok(None) => Ok(None),
            Err(_) => Err(TransportError::Timeout {
                peer: peer.to_owned(),
                seconds: limit.as_secs_f64(),
            }),
        };
    }
}

fn broken(peer: &str, error: impl Into<BoxError>) -> TransportError {
    TransportError::Broken {
        peer: peer.to_owned(),
        reason: innermost(error.into().as_ref()),
    }
}

fn classify(error: &hyper_util::client::legacy::Error, peer: String) -> TransportError {
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(error) = inner.downcast_ref::<TransportError>() {
            return error.clone();
        }
        source = inner.source();
    }
    TransportError::Broken {
        peer,
        reason: innermost(error),
    }
}

/// The last cause says what happened; the ones before say in which layer.
pub fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
