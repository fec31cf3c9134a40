use crate::crowd::{Busy, Crowd, Seat};
use crate::error::error_events;
use crate::framing::Framed;
use crate::progress::Progress;
use crate::{BoxError, Drain, DrainState, InFlight, Listener, error_response};
use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE};
use http::{HeaderValue, Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::{Resource, getrlimit};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tower::{Service, ServiceExt};

/// After [`DrainState::Closed`] connections have this long to send what is in their buffers.
const CLOSE: Duration = Duration::from_millis(500);
/// Pause after a failed accept (no descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Between two looks for an idle connection to close, where there are too many.
const CROWDED: Duration = Duration::from_millis(50);
/// Failed accepts are told together, once in this time.
const ACCEPT_TOLD: Duration = Duration::from_secs(1);

/// Connections at the same time, where the process may open files enough.
pub const MAX_CONNECTIONS: usize = 8192;

/// Descriptors of a process beside its connections: files, sockets, event queues.
pub const OWN_DESCRIPTORS: u64 = 128;

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub struct ServeOptions {
    /// Bytes of request line and headers together; more is 431.
    pub max_header_bytes: usize,
    /// Number of headers; more is 431.
    pub max_headers: usize,
    /// A connection is closed when this passes without a complete request head, idle ones included.
    pub header_timeout: Duration,
    /// A connection is closed when its client takes no byte of what waits to be sent for this long.
    pub write_timeout: Duration,
    /// Connections at the same time; further ones wait until one ends, or the one that has been without
    /// a request longest is closed for them.
    pub max_connections: usize,
    /// Paths that are served in every state and not counted as in flight.
    pub is_control: fn(&str) -> bool,
}

/// Extension of every request: the other end of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientAddr(pub SocketAddr);

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            max_header_bytes: 64 << 10,
            max_headers: 128,
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(60),
            max_connections: MAX_CONNECTIONS,
            is_control: is_control_path,
        }
    }
}

impl ServeOptions {
    /// Lets connections take only what `reserve` leaves of the files that the process may open (`ulimit
    /// -n`), but a quarter in any case: idle clients must not keep the process from its own work.
    #[must_use]
    pub fn with_reserve(self, reserve: u64) -> Self {
        let Some(limit) = getrlimit(Resource::Nofile).current else {
            return self;
        };
        let left = limit.saturating_sub(reserve).max(limit / 4).max(1);
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        Self {
            max_connections: self.max_connections.min(left),
            ..self
        }
    }
}

/// Health, readiness, metrics and peer routes: needed while draining.
fn is_control_path(path: &str) -> bool {
    matches!(path, "/health" | "/ready" | "/metrics") || path.starts_with("/twinfer/")
}

