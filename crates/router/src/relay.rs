//! Decode's answer on its way to the client: the bytes as they came, whole events of a stream.
//!
//! The client's connection polls this body, and it polls the instance's: no task, no channel between
//! them. When the client leaves, hyper drops the body and with it the instance's connection.

use crate::answer::{Side, is_error_event};
use crate::flow::Exchange;
use crate::upstream::UpstreamBody;
use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};
use twinfer_http::sse::{DONE, SseEvent, SseParser, error_events};
use twinfer_protocol::{ApiError, ErrorKind};

/// After `[DONE]` the instance has this long to end its answer properly, so that its connection can
/// be used again.
const LINGER: Duration = Duration::from_millis(500);
/// Largest event of a stream, in bytes.
pub(crate) const MAX_EVENT: usize = 16 << 20;

/// What was read of an answer before its head went to the client.
#[derive(Debug)]
pub(crate) enum Start {
    /// The first event, and what cuts the others.
    Events(SseEvent, SseParser),
    /// Bytes that are no events, or encoded.
    Opaque(Bytes),
}

/// Pieces are gathered up to this, in bytes.
const GATHER: usize = 64 << 10;

/// A response body that passes on an instance's.
pub(crate) struct Relay {
    source: Option<UpstreamBody>,
    /// Cuts an event stream; none for bodies of other types.
    events: Option<SseParser>,
    /// Goes out before anything else.
    next: Option<Bytes>,
    state: State,
    idle: Duration,
    /// Since when the instance is waited for; none while it is ahead of the client.
    waiting: Option<Instant>,
    alarm: Pin<Box<Sleep>>,
    exchange: Exchange,
}

/// Pieces that are there at the same time leave as one; a single one is not copied.
#[derive(Default)]
struct Gathered {
    first: Option<Bytes>,
    more: Option<BytesMut>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// An event told of an error; `[DONE]` may follow.
    ErrorSeen,
    /// `[DONE]` was seen.
    Done,
    /// The rest is in `next`.
    Ended,
}

impl Relay {
    pub(crate) fn new(
        start: Start,
        source: UpstreamBody,
        idle: Duration,
        exchange: Exchange,
    ) -> Self {
        let (first, events, bytes) = match start {
            Start::Events(event, parser) => (Some(event), Some(parser), None),
            Start::Opaque(bytes) => (None, None, Some(bytes)),
        };
        let mut relay = Self {
            source: Some(source),
            events,
            next: bytes,
            state: State::Running,
            idle,
            waiting: None,
            alarm: Box::pin(sleep(idle)),
            exchange,
        };
        if let Some(event) = first {
            relay.look_at(&event);
            relay.next = Some(event.into_raw());
        }
        relay
    }

    fn take(&mut self, data: Bytes) {
        match &mut self.events {
            Some(parser) => parser.push(data),
            None => self.next = Some(data),
        }
    }

    /// The next bytes for the client that are there already.
    fn ready_bytes(&mut self) -> Option<Bytes> {
        if let Some(next) = self.next.take() {
            return Some(next);
        }
        if self.state == State::Ended {
            return None;
        }
        match self.events.as_mut()?.next_event() {
            Ok(Some(event)) => {
                self.look_at(&event);
                Some(event.into_raw())
            }
            Ok(None) => None,
            Err(error) => {
                self.break_off(&error.to_string());
                self.next.take()
            }
        }
    }

    fn look_at(&mut self, event: &SseEvent) {
        let Some(data) = event.data() else { return };
        if *data == *b"[DONE]" {
            self.state = State::Done;
            self.alarm.as_mut().reset(Instant::now() + LINGER);
        } else if self.state == State::Running && is_error_event(&data) {
            self.state = State::ErrorSeen;
            self.exchange.note_error(ErrorKind::DecodeFailed);
        }
    }

    /// The instance ended its answer.
    fn source_ended(&mut self) {
        self.source = None;
        let Some(parser) = &mut self.events else {
            return self.finish();
        };
        let rest = parser.finish();
        let done = self.state == State::Done || SseEvent::from_raw(rest.clone()).is_done();
        match self.state {
            _ if done => {
                self.next = Some(rest).filter(|rest| !rest.is_empty());
                self.finish();
            }
            State::ErrorSeen => {
                self.next = Some(DONE);
                self.finish();
            }
            _ => self.break_off("the stream ended without [DONE]"),
        }
    }

    /// The instance failed after its first byte. What it left half is dropped, so that the error is an
    /// event of its own.
    fn break_off(&mut self, why: &str) {
        self.source = None;
        if self.state == State::Done {
            return self.finish();
        }
        let message = format!(
            "{} instance {} broke off: {why}",
            Side::Decode.as_str(),
            self.exchange.decode_name()
        );
        let error = ApiError::new(ErrorKind::DecodeFailed, message);
        self.exchange.broke(&error);
        if self.events.is_some() {
            self.next = Some(error_events(&error));
        }
        self.state = State::Ended;
    }

    fn finish(&mut self) {
        self.state = State::Ended;
        self.exchange.finished();
    }

    /// Time passed without a byte.
    fn poll_alarm(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.alarm.as_mut().poll(cx));
            if self.state == State::Done {
                self.source = None;
                self.finish();
                return Poll::Ready(());
            }
            // Bytes do not touch the timer; it looks since when there are none.
            let now = Instant::now();
            let until = self.waiting.unwrap_or(now) + self.idle;
            if until > now {
                self.alarm.as_mut().reset(until);
                continue;
            }
            self.break_off(&format!("nothing came for {} s", self.idle.as_secs_f64()));
            return Poll::Ready(());
        }
    }
}

impl Gathered {
    fn push(&mut self, bytes: Bytes) {
        match (&mut self.more, &self.first) {
            (Some(more), _) => more.extend_from_slice(&bytes),
            (None, None) => self.first = Some(bytes),
            (None, Some(first)) => {
                let mut more = BytesMut::with_capacity(2 * (first.len() + bytes.len()));
                more.extend_from_slice(first);
                more.extend_from_slice(&bytes);
                self.more = Some(more);
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    fn is_full(&self) -> bool {
        let first = self.first.as_ref().map_or(0, Bytes::len);
        self.more.as_ref().map_or(first, BytesMut::len) >= GATHER
    }

    fn frame(self) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let bytes = self.more.map(BytesMut::freeze).or(self.first);
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = &mut *self;
        let mut out = Gathered::default();
        loop {
            while let Some(bytes) = this.ready_bytes() {
                out.push(bytes);
            }
            if out.is_full() {
                return out.frame();
            }
            if this.state == State::Ended && !out.is_empty() {
                return out.frame();
            }
            if this.state == State::Ended {
                let cut = this.events.is_none() && this.exchange.is_broken();
                // A body that is no stream of events can only be cut.
                return Poll::Ready(cut.then(|| Err(io::Error::other("the instance broke off"))));
            }
            let Some(source) = &mut this.source else {
                this.finish();
                continue;
            };
            match Pin::new(source).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        this.waiting = None;
                        this.take(data);
                    }
                }
                Poll::Ready(Some(Err(error))) => this.break_off(&error.to_string()),
                Poll::Ready(None) => this.source_ended(),
                Poll::Pending if !out.is_empty() => return out.frame(),
                Poll::Pending => {
                    this.waiting.get_or_insert_with(Instant::now);
                    ready!(this.poll_alarm(cx));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.state == State::Ended
            && self.next.is_none()
            && !(self.events.is_none() && self.exchange.is_broken())
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
