//! The KV side of requests: prompts read from prefill instances, prompts kept for decode instances.

use crate::engine::{Command, EngineHandle, Fetch, HeldBlocks};
use crate::handoff::{self, Exporter, FetchReport, Importer, Judge};
use crate::metrics::KvMetrics;
use crate::rank::{HandoffStats, Lease, News};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use twinfer_config::KvLoadFailurePolicy;
use twinfer_engine::{KvOutcome, RequestId};
use twinfer_http::InFlight;
use twinfer_protocol::{ApiError, BlockId, Epoch, ErrorKind, KvRelease, KvTransferParams, TokenId};

/// A rank answers for its KV within this time, sealing a long prompt included.
const RANK_ANSWER: Duration = Duration::from_secs(30);

/// Requests whose KV is held, each keeping the drain waiting.
pub(crate) type Held = Arc<Mutex<HashMap<RequestId, InFlight>>>;

/// Both directions of an instance's handoff, as far as its role has them.
#[derive(Debug)]
pub(crate) struct Handoff {
    way: Way,
    held: Held,
}

#[derive(Debug)]
enum Way {
    /// The KV is in this process.
    Here {
        exporter: Option<Exporter>,
        importer: Option<Importer>,
    },
    Ranks(RankHandoff),
}

/// Handoff of an instance whose ranks are processes, each with its own KV channel: the front judges handles and passes
/// them on, the ranks move the bytes.
#[derive(Debug)]
pub(crate) struct RankHandoff {
    pub(crate) engine: EngineHandle,
    /// What the first rank said of itself, if KV is handed out.
    pub(crate) addr: Option<String>,
    /// Of the instance; see [`rank_epoch`].
    pub(crate) epoch: Epoch,
    pub(crate) ranks: u32,
    /// If KV is taken in.
    pub(crate) judge: Option<Judge>,
    pub(crate) ledger: Arc<RankLedger>,
}

/// What the front knows of its ranks' handoff.
#[derive(Debug)]
pub(crate) struct RankLedger {
    held: Held,
    stats: Mutex<Vec<HandoffStats>>,
    metrics: KvMetrics,
}

/// Whom the handoff tells what happens.
pub(crate) trait Listener: Clone + Send + Sync + 'static {
    /// A fetch or its cancellation ended so: the blocks are not touched any more.
    fn kv_loaded(&self, id: RequestId, outcome: KvOutcome);
    /// Nobody reads the KV that this request left any more.
    fn freed(&self, id: RequestId);
    /// A fetch ended: after so many seconds if it went well.
    fn fetched(&self, ended: Result<f64, ApiError>);
}

/// The engine of this process listens.
#[derive(Clone)]
pub(crate) struct OwnEngine {
    pub(crate) engine: EngineHandle,
    pub(crate) metrics: KvMetrics,
    pub(crate) held: Held,
}

/// The incarnation that a rank's handles name: each rank of an instance has its own, so that a handle says whose KV it
/// stands for.
pub(crate) fn rank_epoch(instance: Epoch, rank: u32) -> Epoch {
    Epoch(instance.0.wrapping_add(rank.into()))
}

/// A prompt whose KV a prefill instance holds, claimed by one HTTP request. Whatever happens to the
/// request, the KV is read or released.
#[derive(Debug)]
pub(crate) struct Claim {
    holder: Holder,
    /// As prefill tokenised it.
    given: Option<Arc<[TokenId]>>,
    /// What the request computes with: the above, or its own tokens.
    prompt: OnceLock<Arc<[TokenId]>>,
    prefill_cached: u32,
}

/// Who has a claim.
#[derive(Debug)]
enum Holder {
    Here(handoff::Claim),
    /// A rank that is a process of its own, once it was handed over.
    Rank {
        /// As JSON, without the prompt.
        handle: String,
        engine: EngineHandle,
        handed: AtomicBool,
    },
}

/// What a prefill leg leaves for a decode instance.
#[derive(Debug)]
pub(crate) struct Left {
    pub(crate) held: HeldBlocks,
    /// The token that it sampled.
    pub(crate) last_token: Option<TokenId>,
    /// Prompt tokens that were found in the prefix cache.
    pub(crate) cached: u32,
}

/// Runs the fetches that the engine asks for.
pub(crate) struct Fetcher<L> {
    pub(crate) listener: L,
    pub(crate) policy: KvLoadFailurePolicy,
}

impl Handoff {
    /// Of an engine in this process.
    pub(crate) fn new(exporter: Option<Exporter>, importer: Option<Importer>, held: Held) -> Self {
        Self {
            way: Way::Here { exporter, importer },
            held,
        }
    }

