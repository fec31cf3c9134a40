//! The decode side: judges handles, keeps them alive, reads and verifies KV, releases what it does not
//! read.

use crate::handoff::channel::ChannelError;
use crate::handoff::exporter::check_shape;
use crate::handoff::fetch::{Fetch, FetchError};
use crate::handoff::keeper::{ImporterKeeper, RENEWALS, SHORTEST_TICK};
use crate::handoff::params::{Local, RemoteHandle};
use crate::handoff::peers::{PeerList, PeerListError};
use crate::handoff::pool::{Connection, Pool, PoolConfig, Purpose, channel_error};
use crate::handoff::stats::{Counter, Failures, ImporterStats};
use crate::handoff::wire::{Refusal, ReleaseOutcome, Reply, Request, WireGeometry, WireHandle};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use twinfer_comm::handshake::PeerKey;
use twinfer_engine::KvGeometry;
use twinfer_protocol::{ApiError, BlockId, ErrorKind, Fingerprint, KvTransferParams, TokenId};
use twinfer_sys::BlockArena;

/// Releases that wait to be sent; more are left to the lease.
const RELEASE_QUEUE: usize = 1024;

/// What an importer needs to know.
#[derive(Debug)]
pub struct ImporterConfig {
    /// What an exporter must equal.
    pub fingerprint: Fingerprint,
    /// Key that exporters must prove; without one only loopback is dialled.
    pub key: Option<PeerKey>,
    /// KV channels that may be dialled (`--pd-peers`); empty: those on loopback.
    pub peers: Vec<String>,
    /// How long a transfer may make no progress (`--kv-timeout`).
    pub timeout: Duration,
    /// How often handles in use are renewed that do not say how long their lease is; a part of the own
    /// one.
    pub renew_every: Duration,
    /// Shape of the KV.
    pub geometry: KvGeometry,
    /// Where the KV goes.
    pub arena: Arc<BlockArena>,
}

/// Why an importer cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ImporterError {
    /// `--pd-peers` is malformed.
    #[error(transparent)]
    Peers(#[from] PeerListError),
    /// The KV memory does not have the shape it is said to have.
    #[error(
        "KV memory of {layers} layers of {unit_bytes} bytes a unit does not fit the model's KV: {geometry:?}"
    )]
    Geometry {
        /// Layers of the memory.
        layers: usize,
        /// Bytes of its units.
        unit_bytes: usize,
        /// Shape of the model's KV.
        geometry: KvGeometry,
    },
}

/// What a fetch moved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FetchReport {
    /// Bytes of verified units.
    pub bytes: u64,
    /// Blocks filled.
    pub blocks: u32,
    /// From the call to the last verified unit.
    pub seconds: f64,
}

/// The decode side of connector `pull`. Cheap to clone.
#[derive(Clone)]
pub struct Importer {
    pub(crate) shared: Arc<Shared>,
}

/// A handle in use by a request here: renewed while this lives, released when it is dropped without a
/// fetch that ended well.
pub struct Claim {
    importer: Importer,
    handle: Arc<RemoteHandle>,
    number: u64,
    /// The prefill instance was told that all of it has come.
    settled: AtomicBool,
}

pub(crate) struct Shared {
    pub(crate) config: ImporterConfig,
    pub(crate) geometry: WireGeometry,
    pub(crate) pool: Pool,
    pub(crate) claims: Mutex<Claims>,
    /// A claim must be renewed sooner than the keeper thinks.
    pub(crate) hurry: Notify,
    pub(crate) counters: Counters,
    /// Releases that were asked for and have neither been answered nor counted as lost.
    pub(crate) unsettled: AtomicU64,
    peers: PeerList,
    releases: mpsc::Sender<Arc<RemoteHandle>>,
}

/// Handles to keep alive.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    pub(crate) live: HashMap<u64, (Arc<RemoteHandle>, Instant)>,
    /// When the keeper looks next.
    pub(crate) next_look: Option<Instant>,
    last: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) pulls: Counter,
    pub(crate) bytes: Counter,
    pub(crate) failures: Failures,
    pub(crate) redials: Counter,
    pub(crate) releases: Counter,
    pub(crate) releases_lost: Counter,
}

impl Importer {
    /// Checks the peers and returns the importer and the task that renews and releases, to be run by the
    /// caller.
    pub fn new(config: ImporterConfig) -> Result<(Self, ImporterKeeper), ImporterError> {
        let geometry =
            check_shape(&config.arena, config.geometry).ok_or_else(|| ImporterError::Geometry {
                layers: config.arena.layers(),
                unit_bytes: config.arena.unit_bytes(),
                geometry: config.geometry,
            })?;
        let peers = PeerList::new(&config.peers, config.key.is_some())?;
        let pool = Pool::new(PoolConfig {
            key: config.key.clone(),
            fingerprint: config.fingerprint.clone(),
            timeout: config.timeout,
        });
        let (releases, queue) = mpsc::channel(RELEASE_QUEUE);
        let shared = Arc::new(Shared {
            config,
            geometry,
            pool,
            claims: Mutex::new(Claims::default()),
            hurry: Notify::new(),
            counters: Counters::default(),
            unsettled: AtomicU64::new(0),
            peers,
            releases,
        });
        Ok((
            Self {
                shared: Arc::clone(&shared),
            },
            ImporterKeeper::new(shared, queue),
        ))
    }

