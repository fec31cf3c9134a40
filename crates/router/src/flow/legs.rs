//! The legs of a request: one exchange of HTTP with one instance each.

use super::exchange::{Ask, Exchange};
use super::pull::Failure;
use crate::answer::{LegError, Side};
use crate::body::JsonObject;
use crate::metrics::Leg;
use crate::registry::{Instance, InstanceId, Signal};
use crate::relay::{MAX_EVENT, Start};
use crate::release::{Handle, Releaser};
use crate::upstream::UpstreamBody;
use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::Instant;
use twinfer_http::sse::SseParser;
use twinfer_http::{TransportError, collect_body, next_chunk};
use twinfer_protocol::{ErrorKind, IDS_HEADER};

/// Largest answer that is kept whole: prefill's, errors, and those that are no stream.
const MAX_ANSWER: usize = 64 << 20;
/// To read the body of an error answer.
const ERROR_LIMIT: Duration = Duration::from_secs(10);

/// A good answer of decode that has begun.
pub(super) struct Started {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Answer,
    /// From sending to the first byte.
    pub(super) seconds: f64,
}

/// Its body.
pub(super) enum Answer {
    /// All of it.
    Whole(Bytes),
    /// A stream that has begun.
    Stream(Box<Begun>),
}

/// The prefill leg, with a last look when it is dropped.
struct LastLook<'a, F: Future<Output = Result<Option<Handle>, LegError>>> {
    leg: Pin<Box<F>>,
    over: bool,
    releaser: &'a Releaser,
}

impl<F: Future<Output = Result<Option<Handle>, LegError>>> Future for LastLook<'_, F> {
    type Output = Result<Option<Handle>, LegError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = self.leg.as_mut().poll(cx);
        self.over = polled.is_ready();
        polled
    }
}

impl<F: Future<Output = Result<Option<Handle>, LegError>>> Drop for LastLook<'_, F> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let mut cx = Context::from_waker(Waker::noop());
        if let Poll::Ready(Ok(Some(handle))) = self.leg.as_mut().poll(&mut cx) {
            self.releaser.release(&handle);
        }
    }
}

/// What has come of a stream, and the rest.
pub(crate) struct Begun {
    pub(crate) start: Start,
    pub(crate) rest: UpstreamBody,
}

impl Exchange {
    /// Sends the request for one token and reads the handle. Dropped, it looks once more whether the
    /// answer has come: a handle in it is released instead of left to its lease.
    pub(super) async fn prefill_leg(
        &self,
        ask: &Ask,
        to: InstanceId,
    ) -> Result<Option<Handle>, LegError> {
        LastLook {
            leg: Box::pin(self.prefill_answer(ask, to)),
            over: false,
            releaser: &self.shared.releaser,
        }
        .await
    }

    async fn prefill_answer(&self, ask: &Ask, to: InstanceId) -> Result<Option<Handle>, LegError> {
        let instance = &*self.instance(to)?;
        let start = Instant::now();
        let deadline = start + self.shared.times.prefill;
        let answer = self
            .send(
                Side::Prefill,
                instance,
                ask,
                ask.object.for_prefill(self.resume_field.as_deref()),
                &self.id.own,
                deadline,
            )
            .await?;
        let body = self
            .collect(Side::Prefill, instance, answer.into_body(), deadline)
            .await?;
        self.shared
            .metrics
            .first_byte(Leg::Prefill, start.elapsed().as_secs_f64());
        let object = JsonObject::parse(body).map_err(|error| {
            LegError::nonsense(
                Side::Prefill,
                &instance.name(),
                &format!("gave no answer: {error}"),
            )
        })?;
        match object.slice("kv_transfer_params") {
            None => Ok(None),
            Some(params) if params == "null" => Ok(None),
            Some(params) if params.starts_with(b"{") => Ok(Some(Handle { params, from: to })),
            Some(_) => Err(LegError::nonsense(
                Side::Prefill,
                &instance.name(),
                "gave kv_transfer_params that are no object",
            )),
        }
    }

