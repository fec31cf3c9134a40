//! Messages over a stream: `length: u32 le`, body (postcard). Today a socket pair that the rank inherits.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Longest body, in bytes: requests of the longest prompts, with their masks and biases.
const CAP: u32 = 256 << 20;
/// Taken at once, whatever a length says.
const FIRST: usize = 64 << 10;
/// A message that cannot be written for so long will not be read any more.
const WRITE: Duration = Duration::from_secs(2);
/// How often a reader looks at the time.
const TICK: Duration = Duration::from_millis(250);

/// Why no message came.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    /// The other side is gone.
    #[error("the connection is closed")]
    Closed,
    /// Nothing came for so long.
    #[error("nothing was heard for {:.1} s", .0.as_secs_f64())]
    Silent(Duration),
    /// No message.
    #[error("it sent no message")]
    Message,
    /// The system refused something.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The reading end.
#[derive(Debug)]
pub(super) struct Reader {
    stream: UnixStream,
    body: Vec<u8>,
}

/// The writing end.
#[derive(Debug)]
pub(super) struct Writer {
    stream: UnixStream,
}

/// Both ends of a connection.
pub(super) fn ends(stream: UnixStream) -> io::Result<(Reader, Writer)> {
    stream.set_write_timeout(Some(WRITE))?;
    stream.set_read_timeout(Some(TICK))?;
    let other = stream.try_clone()?;
    Ok((
        Reader {
            stream,
            body: Vec::new(),
        },
        Writer { stream: other },
    ))
}

impl Writer {
    pub(super) fn send<T: Serialize>(&mut self, message: &T) -> Result<(), LinkError> {
        let body = postcard::to_allocvec(message).map_err(|_| LinkError::Message)?;
        let length = u32::try_from(body.len()).ok().filter(|n| *n <= CAP);
        let length = length.ok_or(LinkError::Message)?;
        let mut frame = Vec::with_capacity(4 + body.len());
        frame.extend_from_slice(&length.to_le_bytes());
        frame.extend_from_slice(&body);
        self.stream.write_all(&frame)?;
        Ok(())
    }
}

impl Reader {
    /// The next message; without a `limit` it may take for ever.
    pub(super) fn next<T: DeserializeOwned>(
        &mut self,
        limit: Option<Duration>,
    ) -> Result<T, LinkError> {
        let mut head = [0; 4];
        let mut silence = Silence::new(limit);
        let mut got = 0;
        while got < head.len() {
            got += self.some(&mut silence, got, &mut head)?;
        }
        let length = u32::from_le_bytes(head);
        if length > CAP {
            return Err(LinkError::Message);
        }
        let length = length as usize;
        self.body.clear();
        let mut got = 0;
        // Grows with what has come, not with what is announced.
        while got < length {
            let room = length.min(2 * got.max(FIRST / 2));
            self.body.resize(room, 0);
            let mut body = std::mem::take(&mut self.body);
            let read = self.some(&mut silence, got, &mut body);
            self.body = body;
            got += read?;
        }
        postcard::from_bytes(&self.body[..length]).map_err(|_| LinkError::Message)
    }

    /// Reads something into `into` behind `from`.
    fn some(
        &mut self,
        silence: &mut Silence,
        from: usize,
        into: &mut [u8],
    ) -> Result<usize, LinkError> {
        loop {
            match self.stream.read(&mut into[from..]) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(read) => return Ok(read),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    silence.lasts()?;
                }
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return Err(LinkError::Closed),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// How long nothing has been heard, as far as this process ran: time in which it stood still itself is nobody's
/// silence.
struct Silence {
    limit: Option<Duration>,
    so_far: Duration,
    seen: Instant,
}

impl Silence {
    fn new(limit: Option<Duration>) -> Self {
        Self {
            limit,
            so_far: Duration::ZERO,
            seen: Instant::now(),
        }
    }

    fn lasts(&mut self) -> Result<(), LinkError> {
        let now = Instant::now();
        self.so_far += (now - self.seen).min(2 * TICK);
        self.seen = now;
        match self.limit {
            Some(limit) if self.so_far >= limit => Err(LinkError::Silent(self.so_far)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> ((Reader, Writer), (Reader, Writer)) {
        let (a, b) = UnixStream::pair().unwrap();
        (ends(a).unwrap(), ends(b).unwrap())
    }

    #[test]
    fn messages_of_any_length_arrive_in_order() {
        let ((unused, mut writer), (mut reader, _w)) = pair();
        drop(unused);
        let sent: Vec<Vec<u32>> = [0_u32, 1, 300_000, 5]
            .into_iter()
            .map(|n| (0..n).collect())
            .collect();
        let messages = sent.clone();
        let thread = std::thread::spawn(move || {
            for message in &messages {
                writer.send(message).unwrap();
            }
        });
        for message in sent {
            assert_eq!(reader.next::<Vec<u32>>(None).unwrap(), message);
        }
        thread.join().unwrap();
        assert!(matches!(
            reader.next::<Vec<u32>>(None),
            Err(LinkError::Closed)
        ));
    }

    #[test]
    fn what_is_no_message_is_refused_and_announced_lengths_take_no_memory() {
        let (a, mut b) = UnixStream::pair().unwrap();
        let (mut reader, _writer) = ends(a).unwrap();
        b.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(reader.next::<u64>(None), Err(LinkError::Message)));
        let (a, mut b) = UnixStream::pair().unwrap();
        let (mut reader, _writer) = ends(a).unwrap();
        b.write_all(&CAP.to_le_bytes()).unwrap();
        b.write_all(&[1; 100]).unwrap();
        drop(b);
        assert!(matches!(reader.next::<u64>(None), Err(LinkError::Closed)));
        assert!(reader.body.capacity() <= FIRST);
    }

    #[test]
    fn silence_has_a_limit() {
        let ((mut reader, _w), _other) = pair();
        let limit = Some(Duration::from_millis(100));
        assert!(matches!(
            reader.next::<u64>(limit),
            Err(LinkError::Silent(_))
        ));
    }
}
