//! The exporter's connections: who is let in, and what is answered.

use crate::handoff::channel::{Channel, ChannelError, HANDSHAKE_TIME, Pace, SLICES};
use crate::handoff::exporter::{Held, Reading, Shared};
use crate::handoff::stats::Counter;
use crate::handoff::wire::{
    RENEW_CAP, Refusal, ReleaseOutcome, Reply, Request, WireHandle, difference,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use twinfer_protocol::ErrorKind;
use twinfer_sys::BlockRead;

/// Connections whose handshake is not over; the oldest makes place for a newer one.
const UNPROVED_CAP: usize = 64;
/// Connections of peers that have proved themselves.
const PROVED_CAP: usize = 256;
/// An idle connection is closed after this time; longer than importers keep theirs.
const IDLE_TIME: Duration = Duration::from_secs(330);
/// Wait after the system refused to accept a connection, such as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Time to make place for a peer, or to tell it why it is not served.
const FAREWELL_TIME: Duration = Duration::from_millis(500);

/// Serves an exporter's peers and ends its leases. Run it once, on the runtime that also registers.
pub struct ExporterServer {
    shared: Arc<Shared>,
    listener: TcpListener,
}

/// Connections that may be closed for the sake of others, oldest first.
#[derive(Debug, Default)]
struct Spare(Mutex<SpareEntries>);

#[derive(Debug, Default)]
struct SpareEntries {
    last: u64,
    tokens: BTreeMap<u64, CancellationToken>,
}

/// A connection's place among the spare ones; given up when dropped.
#[derive(Debug)]
struct Spared {
    among: Arc<Spare>,
    ticket: u64,
}

/// What a connection needs.
struct Connection {
    shared: Arc<Shared>,
    /// Connections that wait for a request.
    idle: Arc<Spare>,
    places: Arc<Semaphore>,
    address: SocketAddr,
    /// Ends it.
    end: CancellationToken,
}

/// How a connection goes on after a request.
enum Next {
    Serve,
    Close,
}

/// Why a request was not served, and whether anything is left to say.
enum Failure {
    Refuse(Refusal, String),
    Channel(ChannelError),
}

/// Counts an open connection for as long as it lives.
struct Open<'a>(&'a Counter);

impl ExporterServer {
    pub(crate) fn new(shared: Arc<Shared>, listener: TcpListener) -> Self {
        Self { shared, listener }
    }

    /// Accepts and serves until `shutdown`; then closes all connections and returns. Readers lose their
    /// connection.
    pub async fn run(self, shutdown: CancellationToken) {
        let stop = shutdown.child_token();
        let tasks = TaskTracker::new();
        let (unproved, idle) = (Arc::new(Spare::default()), Arc::new(Spare::default()));
        let places = Arc::new(Semaphore::new(PROVED_CAP));
        loop {
            // Past leases end first, so that a flood of connections cannot keep blocks.
            let next_end = self.shared.expire();
            let next_end = async {
                match next_end {
                    Some(then) => sleep_until(self.shared.instant(then)).await,
                    None => std::future::pending().await,
                }
            };
            let accepted = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = next_end => continue,
                () = self.shared.leased.notified() => continue,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, address)) => {
                    let end = stop.child_token();
                    let (spared, count) = unproved.enter(end.clone());
                    if count > UNPROVED_CAP && unproved.evict() {
                        self.shared.counters.rejections.evicted.add(1);
                    }
                    let connection = Connection {
                        shared: Arc::clone(&self.shared),
                        idle: Arc::clone(&idle),
                        places: Arc::clone(&places),
                        address,
                        end: end.clone(),
                    };
                    let serve = connection.serve(stream, spared);
                    tasks.spawn(async move { end.run_until_cancelled(serve).await });
                }
                Err(error) => {
                    tracing::warn!(%error, "KV channel cannot accept connections");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.listener);
        tasks.close();
        tasks.wait().await;
    }
}

