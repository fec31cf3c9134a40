//! Decode's answer on its way to the client: the bytes as they came, whole events of a stream.
//!
//! A stream whose instance dies goes on at another one, if what was given is known: the instance tells the tokens of
//! each event in a line before it, which ends here.
//!
//! The client's connection polls this body, and it polls the instance's: no task, no channel between
//! them. When the client leaves, hyper drops the body and with it the instance's connection.

use crate::answer::{ForeignError, Side, is_error_event, read_error};
use crate::flow::{Begun, Exchange};
use crate::registry::LOOK;
use crate::upstream::UpstreamBody;
use bytes::{Buf, Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;
use twinfer_http::sse::{DONE, SseEvent, SseParser, error_events};
use twinfer_protocol::{ApiError, ErrorKind, Fault, IdsLine};

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
    /// None while another instance is looked for.
    exchange: Option<Exchange>,
    resuming: Option<Resuming>,
    /// Ends when the instance is taken out of the router.
    gone: Option<Gone>,
    /// For the client if no other instance goes on.
    error: Option<ApiError>,
}

type Gone = Pin<Box<WaitForCancellationFutureOwned>>;
type Resuming = Pin<Box<dyn Future<Output = (Exchange, Option<Box<Begun>>)> + Send>>;

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
            alarm: Box::pin(sleep(idle.min(LOOK))),
            gone: exchange.decode_gone().map(Box::pin),
            exchange: Some(exchange),
            resuming: None,
            error: None,
        };
        if let Some(event) = first {
            relay.next = relay.passed(event);
        }
        relay
    }

    /// What the client gets of an event; none where the stream goes on elsewhere instead.
    fn passed(&mut self, event: SseEvent) -> Option<Bytes> {
        if !self.look_at(&event) {
            return None;
        }
        let Some(kept) = self.exchange.as_mut().and_then(Exchange::resumable) else {
            return Some(event.into_raw());
        };
        if !kept.is_whole()
            && let Some(data) = event.data()
        {
            let told = IdsLine::cut(event.raw()).is_some();
            kept.note_head(&data, told);
        }
        let mut raw = event.into_raw();
        while let Some((line, length)) = IdsLine::cut(&raw) {
            kept.note(line);
            raw.advance(length);
        }
        Some(raw)
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
            Ok(Some(event)) => self.passed(event),
            Ok(None) => None,
            Err(error) => {
                self.break_off(&error.to_string());
                self.next.take()
            }
        }
    }

    /// False if the event is not for the client.
    fn look_at(&mut self, event: &SseEvent) -> bool {
        let Some(data) = event.data() else {
            return true;
        };
        if *data == *b"[DONE]" {
            self.state = State::Done;
            self.alarm.as_mut().reset(Instant::now() + LINGER);
        } else if self.state == State::Running && is_error_event(&data) {
            let foreign = read_error(&data);
            let kind = foreign.as_ref().and_then(ForeignError::kind);
            let clients = kind.is_some_and(|kind| kind.fault() == Fault::Client);
            if !clients && self.can_resume() {
                let message = foreign.map(|error| error.message()).unwrap_or_default();
                self.break_off(&message);
                return false;
            }
            self.state = State::ErrorSeen;
            if let Some(exchange) = &self.exchange {
                exchange.note_error(ErrorKind::DecodeFailed);
            }
        }
        true
    }

    fn can_resume(&self) -> bool {
        self.events.is_some() && self.exchange.as_ref().is_some_and(Exchange::can_resume)
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
        let name = self.exchange.as_ref().map(Exchange::decode_name);
        let message = format!(
            "{} instance {} broke off: {why}",
            Side::Decode.as_str(),
            name.unwrap_or_default()
        );
        let error = ApiError::new(ErrorKind::DecodeFailed, message);
        if self.can_resume()
            && let Some(exchange) = self.exchange.take()
        {
            self.error = Some(error.clone());
            self.resuming = Some(Box::pin(exchange.resume(error)));
            return;
        }
        if let Some(exchange) = &mut self.exchange {
            exchange.broke(&error);
        }
        if self.events.is_some() {
            self.next = Some(error_events(&error));
        }
        self.state = State::Ended;
    }

    /// Looks whether another instance goes on.
    fn poll_resuming(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(resuming) = &mut self.resuming else {
            return Poll::Ready(());
        };
        let (exchange, begun) = ready!(resuming.as_mut().poll(cx));
        self.resuming = None;
        self.gone = exchange.decode_gone().map(Box::pin);
        self.exchange = Some(exchange);
        let error = self.error.take();
        match begun.map(|begun| (begun.start, begun.rest)) {
            Some((Start::Events(event, parser), rest)) => {
                self.source = Some(rest);
                self.events = Some(parser);
                self.waiting = None;
                self.next = self.passed(event);
            }
            _ => {
                if let (Some(error), Some(exchange)) = (&error, &self.exchange) {
                    exchange.note_error(error.kind);
                }
                self.next = error.as_ref().map(error_events);
                self.state = State::Ended;
            }
        }
        Poll::Ready(())
    }

    fn finish(&mut self) {
        self.state = State::Ended;
        if let Some(exchange) = &mut self.exchange {
            exchange.finished();
        }
    }

    /// Was the instance taken out of the router?
    fn is_gone(&mut self, cx: &mut Context<'_>) -> bool {
        let gone = self.gone.as_mut();
        let gone = gone.is_some_and(|gone| gone.as_mut().poll(cx).is_ready());
        if gone {
            self.gone = None;
        }
        gone
    }

    fn is_cut(&self) -> bool {
        let broken = self.exchange.as_ref().is_some_and(Exchange::is_broken);
        self.events.is_none() && broken
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
            let since = self.waiting.unwrap_or(now);
            let until = since + self.idle;
            let lost = || self.exchange.as_ref().is_some_and(Exchange::decode_is_lost);
            if until > now && now.duration_since(since) >= LOOK && lost() {
                self.break_off("it does not answer probes any more");
                return Poll::Ready(());
            }
            if until > now {
                self.alarm.as_mut().reset(until.min(now + LOOK));
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
                let cut = this.is_cut();
                // A body that is no stream of events can only be cut.
                return Poll::Ready(cut.then(|| Err(io::Error::other("the instance broke off"))));
            }
            if this.resuming.is_some() {
                match this.poll_resuming(cx) {
                    Poll::Ready(()) => continue,
                    Poll::Pending if !out.is_empty() => return out.frame(),
                    Poll::Pending => return Poll::Pending,
                }
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
                Poll::Pending if this.is_gone(cx) => {
                    this.break_off("it was removed from the router before the answer ended");
                }
                Poll::Pending => {
                    this.waiting.get_or_insert_with(Instant::now);
                    ready!(this.poll_alarm(cx));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.state == State::Ended && self.next.is_none() && !self.is_cut()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
