//! KV handoff of a rank that is a process of its own: its own channel, its own leases, beside its engine. What it has to
//! say goes to the engine by the inbox and to the front by the socket.

use super::messages::{FromRank, HandoffStats, Lease, News, Order, Start};
use super::process::Inbox;
use crate::ServeError;
use crate::engine::Fetch;
use crate::handoff::{
    Exporter, ExporterConfig, Importer, ImporterConfig, KvListener, PeerKey, RENEWALS,
    ReleaseOutcome,
};
use crate::kv::{Claim, Fetcher, Listener, give_back, rank_epoch};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use twinfer_comm::stream::{LinkError, Writer};
use twinfer_config::ServeConfig;
use twinfer_engine::{Engine, Event, KvOutcome, RequestId};
use twinfer_protocol::{ApiError, ErrorKind, Fingerprint, KvRelease};

/// Threads that move KV.
const THREADS: usize = 2;
/// Tasks get this long to end.
const STOP: Duration = Duration::from_millis(1200);

/// Both directions of a rank's handoff, as far as its role has them.
pub(super) struct RankKv {
    runtime: Handle,
    tasks: TaskTracker,
    stop: CancellationToken,
    exporter: Option<Exporter>,
    importer: Option<Importer>,
    fetches: mpsc::Sender<Fetch>,
    /// KV elsewhere that requests here will read.
    claims: Mutex<HashMap<RequestId, Claim>>,
    voice: Voice,
    told: Mutex<HandoffStats>,
}

/// Speaks to the engine and to the front.
#[derive(Clone)]
pub(super) struct Voice {
    pub(super) inbox: Arc<Inbox>,
    pub(super) writer: Arc<Mutex<Writer>>,
}

/// A runtime for the handoff and the port that it listens on, if it hands KV out: opened before anything is loaded.
pub(super) struct Opened {
    runtime: Runtime,
    listener: Option<KvListener>,
}

/// Opens the KV channel that `config` asks for, whose port is this rank's own.
///
/// # Errors
/// The address cannot be listened on, or there are no threads.
pub(super) fn open(config: &ServeConfig, keyed: bool) -> Result<Opened, ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("kv")
        .enable_all()
        .build()
        .map_err(|source| ServeError::System {
            what: "start threads for KV handoff",
            source,
        })?;
    let listener = runtime.block_on(crate::serve::kv_listener(config, keyed))?;
    Ok(Opened { runtime, listener })
}

impl RankKv {
    /// Starts both directions over the memory of `engine`; they run as long as the runtime does.
    ///
    /// # Errors
    /// A peer of the config is none, or the memory has another shape.
    pub(super) fn start(
        opened: Opened,
        start: &Start,
        config: &ServeConfig,
        engine: &Engine,
        fingerprint: &Fingerprint,
        voice: Voice,
    ) -> Result<(Self, Runtime), ServeError> {
        let wrong = |error: &dyn std::fmt::Display| ServeError::Config(error.to_string());
        let Opened { runtime, listener } = opened;
        let key = || {
            let key = start.peer_key.as_ref()?;
            PeerKey::new(&key.0)
        };
        let stop = CancellationToken::new();
        let lease = Duration::from_secs(config.kv_lease.into());
        let patience = Duration::from_secs(config.kv_timeout.into());
        let (geometry, arena) = (engine.geometry(), engine.arena());
        let tasks = TaskTracker::new();
        let inside = runtime.enter();
        let mut exporter = None;
        if let Some(listener) = listener {
            let freed = Arc::new(Notify::new());
            let wake = Arc::clone(&freed);
            let (started, server) = Exporter::on(
                listener,
                ExporterConfig {
                    name: start.instance.clone(),
                    epoch: rank_epoch(start.epoch, start.rank),
                    fingerprint: fingerprint.clone(),
                    key: key(),
                    lease,
                    timeout: patience,
                    geometry,
                    arena: Arc::clone(arena),
                    wake: Box::new(move || wake.notify_one()),
                },
            )
            .map_err(|e| wrong(&e))?;
            tasks.spawn(server.run(stop.clone()));
            tasks.spawn(give_back(
                started.clone(),
                voice.clone(),
                freed,
                stop.clone(),
            ));
            exporter = Some(started);
        }
        let mut importer = None;
        if config.role.can_decode() {
            let (started, keeper) = Importer::new(ImporterConfig {
                fingerprint: fingerprint.clone(),
                key: key(),
                peers: config.pd_peers.clone(),
                timeout: patience,
                renew_every: lease / RENEWALS,
                geometry,
                arena: Arc::clone(arena),
            })
            .map_err(|e| wrong(&e))?;
            tasks.spawn(keeper.run(stop.clone()));
            importer = Some(started);
        }
        // A request sends a fetch and its cancellation at most.
        let capacity = config.max_num_seqs.saturating_add(config.max_waiting);
        let (fetches, receiver) = mpsc::channel(2 * capacity.max(1) as usize);
        let fetcher = Fetcher {
            listener: voice.clone(),
            policy: config.kv_load_failure_policy,
        };
        tasks.spawn(fetcher.run(receiver, stop.clone()));
        drop(inside);
        let kv = Self {
            runtime: runtime.handle().clone(),
            tasks,
            stop,
            exporter,
            importer,
            fetches,
            claims: Mutex::default(),
            voice,
            told: Mutex::default(),
        };
        Ok((kv, runtime))
    }

    /// Where this rank's KV is read.
    pub(super) fn addr(&self) -> Option<String> {
        self.exporter.as_ref().map(Exporter::addr)
    }

