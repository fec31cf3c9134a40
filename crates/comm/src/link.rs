//! One connection to one rank: what was sent and what has come of the frames in both directions. Never blocks.

use crate::call::{Head, Reached};
use crate::channel::{Channel, Direction};
use crate::collective::Ends;
use crate::error::{Cause, Failure};
use crate::frame::{
    FAILURE_BYTES, FRAME_HEAD, Frame, FrameKind, checksum, failure_bytes, failure_of_bytes,
};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;

/// Bytes read at once: small frames come in one piece.
const BUFFER: usize = 4096;

/// The connection.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) rank: u32,
    stream: TcpStream,
    sent: Direction,
    received: Direction,
    /// Head of the frame that is being sent.
    head: [u8; FRAME_HEAD],
    out_done: usize,
    out_total: usize,
    writable: bool,
    buffer: Box<[u8; BUFFER]>,
    start: usize,
    end: usize,
    readable: bool,
    /// The other side has closed: what is left is to be read to its end.
    hangup: bool,
    /// Head of the frame whose payload is coming.
    frame: Option<Frame>,
    got: usize,
    /// The frame this exchange waits for has come.
    in_done: bool,
    pub(crate) last: Option<Reached>,
}

/// Why a link is of no use any more.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// What the rank at the other end did.
    Cause(Cause),
    /// What it told.
    Told(Failure),
}

impl From<Cause> for Trouble {
    fn from(cause: Cause) -> Self {
        Self::Cause(cause)
    }
}

impl Link {
    /// Goes on with a connection past its first messages. The socket no longer blocks.
    pub(crate) fn new(rank: u32, channel: Channel<TcpStream>) -> std::io::Result<Self> {
        let Channel {
            stream,
            sent,
            received,
        } = channel;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self {
            rank,
            stream,
            sent,
            received,
            head: [0; FRAME_HEAD],
            out_done: 0,
            out_total: 0,
            writable: true,
            buffer: Box::new([0; BUFFER]),
            start: 0,
            end: 0,
            readable: true,
            hangup: false,
            frame: None,
            got: 0,
            in_done: true,
            last: None,
        })
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The system says that the socket is ready.
    pub(crate) fn ready(&mut self, to_read: bool, to_write: bool, hangup: bool) {
        self.readable |= to_read || hangup;
        self.writable |= to_write || hangup;
        self.hangup |= hangup;
    }

    /// Begins to send a frame and to wait for one.
    pub(crate) fn begin(&mut self, from: u32, head: &Head, payload: &[u8]) {
        let frame = Frame::data(from, head, payload);
        self.head = frame.encode(&self.sent.key, self.sent.count);
        self.sent.count += 1;
        self.out_done = 0;
        self.out_total = FRAME_HEAD + payload.len();
        self.in_done = false;
    }

    /// Both frames of the exchange have passed.
    pub(crate) fn finished(&self) -> bool {
        self.in_done && self.out_done == self.out_total
    }

    /// Something waits that was not looked at yet.
    fn stirred(&self) -> bool {
        self.readable || self.end > self.start
    }

    /// Sends what the socket takes.
    pub(crate) fn push(&mut self, payload: &[u8]) {
        while self.writable && self.out_done < self.out_total {
            let written = match self.head.get(self.out_done..) {
                Some(head) if !head.is_empty() => self
                    .stream
                    .write_vectored(&[IoSlice::new(head), IoSlice::new(payload)]),
                _ => self.stream.write(
                    payload
                        .get(self.out_done - FRAME_HEAD..)
                        .unwrap_or_default(),
                ),
            };
            match written {
                Ok(0) => self.broken(),
                Ok(length) => self.out_done += length,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.writable = false,
                // Reading tells why, if the other side said so before it closed.
                Err(_) => self.broken(),
            }
        }
    }

    fn broken(&mut self) {
        self.writable = false;
        self.readable = true;
        self.hangup = true;
    }

    /// Takes what has come of the frame that `head` waits for, whose payload is piece `piece`; and what the other side
    /// has to tell besides.
    pub(crate) fn pull(
        &mut self,
        head: &Head,
        piece: u32,
        ends: &mut dyn Ends,
    ) -> Result<(), Trouble> {
        while !self.in_done {
            let Some(frame) = self.next_frame()? else {
                return Ok(());
            };
            let theirs = Head::of_words(&frame.words).ok_or(Cause::Damaged)?;
            if self.got == 0 {
                self.last = Some(theirs.reached);
                if !head.agrees_with(&theirs) {
                    return Err(Cause::OutOfStep.into());
                }
            }
            let room = ends.room(self.rank, piece, theirs.length)?;
            if room.len() as u64 != theirs.length {
                return Err(Cause::Damaged.into());
            }
            let rest = &mut room[self.got..];
            let at_hand = rest.len().min(self.end - self.start);
            rest[..at_hand].copy_from_slice(&self.buffer[self.start..self.start + at_hand]);
            self.start += at_hand;
            self.got += at_hand;
            while self.got < room.len() && self.readable {
                let wanted = room.len() - self.got;
                let outcome = self.stream.read(&mut room[self.got..]);
                self.got += self.took(outcome, wanted)?;
            }
            if self.got < room.len() {
                return Ok(());
            }
            if checksum(room) != frame.checksum {
                return Err(Cause::Damaged.into());
            }
            self.frame = None;
            self.in_done = true;
        }
        self.listen()
    }

