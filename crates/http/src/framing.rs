//! The one error shape for heads that are no HTTP.
//!
//! hyper answers a head that it cannot read by itself, before any service sees it: a status line and
//! `content-length: 0`. On its way to the socket that answer gets the body that all other errors have.

use crate::ServeOptions;
use std::fmt::Write as _;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use twinfer_protocol::{ApiError, ErrorKind};

/// A connection whose bare refusals become whole ones.
pub(crate) struct Framed {
    stream: TcpStream,
    options: ServeOptions,
    /// What is left to write of a refusal.
    rest: Vec<u8>,
}

impl Framed {
    pub(crate) fn new(stream: TcpStream, options: ServeOptions) -> Self {
        Self {
            stream,
            options,
            rest: Vec::new(),
        }
    }

    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.rest.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.rest))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.rest.drain(..written);
        }
        Poll::Ready(Ok(()))
    }

    /// Takes a bare refusal over; it counts as written from then on.
    fn take_over(&mut self, cx: &mut Context<'_>, head: &[u8]) -> Option<Poll<io::Result<usize>>> {
        self.rest = whole(head, &self.options)?;
        Some(match self.poll_rest(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            // The rest goes out with the flush.
            _ => Poll::Ready(Ok(head.len())),
        })
    }
}

impl AsyncRead for Framed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Framed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_rest(cx))?;
        if let Some(taken) = self.take_over(cx, buffer) {
            return taken;
        }
        Pin::new(&mut self.stream).poll_write(cx, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_rest(cx))?;
        if let [one] = buffers
            && let Some(taken) = self.take_over(cx, one)
        {
            return taken;
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_rest(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_rest(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A bare refusal with a body; none for anything else.
fn whole(head: &[u8], options: &ServeOptions) -> Option<Vec<u8>> {
    const EMPTY: &str = "content-length: 0";
    let status = head
        .strip_prefix(b"HTTP/1.1 ")
        .or_else(|| head.strip_prefix(b"HTTP/1.0 "))?
        .get(..4)?;
    let message = match status {
        b"400 " => "the request's first line or a header is not HTTP/1.1".to_owned(),
        b"414 " => "the request's URI is too long; at most 65534 bytes are allowed".to_owned(),
        b"431 " => format!(
            "the request's head is too large; at most {} headers with {} bytes together are allowed",
            options.max_headers, options.max_header_bytes
        ),
        _ => return None,
    };
    let text = std::str::from_utf8(head).ok()?.strip_suffix("\r\n\r\n")?;
    let is_empty = |line: &&str| line.eq_ignore_ascii_case(EMPTY);
    text.split("\r\n").find(is_empty)?;
    let body = ApiError::new(ErrorKind::InvalidRequest, message).body();
    let body = serde_json::to_string(&body).ok()?;
    let mut answer = String::new();
    for line in text.split("\r\n").filter(|line| !is_empty(line)) {
        let _ = write!(answer, "{line}\r\n");
    }
    let _ = write!(
        answer,
        "content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    Some(answer.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bare_refusals_are_changed() {
        let options = ServeOptions::default();
        let bare = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        let whole_one = String::from_utf8(whole(bare, &options).unwrap()).unwrap();
        let (head, body) = whole_one.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 431 Request Header Fields Too Large\r\n"));
        assert!(head.contains("connection: close"), "{head}");
        assert!(head.contains(&format!("content-length: {}", body.len())));
        assert!(body.contains("128 headers") && body.contains("invalid_request"));
        for other in [
            &b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"[..],
            b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
            b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n",
            b"data: HTTP/1.1 400 \r\n\r\n",
            b"",
        ] {
            assert_eq!(whole(other, &options), None);
        }
    }
}
