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
use twinfer_http::{Endpoint, innermost};

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

/// What [`Connection::send`] says of a peer that closed the connection before the request.
const CLOSED: &str = "closed by the peer before the request";

/// Why a request got no answer; the text says how the connection ended.
pub(super) enum NoAnswer {
    /// Not a byte of the request was written.
    NotSent(String),
    /// The peer may have read the request, and may have acted on it.
    Broken(String),
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

    /// Sends a request, and returns when the head of the answer is there.
    pub(super) async fn send(
        self,
        request: Request<Full<Bytes>>,
        pool: &Arc<Pool>,
        home: &Endpoint,
    ) -> Result<Response<UpstreamBody>, NoAnswer> {
        let Self {
            mut sender,
            mut driver,
            ..
        } = self;
        // A new connection takes a request once it was polled.
        let ready = poll_fn(|cx| {
            if driver.as_mut().poll(cx).is_ready() {
                return Poll::Ready(false);
            }
            sender.poll_ready(cx).map(|ready| ready.is_ok())
        });
        if !ready.await {
            return Err(NoAnswer::NotSent(CLOSED.to_owned()));
        }
        let mut answer = pin!(sender.try_send_request(request));
        let mut driver = Some(driver);
        let answered = poll_fn(|cx| {
            if let Some(running) = &mut driver
                && running.as_mut().poll(cx).is_ready()
            {
                // A request that it has not answered gets its error when the driver is gone.
                driver = None;
            }
            answer.as_mut().poll(cx)
        });
        match answered.await {
            Ok(answer) => Ok(answer.map(|incoming| UpstreamBody {
                incoming,
                connection: driver.map(|driver| Self {
                    sender,
                    driver,
                    idle_since: None,
                }),
                home: (Arc::clone(pool), home.clone()),
            })),
            // hyper gives the request back if no byte of it was written.
            Err(mut error) => {
                let not_sent = error.take_message().is_some();
                let reason = innermost(error.error());
                Err(if not_sent {
                    NoAnswer::NotSent(reason)
                } else {
                    NoAnswer::Broken(reason)
                })
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_request_on_a_connection_that_was_closed_before_was_not_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let stream = TcpStream::connect(address).await.expect("a connection");
        drop(listener.accept().await.expect("its other end"));
        stream.readable().await.expect("the end has arrived");
        let connection = Connection::new(stream).await.expect("a connection");
        let pool = Arc::new(Pool::new(Duration::from_secs(1), 1));
        let home: Endpoint = format!("http://{address}").parse().expect("an endpoint");
        let mut request = Request::new(Full::new(Bytes::from_static(b"{}")));
        *request.method_mut() = http::Method::POST;
        let sent = connection.send(request, &pool, &home).await;
        assert!(matches!(sent, Err(NoAnswer::NotSent(_))));
    }
}