/// Serves HTTP/1.1 until the drain is closed.
///
/// Requests are counted in `drain` until their response body has ended. From
/// [`DrainState::Draining`] on they get 503 with Retry-After. When the drain's deadline has passed, a
/// handler that has not answered is dropped and its client gets 503; an event stream (content type
/// `text/event-stream`) gets an event with the error and `[DONE]` behind the last whole event; any
/// other body is broken off. Bodies of event streams must therefore yield whole events.
///
/// A handler's future and a response's body are dropped as soon as the client's connection closes.
pub async fn serve<S, B>(listener: Listener, service: S, options: ServeOptions, drain: Drain)
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let slots = Arc::new(Semaphore::new(
        options.max_connections.min(Semaphore::MAX_PERMITS),
    ));
    let crowd = Arc::new(Crowd::default());
    let mut connections = JoinSet::new();
    let mut closed = pin!(drain.reached(DrainState::Closed));
    let (mut failures, mut told) = (0u32, None);
    loop {
        let accepted = async {
            let slot = place(&slots, &crowd).await;
            (listener.inner.accept().await, slot)
        };
        tokio::select! {
            biased;
            () = &mut closed => break,
            Some(_) = connections.join_next() => {}
            (accepted, slot) = accepted => match accepted {
                Ok((stream, client)) => {
                    let client = ClientAddr(client);
                    let connection = connection(
                        (stream, client),
                        service.clone(),
                        options,
                        drain.clone(),
                        crowd.seat(),
                    );
                    connections.spawn(async move {
                        connection.await;
                        drop(slot);
                    });
                }
                Err(error) => {
                    failures += 1;
                    if told.is_none_or(|told: Instant| told.elapsed() >= ACCEPT_TOLD) {
                        tracing::warn!(%error, addr = %listener.addr(), failures, "accept failed");
                        (failures, told) = (0, Some(Instant::now()));
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    let _ = timeout(CLOSE, async {
        while connections.join_next().await.is_some() {}
    })
    .await;
    connections.shutdown().await;
}

/// Waits for a free place, or makes one.
async fn place(slots: &Arc<Semaphore>, crowd: &Crowd) -> Option<OwnedSemaphorePermit> {
    loop {
        if slots.available_permits() == 0 {
            crowd.evict();
        }
        if let Ok(slot) = timeout(CROWDED, Arc::clone(slots).acquire_owned()).await {
            return slot.ok();
        }
    }
}

async fn connection<S, B>(
    (stream, client): (TcpStream, ClientAddr),
    service: S,
    options: ServeOptions,
    drain: Drain,
    seat: Arc<Seat>,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    // Without NODELAY each small event waits for the acknowledgement of the one before.
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let stream = Progress::new(
        TokioIo::new(Framed::new(stream, options)),
        options.write_timeout,
    );
    let (counted, working) = (drain.clone(), Arc::clone(&seat));
    let handler = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(client);
        let (service, drain, busy) = (service.clone(), counted.clone(), working.busy());
        async move { Ok::<_, Infallible>(answer(service, request, options, &drain, busy).await) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(options.header_timeout)
        .max_headers(options.max_headers)
        .max_header_size(options.max_header_bytes);
    let mut connection = pin!(builder.serve_connection(stream, handler));
    let mut closed = pin!(drain.reached(DrainState::Closed));
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = &mut closed => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        () = seat.evicted() => return,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}

type Answer<B> = Response<Either<DrainBody<B>, Full<Bytes>>>;

async fn answer<S, B>(
    service: S,
    request: Request<Incoming>,
    options: ServeOptions,
    drain: &Drain,
    busy: Busy,
) -> Answer<B>
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    if (options.is_control)(request.uri().path()) {
        let Ok(response) = service.oneshot(request).await;
        return response.map(|body| Either::Left(DrainBody::control(body, busy)));
    }
    let refuse = || {
        let mut response = error_response::<Full<Bytes>>(&drain.refusal()).map(Either::Right);
        response
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
        response
    };
    let Ok(guard) = drain.enter() else {
        return refuse();
    };
    let response = tokio::select! {
        response = service.oneshot(request) => match response {
            Ok(response) => response,
            Err(never) => match never {},
        },
        () = drain.expired() => return refuse(),
    };
    let events = response
        .headers()
        .get(CONTENT_TYPE)
        .is_some_and(|v| v.as_bytes().starts_with(b"text/event-stream"));
    response.map(|body| Either::Left(DrainBody::counted(body, events, drain, guard, busy)))
}

/// A response body under a drain: counted while it lasts, ended at the deadline.
struct DrainBody<B> {
    inner: Option<B>,
    watch: Option<Watch>,
    /// Dropped with the body: the connection is idle from then on.
    _busy: Busy,
}

struct Watch {
    /// Dropped with the body: the request is in flight until then.
    _guard: InFlight,
    drain: Drain,
    expired: Pin<Box<WaitForCancellationFutureOwned>>,
    events: bool,
    tail: Tail,
}

/// The last bytes that were sent, to know whether an event is whole.
#[derive(Clone, Copy, Default)]
struct Tail([u8; 2]);

impl Tail {
    fn push(&mut self, data: &[u8]) {
        // CR LF counts as LF: two line ends in a row end an event.
        for &byte in data
            .iter()
            .filter(|&&b| b != b'\r')
            .rev()
            .take(2)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
        {
            self.0 = [self.0[1], byte];
        }
    }

    fn is_boundary(self) -> bool {
        self.0 == [0; 2] || self.0 == *b"\n\n"
    }
}

impl<B: Body<Data = Bytes> + Unpin> DrainBody<B> {
    fn control(inner: B, busy: Busy) -> Self {
        Self {
            inner: Some(inner),
            watch: None,
            _busy: busy,
        }
    }

    fn counted(inner: B, events: bool, drain: &Drain, guard: InFlight, busy: Busy) -> Self {
        let watch = Watch {
            _guard: guard,
            drain: drain.clone(),
            expired: Box::pin(drain.expired()),
            events,
            tail: Tail::default(),
        };
        Self {
            inner: Some(inner),
            watch: Some(watch),
            _busy: busy,
        }
    }
}

impl<B> Body for DrainBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        let Some(inner) = &mut this.inner else {
            return Poll::Ready(None);
        };
        let mut expired = false;
        if let Some(watch) = &mut this.watch {
            expired = watch.expired.as_mut().poll(cx).is_ready();
            if expired && watch.events && watch.tail.is_boundary() && !inner.is_end_stream() {
                let last = error_events(&watch.drain.refusal());
                this.inner = None;
                return Poll::Ready(Some(Ok(Frame::data(last))));
            }
        }
        match Pin::new(inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                if let (Some(watch), Some(data)) = (&mut this.watch, frame.data_ref()) {
                    watch.tail.push(data);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error.into()))),
            Poll::Ready(None) => {
                this.inner = None;
                Poll::Ready(None)
            }
            Poll::Pending if expired => {
                this.inner = None;
                Poll::Ready(Some(Err("the process is shutting down".into())))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner
            .as_ref()
            .map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}
