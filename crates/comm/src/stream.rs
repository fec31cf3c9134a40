//! Messages over a stream: `length: u32 le`, body (postcard); between nodes a tag under the connection's session key
//! follows. Between a front and its ranks and nodes, and between `up` and agents.

use crate::channel::{Channel, Direction};
use crate::handshake::TAG_LEN;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Bytes of a length.
const HEAD: usize = 4;

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
pub enum LinkError {
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

/// A socket to the other side.
#[derive(Debug)]
enum Socket {
    /// Inherited, within a node.
    Local(UnixStream),
    /// Between nodes.
    Remote(TcpStream),
}

/// The reading end.
#[derive(Debug)]
pub struct Reader {
    socket: Socket,
    /// Length, body and, between nodes, tag of the last message.
    frame: Vec<u8>,
    seals: Option<Direction>,
}

/// The writing end.
#[derive(Debug)]
pub struct Writer {
    socket: Socket,
    seals: Option<Direction>,
}

/// Both ends of a connection within a node.
///
/// # Errors
/// What the system says.
pub fn ends(stream: UnixStream) -> io::Result<(Reader, Writer)> {
    stream.set_write_timeout(Some(WRITE))?;
    stream.set_read_timeout(Some(TICK))?;
    let other = stream.try_clone()?;
    Ok((
        Reader::new(Socket::Local(stream), None),
        Writer {
            socket: Socket::Local(other),
            seals: None,
        },
    ))
}

/// Both ends of a connection between nodes, on which both sides have proven the key.
///
/// # Errors
/// What the system says.
pub fn remote_ends(channel: Channel<TcpStream>) -> io::Result<(Reader, Writer)> {
    let (stream, sent, received) = channel.into_parts();
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE))?;
    stream.set_read_timeout(Some(TICK))?;
    let other = stream.try_clone()?;
    Ok((
        Reader::new(Socket::Remote(stream), Some(received)),
        Writer {
            socket: Socket::Remote(other),
            seals: Some(sent),
        },
    ))
}

impl Writer {
    /// Sends a message.
    ///
    /// # Errors
    /// [`LinkError`]: the other side is gone, or does not read.
    pub fn send<T: Serialize>(&mut self, message: &T) -> Result<(), LinkError> {
        let mut frame =
            postcard::to_extend(message, vec![0_u8; HEAD]).map_err(|_| LinkError::Message)?;
        let length = u32::try_from(frame.len() - HEAD).ok();
        let length = length.filter(|n| *n <= CAP).ok_or(LinkError::Message)?;
        frame[..HEAD].copy_from_slice(&length.to_le_bytes());
        if let Some(seals) = &mut self.seals {
            let tag = seals.seal(&frame);
            frame.extend_from_slice(&tag);
        }
        match &mut self.socket {
            Socket::Local(stream) => stream.write_all(&frame)?,
            Socket::Remote(stream) => stream.write_all(&frame)?,
        }
        Ok(())
    }
}

impl Drop for Writer {
    /// Who reads at the other side is told, also while this side's reader still has the socket.
    fn drop(&mut self) {
        let _ = match &self.socket {
            Socket::Local(stream) => stream.shutdown(Shutdown::Write),
            Socket::Remote(stream) => stream.shutdown(Shutdown::Write),
        };
    }
}

impl Reader {
    fn new(socket: Socket, seals: Option<Direction>) -> Self {
        Self {
            socket,
            frame: Vec::new(),
            seals,
        }
    }

    /// The next message; without a `limit` it may take for ever.
    ///
    /// # Errors
    /// [`LinkError`]; none may be read afterwards.
    pub fn next<T: DeserializeOwned>(&mut self, limit: Option<Duration>) -> Result<T, LinkError> {
        let mut silence = Silence::new(limit);
        let mut frame = std::mem::take(&mut self.frame);
        let read = self.frame(&mut silence, &mut frame);
        self.frame = frame;
        let end = HEAD + read?;
        let (signed, tag) = self.frame.split_at(end);
        if let Some(seals) = &mut self.seals
            && !seals.open(signed, tag)
        {
            return Err(LinkError::Message);
        }
        postcard::from_bytes(&signed[HEAD..]).map_err(|_| LinkError::Message)
    }

    /// Reads a whole frame into `frame`; the length of its body.
    fn frame(&mut self, silence: &mut Silence, frame: &mut Vec<u8>) -> Result<usize, LinkError> {
        frame.clear();
        frame.resize(HEAD, 0);
        self.fill(silence, 0, frame)?;
        let head = frame.first_chunk().copied().unwrap_or_default();
        let length = u32::from_le_bytes(head);
        if length > CAP {
            return Err(LinkError::Message);
        }
        let tag = match self.seals {
            Some(_) => TAG_LEN,
            None => 0,
        };
        let whole = HEAD + length as usize + tag;
        // Grows with what has come, not with what is announced.
        while frame.len() < whole {
            let got = frame.len();
            frame.resize(whole.min(2 * got.max(FIRST / 2)), 0);
            self.fill(silence, got, frame)?;
        }
        Ok(length as usize)
    }

    /// Fills `into` behind `from`.
    fn fill(
        &mut self,
        silence: &mut Silence,
        mut from: usize,
        into: &mut [u8],
    ) -> Result<(), LinkError> {
        while from < into.len() {
            let rest = &mut into[from..];
            let read = match &mut self.socket {
                Socket::Local(stream) => stream.read(rest),
                Socket::Remote(stream) => stream.read(rest),
            };
            match read {
                Ok(0) => return Err(LinkError::Closed),
                Ok(read) => from += read,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    silence.lasts()?;
                }
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return Err(LinkError::Closed),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
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
        assert!(reader.frame.capacity() <= FIRST);
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
