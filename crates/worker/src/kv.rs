//! The KV side of requests: prompts read from prefill instances, prompts kept for decode instances.

use crate::engine::{EngineHandle, Fetch, HeldBlocks};
use crate::handoff::{self, Exporter, FetchReport, Importer};
use crate::metrics::KvMetrics;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use twinfer_config::KvLoadFailurePolicy;
use twinfer_engine::{KvOutcome, RequestId};
use twinfer_http::InFlight;
use twinfer_protocol::{ApiError, BlockId, ErrorKind, KvRelease, KvTransferParams, TokenId};

/// Both directions of an instance's handoff, as far as its role has them.
#[derive(Debug)]
pub(crate) struct Handoff {
    pub(crate) exporter: Option<Exporter>,
    pub(crate) importer: Option<Importer>,
    /// Requests whose KV is held, each keeping the drain waiting.
    held: Arc<Mutex<HashMap<RequestId, InFlight>>>,
}

/// A prompt whose KV a prefill instance holds, claimed by one HTTP request. Whatever happens to the
/// request, the KV is read or released.
#[derive(Debug)]
pub(crate) struct Claim {
    claim: handoff::Claim,
    /// As prefill tokenised it.
    given: Option<Arc<[TokenId]>>,
    /// What the request computes with: the above, or its own tokens.
    prompt: OnceLock<Arc<[TokenId]>>,
    prefill_cached: u32,
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
pub(crate) struct Fetcher {
    pub(crate) engine: EngineHandle,
    pub(crate) policy: KvLoadFailurePolicy,
    pub(crate) metrics: KvMetrics,
}

impl Handoff {
    pub(crate) fn new(exporter: Option<Exporter>, importer: Option<Importer>) -> Self {
        Self {
            exporter,
            importer,
            held: Arc::default(),
        }
    }

    /// Where peers read KV; none if nothing is handed over.
    pub(crate) fn addr(&self) -> Option<String> {
        self.exporter.as_ref().map(Exporter::addr)
    }

    /// Judges a decode leg's parameters and takes the KV they name into use. Opens no connection.
    ///
    /// Errors: a field is wrong, the peer is not allowed, the shape differs.
    pub(crate) fn claim(&self, mut params: KvTransferParams) -> Result<Arc<Claim>, ApiError> {
        let importer = self.importer.as_ref().ok_or_else(|| {
            ApiError::new(ErrorKind::Internal, "this instance has no importer of KV")
        })?;
        let handle = importer.check(&params)?;
        let given = params.prompt_token_ids.take();
        let claim = importer.claim(handle);
        // From here on every way out releases.
        if given.as_ref().is_some_and(Vec::is_empty) {
            let name = "kv_transfer_params.prompt_token_ids";
            return Err(ApiError::invalid(name, format!("{name} is empty")));
        }
        Ok(Arc::new(Claim {
            claim,
            given: given.map(Into::into),
            prompt: OnceLock::new(),
            prefill_cached: params.remote_prefill_cached_tokens.unwrap_or(0),
        }))
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
        let exporter = self.exporter.as_ref().ok_or_else(|| {
            ApiError::new(ErrorKind::Internal, "this instance has no exporter of KV")
        })?;
        let Left {
            held,
            last_token,
            cached,
        } = left;
        let (id, kv) = (held.id, held.kv.clone());
        if let Some(guard) = guard {
            self.held.lock().insert(id, guard);
        }
        held.keep();
        let mut params = exporter.register(id, kv, prompt, last_token).await?;
        params.remote_prefill_cached_tokens = Some(cached);
        Ok(params)
    }

    /// Takes over the connector's numbers.
    pub(crate) fn publish(&self, metrics: &KvMetrics) {
        metrics.publish(
            self.exporter.as_ref().map(Exporter::stats),
            self.importer.as_ref().map(Importer::stats),
        );
    }

    /// Ends a lease early; idempotent.
    pub(crate) fn release(&self, release: &KvRelease) -> handoff::ReleaseOutcome {
        match &self.exporter {
            Some(exporter) => exporter.release(release),
            None => handoff::ReleaseOutcome::Unknown,
        }
    }

    /// Gives blocks back to the engine whenever `freed` says that there are some.
    pub(crate) async fn give_back(
        exporter: Exporter,
        engine: EngineHandle,
        held: Arc<Mutex<HashMap<RequestId, InFlight>>>,
        freed: Arc<Notify>,
        stop: CancellationToken,
    ) {
        loop {
            let notified = freed.notified();
            for id in exporter.take_freed() {
                engine.release_held(id);
                held.lock().remove(&id);
            }
            tokio::select! {
                () = notified => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// For [`Self::give_back`].
    pub(crate) fn held(&self) -> Arc<Mutex<HashMap<RequestId, InFlight>>> {
        Arc::clone(&self.held)
    }
}

impl Claim {
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
        self.claim.fetch(prompt, blocks, positions).await
    }
}

impl Fetcher {
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
                        None => self.engine.kv_loaded(id, KvOutcome::Recompute),
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
        let (engine, policy, metrics) = (self.engine.clone(), self.policy, self.metrics.clone());
        let reporter = Self {
            engine,
            policy,
            metrics,
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
                None => reporter.engine.kv_loaded(id, KvOutcome::Recompute),
            }
        }
    }

    fn report(&self, id: RequestId, fetched: Result<FetchReport, ApiError>) {
        let outcome = match fetched {
            Ok(report) => {
                self.metrics.seconds.observe(report.seconds);
                KvOutcome::Loaded
            }
            Err(error) => {
                self.metrics.failure(&error);
                tracing::warn!(request = id.0, %error, policy = ?self.policy, "KV handoff failed");
                match self.policy {
                    KvLoadFailurePolicy::Fail => KvOutcome::Failed(error),
                    KvLoadFailurePolicy::Recompute => KvOutcome::Recompute,
                }
            }
        };
        self.engine.kv_loaded(id, outcome);
    }
}
