//! Takes connections and their first message, from many at a time: one that is slow, silent or a stranger delays
//! nobody.

use crate::channel::{Channel, ChannelError, Direction, FIRST_CAP, body_length, hello};
use crate::handshake::{
    HELLO_LEN, Hello, HelloError, PROOF_LEN, PeerKey, Protocol, Side, TAG_LEN, Transcript,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Time for handshake and first message.
const FIRST_TIME: Duration = Duration::from_secs(5);
/// Connections that may be on their way to a first message, beyond one for each rank.
const SPARE: usize = 64;

/// A listener and who has come to it.
#[derive(Debug)]
pub struct Acceptor {
    protocol: &'static Protocol,
    listener: TcpListener,
    key: Option<PeerKey>,
    coming: Vec<Coming>,
    most: usize,
}

/// What happened.
#[expect(
    clippy::large_enum_variant,
    reason = "few at a time, and only while a group starts"
)]
pub enum Event<T> {
    /// Somebody has proven the key and said this.
    Arrived {
        /// The connection.
        channel: Channel<TcpStream>,
        /// From where.
        from: SocketAddr,
        /// What was said first.
        message: T,
    },
    /// Somebody was turned away.
    Turned {
        /// From where.
        from: SocketAddr,
        /// What it did.
        why: ChannelError,
    },
    /// A connection that is watched has closed, or said something out of turn.
    Gone(u32),
    /// The time is over.
    Time,
}

/// One that has not said its first message yet.
#[derive(Debug)]
struct Coming {
    stream: TcpStream,
    from: SocketAddr,
    input: Vec<u8>,
    state: State,
    until: Instant,
}

#[derive(Debug)]
enum State {
    Hello(Hello),
    Proof(Transcript),
    First {
        sent: Direction,
        received: Direction,
    },
}

impl Acceptor {
    /// Takes connections of `expected` peers and some strangers at a time.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(
        protocol: &'static Protocol,
        listener: TcpListener,
        key: Option<PeerKey>,
        expected: u32,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            protocol,
            listener,
            key,
            coming: Vec::new(),
            most: expected as usize + SPARE,
        })
    }

    /// Waits for the next event; besides, for the end of any of `watched`.
    ///
    /// # Errors
    /// What the system reports of the listener.
    pub fn next<T: DeserializeOwned>(
        &mut self,
        watched: &[(u32, &TcpStream)],
        until: Instant,
    ) -> io::Result<Event<T>> {
        loop {
            let now = Instant::now();
            if now >= until {
                return Ok(Event::Time);
            }
            if let Some(late) = self.coming.iter().position(|coming| coming.until <= now) {
                let from = self.coming.swap_remove(late).from;
                let why = ChannelError::Timeout;
                return Ok(Event::Turned { from, why });
            }
            let wake = self.coming.iter().map(|coming| coming.until).min();
            let ready = self.poll(watched, wake.map_or(until, |wake| wake.min(until)))?;
            if let Some(rank) = ready.gone {
                return Ok(Event::Gone(rank));
            }
            // From the back, so that the places before stay.
            for place in ready.coming.into_iter().rev() {
                match self.coming[place].advance(self.key.as_ref()) {
                    Ok(false) => {}
                    Ok(true) => {
                        let coming = self.coming.swap_remove(place);
                        let from = coming.from;
                        return Ok(match coming.arrive() {
                            Ok((channel, message)) => Event::Arrived {
                                channel,
                                from,
                                message,
                            },
                            Err(why) => Event::Turned { from, why },
                        });
                    }
                    Err(why) => {
                        let from = self.coming.swap_remove(place).from;
                        return Ok(Event::Turned { from, why });
                    }
                }
            }
            if ready.listener {
                self.accept()?;
            }
        }
    }

    fn poll(&self, watched: &[(u32, &TcpStream)], until: Instant) -> io::Result<Ready> {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs().min(1 << 30) as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        let streams = self.coming.iter().map(|coming| &coming.stream);
        let streams = streams.chain(watched.iter().map(|(_, stream)| *stream));
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(streams.map(|stream| PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP)));
        match poll(&mut fds, Some(&left)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            Err(error) => return Err(error.into()),
        }
        let stirred: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (listener, streams) = stirred.split_at(1);
        let (coming, others) = streams.split_at(self.coming.len());
        Ok(Ready {
            listener: listener[0],
            coming: (0..coming.len()).filter(|&place| coming[place]).collect(),
            gone: others
                .iter()
                .zip(watched)
                .find(|(stirred, _)| **stirred)
                .map(|(_, (rank, _))| *rank),
        })
    }

    fn accept(&mut self) -> io::Result<()> {
        let (stream, from) = match self.listener.accept() {
            Ok(accepted) => accepted,
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {
                    return Ok(());
                }
                _ => return Err(error),
            },
        };
        let Ok(hello) = hello(self.protocol, Side::Listener, self.key.is_some()) else {
            return Ok(());
        };
        stream.set_nonblocking(true)?;
        if self.coming.len() >= self.most {
            // Who holds the key speaks at once; the oldest of those who do not makes room.
            self.coming.remove(0);
        }
        self.coming.push(Coming {
            stream,
            from,
            input: Vec::new(),
            state: State::Hello(hello),
            until: Instant::now() + FIRST_TIME,
        });
        Ok(())
    }
}