    /// Sends the request for one token with parameters of the caller. What it answers does not matter, if it is good.
    pub(super) async fn prefill_with(
        &self,
        ask: &Ask,
        to: InstanceId,
        params: String,
        id: HeaderValue,
    ) -> Result<(), LegError> {
        let instance = &*self.instance(to)?;
        let start = Instant::now();
        let deadline = start + self.shared.times.prefill;
        let body = ask.object.for_prefill_with(&params);
        let answer = self.send(Side::Prefill, instance, ask, body, &id, deadline);
        let body = answer.await?.into_body();
        let body = self
            .collect(Side::Prefill, instance, body, deadline)
            .await?;
        let seconds = start.elapsed().as_secs_f64();
        self.shared.metrics.first_byte(Leg::Prefill, seconds);
        JsonObject::parse(body).map(drop).map_err(|error| {
            let what = format!("gave no answer: {error}");
            LegError::nonsense(Side::Prefill, &instance.name(), &what)
        })
    }

    /// Sends the request with parameters of the caller, and returns when the first byte of a good answer is there.
    pub(super) async fn decode_with(
        &self,
        ask: &Ask,
        to: InstanceId,
        params: String,
        id: HeaderValue,
    ) -> Result<Started, LegError> {
        let body = ask.object.for_decode(&params, None);
        self.decode_body(ask, to, body, &id).await
    }

    /// Sends the request, and returns when the first byte of a good answer is there.
    pub(super) async fn decode_leg(
        &self,
        ask: &Ask,
        to: InstanceId,
        with_handle: bool,
    ) -> Result<Started, LegError> {
        let params = self
            .handle
            .as_ref()
            .filter(|_| with_handle)
            .map(|handle| &handle.params);
        let resume = self.resume_field.as_deref();
        let params = params.and_then(|params| std::str::from_utf8(params).ok());
        let body = match (params, resume) {
            (Some(params), resume) => ask.object.for_decode(params, resume),
            (None, Some(resume)) => ask.object.plain_resumed(resume),
            (None, None) => ask.object.plain(),
        };
        self.decode_body(ask, to, body, &self.id.own).await
    }

    async fn decode_body(
        &self,
        ask: &Ask,
        to: InstanceId,
        body: Bytes,
        id: &HeaderValue,
    ) -> Result<Started, LegError> {
        let instance = &*self.instance(to)?;
        let start = Instant::now();
        let deadline = start + self.shared.times.first_byte;
        let answer = self
            .send(Side::Decode, instance, ask, body, id, deadline)
            .await?;
        let (parts, body) = answer.into_parts();
        let encoded = parts.headers.contains_key(CONTENT_ENCODING);
        let is_stream = is_event_stream(&parts.headers);
        if self.resume_field.is_some() && !is_stream {
            let what = "gave no stream where one was to go on";
            return Err(LegError::nonsense(Side::Decode, &instance.name(), what));
        }
        let body = if is_stream {
            self.first_event(instance, body, encoded, deadline).await?
        } else {
            let whole = self.collect(Side::Decode, instance, body, deadline).await?;
            if whole.is_empty() {
                return Err(LegError::nonsense(
                    Side::Decode,
                    &instance.name(),
                    "gave an empty answer",
                ));
            }
            if !encoded {
                serde_json::from_slice::<serde::de::IgnoredAny>(&whole).map_err(|error| {
                    LegError::nonsense(
                        Side::Decode,
                        &instance.name(),
                        &format!("gave an answer that is no JSON: {error}"),
                    )
                })?;
            }
            Answer::Whole(whole)
        };
        Ok(Started {
            status: parts.status,
            headers: parts.headers,
            body,
            seconds: start.elapsed().as_secs_f64(),
        })
    }