    /// Of ranks that are processes.
    pub(crate) fn of_ranks(ranks: RankHandoff) -> Self {
        Self {
            held: Arc::clone(&ranks.ledger.held),
            way: Way::Ranks(ranks),
        }
    }

    /// Where peers read KV, of the first rank; none if nothing is handed over.
    pub(crate) fn addr(&self) -> Option<String> {
        match &self.way {
            Way::Here { exporter, .. } => exporter.as_ref().map(Exporter::addr),
            Way::Ranks(ranks) => ranks.addr.clone(),
        }
    }

    /// Judges a decode leg's parameters and takes the KV they name into use. Opens no connection.
    ///
    /// Errors: a field is wrong, the peer is not allowed, the shape differs.
    pub(crate) fn claim(&self, mut params: KvTransferParams) -> Result<Arc<Claim>, ApiError> {
        let none = || ApiError::new(ErrorKind::Internal, "this instance has no importer of KV");
        let given = params.prompt_token_ids.take();
        let holder = match &self.way {
            Way::Here { importer, .. } => {
                let importer = importer.as_ref().ok_or_else(none)?;
                Holder::Here(importer.claim(importer.check(&params)?))
            }
            Way::Ranks(ranks) => {
                ranks.judge.as_ref().ok_or_else(none)?.check(&params)?;
                Holder::Rank {
                    handle: serde_json::to_string(&params).map_err(|error| unreadable(&error))?,
                    engine: ranks.engine.clone(),
                    handed: AtomicBool::new(false),
                }
            }
        };
        // From here on every way out releases.
        let prefill_cached = params.remote_prefill_cached_tokens.unwrap_or(0);
        let claim = Claim {
            holder,
            given: given.map(Into::into),
            prompt: OnceLock::new(),
            prefill_cached,
        };
        if claim.given.as_ref().is_some_and(|given| given.is_empty()) {
            let name = "kv_transfer_params.prompt_token_ids";
            return Err(ApiError::invalid(name, format!("{name} is empty")));
        }
        Ok(Arc::new(claim))
    }

    /// Leases the KV that a finished request left and returns the handle for its answer. `guard` keeps
    /// the drain waiting until the KV is read or its lease ends.
    ///
    /// Errors: `Internal`; the KV is free then.
    pub(crate) async fn export(
        &self,
        left: Left,
        prompt: &[TokenId],
        guard: Option<InFlight>,
    ) -> Result<KvTransferParams, ApiError> {
        let Left {
            held,
            last_token,
            cached,
        } = left;
        let (id, kv) = (held.id, held.kv.clone());
        let mut params = match &self.way {
            Way::Here { exporter, .. } => {
                let none = "this instance has no exporter of KV";
                let none = || ApiError::new(ErrorKind::Internal, none);
                let exporter = exporter.as_ref().ok_or_else(none)?;
                self.keep(held, guard);
                exporter.register(id, kv, prompt, last_token).await?
            }
            Way::Ranks(ranks) => {
                let lease = Lease {
                    id,
                    kv,
                    prompt: prompt.to_vec(),
                    last_token,
                };
                let rank = held.rank;
                self.keep(held, guard);
                ranks.lease(rank, lease).await?
            }
        };
        params.remote_prefill_cached_tokens = Some(cached);
        Ok(params)
    }

    /// The blocks are the exporter's from now on.
    fn keep(&self, blocks: HeldBlocks, guard: Option<InFlight>) {
        if let Some(guard) = guard {
            self.held.lock().insert(blocks.id, guard);
        }
        blocks.keep();
    }

    /// Takes over the connector's numbers.
    pub(crate) fn publish(&self, metrics: &KvMetrics) {
        match &self.way {
            Way::Here { exporter, importer } => metrics.publish(
                exporter.as_ref().map(Exporter::stats),
                importer.as_ref().map(Importer::stats),
            ),
            Way::Ranks(ranks) => {
                let HandoffStats { exporter, importer } =
                    HandoffStats::total(&ranks.ledger.stats.lock());
                metrics.publish(exporter, importer);
            }
        }
    }

    /// Ends a lease early; idempotent.
    ///
    /// Errors: the instance cannot go on.
    pub(crate) async fn release(
        &self,
        release: KvRelease,
    ) -> Result<handoff::ReleaseOutcome, ApiError> {
        match &self.way {
            Way::Here { exporter, .. } => Ok(match exporter {
                Some(exporter) => exporter.release(&release),
                None => handoff::ReleaseOutcome::Unknown,
            }),
            Way::Ranks(ranks) => ranks.release(release).await,
        }
    }
}

