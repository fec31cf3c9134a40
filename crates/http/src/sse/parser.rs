use bytes::{Bytes, BytesMut};
use std::borrow::Cow;

const BOM: &[u8] = b"\xef\xbb\xbf";

/// Cuts a byte stream into events, however the bytes arrive. Each byte is looked at once; an event
/// that lies in one chunk is not copied.
#[derive(Debug)]
pub struct SseParser {
    /// Start of the current event, from earlier chunks.
    partial: BytesMut,
    /// Bytes that were not looked at yet.
    rest: Bytes,
    line: Line,
    started: bool,
    max_event: usize,
}

/// One event as it came: its lines and the blank line that ends it. Concatenated, the events of a
/// stream are the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SseEvent {
    raw: Bytes,
    /// Only the first event of a stream may begin with a byte order mark.
    first: bool,
}

/// A stream that is not followed any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// More bytes without a blank line than allowed.
    #[error("an event has more than {limit} bytes")]
    TooLarge {
        /// Allowed bytes.
        limit: usize,
    },
}

/// Where in a line the next byte stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// At the start of an event: a blank line here is an event of its own.
    Start,
    Inside,
    /// Behind CR: LF may follow and belongs to it. `bare` lines before mean a CR-only stream.
    AfterCr,
    /// Behind a line that ended with LF or CR LF.
    AfterLf,
    /// Behind the CR of a blank line: complete, but LF may follow.
    BlankCr,
}

impl SseParser {
    /// `max_event` bounds an event in bytes.
    pub fn new(max_event: usize) -> Self {
        Self {
            partial: BytesMut::new(),
            rest: Bytes::new(),
            line: Line::Start,
            started: false,
            max_event,
        }
    }

    /// Adds the next chunk. Take out every event with [`Self::next_event`] before adding another.
    pub fn push(&mut self, chunk: Bytes) {
        if self.rest.is_empty() {
            self.rest = chunk;
        } else {
            let mut joined = BytesMut::with_capacity(self.rest.len() + chunk.len());
            joined.extend_from_slice(&self.rest);
            joined.extend_from_slice(&chunk);
            self.rest = joined.freeze();
        }
    }

    /// The next whole event, if there is one.
    ///
    /// # Errors
    /// [`SseError::TooLarge`]; the parser is of no use afterwards.
    pub fn next_event(&mut self) -> Result<Option<SseEvent>, SseError> {
        let limit = self.max_event;
        let taken = match self.find_end() {
            Some(end) => self.rest.split_to(end),
            None => {
                let rest = std::mem::take(&mut self.rest);
                if self.partial.len() + rest.len() > limit {
                    return Err(SseError::TooLarge { limit });
                }
                self.partial.extend_from_slice(&rest);
                return Ok(None);
            }
        };
        if self.partial.len() + taken.len() > limit {
            return Err(SseError::TooLarge { limit });
        }
        Ok(Some(self.finish_event(taken)))
    }

    /// Ends the stream: bytes behind the last blank line. Readers ignore them; whoever passes the
    /// stream on passes them on too.
    pub fn finish(&mut self) -> Bytes {
        let rest = std::mem::take(&mut self.rest);
        if self.partial.is_empty() {
            return rest;
        }
        self.partial.extend_from_slice(&rest);
        self.partial.split().freeze()
    }

    /// Bytes that wait for the end of their event.
    pub fn held(&self) -> usize {
        self.partial.len() + self.rest.len()
    }

    fn finish_event(&mut self, taken: Bytes) -> SseEvent {
        let raw = if self.partial.is_empty() {
            taken
        } else {
            self.partial.extend_from_slice(&taken);
            self.partial.split().freeze()
        };
        let first = !std::mem::replace(&mut self.started, true);
        SseEvent { raw, first }
    }

    /// Length of the current event's part of `rest`, if the event ends there. The result does not
    /// depend on how the bytes were cut: a CR that ends a blank line takes a following LF with it,
    /// unless the line before ended with a CR alone (then nothing is waited for).
    fn find_end(&mut self) -> Option<usize> {
        let mut i = 0;
        let bytes = &self.rest[..];
        while let Some(&byte) = bytes.get(i) {
            self.line = match (self.line, byte) {
                (Line::BlankCr, b'\n') => {
                    self.line = Line::Start;
                    return Some(i + 1);
                }
                (Line::BlankCr, _) => {
                    self.line = Line::Start;
                    return Some(i);
                }
                (Line::AfterCr, b'\n') => Line::AfterLf,
                (Line::AfterCr, b'\r') => {
                    self.line = Line::Start;
                    return Some(i + 1);
                }
                (Line::Start | Line::AfterLf, b'\n') => {
                    self.line = Line::Start;
                    return Some(i + 1);
                }
                (Line::Start | Line::AfterLf, b'\r') => Line::BlankCr,
                (_, b'\r') => Line::AfterCr,
                (_, b'\n') => Line::AfterLf,
                _ => {
                    let run = bytes[i..].iter().position(|b| matches!(b, b'\n' | b'\r'));
                    i += run.unwrap_or(bytes.len() - i);
                    self.line = Line::Inside;
                    continue;
                }
            };
            i += 1;
        }
        None
    }
}

impl SseEvent {
    /// An event from its bytes, blank line included.
    pub fn from_raw(raw: Bytes) -> Self {
        Self { raw, first: false }
    }

    /// The event's bytes, unchanged.
    pub fn raw(&self) -> &Bytes {
        &self.raw
    }

    /// The bytes themselves.
    pub fn into_raw(self) -> Bytes {
        self.raw
    }

    /// The values of its `data` lines, joined by LF; none for an event without such a line (a
    /// keep-alive comment), which readers ignore.
    pub fn data(&self) -> Option<Cow<'_, [u8]>> {
        let mut data: Option<Cow<'_, [u8]>> = None;
        for value in self.field(b"data") {
            match &mut data {
                None => data = Some(Cow::Borrowed(value)),
                Some(text) => {
                    let text = text.to_mut();
                    text.push(b'\n');
                    text.extend_from_slice(value);
                }
            }
        }
        data
    }

    /// The value of its last `event` line.
    pub fn event(&self) -> Option<&[u8]> {
        self.field(b"event").last()
    }

    /// Its comments, without the colon and one space.
    pub fn comments(&self) -> impl Iterator<Item = &[u8]> {
        self.field(b"")
    }

    /// Is this the end of a stream of the OpenAI API? Only if its whole data is `[DONE]`.
    pub fn is_done(&self) -> bool {
        self.data().is_some_and(|data| *data == *b"[DONE]")
    }

    fn field<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        Lines(self.text()).filter_map(move |line| {
            let rest = line.strip_prefix(name)?;
            match rest.split_first() {
                None if !name.is_empty() => Some(rest),
                Some((b':', value)) => Some(value.strip_prefix(b" ").unwrap_or(value)),
                _ => None,
            }
        })
    }

    fn text(&self) -> &[u8] {
        match self.raw.strip_prefix(BOM) {
            Some(rest) if self.first => rest,
            _ => &self.raw,
        }
    }
}

struct Lines<'a>(&'a [u8]);

impl<'a> Iterator for Lines<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.0.is_empty() {
            return None;
        }
        let Some(end) = self.0.iter().position(|b| matches!(b, b'\n' | b'\r')) else {
            return Some(std::mem::take(&mut self.0));
        };
        let line = &self.0[..end];
        let width = if self.0[end..].starts_with(b"\r\n") {
            2
        } else {
            1
        };
        self.0 = &self.0[end + width..];
        Some(line)
    }
}