impl Spare {
    /// Enters a connection that `token` ends. Returns how many there are with it.
    fn enter(self: &Arc<Self>, token: CancellationToken) -> (Spared, usize) {
        let mut entries = self.0.lock();
        entries.last += 1;
        let ticket = entries.last;
        entries.tokens.insert(ticket, token);
        (
            Spared {
                among: Arc::clone(self),
                ticket,
            },
            entries.tokens.len(),
        )
    }

    /// Closes the oldest; false if there is none.
    fn evict(&self) -> bool {
        let oldest = self.0.lock().tokens.pop_first();
        oldest.is_some_and(|(_, token)| {
            token.cancel();
            true
        })
    }
}

impl Drop for Spared {
    fn drop(&mut self) {
        self.among.0.lock().tokens.remove(&self.ticket);
    }
}

impl Connection {
    async fn serve(self, stream: TcpStream, unproved: Spared) {
        let counters = &self.shared.counters;
        let _open = Open::new(&counters.connections);
        let key = self.shared.config.key.as_ref();
        if key.is_none() && !self.address.ip().to_canonical().is_loopback() {
            counters.rejections.key.add(1);
            return;
        }
        let deadline = Instant::now() + HANDSHAKE_TIME;
        let opened = async {
            let mut channel = Channel::export(stream, key, deadline).await?;
            let request = channel.receive::<Request>(deadline).await?;
            Ok::<_, ChannelError>((channel, request))
        };
        let opened = timeout_at(deadline, opened)
            .await
            .unwrap_or(Err(ChannelError::Timeout("handshake")));
        let (mut channel, request) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                counters.rejections.count(&error);
                tracing::debug!(peer = %self.address, %error, "KV connection refused");
                return;
            }
        };
        drop(unproved);
        match self.open(&mut channel, request).await {
            Ok(Some(_place)) => self.serve_requests(&mut channel).await,
            Ok(None) => {}
            Err(error) => tracing::debug!(peer = %self.address, %error, "KV connection ended"),
        }
    }

    /// Answers the first frame; none if the peer is not served.
    async fn open(
        &self,
        channel: &mut Channel,
        request: Request,
    ) -> Result<Option<OwnedSemaphorePermit>, ChannelError> {
        let rejections = &self.shared.counters.rejections;
        let Request::Open { fingerprint } = request else {
            rejections.protocol.add(1);
            self.refuse(channel, Refusal::Protocol, "the first message must be Open")
                .await;
            return Ok(None);
        };
        let Some(place) = self.take_place().await else {
            rejections.busy.add(1);
            self.refuse(channel, Refusal::Busy, "all connections are taken")
                .await;
            return Ok(None);
        };
        let config = &self.shared.config;
        let welcome = Reply::Welcome {
            epoch: config.epoch.0,
            fingerprint: config.fingerprint.clone(),
        };
        channel
            .send(&welcome, Instant::now() + HANDSHAKE_TIME)
            .await?;
        if let Some(parts) = difference(&config.fingerprint, &fingerprint) {
            rejections.mismatch.add(1);
            tracing::warn!(peer = %self.address, parts, "decode instance has another fingerprint");
            return Ok(None);
        }
        Ok(Some(place))
    }

    /// A place among the proved connections, at the cost of one that is idle: its peer dials again when
    /// it needs to.
    async fn take_place(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
            return Some(place);
        }
        self.idle.evict();
        let place = Arc::clone(&self.places).acquire_owned();
        timeout(FAREWELL_TIME, place).await.ok()?.ok()
    }

    async fn serve_requests(&self, channel: &mut Channel) {
        loop {
            let (idle, _) = self.idle.enter(self.end.clone());
            let received = channel.receive::<Request>(Instant::now() + IDLE_TIME).await;
            drop(idle);
            let request = match received {
                Ok(request) => request,
                Err(error) => {
                    if matches!(error, ChannelError::Frame(_)) {
                        self.shared.counters.rejections.protocol.add(1);
                    }
                    tracing::debug!(peer = %self.address, %error, "KV connection ended");
                    return;
                }
            };
            match self.answer(channel, request).await {
                Ok(Next::Serve) => {}
                Ok(Next::Close) => return,
                Err(error) => {
                    tracing::debug!(peer = %self.address, %error, "KV connection ended");
                    return;
                }
            }
        }
    }

    async fn answer(&self, channel: &mut Channel, request: Request) -> Result<Next, ChannelError> {
        let deadline = Instant::now() + self.shared.config.timeout;
        match request {
            Request::Pull { handle, .. } => {
                let Err(failure) = self.send_kv(channel, &request).await else {
                    return Ok(Next::Serve);
                };
                let failures = &self.shared.counters.failures;
                match failure {
                    Failure::Refuse(refusal, message) => {
                        failures.count(refusal.error(&message).kind);
                        tracing::info!(peer = %self.address, handle = %handle.id(), message, "KV refused");
                        self.refuse(channel, refusal, &message).await;
                        Ok(if refusal == Refusal::Gone {
                            Next::Serve
                        } else {
                            Next::Close
                        })
                    }
                    Failure::Channel(error) => {
                        failures.count(ErrorKind::KvTransfer);
                        tracing::info!(peer = %self.address, handle = %handle.id(), %error, "KV transfer broke off");
                        Err(error)
                    }
                }
            }
            Request::Release { handle } => {
                let outcome = match self.is_ours(handle) {
                    true => self.shared.release(handle.id()),
                    false => ReleaseOutcome::Unknown,
                };
                channel.send(&Reply::Released { outcome }, deadline).await?;
                Ok(Next::Serve)
            }
            Request::Renew { handles } if handles.len() <= RENEW_CAP => {
                let alive = self.renew(&handles);
                channel.send(&Reply::Renewed { alive }, deadline).await?;
                Ok(Next::Serve)
            }
            Request::Open { .. } | Request::Done { .. } | Request::Renew { .. } => {
                self.shared.counters.rejections.protocol.add(1);
                self.refuse(channel, Refusal::Protocol, "message out of order")
                    .await;
                Ok(Next::Close)
            }
        }
    }

    /// Sends what a pull asks for and waits for its acknowledgement.
    async fn send_kv(&self, channel: &mut Channel, pull: &Request) -> Result<(), Failure> {
        let (reading, blocks) = self.admit(pull)?;
        let held = reading.held();
        let timeout = self.shared.config.timeout;
        let payload = held.units.payload(blocks.clone());
        let pace = Pace::new(timeout, payload);
        let arena = Arc::clone(&self.shared.config.arena);
        // Held while sending: memory that is being read cannot be written, whatever becomes of the lease.
        let guards = held.kv.blocks[blocks.clone()]
            .iter()
            .map(|&id| arena.read(id))
            .collect::<Result<Vec<_>, _>>();
        let guards = guards.map_err(|error| {
            tracing::error!(%error, "held KV cannot be read");
            Failure::Refuse(Refusal::Internal, "held KV cannot be read".to_owned())
        })?;
        let Request::Pull { handle, .. } = *pull else {
            return Err(Failure::Refuse(
                Refusal::Protocol,
                "message out of order".to_owned(),
            ));
        };
        let header = Reply::Header {
            handle,
            token_hash: held.token_hash,
            tokens: held.kv.tokens,
            seal: held.seal.0,
            units: held.checksums.len() as u64,
            payload,
        };
        channel.send(&header, Instant::now() + timeout).await?;
        channel
            .write_units(&mut [IoSlice::new(held.checksums.as_flattened())], &pace)
            .await?;
        self.send_units(channel, held, blocks.start, &guards, &pace)
            .await?;
        self.shared.counters.bytes.add(payload);
        match channel.receive::<Request>(Instant::now() + timeout).await? {
            Request::Done { handle: done } if done == handle => {
                drop(guards);
                reading.finish();
                self.shared.counters.pulls.add(1);
                Ok(())
            }
            _ => Err(Failure::Refuse(
                Refusal::Protocol,
                "Done must follow a transfer".to_owned(),
            )),
        }
    }

    async fn send_units(
        &self,
        channel: &mut Channel,
        held: &Held,
        first: usize,
        guards: &[BlockRead<'_>],
        pace: &Pace,
    ) -> Result<(), Failure> {
        let mut batch: Vec<IoSlice<'_>> = Vec::with_capacity(SLICES);
        for layer in 0..held.units.layers() {
            for (block, guard) in (first..).zip(guards) {
                let rows = guard
                    .unit(layer)
                    .and_then(|unit| unit.get(..held.units.bytes(block)));
                let rows = rows.ok_or_else(|| {
                    Failure::Refuse(Refusal::Internal, format!("held KV has no layer {layer}"))
                })?;
                batch.push(IoSlice::new(rows));
                if batch.len() == SLICES {
                    channel.write_units(&mut batch, pace).await?;
                    batch.clear();
                }
            }
        }
        Ok(channel.write_units(&mut batch, pace).await?)
    }

    /// Pins the KV a pull asks for, if it may have it, and tells which blocks it wants.
    fn admit(&self, pull: &Request) -> Result<(Reading, Range<usize>), Failure> {
        let Request::Pull {
            handle,
            ref token_hash,
            tokens,
            first,
            blocks,
            geometry,
        } = *pull
        else {
            return Err(Failure::Refuse(
                Refusal::Protocol,
                "message out of order".to_owned(),
            ));
        };
        let refuse = |refusal, message: String| Err(Failure::Refuse(refusal, message));
        if geometry != self.shared.geometry {
            let ours = self.shared.geometry;
            return refuse(
                Refusal::Mismatch,
                format!("shape of KV is {ours:?} here, {geometry:?} there"),
            );
        }
        if !self.is_ours(handle) {
            let epoch = self.shared.config.epoch;
            return refuse(
                Refusal::Gone,
                format!("handle is of another epoch than {epoch}"),
            );
        }
        let reading = self.shared.read(handle.id()).map_err(|gone| {
            let id = handle.id();
            Failure::Refuse(Refusal::Gone, format!("handle {id} is {}", gone.name()))
        })?;
        let held = reading.held();
        if tokens != held.kv.tokens || *token_hash != held.token_hash {
            return refuse(
                Refusal::Corrupt,
                format!("handle {} is for other tokens", handle.id()),
            );
        }
        let has = held.kv.blocks.len();
        let first = first as usize;
        match first.checked_add(blocks as usize) {
            Some(end) if first < end && end <= has => Ok((reading, first..end)),
            _ => refuse(
                Refusal::Protocol,
                format!(
                    "{blocks} blocks are asked for from number {first} on; handle has {has}, at least one must be asked for"
                ),
            ),
        }
    }

    fn renew(&self, handles: &[WireHandle]) -> Vec<bool> {
        let now = self.shared.now();
        let mut leases = self.shared.leases.lock();
        handles
            .iter()
            .map(|&handle| self.is_ours(handle) && leases.renew(now, handle.id()).is_ok())
            .collect()
    }

    fn is_ours(&self, handle: WireHandle) -> bool {
        handle.epoch == self.shared.config.epoch.0
    }

    /// Says why, as far as the peer listens.
    async fn refuse(&self, channel: &mut Channel, reason: Refusal, message: &str) {
        let reply = Reply::Refused {
            reason,
            message: message.to_owned(),
        };
        let deadline = Instant::now() + FAREWELL_TIME.min(self.shared.config.timeout);
        if let Err(error) = channel.send(&reply, deadline).await {
            tracing::debug!(peer = %self.address, %error, "peer did not listen to a refusal");
        }
    }
}

impl<'a> Open<'a> {
    fn new(counter: &'a Counter) -> Self {
        counter.add(1);
        Self(counter)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.sub(1);
    }
}

impl From<ChannelError> for Failure {
    fn from(error: ChannelError) -> Self {
        Self::Channel(error)
    }
}
