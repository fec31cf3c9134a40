//! A connection on which both sides have proven the key, and the messages that make a group: `length: u32 le`, body
//! (postcard), tag. Blocking, every wait with a deadline.

use crate::handshake::{
    HELLO_LEN, Hello, HelloError, PROOF_LEN, PeerKey, Protocol, SessionKey, Side, TAG_LEN,
    Transcript,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// What ranks say to each other.
pub(crate) static RANKS: Protocol = Protocol {
    magic: *b"twinfrRK",
    version: 1,
    label: b"twinfer rank link ",
};

/// Longest body of a message, in bytes: the table of a full world fits in.
pub(crate) const MESSAGE_CAP: usize = 512 << 10;
/// Longest body of the first message of somebody who dials.
pub(crate) const FIRST_CAP: usize = 32 << 10;

/// Why a conversation ended.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// What the other side said first is not accepted.
    #[error("the other side {0}")]
    Hello(#[from] HelloError),
    /// The other side closed.
    #[error("the other side closed the connection")]
    Closed,
    /// The deadline passed.
    #[error("the other side did not answer in time")]
    Timeout,
    /// A message that is too long, damaged or none.
    #[error("the other side sent no message of a rank")]
    Message,
    /// The system refused something.
    #[error("{0}")]
    Io(io::Error),
}

/// A blocking socket whose waits can be bounded.
pub trait Socket: Read + Write {
    /// Reads and writes take at most `limit` from here on.
    ///
    /// # Errors
    /// What the system says; a limit of zero is none.
    fn bound_waits(&self, limit: Duration) -> io::Result<()>;
}

/// One side of a connection, past the handshake.
#[derive(Debug)]
pub struct Channel<S> {
    pub(crate) stream: S,
    pub(crate) sent: Direction,
    pub(crate) received: Direction,
}

/// Key and number of messages of one direction of a connection.
#[derive(Clone, Debug)]
pub struct Direction {
    pub(crate) key: SessionKey,
    pub(crate) count: u64,
}

impl Socket for TcpStream {
    fn bound_waits(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

impl Socket for UnixStream {
    fn bound_waits(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

impl From<io::Error> for ChannelError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe => Self::Closed,
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::Timeout,
            _ => Self::Io(error),
        }
    }
}

/// A number nobody can guess.
pub(crate) fn nonce() -> Result<[u8; 32], ChannelError> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|error| ChannelError::Io(io::Error::other(error)))?;
    Ok(nonce)
}

/// First words of `side`.
pub(crate) fn hello(
    protocol: &'static Protocol,
    side: Side,
    keyed: bool,
) -> Result<Hello, ChannelError> {
    Ok(Hello {
        protocol,
        side,
        keyed,
        nonce: nonce()?,
    })
}

/// The time left, or the error that there is none.
fn left(until: Instant) -> Result<Duration, ChannelError> {
    let left = until.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(ChannelError::Timeout),
        false => Ok(left),
    }
}

