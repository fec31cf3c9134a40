//! What the tests see of bodies and handlers that end before their time.

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};

/// How a response body ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyEnd {
    /// All of it was handed to the connection.
    Complete,
    /// Its source failed.
    Failed,
    /// It was dropped before its end: the client left, or the process ends.
    Abandoned,
}

/// A response body that tells how it ended, once: how streams notice that their client left. hyper
/// drops the body of a response when the connection closes, at once if it waits for data.
#[derive(Debug)]
pub(crate) struct TrackedBody<B, F: FnOnce(BodyEnd)> {
    inner: B,
    on_end: OnEnd<F>,
}

/// Runs a closure when dropped: how a handler that has not answered yet notices
/// that its client left. hyper drops the handler's future when the connection closes, so a guard that
/// lives in the future (not in a task that it started) is dropped with it.
#[derive(Debug)]
pub(crate) struct CancelGuard<F: FnOnce()>(Option<F>);

#[derive(Debug)]
struct OnEnd<F: FnOnce(BodyEnd)>(Option<F>);

impl<B, F: FnOnce(BodyEnd)> TrackedBody<B, F> {
    /// `on_end` runs when the body ended, failed or was dropped, whichever is first.
    pub(crate) fn new(inner: B, on_end: F) -> Self {
        Self {
            inner,
            on_end: OnEnd(Some(on_end)),
        }
    }
}

impl<F: FnOnce()> CancelGuard<F> {
    pub(crate) fn new(on_cancel: F) -> Self {
        Self(Some(on_cancel))
    }
}

impl<F: FnOnce()> Drop for CancelGuard<F> {
    fn drop(&mut self) {
        if let Some(on_cancel) = self.0.take() {
            on_cancel();
        }
    }
}

impl<F: FnOnce(BodyEnd)> OnEnd<F> {
    fn run(&mut self, end: BodyEnd) {
        if let Some(on_end) = self.0.take() {
            on_end(end);
        }
    }
}

impl<F: FnOnce(BodyEnd)> Drop for OnEnd<F> {
    fn drop(&mut self) {
        self.run(BodyEnd::Abandoned);
    }
}

impl<B, F> Body for TrackedBody<B, F>
where
    B: Body + Unpin,
    B::Data: Buf,
    F: FnOnce(BodyEnd) + Unpin,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        match &polled {
            Poll::Ready(None) => self.on_end.run(BodyEnd::Complete),
            Poll::Ready(Some(Err(_))) => self.on_end.run(BodyEnd::Failed),
            Poll::Ready(Some(Ok(_))) if self.inner.is_end_stream() => {
                self.on_end.run(BodyEnd::Complete)
            }
            _ => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
