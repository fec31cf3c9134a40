//! An importer's connections: dialled, proved, kept for the next request.

use crate::handoff::channel::{Channel, ChannelError, HANDSHAKE_TIME};
use crate::handoff::peers::Peer;
use crate::handoff::stats::Counter;
use crate::handoff::wire::{Refusal, Reply, Request, difference, printable};
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use twinfer_comm::handshake::PeerKey;
use twinfer_protocol::{ApiError, Epoch, ErrorKind, Fingerprint};

/// Connections in use at the same time, for each purpose; who finds none free waits.
const IN_USE_CAP: usize = 64;
/// Idle connections kept, in all and to one peer.
const IDLE_CAP: usize = 16;
const IDLE_PER_PEER: usize = 4;
/// Idle connections are kept so long; shorter than exporters keep theirs.
const IDLE_TIME: Duration = Duration::from_secs(300);

/// What a pool needs to know.
#[derive(Debug)]
pub(crate) struct PoolConfig {
    pub(crate) key: Option<PeerKey>,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) timeout: Duration,
}

/// What a connection is for. Renewals and releases have places of their own: fetches from peers that
/// hang must not end the leases of others.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    Fetch,
    Control,
}

/// Connections to exporters.
#[derive(Debug)]
pub(crate) struct Pool {
    config: PoolConfig,
    fetches: Arc<Semaphore>,
    controls: Arc<Semaphore>,
    idle: Mutex<Vec<Idle>>,
    open: Arc<Counter>,
}

/// A proved connection with an equal fingerprint at its other end.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) channel: Channel,
    /// The exporter's incarnation.
    pub(crate) epoch: Epoch,
    /// It was idle before: it may be dead without anybody knowing.
    pub(crate) reused: bool,
    peer: Peer,
    _place: Option<OwnedSemaphorePermit>,
    _open: Open,
}

#[derive(Debug)]
struct Idle {
    connection: Connection,
    since: Instant,
}

/// Counts an open connection for as long as it lives.
#[derive(Debug)]
struct Open(Arc<Counter>);

impl Pool {
    pub(crate) fn new(config: PoolConfig) -> Self {
        Self {
            config,
            fetches: Arc::new(Semaphore::new(IN_USE_CAP)),
            controls: Arc::new(Semaphore::new(IN_USE_CAP)),
            idle: Mutex::new(Vec::new()),
            open: Arc::new(Counter::default()),
        }
    }

    /// Open connections, idle ones included.
    pub(crate) fn open(&self) -> u64 {
        self.open.get()
    }

    /// A connection to `peer`: an idle one if there is a live one and `fresh` is not asked for.
    pub(crate) async fn connect(
        &self,
        peer: &Peer,
        fresh: bool,
        purpose: Purpose,
    ) -> Result<Connection, ApiError> {
        let deadline = Instant::now() + self.config.timeout;
        let places = match purpose {
            Purpose::Fetch => &self.fetches,
            Purpose::Control => &self.controls,
        };
        let place = timeout_at(deadline, Arc::clone(places).acquire_owned())
            .await
            .map_err(|_| failed(peer, "all connections of this instance stay in use"))?
            .map_err(|_| failed(peer, "this instance stops"))?;
        if !fresh && let Some(mut connection) = self.take_idle(peer) {
            connection.reused = true;
            connection.channel.listen();
            connection._place = Some(place);
            return Ok(connection);
        }
        let deadline = Instant::now() + HANDSHAKE_TIME;
        timeout_at(deadline, self.dial(peer, place, deadline))
            .await
            .unwrap_or_else(|_| Err(failed(peer, "no connection in time")))
    }

    /// Keeps a connection whose last exchange is complete.
    pub(crate) fn keep(&self, mut connection: Connection) {
        connection._place = None;
        let mut idle = self.idle.lock();
        idle.retain(Idle::is_fresh);
        let to_peer = idle
            .iter()
            .filter(|other| other.connection.peer == connection.peer)
            .count();
        if to_peer < IDLE_PER_PEER && idle.len() < IDLE_CAP {
            idle.push(Idle {
                connection,
                since: Instant::now(),
            });
        }
    }

    /// Closes idle connections that are old, or whose peer has closed.
    pub(crate) fn sweep(&self) {
        self.idle.lock().retain(Idle::is_fresh);
    }