pub(crate) fn read_full(
    stream: &mut impl Socket,
    buffer: &mut [u8],
    until: Instant,
) -> Result<(), ChannelError> {
    let mut filled = 0;
    while filled < buffer.len() {
        stream.bound_waits(left(until)?)?;
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(ChannelError::Closed),
            Ok(length) => filled += length,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn write_full(stream: &mut impl Socket, bytes: &[u8], until: Instant) -> Result<(), ChannelError> {
    let mut sent = 0;
    while sent < bytes.len() {
        stream.bound_waits(left(until)?)?;
        match stream.write(&bytes[sent..]) {
            Ok(0) => return Err(ChannelError::Closed),
            Ok(length) => sent += length,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

impl Direction {
    /// Both directions of a connection, as `side` sees them: what it sends, what it receives.
    pub(crate) fn pair(transcript: &Transcript, key: Option<&PeerKey>, side: Side) -> (Self, Self) {
        let of = |side| Self {
            key: transcript.session(key, side),
            count: 0,
        };
        (of(side), of(side.other()))
    }

    /// Tag of the next frame that this side sends, `signed` being its length and body.
    pub fn seal(&mut self, signed: &[u8]) -> [u8; TAG_LEN] {
        let tag = self.key.tag(self.count, signed);
        self.count += 1;
        tag
    }

    /// Whether `tag` is that of the next frame that comes, `signed` being its length and body.
    pub fn open(&mut self, signed: &[u8], tag: &[u8]) -> bool {
        let good = self.key.verify(self.count, signed, tag);
        self.count += u64::from(good);
        good
    }

    /// Bytes of the next message.
    pub(crate) fn encode<T: Serialize>(&mut self, message: &T) -> Result<Vec<u8>, ChannelError> {
        let mut frame: Vec<u8> =
            postcard::to_extend(message, vec![0_u8; 4]).map_err(|_| ChannelError::Message)?;
        let length = u32::try_from(frame.len() - 4).unwrap_or(u32::MAX);
        body_length(length.to_le_bytes(), MESSAGE_CAP)?;
        frame[..4].copy_from_slice(&length.to_le_bytes());
        let tag = self.seal(&frame);
        frame.extend_from_slice(&tag);
        Ok(frame)
    }

    /// The message of the next frame: `frame` is length, body and tag.
    pub(crate) fn decode<T: DeserializeOwned>(&mut self, frame: &[u8]) -> Result<T, ChannelError> {
        let (signed, tag) = frame
            .len()
            .checked_sub(TAG_LEN)
            .and_then(|at| frame.split_at_checked(at))
            .ok_or(ChannelError::Message)?;
        if !self.open(signed, tag) {
            return Err(ChannelError::Message);
        }
        match postcard::take_from_bytes(signed.get(4..).unwrap_or_default()) {
            Ok((message, [])) => Ok(message),
            _ => Err(ChannelError::Message),
        }
    }
}

/// Length of the body that follows a prefix. To be asked before anything is allocated.
pub(crate) fn body_length(prefix: [u8; 4], cap: usize) -> Result<usize, ChannelError> {
    let length = u32::from_le_bytes(prefix) as usize;
    match (1..=cap).contains(&length) {
        true => Ok(length),
        false => Err(ChannelError::Message),
    }
}

impl<S: Socket> Channel<S> {
    /// The dialling side's handshake.
    ///
    /// # Errors
    /// [`ChannelError`], at `until` at the latest.
    pub fn dial(
        protocol: &'static Protocol,
        mut stream: S,
        key: Option<&PeerKey>,
        until: Instant,
    ) -> Result<Self, ChannelError> {
        let ours = hello(protocol, Side::Dialer, key.is_some())?;
        write_full(&mut stream, &ours.encode(), until)?;
        let mut listener = [0; HELLO_LEN];
        read_full(&mut stream, &mut listener, until)?;
        ours.check_peer(&listener)?;
        let transcript = Transcript {
            protocol,
            dialer: ours.encode(),
            listener,
        };
        write_full(&mut stream, &transcript.proof(key, Side::Dialer), until)?;
        let mut proof = [0; PROOF_LEN];
        read_full(&mut stream, &mut proof, until)?;
        if proof == protocol.refusal() {
            return Err(HelloError::KeyRefused.into());
        }
        transcript.verify(key, Side::Listener, &proof)?;
        Ok(Self::past(stream, &transcript, key, Side::Dialer))
    }

    /// The listening side's handshake.
    ///
    /// # Errors
    /// As [`Self::dial`].
    pub fn listen(
        protocol: &'static Protocol,
        mut stream: S,
        key: Option<&PeerKey>,
        until: Instant,
    ) -> Result<Self, ChannelError> {
        let ours = hello(protocol, Side::Listener, key.is_some())?;
        let mut dialer = [0; HELLO_LEN];
        read_full(&mut stream, &mut dialer, until)?;
        let fits = ours.check_peer(&dialer);
        if !fits.is_err_and(HelloError::is_strange) {
            write_full(&mut stream, &ours.encode(), until)?;
        }
        fits?;
        let transcript = Transcript {
            protocol,
            dialer,
            listener: ours.encode(),
        };
        let mut proof = [0; PROOF_LEN];
        read_full(&mut stream, &mut proof, until)?;
        if let Err(error) = transcript.verify(key, Side::Dialer, &proof) {
            write_full(&mut stream, &protocol.refusal(), until)?;
            return Err(error.into());
        }
        write_full(&mut stream, &transcript.proof(key, Side::Listener), until)?;
        Ok(Self::past(stream, &transcript, key, Side::Listener))
    }

    pub(crate) fn past(
        stream: S,
        transcript: &Transcript,
        key: Option<&PeerKey>,
        side: Side,
    ) -> Self {
        let (sent, received) = Direction::pair(transcript, key, side);
        Self {
            stream,
            sent,
            received,
        }
    }

    /// The socket, to be watched.
    pub fn stream(&self) -> &S {
        &self.stream
    }

    /// The socket, and the directions that it sends and receives in.
    pub fn into_parts(self) -> (S, Direction, Direction) {
        (self.stream, self.sent, self.received)
    }

    /// Sends a message of at most 512 KiB.
    ///
    /// # Errors
    /// [`ChannelError`], at `until` at the latest.
    pub fn send<T: Serialize>(&mut self, message: &T, until: Instant) -> Result<(), ChannelError> {
        let frame = self.sent.encode(message)?;
        write_full(&mut self.stream, &frame, until)
    }

    /// The next message.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn receive<T: DeserializeOwned>(&mut self, until: Instant) -> Result<T, ChannelError> {
        let mut prefix = [0; 4];
        read_full(&mut self.stream, &mut prefix, until)?;
        let length = body_length(prefix, MESSAGE_CAP)?;
        let mut frame = vec![0; 4 + length + TAG_LEN];
        frame[..4].copy_from_slice(&prefix);
        read_full(&mut self.stream, &mut frame[4..], until)?;
        self.received.decode(&frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> Option<PeerKey> {
        PeerKey::new(text.as_bytes())
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn meet(
        dialer: Option<&PeerKey>,
        listener: Option<&PeerKey>,
    ) -> (
        Result<Channel<UnixStream>, ChannelError>,
        Result<Channel<UnixStream>, ChannelError>,
    ) {
        let (left, right) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let dialing = scope.spawn(|| Channel::dial(&RANKS, left, dialer, soon()));
            let listening = Channel::listen(&RANKS, right, listener, soon());
            (dialing.join().unwrap(), listening)
        })
    }

    #[test]
    fn messages_pass_between_holders_of_a_key_both_ways() {
        for shared in [None, key("peer key")] {
            let (left, right) = meet(shared.as_ref(), shared.as_ref());
            let (mut left, mut right) = (left.unwrap(), right.unwrap());
            for count in 0..3_u64 {
                left.send(&(count, "there"), soon()).unwrap();
                assert_eq!(right.receive::<(u64, String)>(soon()).unwrap().0, count);
                right.send(&vec![count; 1000], soon()).unwrap();
                assert_eq!(left.receive::<Vec<u64>>(soon()).unwrap(), vec![count; 1000]);
            }
        }
    }

    #[test]
    fn another_key_is_named_on_both_sides() {
        let (dialer, listener) = meet(key("one").as_ref(), key("two").as_ref());
        let told = |outcome: Result<_, ChannelError>| match outcome.map(|_: Channel<_>| ()) {
            Err(ChannelError::Hello(error)) => error,
            other => panic!("{other:?}"),
        };
        assert_eq!(told(dialer), HelloError::KeyRefused);
        assert_eq!(told(listener), HelloError::Proof);
        let (dialer, listener) = meet(key("one").as_ref(), None);
        assert_eq!(told(dialer), HelloError::PeerUnkeyed);
        assert_eq!(told(listener), HelloError::PeerKeyed);
    }

    #[test]
    fn lengths_are_checked_before_memory_is_taken() {
        let (left, right) = meet(None, None);
        let (mut left, mut right) = (left.unwrap(), right.unwrap());
        left.stream.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(
            right.receive::<u64>(soon()),
            Err(ChannelError::Message)
        ));
        assert!(body_length([0; 4], MESSAGE_CAP).is_err());
    }

    #[test]
    fn silence_ends_at_the_deadline_and_closing_at_once() {
        let (left, right) = meet(None, None);
        let (left, mut right) = (left.unwrap(), right.unwrap());
        let until = Instant::now() + Duration::from_millis(30);
        assert!(matches!(
            right.receive::<u64>(until),
            Err(ChannelError::Timeout)
        ));
        drop(left);
        assert!(matches!(
            right.receive::<u64>(soon()),
            Err(ChannelError::Closed)
        ));
    }
}