/// Tells `listener` whose blocks are free whenever `freed` says that there are some.
pub(crate) async fn give_back(
    exporter: Exporter,
    listener: impl Listener,
    freed: Arc<Notify>,
    stop: CancellationToken,
) {
    loop {
        let notified = freed.notified();
        for id in exporter.take_freed() {
            listener.freed(id);
        }
        tokio::select! {
            () = notified => {}
            () = stop.cancelled() => return,
        }
    }
}

impl RankHandoff {
    async fn lease(&self, rank: u32, lease: Lease) -> Result<KvTransferParams, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.engine.push(Command::Lease {
            rank,
            lease: Box::new(lease),
            reply,
        });
        let handle = self.answered(answer).await??;
        serde_json::from_str(&handle).map_err(|error| unreadable(&error))
    }

    async fn release(&self, release: KvRelease) -> Result<handoff::ReleaseOutcome, ApiError> {
        let epochs = 0..self.ranks;
        let rank = epochs
            .into_iter()
            .find(|rank| rank_epoch(self.epoch, *rank) == release.epoch);
        let Some(rank) = rank else {
            return Ok(handoff::ReleaseOutcome::Unknown);
        };
        let (reply, answer) = oneshot::channel();
        self.engine.push(Command::EndLease {
            rank,
            release,
            reply: Some(reply),
        });
        self.answered(answer).await
    }

    /// What a rank answers; it does not wait for a step.
    async fn answered<T>(&self, answer: oneshot::Receiver<T>) -> Result<T, ApiError> {
        tokio::select! {
            answer = timeout(RANK_ANSWER, answer) => match answer {
                Ok(answer) => answer.map_err(|_| self.engine.failure()),
                Err(_) => Err(ApiError::new(
                    ErrorKind::Internal,
                    format!("a rank has not answered for {} s", RANK_ANSWER.as_secs()),
                )),
            },
            () = self.engine.failed() => Err(self.engine.failure()),
        }
    }
}

impl RankLedger {
    pub(crate) fn new(ranks: u32, metrics: KvMetrics) -> Self {
        Self {
            held: Held::default(),
            stats: Mutex::new(vec![HandoffStats::default(); ranks as usize]),
            metrics,
        }
    }

    /// Takes in what a rank says of its handoff.
    pub(crate) fn hear(&self, rank: u32, news: News) {
        match news {
            News::Freed(id) => {
                self.held.lock().remove(&id);
            }
            News::Fetched(Ok(seconds)) => self.metrics.seconds.observe(seconds),
            News::Fetched(Err(error)) => self.metrics.failure(&error),
            News::Handoff(stats) => {
                if let Some(own) = self.stats.lock().get_mut(rank as usize) {
                    *own = *stats;
                }
            }
            _ => {}
        }
    }
}

impl Listener for OwnEngine {
    fn kv_loaded(&self, id: RequestId, outcome: KvOutcome) {
        self.engine.kv_loaded(id, outcome);
    }

    fn freed(&self, id: RequestId) {
        self.engine.release_held(0, id);
        self.held.lock().remove(&id);
    }

    fn fetched(&self, ended: Result<f64, ApiError>) {
        match ended {
            Ok(seconds) => self.metrics.seconds.observe(seconds),
            Err(error) => self.metrics.failure(&error),
        }
    }
}

impl Claim {
    /// Takes a handle into use that another process has judged and passed on; for a request of this prompt.
    ///
    /// Errors: as [`Handoff::claim`].
    pub(crate) fn passed_on(
        importer: &Importer,
        handle: &str,
        prompt: &Arc<[TokenId]>,
    ) -> Result<Self, ApiError> {
        let params = serde_json::from_str(handle).map_err(|error| unreadable(&error))?;
        Ok(Self {
            holder: Holder::Here(importer.claim(importer.check(&params)?)),
            given: None,
            prompt: OnceLock::from(Arc::clone(prompt)),
            prefill_cached: 0,
        })
    }

    /// The handle, as JSON, for a rank that is a process of its own and answers for it from now on; none where this
    /// process does.
    pub(crate) fn hand_over(&self) -> Option<String> {
        match &self.holder {
            Holder::Here(_) => None,
            Holder::Rank { handle, handed, .. } => {
                let first = !handed.swap(true, Ordering::Relaxed);
                first.then(|| handle.clone())
            }
        }
    }

