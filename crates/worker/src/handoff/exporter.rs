//! The prefill side: seals prompts' KV, leases it, serves it, gives it back.

use crate::handoff::lease::{Gone, HandleId, LeaseConfig, LeaseTable, Pin, Release};
use crate::handoff::listener::KvListener;
use crate::handoff::params::RemoteHandle;
use crate::handoff::peers::Peer;
use crate::handoff::seal::{Checksum, Seal, Sealed, TokenHash, Units, token_hash, unit_checksum};
use crate::handoff::server::ExporterServer;
use crate::handoff::stats::{Counter, ExporterStats, Failures, Rejections};
use crate::handoff::wire::{ReleaseOutcome, WireGeometry};
use parking_lot::Mutex;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;
use twinfer_comm::handshake::PeerKey;
use twinfer_engine::{HeldKv, KvGeometry, RequestId};
use twinfer_protocol::{
    ApiError, Epoch, ErrorKind, Fingerprint, KvRelease, KvTransferParams, TokenId,
};
use twinfer_sys::BlockArena;

/// KV up to this size is sealed where the caller stands; more goes to a blocking thread.
const SEAL_INLINE_BYTES: u64 = 1 << 20;
/// Ended handles that are remembered, so that late calls learn what happened.
const TOMBSTONES: usize = 4096;

/// What an exporter needs to know.
pub struct ExporterConfig {
    /// Name of the instance.
    pub name: String,
    /// This incarnation.
    pub epoch: Epoch,
    /// What an importer must equal.
    pub fingerprint: Fingerprint,
    /// Key that importers must prove; without one only loopback is served.
    pub key: Option<PeerKey>,
    /// How long KV is kept for an importer, unless renewed (`--kv-lease`).
    pub lease: Duration,
    /// How long a transfer may make no progress (`--kv-timeout`).
    pub timeout: Duration,
    /// Shape of the KV.
    pub geometry: KvGeometry,
    /// Where the KV is.
    pub arena: Arc<BlockArena>,
    /// Called after requests were added to what [`Exporter::take_freed`] returns, from any thread; must
    /// neither block nor panic. May be called once for several requests.
    pub wake: Box<dyn Fn() + Send + Sync>,
}

/// Why an exporter cannot start.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Listening elsewhere than on loopback without a key.
    #[error(
        "kv-host (host if not given) is {host}, which is not loopback: set a peer key (peer-key-file, TWINFER_PEER_KEY), or listen on 127.0.0.1"
    )]
    NeedsKey {
        /// The host.
        host: String,
    },
    /// Listening on a wildcard without an address to tell others.
    #[error(
        "kv-host (host if not given) is {host}, which nobody can dial: set kv-advertise-host to an address of this node"
    )]
    NeedsAdvertise {
        /// The host.
        host: String,
    },
    /// The advertised host cannot be dialled.
    #[error("kv-advertise-host is {host:?}; allowed is a name or an address, not a wildcard")]
    BadAdvertise {
        /// The host.
        host: String,
    },
    /// The host is none.
    #[error("kv-host (host if not given) is {host:?}; it {reason}")]
    BadHost {
        /// The host.
        host: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The host has no address.
    #[error("kv-host (host if not given) is {host:?}, which has no address: {reason}")]
    Resolve {
        /// The host.
        host: String,
        /// Why.
        reason: String,
    },
    /// The system refused.
    #[error("cannot listen for KV handoff on {addr} (kv-host, kv-port): {source}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The KV memory does not have the shape it is said to have.
    #[error(
        "KV memory has {layers} layers of {unit_bytes} bytes a unit, the model's KV has another shape: {geometry:?}"
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

/// The prefill side of connector `pull`. Cheap to clone.
#[derive(Clone)]
pub struct Exporter {
    pub(crate) shared: Arc<Shared>,
}

/// What an exporter's connections and callers share.
pub(crate) struct Shared {
    pub(crate) config: ExporterConfig,
    pub(crate) geometry: WireGeometry,
    pub(crate) peer: Peer,
    pub(crate) leases: Mutex<LeaseTable<Arc<Held>>>,
    pub(crate) leased: Notify,
    pub(crate) counters: Counters,
    started: Instant,
    freed: Mutex<Vec<RequestId>>,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) connections: Counter,
    pub(crate) registered: Counter,
    pub(crate) pulls: Counter,
    pub(crate) bytes: Counter,
    pub(crate) failures: Failures,
    pub(crate) rejections: Rejections,
}