    /// Closes all idle connections to `peer`: one of them was dead.
    pub(crate) fn forget(&self, peer: &Peer) {
        self.idle
            .lock()
            .retain(|idle| idle.connection.peer != *peer);
    }

    fn take_idle(&self, peer: &Peer) -> Option<Connection> {
        let mut idle = self.idle.lock();
        idle.retain(Idle::is_fresh);
        let at = idle
            .iter()
            .rposition(|idle| idle.connection.peer == *peer)?;
        Some(idle.remove(at).connection)
    }

    async fn dial(
        &self,
        peer: &Peer,
        place: OwnedSemaphorePermit,
        deadline: Instant,
    ) -> Result<Connection, ApiError> {
        let stream = self.reach(peer).await?;
        let open = Open::new(&self.open);
        let key = self.config.key.as_ref();
        let mut channel = Channel::import(stream, key, deadline)
            .await
            .map_err(|error| channel_error(peer, &error))?;
        let hello = Request::Open {
            fingerprint: self.config.fingerprint.clone(),
        };
        channel
            .send(&hello, deadline)
            .await
            .map_err(|error| channel_error(peer, &error))?;
        let reply = channel
            .receive(deadline)
            .await
            .map_err(|error| channel_error(peer, &error))?;
        let (epoch, fingerprint) = match reply {
            Reply::Welcome { epoch, fingerprint } => (epoch, fingerprint),
            Reply::Refused { reason, message } => return Err(reason.error(&message)),
            _ => return Err(Refusal::Protocol.error("it does not welcome")),
        };
        if let Some(parts) = difference(&self.config.fingerprint, &fingerprint) {
            let what = format!("prefill instance at {peer} has another fingerprint: {parts}");
            return Err(ApiError::new(ErrorKind::KvMismatch, what));
        }
        Ok(Connection {
            channel,
            epoch: Epoch(epoch),
            reused: false,
            peer: peer.clone(),
            _place: Some(place),
            _open: open,
        })
    }

    async fn reach(&self, peer: &Peer) -> Result<TcpStream, ApiError> {
        let addresses: Vec<SocketAddr> = match peer.address() {
            Some(address) => vec![SocketAddr::new(address, peer.port())],
            None => lookup_host((peer.host(), peer.port()))
                .await
                .map_err(|error| failed(peer, &error.to_string()))?
                .collect(),
        };
        let mut last = failed(peer, "its name has no address");
        for address in addresses {
            if self.config.key.is_none() && !address.ip().to_canonical().is_loopback() {
                let what = format!("{peer} is not on loopback, and this instance has no peer key");
                return Err(ApiError::new(ErrorKind::KvParamsForbidden, what));
            }
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = failed(peer, &error.to_string()),
            }
        }
        Err(last)
    }
}

impl Connection {
    /// How long the first byte of an answer may take: little on a connection that may be dead.
    pub(crate) fn patience(&self, timeout: Duration) -> Duration {
        match self.reused {
            true => timeout.min(HANDSHAKE_TIME),
            false => timeout,
        }
    }
}

impl Idle {
    fn is_fresh(&self) -> bool {
        self.since.elapsed() < IDLE_TIME && self.connection.channel.is_quiet()
    }
}

impl Open {
    fn new(counter: &Arc<Counter>) -> Self {
        counter.add(1);
        Self(Arc::clone(counter))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.sub(1);
    }
}

/// The error a request ends with when its connection cannot go on.
pub(crate) fn channel_error(peer: &Peer, error: &ChannelError) -> ApiError {
    let kind = match error {
        ChannelError::Hello(_) => ErrorKind::KvMismatch,
        ChannelError::Frame(_) => ErrorKind::KvCorrupt,
        ChannelError::Random(_) => ErrorKind::Internal,
        ChannelError::Closed | ChannelError::Io(_) | ChannelError::Timeout(_) => {
            ErrorKind::KvTransfer
        }
    };
    // A release from here is refused for the same reason.
    let held = match error {
        ChannelError::Hello(_) => {
            "; the KV stays there until its lease ends or the router releases it"
        }
        _ => "",
    };
    ApiError::new(kind, format!("KV handoff from {peer}: {error}{held}"))
}

fn failed(peer: &Peer, why: &str) -> ApiError {
    ApiError::new(
        ErrorKind::KvTransfer,
        format!("KV handoff from {peer}: {}", printable(why)),
    )
}
