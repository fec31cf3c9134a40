//! Requests to instances: the peer key, the router's id, nothing of the client's headers but the
//! trace context.

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};
use hyper::body::Incoming;
use std::time::Duration;
use twinfer_http::{ClientOptions, Endpoint, PeerClient, Secret, TransportError};

/// W3C trace context, passed on as it came.
const TRACE_HEADERS: [&str; 2] = ["traceparent", "tracestate"];

/// The client for all instances. Clones share its connections.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    client: PeerClient,
    bearer: Option<HeaderValue>,
}

impl Upstream {
    pub(crate) fn new(connect_timeout: Duration, peer_key: Option<&Secret>) -> Self {
        let client = PeerClient::new(ClientOptions {
            connect_timeout,
            max_idle_per_peer: 1024,
            ..ClientOptions::default()
        });
        Self {
            client,
            bearer: peer_key.map(Secret::bearer),
        }
    }

    /// Headers of both legs of a request.
    pub(crate) fn headers(&self, request_id: &HeaderValue, client: &HeaderMap) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(8);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
        headers.insert(
            HeaderName::from_static(twinfer_protocol::REQUEST_ID_HEADER),
            request_id.clone(),
        );
        if let Some(bearer) = &self.bearer {
            headers.insert(AUTHORIZATION, bearer.clone());
        }
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
        path: &str,
        headers: HeaderMap,
        body: Bytes,
        limit: Duration,
    ) -> Result<Response<Incoming>, TransportError> {
        self.client
            .send(Method::POST, to, path, headers, body, limit)
            .await
    }

    /// GET of a small answer.
    pub(crate) async fn get(
        &self,
        from: &Endpoint,
        path: &str,
        max_bytes: usize,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), TransportError> {
        let mut headers = HeaderMap::new();
        if let Some(bearer) = &self.bearer {
            headers.insert(AUTHORIZATION, bearer.clone());
        }
        self.client.get(from, path, headers, max_bytes, limit).await
    }
}