#[derive(Default)]
struct Ready {
    listener: bool,
    coming: Vec<usize>,
    gone: Option<u32>,
}

impl Coming {
    /// Bytes that the state needs, as far as they are known.
    fn need(&self) -> Result<usize, ChannelError> {
        Ok(match &self.state {
            State::Hello(_) => HELLO_LEN,
            State::Proof(_) => PROOF_LEN,
            State::First { .. } => match self.input.first_chunk() {
                None => 4,
                Some(prefix) => 4 + body_length(*prefix, FIRST_CAP)? + TAG_LEN,
            },
        })
    }

    /// Reads what has come and answers it; whether the first message is here. Never reads behind it.
    fn advance(&mut self, key: Option<&PeerKey>) -> Result<bool, ChannelError> {
        loop {
            let (have, need) = (self.input.len(), self.need()?);
            if have < need {
                self.input.resize(need, 0);
                let outcome = self.stream.read(&mut self.input[have..]);
                let got = *outcome.as_ref().unwrap_or(&0);
                self.input.truncate(have + got);
                match outcome {
                    Ok(0) => return Err(ChannelError::Closed),
                    Ok(_) => continue,
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                    Err(error) => return Err(error.into()),
                }
            }
            match &self.state {
                State::Hello(ours) => {
                    let Some(dialer) = self.input.first_chunk::<HELLO_LEN>().copied() else {
                        return Ok(false);
                    };
                    let listener = ours.encode();
                    let fits = ours.check_peer(&dialer);
                    if !fits.is_err_and(HelloError::is_strange) {
                        self.stream.write_all(&listener)?;
                    }
                    fits?;
                    self.state = State::Proof(Transcript {
                        protocol: ours.protocol,
                        dialer,
                        listener,
                    });
                }
                State::Proof(transcript) => {
                    let Some(proof) = self.input.first_chunk::<PROOF_LEN>() else {
                        return Ok(false);
                    };
                    if let Err(error) = transcript.verify(key, Side::Dialer, proof) {
                        self.stream.write_all(&transcript.protocol.refusal())?;
                        return Err(error.into());
                    }
                    self.stream
                        .write_all(&transcript.proof(key, Side::Listener))?;
                    let (sent, received) = Direction::pair(transcript, key, Side::Listener);
                    self.state = State::First { sent, received };
                }
                State::First { .. } => return Ok(true),
            }
            self.input.clear();
        }
    }

    /// The channel and its first message.
    fn arrive<T: DeserializeOwned>(self) -> Result<(Channel<TcpStream>, T), ChannelError> {
        let State::First { sent, mut received } = self.state else {
            return Err(ChannelError::Message);
        };
        let message = received.decode(&self.input)?;
        self.stream.set_nonblocking(false)?;
        let stream = self.stream;
        Ok((
            Channel {
                stream,
                sent,
                received,
            },
            message,
        ))
    }
}
