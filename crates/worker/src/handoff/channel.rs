//! One connection of the KV channel: handshake, frames and raw units, every wait with a deadline.

use crate::handoff::wire::{FRAME_CAP, FrameCodec, FrameError, PROTOCOL};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, IoSlice, IoSliceMut};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use twinfer_comm::handshake::{HELLO_LEN, Hello, HelloError, PROOF_LEN, PeerKey, Side, Transcript};

/// A handshake, fingerprints included, takes no longer.
pub(crate) const HANDSHAKE_TIME: Duration = Duration::from_secs(2);
/// Slowest rate at which units may move, in bytes per second, beside the time without progress: a
/// peer that trickles cannot hold blocks for ever.
const LEAST_RATE: u64 = 1 << 20;
/// Bytes moved between two chances for other tasks of the thread.
const TURN_BYTES: usize = 1 << 20;
/// Buffers given to the system at once.
pub(crate) const SLICES: usize = 64;

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChannelError {
    #[error("connection closed by the peer")]
    Closed,
    #[error("connection failed: {0}")]
    Io(io::Error),
    #[error("no progress in time while {0}")]
    Timeout(&'static str),
    #[error("peer sent a {0}")]
    Frame(#[from] FrameError),
    #[error("peer {0}")]
    Hello(#[from] HelloError),
    #[error("no random numbers: {0}")]
    Random(getrandom::Error),
}

/// Deadlines of a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Longest time without a byte.
    stall: Duration,
    end: Instant,
}

/// An authenticated connection.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: TcpStream,
    outgoing: FrameCodec,
    incoming: FrameCodec,
    frame: Vec<u8>,
    heard: bool,
    /// Bytes moved since other tasks had their chance.
    turn: usize,
}

impl Pace {
    pub(crate) fn new(stall: Duration, bytes: u64) -> Self {
        let whole = Duration::from_millis(bytes.saturating_mul(1000) / LEAST_RATE);
        Self {
            stall,
            end: Instant::now() + stall + whole,
        }
    }

    /// When the next byte must have moved.
    fn next(&self, now: Instant) -> Instant {
        self.end.min(now + self.stall)
    }
}

impl Channel {
    /// Dials nothing: `stream` is connected. Proves the key, then checks the exporter's proof.
    pub(crate) async fn import(
        stream: TcpStream,
        key: Option<&PeerKey>,
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        let mut raw = Raw::new(stream, deadline)?;
        let ours = hello(Side::Dialer, key)?;
        let importer = ours.encode();
        raw.write(&importer).await?;
        let exporter = raw.read::<HELLO_LEN>().await?;
        ours.check_peer(&exporter)?;
        let transcript = Transcript {
            protocol: &PROTOCOL,
            dialer: importer,
            listener: exporter,
        };
        raw.write(&transcript.proof(key, Side::Dialer)).await?;
        let proof = raw.read::<PROOF_LEN>().await?;
        if proof == PROTOCOL.refusal() {
            return Err(HelloError::KeyRefused.into());
        }
        transcript.verify(key, Side::Listener, &proof)?;
        Ok(Self::new(raw.stream, &transcript, key, Side::Dialer))
    }

    /// The listening side: says nothing to a peer that does not speak the protocol, and proves nothing
    /// to one that has not proved the key.
    pub(crate) async fn export(
        stream: TcpStream,
        key: Option<&PeerKey>,
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        let mut raw = Raw::new(stream, deadline)?;
        let ours = hello(Side::Listener, key)?;
        let exporter = ours.encode();
        let importer = raw.read::<HELLO_LEN>().await?;
        let fits = ours.check_peer(&importer);
        if !fits.is_err_and(HelloError::is_strange) {
            raw.write(&exporter).await?;
        }
        fits?;
        let transcript = Transcript {
            protocol: &PROTOCOL,
            dialer: importer,
            listener: exporter,
        };
        let proof = raw.read::<PROOF_LEN>().await?;
        if let Err(wrong) = transcript.verify(key, Side::Dialer, &proof) {
            raw.write(&PROTOCOL.refusal()).await?;
            return Err(wrong.into());
        }
        raw.write(&transcript.proof(key, Side::Listener)).await?;
        Ok(Self::new(raw.stream, &transcript, key, Side::Listener))
    }

    fn new(stream: TcpStream, transcript: &Transcript, key: Option<&PeerKey>, side: Side) -> Self {
        Self {
            stream,
            outgoing: FrameCodec::new(transcript.session(key, side)),
            incoming: FrameCodec::new(transcript.session(key, side.other())),
            frame: Vec::new(),
            heard: false,
            turn: 0,
        }
    }

    /// Nothing came unasked and the peer has not closed: an idle connection may be used again.
    pub(crate) fn is_quiet(&self) -> bool {
        let mut byte = [0];
        matches!(self.stream.try_read(&mut byte), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Has the peer said anything since [`Self::listen`]?
    pub(crate) fn heard(&self) -> bool {
        self.heard
    }

    /// From now on [`Self::heard`] is about what comes next.
    pub(crate) fn listen(&mut self) {
        self.heard = false;
    }

    pub(crate) async fn send<T: Serialize>(
        &mut self,
        message: &T,
        deadline: Instant,
    ) -> Result<(), ChannelError> {
        let frame = self.outgoing.encode(message)?;
        write_all(&self.stream, &frame, deadline).await
    }

    /// The next message, whose first byte comes before `deadline`; the rest may take a further
    /// handshake's time.
    pub(crate) async fn receive<T: DeserializeOwned>(
        &mut self,
        deadline: Instant,
    ) -> Result<T, ChannelError> {
        let mut prefix = [0; 4];
        let (first, rest) = prefix.split_at_mut(1);
        read_exact(&self.stream, first, deadline, "waiting for a message").await?;
        self.heard = true;
        let deadline = Instant::now() + HANDSHAKE_TIME;
        read_exact(&self.stream, rest, deadline, "reading a message").await?;
        let length = FrameCodec::rest_len(prefix)?;
        self.frame.clear();
        self.frame.extend_from_slice(&prefix);
        self.frame.resize(prefix.len() + length, 0);
        read_exact(
            &self.stream,
            &mut self.frame[4..],
            deadline,
            "reading a message",
        )
        .await?;
        debug_assert!(self.frame.len() <= FRAME_CAP + 64);
        Ok(self.incoming.decode(&self.frame)?)
    }

    /// Sends all of `slices`, at most [`SLICES`] of them.
    pub(crate) async fn write_units(
        &mut self,
        mut slices: &mut [IoSlice<'_>],
        pace: &Pace,
    ) -> Result<(), ChannelError> {
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match self.stream.try_write_vectored(slices) {
                Ok(0) => return Err(ChannelError::Closed),
                Ok(sent) => {
                    IoSlice::advance_slices(&mut slices, sent);
                    self.turn = give_way(self.turn + sent).await;
                }
                Err(error) => {
                    or_wait(
                        error,
                        self.stream.writable(),
                        pace.next(Instant::now()),
                        "sending KV",
                    )
                    .await?;
                }
            }
        }
        Ok(())
    }

    /// Fills all of `slices`.
    pub(crate) async fn read_units(
        &mut self,
        mut slices: &mut [IoSliceMut<'_>],
        pace: &Pace,
    ) -> Result<(), ChannelError> {
        IoSliceMut::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match self.stream.try_read_vectored(slices) {
                Ok(0) => return Err(ChannelError::Closed),
                Ok(received) => {
                    IoSliceMut::advance_slices(&mut slices, received);
                    self.turn = give_way(self.turn + received).await;
                }
                Err(error) => {
                    or_wait(
                        error,
                        self.stream.readable(),
                        pace.next(Instant::now()),
                        "reading KV",
                    )
                    .await?;
                }
            }
        }
        Ok(())
    }
}

/// A connection before its handshake is over.
struct Raw {
    stream: TcpStream,
    deadline: Instant,
}

impl Raw {
    fn new(stream: TcpStream, deadline: Instant) -> Result<Self, ChannelError> {
        // Small frames must not wait for the acknowledgement of earlier ones.
        stream.set_nodelay(true).map_err(ChannelError::Io)?;
        Ok(Self { stream, deadline })
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), ChannelError> {
        write_all(&self.stream, bytes, self.deadline).await
    }

    async fn read<const N: usize>(&mut self) -> Result<[u8; N], ChannelError> {
        let mut bytes = [0; N];
        read_exact(
            &self.stream,
            &mut bytes,
            self.deadline,
            "waiting for the handshake",
        )
        .await?;
        Ok(bytes)
    }
}

fn hello(side: Side, key: Option<&PeerKey>) -> Result<Hello, ChannelError> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(ChannelError::Random)?;
    Ok(Hello {
        protocol: &PROTOCOL,
        side,
        keyed: key.is_some(),
        nonce,
    })
}

async fn write_all(
    stream: &TcpStream,
    mut bytes: &[u8],
    deadline: Instant,
) -> Result<(), ChannelError> {
    while !bytes.is_empty() {
        match stream.try_write(bytes) {
            Ok(0) => return Err(ChannelError::Closed),
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) => or_wait(error, stream.writable(), deadline, "sending a message").await?,
        }
    }
    Ok(())
}

async fn read_exact(
    stream: &TcpStream,
    mut bytes: &mut [u8],
    deadline: Instant,
    doing: &'static str,
) -> Result<(), ChannelError> {
    while !bytes.is_empty() {
        match stream.try_read(bytes) {
            Ok(0) => return Err(ChannelError::Closed),
            Ok(received) => bytes = &mut bytes[received..],
            Err(error) => or_wait(error, stream.readable(), deadline, doing).await?,
        }
    }
    Ok(())
}

/// Waits until the stream is ready if `error` says that it is not.
async fn or_wait(
    error: io::Error,
    ready: impl Future<Output = io::Result<()>>,
    deadline: Instant,
    doing: &'static str,
) -> Result<(), ChannelError> {
    match error.kind() {
        io::ErrorKind::WouldBlock => timeout_at(deadline, ready)
            .await
            .map_err(|_| ChannelError::Timeout(doing))?
            .map_err(ChannelError::Io),
        io::ErrorKind::Interrupted => Ok(()),
        _ => Err(ChannelError::Io(error)),
    }
}

/// A socket that is always ready would never let go of its thread.
async fn give_way(moved: usize) -> usize {
    if moved < TURN_BYTES {
        return moved;
    }
    tokio::task::yield_now().await;
    0
}

#[cfg(test)]
#[path = "channel_tests.rs"]
mod tests;
