//! One connection to an instance, driven by whoever waits for its answer.

use super::pool::Pool;
use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tokio::net::TcpStream;
use tokio::time::Instant;
use twinfer_http::Endpoint;

type Driver = http1::Connection<TokioIo<TcpStream>, Full<Bytes>>;

/// A connection with no request on it.
pub(super) struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    /// Does the reading and writing; on the heap, so that moving a connection is cheap.
    driver: Pin<Box<Driver>>,
    /// When it was put aside; none: it is new.
    idle_since: Option<Instant>,
}

/// The body of an answer, with the connection that brings it. At its end the connection goes back to
/// the pool; dropped before, it is closed.
pub(crate) struct UpstreamBody {
    incoming: Incoming,
    connection: Option<Connection>,
    home: (Arc<Pool>, Endpoint),
}

impl Connection {
    pub(super) async fn new(stream: TcpStream) -> Result<Self, hyper::Error> {
        let (sender, driver) = http1::handshake(TokioIo::new(stream)).await?;
        Ok(Self {
            sender,
            driver: Box::pin(driver),
            idle_since: None,
        })
    }

    pub(super) fn is_reused(&self) -> bool {
        self.idle_since.is_some()
    }

    pub(super) fn idle_since(&self) -> Option<Instant> {
        self.idle_since
    }

    pub(super) fn put_aside(&mut self) {
        self.idle_since = Some(Instant::now());
    }

    /// Looks whether the peer has closed it; true if a request can be sent.
    pub(super) fn is_usable(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        self.driver.as_mut().poll(&mut cx).is_pending() && self.sender.is_ready()
    }

    /// Sends a request, and returns when the head of the answer is there; the error says how the
    /// connection broke before.
    pub(super) async fn send(
        mut self,
        request: Request<Full<Bytes>>,
        pool: &Arc<Pool>,
        home: &Endpoint,
    ) -> Result<Response<UpstreamBody>, String> {
        // A new connection takes a request once it was polled.
        let driver = &mut self.driver;
        let sender = &mut self.sender;
        let ready = poll_fn(|cx| {
            if driver.as_mut().poll(cx).is_ready() {
                return Poll::Ready(false);
            }
            sender.poll_ready(cx).map(|ready| ready.is_ok())
        });
        if !ready.await {
            return Err("closed by the peer".to_owned());
        }
        let answer = {
            let mut answer = pin!(self.sender.send_request(request));
            let driver = &mut self.driver;
            let mut ended = false;
            poll_fn(|cx| {
                ended = ended || driver.as_mut().poll(cx).is_ready();
                match answer.as_mut().poll(cx) {
                    Poll::Pending if ended => Poll::Ready(None),
                    polled => polled.map(Some),
                }
            })
            .await
        };
        match answer {
            Some(Ok(answer)) => Ok(answer.map(|incoming| UpstreamBody {
                incoming,
                connection: Some(self),
                home: (Arc::clone(pool), home.clone()),
            })),
            Some(Err(error)) => Err(innermost(&error)),
            None => Err("closed by the peer".to_owned()),
        }
    }
}

impl UpstreamBody {
    /// The answer is read: its connection serves the next request.
    fn give_back(&mut self) {
        if let Some(mut connection) = self.connection.take()
            && connection.is_usable()
        {
            let (pool, endpoint) = &self.home;
            pool.put(endpoint, connection);
        }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        let mut polled = Pin::new(&mut this.incoming).poll_frame(cx);
        if polled.is_pending()
            && let Some(connection) = &mut this.connection
        {
            if connection.driver.as_mut().poll(cx).is_ready() {
                // It has ended; what it read before is in the body's channel.
                this.connection = None;
            }
            polled = Pin::new(&mut this.incoming).poll_frame(cx);
        }
        match &polled {
            Poll::Ready(Some(Ok(_))) if this.incoming.is_end_stream() => this.give_back(),
            Poll::Ready(None) => this.give_back(),
            _ => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

/// The last cause says what happened; the ones before say in which layer.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