    /// Reads a stream up to its first event: an error there can still go to another instance, or become
    /// an answer with a status.
    async fn first_event(
        &self,
        instance: &Instance,
        mut source: UpstreamBody,
        encoded: bool,
        deadline: Instant,
    ) -> Result<Answer, LegError> {
        let nonsense = |what: &str| LegError::nonsense(Side::Decode, &instance.name(), what);
        let name = instance.spec.endpoint.host_port().to_string();
        let mut parser = SseParser::new(MAX_EVENT);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let piece = next_chunk(&mut source, &name, left).await;
            let piece = piece.map_err(|error| self.lost(Side::Decode, instance, &error))?;
            let Some(piece) = piece else {
                return Err(nonsense("ended its stream before the first event"));
            };
            if encoded {
                return Ok(begun(Start::Opaque(piece), source));
            }
            parser.push(piece);
            let event = parser
                .next_event()
                .map_err(|error| nonsense(&error.to_string()))?;
            let Some(event) = event else { continue };
            let error = event
                .data()
                .and_then(|data| LegError::first_event(Side::Decode, &instance.name(), &data));
            return match error {
                Some(error) => Err(error),
                None => Ok(begun(Start::Events(event, parser), source)),
            };
        }
    }

    /// Sends a leg, and returns the head of a good answer.
    async fn send(
        &self,
        side: Side,
        instance: &Instance,
        ask: &Ask,
        body: Bytes,
        id: &HeaderValue,
        deadline: Instant,
    ) -> Result<Response<UpstreamBody>, LegError> {
        let upstream = &self.shared.upstream;
        let mut headers = upstream.headers(id, &ask.headers);
        let native = instance
            .facts
            .load()
            .as_ref()
            .is_some_and(|facts| facts.native);
        if side == Side::Decode && native && self.keeps(ask) {
            let wanted = HeaderValue::from_static("1");
            headers.insert(HeaderName::from_static(IDS_HEADER), wanted);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let answer = upstream.post(&instance.spec.endpoint, ask.path, headers, body, left);
        let answer = tokio::select! {
            answer = answer => answer,
            () = instance.lost() => Err(TransportError::Broken {
                peer: instance.spec.endpoint.host_port().to_string(),
                reason: "it does not answer probes any more".to_owned(),
            }),
        };
        let answer = answer.map_err(|error| self.lost(side, instance, &error))?;
        self.shared.registry.signal(instance.id, Signal::Answered);
        if answer.status().is_success() {
            return Ok(answer);
        }
        let (parts, body) = answer.into_parts();
        let body = self
            .collect(side, instance, body, Instant::now() + ERROR_LIMIT)
            .await?;
        Err(LegError::status(
            side,
            &instance.name(),
            parts.status,
            parts.headers,
            body,
        ))
    }

    async fn collect(
        &self,
        side: Side,
        instance: &Instance,
        body: UpstreamBody,
        deadline: Instant,
    ) -> Result<Bytes, LegError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let name = instance.spec.endpoint.host_port().to_string();
        let whole = collect_body(body, &name, MAX_ANSWER, left).await;
        whole.map_err(|error| self.lost(side, instance, &error))
    }

    fn lost(&self, side: Side, instance: &Instance, error: &TransportError) -> LegError {
        let (error, signal) = LegError::transport(side, &instance.name(), error);
        if let Some(signal) = signal {
            self.shared.registry.signal(instance.id, signal);
        }
        error
    }

    fn instance(&self, id: InstanceId) -> Result<Arc<Instance>, LegError> {
        self.shared.registry.get(id).ok_or_else(|| {
            LegError::new(
                Failure::Unreachable,
                ErrorKind::NoInstance,
                "the instance that was picked has been removed",
            )
        })
    }
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    headers
        .get(CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"))
}

fn begun(start: Start, rest: UpstreamBody) -> Answer {
    Answer::Stream(Box::new(Begun { start, rest }))
}