/// Sealed KV of a request.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) request: RequestId,
    pub(crate) kv: HeldKv,
    pub(crate) units: Units,
    pub(crate) token_hash: TokenHash,
    pub(crate) checksums: Vec<Checksum>,
    pub(crate) seal: Seal,
}

/// A reader's hold on sealed KV; gives it back when dropped.
pub(crate) struct Reading {
    shared: Arc<Shared>,
    pin: Option<Pin>,
    held: Arc<Held>,
}

/// A request's KV on its way into a lease: wherever that way ends, the engine gets it back.
struct Unleased {
    shared: Arc<Shared>,
    request: Option<RequestId>,
}

/// A leased handle that nobody has been told of yet.
struct Undelivered {
    shared: Arc<Shared>,
    handle: Option<RemoteHandle>,
}

impl Exporter {
    /// The exporter, and the task that serves its peers, to be run by the caller.
    ///
    /// Errors: [`BindError::Geometry`].
    pub fn on(
        listener: KvListener,
        config: ExporterConfig,
    ) -> Result<(Self, ExporterServer), BindError> {
        let geometry = check_geometry(&config)?;
        let KvListener { listener, peer } = listener;
        let leases = LeaseTable::new(LeaseConfig {
            lease: config.lease,
            tombstones: TOMBSTONES,
        });
        let shared = Arc::new(Shared {
            config,
            geometry,
            peer,
            leases: Mutex::new(leases),
            leased: Notify::new(),
            counters: Counters::default(),
            started: Instant::now(),
            freed: Mutex::new(Vec::new()),
        });
        Ok((
            Self {
                shared: Arc::clone(&shared),
            },
            ExporterServer::new(shared, listener),
        ))
    }

    /// `host:port` that importers dial.
    pub fn addr(&self) -> String {
        self.shared.peer.to_string()
    }

    /// Seals the KV that a finished request left, leases it and returns the handle for the answer.
    /// `prompt` is the request's prompt, `last_token` the token it sampled.
    ///
    /// From this call on the KV belongs to the exporter: the request's id comes out of
    /// [`Self::take_freed`] exactly once, and at once if the call fails or is dropped. A large prompt is sealed on a blocking thread
    /// (some GB/s), not on the caller's; it must not be called from the engine's thread.
    ///
    /// Errors: [`ErrorKind::Internal`].
    pub async fn register(
        &self,
        request: RequestId,
        kv: HeldKv,
        prompt: &[TokenId],
        last_token: Option<TokenId>,
    ) -> Result<KvTransferParams, ApiError> {
        let shared = &self.shared;
        let unleased = Unleased {
            shared: Arc::clone(shared),
            request: Some(request),
        };
        let geometry = shared.config.geometry;
        let units = Units::new(geometry, kv.tokens)
            .filter(|units| units.blocks() == kv.blocks.len())
            .ok_or_else(|| {
                internal(format!(
                    "{} blocks cannot hold {} tokens",
                    kv.blocks.len(),
                    kv.tokens
                ))
            })?;
        let covered = prompt.get(..kv.tokens as usize).ok_or_else(|| {
            internal(format!(
                "KV of {} tokens is held for a prompt of {}",
                kv.tokens,
                prompt.len()
            ))
        })?;
        let token_hash = token_hash(covered);
        let nonce =
            getrandom::u64().map_err(|error| internal(format!("no random numbers: {error}")))?;

        let sealing = move || {
            let checksums = checksums(&unleased.shared.config.arena, &kv, &units)?;
            unleased.lease(kv, units, token_hash, checksums, nonce)
        };
        let leased = match units.payload(0..units.blocks()) <= SEAL_INLINE_BYTES {
            true => sealing()?,
            // If this wait is dropped the thread goes on, and what it leased is freed when its result is dropped.
            false => tokio::task::spawn_blocking(sealing)
                .await
                .map_err(|error| internal(format!("sealing thread failed: {error}")))??,
        };
        let handle = leased
            .deliver()
            .ok_or_else(|| internal("handle is delivered twice".to_owned()))?;
        Ok(handle.to_params(shared.geometry.block_size, last_token, prompt))
    }