    /// Judges a request's parameters at admission. Opens no connection.
    ///
    /// Errors: [`ErrorKind::InvalidRequest`], [`ErrorKind::KvParamsForbidden`],
    /// [`ErrorKind::KvMismatch`]; `param` names the field.
    pub fn check(&self, params: &KvTransferParams) -> Result<RemoteHandle, ApiError> {
        let block_size = self.shared.geometry.block_size;
        RemoteHandle::from_params(
            params,
            Local {
                peers: &self.shared.peers,
                block_size,
            },
        )
    }

    /// Takes a handle into use: from now on it is renewed, and released on every way out.
    pub fn claim(&self, handle: RemoteHandle) -> Claim {
        let handle = Arc::new(handle);
        let now = Instant::now();
        let due = now + self.shared.renew_every(&handle);
        let mut claims = self.shared.claims.lock();
        claims.last += 1;
        let number = claims.last;
        claims.live.insert(number, (Arc::clone(&handle), now));
        let hurry = claims.next_look.is_some_and(|look| due < look);
        drop(claims);
        if hurry {
            self.shared.hurry.notify_one();
        }
        Claim {
            importer: self.clone(),
            handle,
            number,
            settled: AtomicBool::new(false),
        }
    }

    /// Releases a handle and waits for the answer; see [`Self::release_later`] for ways out that cannot
    /// wait. Idempotent.
    ///
    /// Errors: [`ErrorKind::KvTransfer`] and what a dial can end with; the lease ends by itself then.
    pub async fn release(&self, handle: &RemoteHandle) -> Result<ReleaseOutcome, ApiError> {
        let request = Request::Release {
            handle: WireHandle::new(handle.epoch.0, handle.id),
        };
        let answer = self.shared.ask(handle, &request).await;
        let counters = &self.shared.counters;
        match answer {
            Ok(Reply::Released { outcome }) => {
                counters.releases.add(1);
                Ok(outcome)
            }
            Ok(_) => {
                counters.releases_lost.add(1);
                Err(Refusal::Protocol.error("it does not answer a release"))
            }
            Err(error) => {
                counters.releases_lost.add(1);
                Err(error)
            }
        }
    }

    /// Has a handle released soon, without waiting.
    pub fn release_later(&self, handle: Arc<RemoteHandle>) {
        // Counted first: the keeper may be done with it before this goes on.
        self.shared.unsettled.fetch_add(1, Ordering::Relaxed);
        if self.shared.releases.try_send(handle).is_err() {
            self.shared.unsettled.fetch_sub(1, Ordering::Relaxed);
            self.shared.counters.releases_lost.add(1);
        }
    }

    /// Counters and gauges.
    pub fn stats(&self) -> ImporterStats {
        let counters = &self.shared.counters;
        ImporterStats {
            claims: self.shared.claims.lock().live.len() as u64,
            connections: self.shared.pool.open(),
            pulls: counters.pulls.get(),
            bytes: counters.bytes.get(),
            failures: counters.failures.get(),
            redials: counters.redials.get(),
            releases: counters.releases.get(),
            releases_lost: counters.releases_lost.get(),
        }
    }
}

impl fmt::Debug for Importer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Importer").finish_non_exhaustive()
    }
}

impl Claim {
    /// The handle.
    pub fn handle(&self) -> &RemoteHandle {
        &self.handle
    }

    /// Fills the first blocks of `blocks` with the KV of `positions`, which begin a block, all of it
    /// verified. `prompt` must begin with the tokens that the handle covers; `blocks` belong to nobody else
    /// while this runs. What follows the last position in the last block is undefined afterwards. The prefill
    /// instance frees the KV as soon as it is read: there is no second fetch of a claim.
    ///
    /// After an error, or when this is dropped, what is in the blocks is of no use. A connection that
    /// was idle and turns out dead is replaced once.
    ///
    /// Errors: [`ErrorKind::KvStale`], [`ErrorKind::KvCorrupt`], [`ErrorKind::KvMismatch`],
    /// [`ErrorKind::KvTransfer`]; [`ErrorKind::Internal`] for blocks that are in use or do not exist.
    pub async fn fetch(
        &self,
        prompt: &[TokenId],
        blocks: &[BlockId],
        positions: Range<u32>,
    ) -> Result<FetchReport, ApiError> {
        let shared = &self.importer.shared;
        let started = Instant::now();
        let fetched = self.try_fetch(prompt, blocks, positions).await;
        match fetched {
            Ok((bytes, blocks)) => {
                shared.counters.pulls.add(1);
                shared.counters.bytes.add(bytes);
                Ok(FetchReport {
                    bytes,
                    blocks,
                    seconds: started.elapsed().as_secs_f64(),
                })
            }
            Err(error) => {
                shared.counters.failures.count(error.kind);
                Err(error)
            }
        }
    }