    /// Takes an order that is for the handoff alone; gives others back. Does not wait for a step.
    pub(super) fn order(&self, order: Order) -> Option<Order> {
        match order {
            Order::Lease(lease) => {
                self.lease(*lease);
                None
            }
            Order::EndLease { ticket, release } => {
                let outcome = match &self.exporter {
                    Some(exporter) => exporter.release(&release),
                    None => ReleaseOutcome::Unknown,
                };
                self.voice.tell(News::LeaseEnded(ticket, outcome));
                None
            }
            Order::Disclaim(handle) => {
                // A claim that is dropped is released; one that cannot be made was judged by nobody.
                if let Some(importer) = &self.importer {
                    let claim = Claim::passed_on(importer, &handle, &Vec::new().into());
                    drop(claim);
                }
                None
            }
            other => Some(other),
        }
    }

    fn lease(&self, lease: Lease) {
        let Lease {
            id,
            kv,
            prompt,
            last_token,
        } = lease;
        let voice = self.voice.clone();
        let Some(exporter) = self.exporter.clone() else {
            let error = internal("this instance has no exporter of KV");
            voice.tell(News::Leased(id, Err(error)));
            voice.freed(id);
            return;
        };
        self.runtime.spawn(async move {
            let leased = exporter.register(id, kv, &prompt, last_token).await;
            let leased = leased.and_then(|params| {
                let handle = serde_json::to_string(&params)
                    .map_err(|error| internal(&format!("a handle cannot be written: {error}")))?;
                let release = release_of(&params)
                    .ok_or_else(|| internal("a handle does not say how it is released"))?;
                Ok((release, handle))
            });
            voice.tell(News::Leased(id, leased));
        });
    }

    /// Takes the claims of requests that the engine is about to get.
    pub(super) fn take_claims(&self, order: &mut Order) {
        let Order::Submit {
            requests, claims, ..
        } = order
        else {
            return;
        };
        for (id, handle) in claims.drain(..) {
            let request = requests.iter().find(|request| request.id == id);
            let (Some(request), Some(importer)) = (request, &self.importer) else {
                continue;
            };
            match Claim::passed_on(importer, &handle, &request.prompt) {
                Ok(claim) => {
                    self.claims.lock().insert(id, claim);
                }
                // The request ends with an error when its fetch is to begin.
                Err(error) => tracing::warn!(request = id.0, %error, "a handle of KV is refused"),
            }
        }
    }

    /// What becomes of claims and fetches by what the engine says; whether the front is to hear it.
    pub(super) fn hear(&self, news: &News) -> bool {
        match news {
            News::Event(Event::KvFetch {
                id,
                blocks,
                positions,
            }) => {
                let id = *id;
                let claim = self.claims.lock().remove(&id);
                let sent = claim.is_some_and(|claim| {
                    let fetch = Fetch::Start {
                        id,
                        claim: Arc::new(claim),
                        blocks: blocks.clone(),
                        positions: positions.clone(),
                    };
                    self.fetches.try_send(fetch).is_ok()
                });
                if !sent {
                    let error = internal("the KV fetch could not be started");
                    self.voice.kv_loaded(id, KvOutcome::Failed(error));
                }
                false
            }
            News::Event(Event::KvFetchCancel { id }) => {
                let id = *id;
                if self.fetches.try_send(Fetch::Cancel { id }).is_err() {
                    // No fetcher, so nothing writes to the blocks.
                    let error = internal("no fetcher");
                    self.voice.kv_loaded(id, KvOutcome::Failed(error));
                }
                false
            }
            News::Event(Event::Output { id, .. }) => {
                // With all of the prompt in the cache nothing was fetched: prefill's copy is of no use.
                self.claims.lock().remove(id);
                true
            }
            _ => true,
        }
    }

    /// Releases the claims of requests that the engine has refused.
    pub(super) fn refused(&self, ids: &[RequestId]) {
        let mut claims = self.claims.lock();
        for id in ids {
            claims.remove(id);
        }
    }

    /// Tells the front the counters, if they have changed.
    ///
    /// # Errors
    /// The front is gone.
    pub(super) fn publish(&self) -> Result<(), LinkError> {
        let stats = HandoffStats {
            exporter: self.exporter.as_ref().map(Exporter::stats),
            importer: self.importer.as_ref().map(Importer::stats),
        };
        let changed = std::mem::replace(&mut *self.told.lock(), stats) != stats;
        if !changed {
            return Ok(());
        }
        let news = vec![News::Handoff(Box::new(stats))];
        self.voice.writer.lock().send(&FromRank::News(news))
    }

    /// Sends the releases that wait, and ends all tasks.
    pub(super) fn end(&self, runtime: &Runtime) {
        self.claims.lock().clear();
        self.stop.cancel();
        self.tasks.close();
        let ended = runtime.block_on(async { timeout(STOP, self.tasks.wait()).await });
        if ended.is_err() {
            tracing::warn!("some tasks of the handoff did not end in time");
        }
    }
}

impl Voice {
    fn tell(&self, news: News) {
        // Without a front the process ends.
        let _ = self.writer.lock().send(&FromRank::News(vec![news]));
    }
}

impl Listener for Voice {
    fn kv_loaded(&self, id: RequestId, outcome: KvOutcome) {
        self.inbox.push(Order::KvLoaded(id, outcome));
    }

    fn freed(&self, id: RequestId) {
        self.inbox.push(Order::ReleaseHeld(id));
        self.tell(News::Freed(id));
    }

    fn fetched(&self, ended: Result<f64, ApiError>) {
        self.tell(News::Fetched(ended));
    }
}

fn release_of(params: &twinfer_protocol::KvTransferParams) -> Option<KvRelease> {
    let (_, epoch) = params.remote_engine_id.as_deref()?.rsplit_once('-')?;
    Some(KvRelease {
        remote_request_id: params.remote_request_id.clone()?,
        epoch: epoch.parse().ok()?,
    })
}

fn internal(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Internal, message)
}