    /// Ends a lease early, for `POST /twinfer/kv/release`. Idempotent.
    pub fn release(&self, release: &KvRelease) -> ReleaseOutcome {
        match release.remote_request_id.parse() {
            Ok(id) if release.epoch == self.shared.config.epoch => self.shared.release(id),
            _ => ReleaseOutcome::Unknown,
        }
    }

    /// Requests whose held KV nobody reads any more, each exactly once: the engine's thread passes them
    /// to `Engine::release_held`.
    pub fn take_freed(&self) -> Vec<RequestId> {
        std::mem::take(&mut *self.shared.freed.lock())
    }

    /// Counters and gauges.
    pub fn stats(&self) -> ExporterStats {
        let counters = &self.shared.counters;
        let leases = self.shared.leases.lock();
        ExporterStats {
            leases: leases.held() as u64,
            readers: leases.readers() as u64,
            connections: counters.connections.get(),
            registered: counters.registered.get(),
            expired: leases.expired(),
            pulls: counters.pulls.get(),
            bytes: counters.bytes.get(),
            failures: counters.failures.get(),
            rejections: counters.rejections.get(),
        }
    }
}

impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exporter")
            .field("addr", &self.addr())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// The leases' clock.
    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// When the clock will show `then`.
    pub(crate) fn instant(&self, then: Duration) -> Instant {
        self.started + then
    }

    pub(crate) fn read(self: &Arc<Self>, id: HandleId) -> Result<Reading, Gone> {
        let now = self.now();
        let mut leases = self.leases.lock();
        let (pin, held) = leases.begin_read(now, id)?;
        let held = Arc::clone(held);
        Ok(Reading {
            shared: Arc::clone(self),
            pin: Some(pin),
            held,
        })
    }

    pub(crate) fn release(&self, id: HandleId) -> ReleaseOutcome {
        let now = self.now();
        let release = self.leases.lock().release(now, id);
        match release {
            Release::Freed(held) => {
                self.give_back([held.request]);
                ReleaseOutcome::Freed
            }
            Release::Deferred => ReleaseOutcome::Deferred,
            Release::Gone(gone) => ReleaseOutcome::of_gone(gone),
        }
    }

    /// Ends leases whose time has come; returns when the next one ends.
    pub(crate) fn expire(&self) -> Option<Duration> {
        let now = self.now();
        let mut leases = self.leases.lock();
        let expired = leases.expire(now);
        let next = leases.next_deadline();
        drop(leases);
        if !expired.is_empty() {
            tracing::info!(
                count = expired.len(),
                "KV leases expired: no decode instance came for them"
            );
            self.give_back(expired.iter().map(|held| held.request));
        }
        next
    }

    fn give_back(&self, requests: impl IntoIterator<Item = RequestId>) {
        self.freed.lock().extend(requests);
        (self.config.wake)();
    }
}

impl Reading {
    pub(crate) fn held(&self) -> &Held {
        &self.held
    }

    /// The reader has everything; nobody else is to come.
    pub(crate) fn finish(mut self) {
        self.end(true);
    }