    async fn try_fetch(
        &self,
        prompt: &[TokenId],
        blocks: &[BlockId],
        positions: Range<u32>,
    ) -> Result<(u64, u32), ApiError> {
        let shared = &self.importer.shared;
        let handle = &*self.handle;
        if positions.is_empty() {
            // Nothing to read: a release is sent when the claim is dropped.
            return Ok((0, 0));
        }
        let (geometry, shape) = (shared.config.geometry, shared.geometry);
        let fetch = Fetch::new(handle, geometry, shape, prompt, positions)?;
        let arena = Arc::clone(&shared.config.arena);
        let mut guards = fetch.guards(&arena, blocks)?;
        let mut fresh = false;
        loop {
            let pool = &shared.pool;
            let mut connection = pool.connect(&handle.peer, fresh, Purpose::Fetch).await?;
            if connection.epoch != handle.epoch {
                if connection.reused {
                    // It may be one to the incarnation before the one that made the handle.
                    shared.pool.forget(&handle.peer);
                    fresh = true;
                    continue;
                }
                shared.pool.keep(connection);
                let what = format!(
                    "prefill instance {} was restarted since it made this handle",
                    handle.peer
                );
                return Err(ApiError::new(ErrorKind::KvStale, what));
            }
            let timeout = shared.config.timeout;
            match fetch.run(&mut connection, &mut guards, timeout).await {
                Ok(()) => {
                    if fetch.acknowledge(&mut connection, timeout).await {
                        self.settled.store(true, Ordering::Relaxed);
                        shared.pool.keep(connection);
                    }
                    return Ok((fetch.payload(), fetch.blocks()));
                }
                Err(FetchError::Channel(error)) if shared.is_dead(&connection, &error) => {
                    shared.redial(handle);
                    fresh = true;
                }
                Err(FetchError::Channel(error)) => return Err(channel_error(&handle.peer, &error)),
                Err(FetchError::Refused(error)) => {
                    shared.pool.keep(connection);
                    return Err(error);
                }
                Err(FetchError::Wrong(error)) => return Err(error),
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.importer.shared.claims.lock().live.remove(&self.number);
        if !self.settled.load(Ordering::Relaxed) {
            self.importer.release_later(Arc::clone(&self.handle));
        }
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("handle", &self.handle)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// How often a handle is renewed.
    pub(crate) fn renew_every(&self, handle: &RemoteHandle) -> Duration {
        let every = match handle.lease {
            Some(lease) => lease / RENEWALS,
            None => self.config.renew_every,
        };
        every.max(SHORTEST_TICK)
    }

    /// One question, one answer; refusals are errors.
    pub(crate) async fn ask(
        &self,
        handle: &RemoteHandle,
        request: &Request,
    ) -> Result<Reply, ApiError> {
        let mut fresh = false;
        loop {
            let pool = &self.pool;
            let mut connection = pool.connect(&handle.peer, fresh, Purpose::Control).await?;
            let deadline = self.answer_time(&connection);
            let channel = &mut connection.channel;
            let answer = async {
                channel.send(request, deadline).await?;
                channel.receive::<Reply>(deadline).await
            };
            match answer.await {
                Ok(Reply::Refused { reason, message }) => return Err(reason.error(&message)),
                Ok(reply) => {
                    self.pool.keep(connection);
                    return Ok(reply);
                }
                Err(error) if self.is_dead(&connection, &error) => {
                    self.redial(handle);
                    fresh = true;
                }
                Err(error) => return Err(channel_error(&handle.peer, &error)),
            }
        }
    }

    /// When the first byte of an answer must have come.
    pub(crate) fn answer_time(&self, connection: &Connection) -> Instant {
        Instant::now() + connection.patience(self.config.timeout)
    }

    /// It was idle, and nothing came: the exporter has done nothing on it, and a new one may do.
    fn is_dead(&self, connection: &Connection, error: &ChannelError) -> bool {
        let broken = matches!(
            error,
            ChannelError::Closed | ChannelError::Io(_) | ChannelError::Timeout(_)
        );
        connection.reused && broken && !connection.channel.heard()
    }

    fn redial(&self, handle: &RemoteHandle) {
        self.counters.redials.add(1);
        self.pool.forget(&handle.peer);
    }
}
