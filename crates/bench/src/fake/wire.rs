//! HTTP/1.1 by hand: requests from a socket, heads of answers.

use bytes::{Buf, Bytes, BytesMut};
use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

const MAX_HEAD: usize = 1 << 16;
const MAX_BODY: usize = 256 << 20;

/// A request as read.
pub(super) struct Request {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Bytes,
}

/// Reads one request after the other from a connection.
#[derive(Default)]
pub(super) struct RequestReader {
    buffer: BytesMut,
}

impl Request {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    }

    /// Path without query.
    pub(super) fn route(&self) -> &str {
        self.path.split('?').next().unwrap_or_default()
    }

    pub(super) fn wants_close(&self) -> bool {
        self.header("connection")
            .is_some_and(|v| v.eq_ignore_ascii_case("close"))
    }
}

impl RequestReader {
    /// The next request; none when the client closed between requests.
    pub(super) async fn next(
        &mut self,
        read: &mut OwnedReadHalf,
        write: &mut OwnedWriteHalf,
    ) -> io::Result<Option<Request>> {
        let head_len = loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            if self.buffer.len() > MAX_HEAD {
                return Err(bad("head too long"));
            }
            if read.read_buf(&mut self.buffer).await? == 0 {
                return if self.buffer.is_empty() {
                    Ok(None)
                } else {
                    Err(bad("cut within a head"))
                };
            }
        };
        let head = self.buffer.split_to(head_len);
        let head = std::str::from_utf8(&head).map_err(|_| bad("head is not UTF-8"))?;
        let mut lines = head.split("\r\n");
        let mut first = lines.next().unwrap_or_default().split(' ');
        let (method, path) = match (first.next(), first.next()) {
            (Some(method), Some(path)) if path.starts_with('/') => {
                (method.to_owned(), path.to_owned())
            }
            _ => return Err(bad("not a request line")),
        };
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let mut request = Request {
            method,
            path,
            headers,
            body: Bytes::new(),
        };
        if request
            .header("expect")
            .is_some_and(|v| v.eq_ignore_ascii_case("100-continue"))
        {
            write.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        let chunked = request
            .header("transfer-encoding")
            .is_some_and(|v| v.eq_ignore_ascii_case("chunked"));
        request.body = if chunked {
            self.chunked(read).await?
        } else {
            let len = request.header("content-length").unwrap_or("0");
            let len: usize = len.parse().map_err(|_| bad("content-length"))?;
            self.exact(read, len).await?
        };
        Ok(Some(request))
    }

    async fn chunked(&mut self, read: &mut OwnedReadHalf) -> io::Result<Bytes> {
        let mut body = BytesMut::new();
        loop {
            let size = loop {
                if let Some(at) = self.buffer.windows(2).position(|w| w == b"\r\n") {
                    let line = self.buffer.split_to(at);
                    self.buffer.advance(2);
                    let text = String::from_utf8_lossy(&line);
                    let digits = text.split(';').next().unwrap_or_default().trim();
                    break usize::from_str_radix(digits, 16).map_err(|_| bad("chunk size"))?;
                }
                self.more(read).await?;
            };
            let chunk = self.exact(read, size).await?;
            let end = self.exact(read, 2).await?;
            if &end[..] != b"\r\n" {
                return Err(bad("chunk end"));
            }
            if size == 0 {
                return Ok(body.freeze());
            }
            if body.len() + size > MAX_BODY {
                return Err(bad("body too long"));
            }
            body.extend_from_slice(&chunk);
        }
    }

    async fn exact(&mut self, read: &mut OwnedReadHalf, len: usize) -> io::Result<Bytes> {
        if len > MAX_BODY {
            return Err(bad("body too long"));
        }
        while self.buffer.len() < len {
            self.more(read).await?;
        }
        Ok(self.buffer.split_to(len).freeze())
    }

    async fn more(&mut self, read: &mut OwnedReadHalf) -> io::Result<()> {
        if read.read_buf(&mut self.buffer).await? == 0 {
            return Err(bad("cut within a body"));
        }
        Ok(())
    }
}

/// Head of an answer; `length` none means chunked.
pub(super) fn head(
    status: u16,
    content_type: &str,
    length: Option<usize>,
    extra: &[(String, String)],
) -> Bytes {
    let mut head = format!(
        "HTTP/1.1 {status} {}\r\nserver: uvicorn\r\n",
        reason(status)
    );
    match length {
        Some(length) => head.push_str(&format!("content-length: {length}\r\n")),
        None => head.push_str("transfer-encoding: chunked\r\n"),
    }
    if !content_type.is_empty() {
        head.push_str(&format!("content-type: {content_type}\r\n"));
    }
    for (name, value) in extra {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    Bytes::from(head)
}

/// One chunk of a chunked body.
pub(super) fn chunk(data: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(data.len() + 12);
    out.extend_from_slice(format!("{:x}\r\n", data.len()).as_bytes());
    out.extend_from_slice(data);
    out.extend_from_slice(b"\r\n");
    Bytes::from(out)
}

fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status)
        .ok()
        .and_then(|s| s.canonical_reason())
        .unwrap_or("Unknown")
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