    /// Looks for what the other side has to tell while nothing is expected from it. A frame of a later call stays, and
    /// so does a good-bye: a rank that has ended its part is missed only when it is needed again.
    pub(crate) fn listen(&mut self) -> Result<(), Trouble> {
        let waiting = self
            .frame
            .is_some_and(|frame| frame.kind != FrameKind::Failed);
        if waiting || !self.stirred() {
            return Ok(());
        }
        match self.next_frame() {
            Ok(_) | Err(Trouble::Cause(Cause::Left)) => Ok(()),
            Err(trouble) => Err(trouble),
        }
    }

    /// The frame that is coming, when its head is here. What is no data is an end.
    fn next_frame(&mut self) -> Result<Option<Frame>, Trouble> {
        if self.frame.is_none() {
            if !self.fill(FRAME_HEAD)? {
                return Ok(None);
            }
            let bytes = self.buffer[self.start..self.end].first_chunk();
            let frame = bytes
                .and_then(|bytes| Frame::decode(bytes, &self.received.key, self.received.count))
                .filter(|frame| frame.from == self.rank)
                .ok_or(Cause::Damaged)?;
            self.received.count += 1;
            self.start += FRAME_HEAD;
            self.got = 0;
            self.frame = Some(frame);
        }
        match self.frame {
            Some(frame) if frame.kind == FrameKind::Bye => Err(Cause::Left.into()),
            Some(frame) if frame.kind == FrameKind::Failed => {
                if frame.length() != FAILURE_BYTES as u64 {
                    return Err(Cause::Damaged.into());
                }
                if !self.fill(FAILURE_BYTES)? {
                    return Ok(None);
                }
                let told = self.buffer[self.start..self.end]
                    .first_chunk()
                    .filter(|bytes| checksum(*bytes) == frame.checksum)
                    .and_then(failure_of_bytes)
                    .ok_or(Cause::Damaged)?;
                Err(Trouble::Told(told))
            }
            frame => Ok(frame),
        }
    }

    /// Reads until `count` bytes are at hand; whether they are.
    fn fill(&mut self, count: usize) -> Result<bool, Trouble> {
        if self.start + count > BUFFER || self.start == self.end {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        while self.end - self.start < count && self.readable {
            let wanted = BUFFER - self.end;
            let outcome = self.stream.read(&mut self.buffer[self.end..]);
            self.end += self.took(outcome, wanted)?;
        }
        Ok(self.end - self.start >= count)
    }

    /// Bytes of a read that asked for `wanted`, and whether there may be more.
    fn took(&mut self, outcome: std::io::Result<usize>, wanted: usize) -> Result<usize, Trouble> {
        match outcome {
            Ok(0) => Err(Cause::Died.into()),
            Ok(length) => {
                // A short read has emptied the socket; only an end may still follow.
                self.readable = length == wanted || self.hangup;
                Ok(length)
            }
            Err(error) => match error.kind() {
                ErrorKind::Interrupted => Ok(0),
                ErrorKind::WouldBlock => {
                    self.readable = false;
                    Ok(0)
                }
                _ => Err(Cause::Died.into()),
            },
        }
    }

    /// Tells the other side that the group has ended, as far as the socket takes it at once. Behind a frame that was
    /// sent in part nothing can be said any more but the end.
    pub(crate) fn tell_failure(&mut self, from: u32, failure: &Failure) {
        let payload = failure_bytes(failure);
        self.last_word(FrameKind::Failed, from, &payload);
    }

    /// Tells the other side that this one leaves in order.
    pub(crate) fn tell_bye(&mut self, from: u32) {
        self.last_word(FrameKind::Bye, from, &[]);
    }

    fn last_word(&mut self, kind: FrameKind, from: u32, payload: &[u8]) {
        if self.out_done < self.out_total {
            if self.out_done > 0 {
                let _ = self.stream.shutdown(std::net::Shutdown::Write);
                return;
            }
            // The frame that was made but not begun gives its number back.
            self.sent.count -= 1;
        }
        let frame = Frame::control(kind, from, payload);
        let head = frame.encode(&self.sent.key, self.sent.count);
        self.sent.count += 1;
        let mut bytes = [0; FRAME_HEAD + FAILURE_BYTES];
        bytes[..FRAME_HEAD].copy_from_slice(&head);
        bytes[FRAME_HEAD..FRAME_HEAD + payload.len()].copy_from_slice(payload);
        // The other side is told if it can be: without this word it sees the connection's end.
        let _ = self.stream.write(&bytes[..FRAME_HEAD + payload.len()]);
        (self.out_done, self.out_total) = (0, 0);
    }
}