    fn end(&mut self, release: bool) {
        if let Some(pin) = self.pin.take() {
            let now = self.shared.now();
            let freed = self.shared.leases.lock().end_read(now, pin, release);
            if let Some(held) = freed {
                self.shared.give_back([held.request]);
            }
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.end(false);
    }
}

impl Unleased {
    /// Seals and starts the lease.
    fn lease(
        mut self,
        kv: HeldKv,
        units: Units,
        token_hash: TokenHash,
        checksums: Vec<Checksum>,
        nonce: u64,
    ) -> Result<Undelivered, ApiError> {
        let request = self
            .request
            .take()
            .ok_or_else(|| internal("KV is leased twice".to_owned()))?;
        let shared = &self.shared;
        let config = &shared.config;
        let id = shared.leases.lock().reserve(nonce);
        let seal = Sealed {
            epoch: config.epoch,
            id,
            geometry: config.geometry,
            tokens: kv.tokens,
            token_hash: &token_hash,
            blocks: &kv.blocks,
            checksums: &checksums,
        }
        .seal();
        let handle = RemoteHandle {
            name: config.name.clone(),
            epoch: config.epoch,
            id,
            peer: shared.peer.clone(),
            tokens: kv.tokens,
            blocks: kv.blocks.clone(),
            seal,
            lease: Some(config.lease),
        };
        let held = Held {
            request,
            kv,
            units,
            token_hash,
            checksums,
            seal,
        };
        let now = shared.now();
        shared.leases.lock().register(now, id, Arc::new(held));
        shared.counters.registered.add(1);
        shared.leased.notify_one();
        Ok(Undelivered {
            shared: Arc::clone(shared),
            handle: Some(handle),
        })
    }
}

impl Undelivered {
    fn deliver(mut self) -> Option<RemoteHandle> {
        self.handle.take()
    }
}

impl Drop for Undelivered {
    fn drop(&mut self) {
        if let Some(handle) = &self.handle {
            self.shared.release(handle.id);
        }
    }
}

impl Drop for Unleased {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            self.shared.give_back([request]);
        }
    }
}

/// Checksum of every unit, all blocks of layer 0 first.
fn checksums(arena: &BlockArena, kv: &HeldKv, units: &Units) -> Result<Vec<Checksum>, ApiError> {
    let mut checksums = vec![Checksum::default(); units.count()];
    for (block, &id) in kv.blocks.iter().enumerate() {
        let guard = arena
            .read(id)
            .map_err(|error| internal(format!("held KV cannot be read: {error}")))?;
        for layer in 0..units.layers() {
            let rows = guard
                .unit(layer)
                .and_then(|unit| unit.get(..units.bytes(block)));
            let rows =
                rows.ok_or_else(|| internal(format!("KV block {id} has no layer {layer}")))?;
            checksums[units.index(layer, block)] = unit_checksum(rows);
        }
    }
    Ok(checksums)
}

pub(crate) fn check_shape(arena: &BlockArena, geometry: KvGeometry) -> Option<WireGeometry> {
    let KvGeometry {
        layers,
        width,
        value_bytes,
        block_size,
    } = geometry;
    // Any number of tokens that the arena can hold has a size that fits.
    let tokens = u32::try_from(block_size.checked_mul(arena.num_blocks() as usize)?).ok()?;
    Units::new(geometry, tokens)?;
    let fits = layers == arena.layers() && width * value_bytes * block_size <= arena.unit_bytes();
    WireGeometry::new(geometry).filter(|_| fits)
}

fn check_geometry(config: &ExporterConfig) -> Result<WireGeometry, BindError> {
    check_shape(&config.arena, config.geometry).ok_or_else(|| BindError::Geometry {
        layers: config.arena.layers(),
        unit_bytes: config.arena.unit_bytes(),
        geometry: config.geometry,
    })
}

fn internal(what: String) -> ApiError {
    tracing::error!(what, "KV handoff");
    ApiError::new(ErrorKind::Internal, what)
}
