//! Requests to instances: the peer key, the router's id, nothing of the client's headers but the
//! trace context.

mod conn;
mod pool;

pub(crate) use conn::UpstreamBody;

use bytes::Bytes;
use conn::NoAnswer;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use pool::Pool;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use twinfer_http::{Endpoint, Secret, TransportError, collect_body};

/// W3C trace context, passed on as it came.
const TRACE_HEADERS: [&str; 2] = ["traceparent", "tracestate"];

/// The client for all instances. Clones share its connections.
///
/// A request and its connection are driven by the task that waits for them, without a task of the
/// connection's own: a piece of a stream costs one wake-up. Dropping a request or an answer closes
/// its connection, at once.
#[derive(Clone)]
pub(crate) struct Upstream {
    pool: Arc<Pool>,
    bearer: Option<HeaderValue>,
}

impl Upstream {
    pub(crate) fn new(
        connect_timeout: Duration,
        max_idle: usize,
        peer_key: Option<&Secret>,
    ) -> Self {
        Self {
            pool: Arc::new(Pool::new(connect_timeout, max_idle)),
            bearer: peer_key.map(Secret::bearer),
        }
    }

    /// Headers of both legs of a request.
    pub(crate) fn headers(&self, request_id: &HeaderValue, client: &HeaderMap) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(8);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(
            HeaderName::from_static(twinfer_protocol::REQUEST_ID_HEADER),
            request_id.clone(),
        );
        self.put_common(&mut headers);
        for name in TRACE_HEADERS {
            if let Some(value) = client.get(name) {
                headers.insert(HeaderName::from_static(name), value.clone());
            }
        }
        headers
    }

    /// POST; returns when the head of the answer is there.
    pub(crate) async fn post(
        &self,
        to: &Endpoint,
        path: &'static str,
        headers: HeaderMap,
        body: Bytes,
        limit: Duration,
    ) -> Result<Response<UpstreamBody>, TransportError> {
        self.send(Method::POST, to, path, headers, body, limit)
            .await
    }

    /// GET of a small answer.
    pub(crate) async fn get(
        &self,
        from: &Endpoint,
        path: &'static str,
        max_bytes: usize,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), TransportError> {
        let mut headers = HeaderMap::with_capacity(4);
        self.put_common(&mut headers);
        let deadline = Instant::now() + limit;
        let answer = self
            .send(Method::GET, from, path, headers, Bytes::new(), limit)
            .await?;
        let status = answer.status();
        let left = deadline.saturating_duration_since(Instant::now());
        let body = collect_body(
            answer.into_body(),
            &from.host_port().to_string(),
            max_bytes,
            left,
        )
        .await?;
        Ok((status, body))
    }

    /// Closes idle connections that are old or that the instance has closed; now and then.
    pub(crate) async fn sweep(&self) {
        self.pool.sweep_forever().await;
    }

    fn put_common(&self, headers: &mut HeaderMap) {
        headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
        if let Some(bearer) = &self.bearer {
            headers.insert(AUTHORIZATION, bearer.clone());
        }
    }

    async fn send(
        &self,
        method: Method,
        to: &Endpoint,
        path: &'static str,
        mut headers: HeaderMap,
        body: Bytes,
        limit: Duration,
    ) -> Result<Response<UpstreamBody>, TransportError> {
        let deadline = Instant::now() + limit;
        let peer = || to.host_port().to_string();
        if let Ok(host) = HeaderValue::try_from(peer()) {
            headers.insert(HOST, host);
        }
        loop {
            let mut request = Request::new(Full::new(body.clone()));
            *request.method_mut() = method.clone();
            *request.uri_mut() = http::Uri::from_static(path);
            *request.headers_mut() = headers.clone();
            let connection = self.pool.connection(to).await?;
            let reused = connection.is_reused();
            let sent = match timeout_at(deadline, connection.send(request, &self.pool, to)).await {
                Ok(sent) => sent,
                Err(_) => {
                    return Err(TransportError::Timeout {
                        peer: peer(),
                        seconds: limit.as_secs_f64(),
                    });
                }
            };
            match sent {
                Ok(answer) => return Ok(answer),
                // An idle connection may be closed by its peer just when a request is sent on it. Only what
                // was certainly not begun, or does no harm twice, goes out again.
                Err(NoAnswer::NotSent(_)) if reused => {}
                Err(NoAnswer::Broken(_)) if reused && method.is_safe() => {}
                Err(NoAnswer::NotSent(reason)) => {
                    return Err(TransportError::Connect {
                        peer: peer(),
                        reason,
                    });
                }
                Err(NoAnswer::Broken(reason)) => {
                    return Err(TransportError::Broken {
                        peer: peer(),
                        reason,
                    });
                }
            }
        }
    }
}