    /// The prompt as prefill tokenised it, if it said so.
    pub(crate) fn prompt(&self) -> Option<Arc<[TokenId]>> {
        self.given.clone()
    }

    /// Prompt tokens that prefill found in its prefix cache, as it says.
    pub(crate) fn prefill_cached(&self) -> u32 {
        self.prefill_cached
    }

    /// A request is going to fetch for `prompt`.
    pub(crate) fn set_use(&self, prompt: &Arc<[TokenId]>) {
        let _ = self.prompt.set(Arc::clone(prompt));
    }

    async fn fetch(
        &self,
        blocks: &[BlockId],
        positions: Range<u32>,
    ) -> Result<FetchReport, ApiError> {
        let prompt = self.prompt.get().ok_or_else(|| {
            ApiError::new(ErrorKind::Internal, "the prompt of a KV fetch is not known")
        })?;
        match &self.holder {
            Holder::Here(claim) => claim.fetch(prompt, blocks, positions).await,
            Holder::Rank { .. } => Err(ApiError::new(
                ErrorKind::Internal,
                "a rank's KV is not fetched by its front",
            )),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Holder::Rank {
            handle,
            engine,
            handed,
        } = &mut self.holder
            && !*handed.get_mut()
        {
            engine.push(Command::Disclaim {
                handle: std::mem::take(handle),
            });
        }
    }
}

fn unreadable(error: &serde_json::Error) -> ApiError {
    ApiError::new(
        ErrorKind::Internal,
        format!("a handle of KV cannot be passed on: {error}"),
    )
}

impl<L: Listener> Fetcher<L> {
    /// Works until `stop`; fetches that run then are dropped.
    pub(crate) async fn run(self, mut fetches: mpsc::Receiver<Fetch>, stop: CancellationToken) {
        let mut running = JoinSet::new();
        let mut by_request: HashMap<RequestId, CancellationToken> = HashMap::new();
        let mut by_task = HashMap::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(ended) = running.join_next_with_id() => {
                    let (task, panicked) = match ended {
                        Ok((task, ())) => (task, false),
                        Err(error) => (error.id(), true),
                    };
                    if let Some(id) = by_task.remove(&task) {
                        by_request.remove(&id);
                        if panicked {
                            let error = ApiError::new(ErrorKind::Internal, "a KV fetch panicked");
                            self.report(id, Err(error));
                        }
                    }
                }
                fetch = fetches.recv() => match fetch {
                    Some(Fetch::Start { id, claim, blocks, positions }) => {
                        let cancel = CancellationToken::new();
                        by_request.insert(id, cancel.clone());
                        let task = self.task(id, claim, blocks, positions, cancel);
                        by_task.insert(running.spawn(task).id(), id);
                    }
                    Some(Fetch::Cancel { id }) => match by_request.get(&id) {
                        Some(cancel) => cancel.cancel(),
                        // It has ended and said so; the engine ignores a second answer.
                        None => self.listener.kv_loaded(id, KvOutcome::Recompute),
                    },
                    None => return,
                }
            }
        }
    }

    fn task(
        &self,
        id: RequestId,
        claim: Arc<Claim>,
        blocks: Vec<BlockId>,
        positions: Range<u32>,
        cancel: CancellationToken,
    ) -> impl Future<Output = ()> + Send + 'static {
        let reporter = Self {
            listener: self.listener.clone(),
            policy: self.policy,
        };
        async move {
            // A fetch that is cancelled is dropped, with its hold on the blocks, before the answer.
            let fetched = tokio::select! {
                biased;
                () = cancel.cancelled() => None,
                fetched = claim.fetch(&blocks, positions) => Some(fetched),
            };
            drop(claim);
            match fetched {
                Some(fetched) => reporter.report(id, fetched),
                None => reporter.listener.kv_loaded(id, KvOutcome::Recompute),
            }
        }
    }

    fn report(&self, id: RequestId, fetched: Result<FetchReport, ApiError>) {
        let outcome = match fetched {
            Ok(report) => {
                self.listener.fetched(Ok(report.seconds));
                KvOutcome::Loaded
            }
            Err(error) => {
                self.listener.fetched(Err(error.clone()));
                tracing::warn!(request = id.0, %error, policy = ?self.policy, "KV handoff failed");
                match self.policy {
                    KvLoadFailurePolicy::Fail => KvOutcome::Failed(error),
                    KvLoadFailurePolicy::Recompute => KvOutcome::Recompute,
                }
            }
        };
        self.listener.kv_loaded(id, outcome);
    }
}
