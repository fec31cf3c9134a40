use super::handle::{EngineHandle, Shared};
use crate::kv::Claim;
use crate::metrics::EngineMetrics;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use twinfer_engine::{
    Engine, EngineStats, Event, FinishReason, HeldKv, KvOutcome, OutputToken, PromptSources,
    Request, RequestId, StepOutput, TokenLogprobs,
};
use twinfer_protocol::{ApiError, BlockId, ErrorKind};

/// How often the watch looks at the engine thread.
const WATCH: Duration = Duration::from_millis(500);

/// What the engine thread is made of.
pub(crate) struct EngineParts {
    /// Warmed up and idle.
    pub(crate) engine: Engine,
    /// Changes with every layer that was computed.
    pub(crate) progress: Arc<AtomicU64>,
    /// Where fetches go; bounded by what is admitted.
    pub(crate) fetches: mpsc::Sender<Fetch>,
    /// Counters and histograms.
    pub(crate) metrics: EngineMetrics,
    /// Sequences inside at the same time, running and waiting.
    pub(crate) capacity: u32,
}

/// One sequence of a submission.
#[derive(Debug)]
pub(crate) struct NewRequest {
    pub(crate) request: Request,
    /// Index of the choice in the answer.
    pub(crate) choice: u32,
    /// Where its KV is, if it is remote.
    pub(crate) claim: Option<Arc<Claim>>,
}

pub(super) enum Command {
    Submit {
        requests: Vec<NewRequest>,
        /// One per request.
        permits: OwnedSemaphorePermit,
        arrived: Instant,
        sink: mpsc::Sender<ChoiceEvent>,
        reply: oneshot::Sender<Result<(), ApiError>>,
    },
    Abort(RequestId),
    KvLoaded(RequestId, KvOutcome),
    ReleaseHeld(RequestId),
    Stop,
}

/// What a fetcher is told.
pub(crate) enum Fetch {
    /// Fill `blocks` with these positions, then say so by [`EngineHandle::kv_loaded`].
    Start {
        id: RequestId,
        claim: Arc<Claim>,
        blocks: Vec<BlockId>,
        positions: Range<u32>,
    },
    /// Stop, then say so.
    Cancel { id: RequestId },
}

/// New output of one choice.
#[derive(Debug)]
pub(crate) struct ChoiceEvent {
    pub(crate) choice: u32,
    /// Of the prompt's tokens but the first, with the first event if asked for.
    pub(crate) prompt_logprobs: Vec<TokenLogprobs>,
    pub(crate) tokens: Vec<OutputToken>,
    pub(crate) text: String,
    /// On the last event of the choice.
    pub(crate) end: Option<End>,
}

/// The end of one choice.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) reason: FinishReason,
    pub(crate) output_tokens: u32,
    pub(crate) sources: PromptSources,
    /// Prompt tokens found in the prefix cache of this instance or of the prefill instance: the more.
    pub(crate) cached: u32,
    pub(crate) held: Option<HeldBlocks>,
}

/// Blocks kept for a decode instance; released when dropped, so that a handler that is gone before it
/// has registered them leaks nothing.
#[derive(Debug)]
pub(crate) struct HeldBlocks {
    pub(crate) id: RequestId,
    pub(crate) kv: HeldKv,
    engine: Option<EngineHandle>,
}

struct Entry {
    choice: u32,
    sink: mpsc::Sender<ChoiceEvent>,
    claim: Option<Arc<Claim>>,
    /// Prompt tokens that the prefill instance found in its cache.
    prefill_cached: u32,
    arrived: Instant,
    last_token: Option<Instant>,
    first_token: Option<Instant>,
    tokens: u32,
    _permit: Option<OwnedSemaphorePermit>,
}

struct EngineThread {
    engine: Engine,
    shared: Arc<Shared>,
    entries: HashMap<RequestId, Entry>,
    fetches: mpsc::Sender<Fetch>,
    metrics: EngineMetrics,
    published: EngineStats,
    /// Events of a step; kept so that steps need no new memory.
    out: StepOutput,
}

/// Runs the engine in the calling thread until it is stopped or cannot go on; `running` gets its handle
/// before the first step.
pub(crate) fn run(parts: EngineParts, running: impl FnOnce(EngineHandle)) {
    let stats = parts.engine.stats();
    let shared = Arc::new(Shared::new(parts.capacity, stats, parts.progress));
    let mut thread = EngineThread {
        engine: parts.engine,
        shared: Arc::clone(&shared),
        entries: HashMap::new(),
        fetches: parts.fetches,
        metrics: parts.metrics,
        published: stats,
        out: StepOutput::new(),
    };
    // What warm-up counted is no client's.
    thread.metrics.publish(&stats, &stats);
    let watched = Arc::clone(&shared);
    let watch = std::thread::Builder::new()
        .name("engine-watch".into())
        .spawn(move || watched.watch(WATCH));
    if let Err(error) = watch {
        shared.fail(ApiError::new(
            ErrorKind::Internal,
            format!("cannot start a thread: {error}"),
        ));
    }
    running(EngineHandle(Arc::clone(&shared)));
    let outcome = catch_unwind(AssertUnwindSafe(|| thread.run()));
    let error = match outcome {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error),
        Err(panic) => Some(ApiError::new(
            ErrorKind::Internal,
            format!("the engine thread panicked: {}", panic_text(panic.as_ref())),
        )),
    };
    if let Some(error) = error {
        shared.fail(error);
    }
    // The sinks close with the entries; readers see the failure that was set before.
    drop(thread);
    shared.stopped();
}

impl EngineThread {
    fn run(&mut self) -> Result<(), ApiError> {
        let mut inbox = VecDeque::new();
        loop {
            let idle = !self.engine.has_work();
            if !self.shared.mailbox.take(idle, &mut inbox) {
                return Ok(());
            }
            for command in inbox.drain(..) {
                if let Command::Stop = command {
                    return Ok(());
                }
                self.apply(command);
            }
            if self.engine.has_work() {
                let begin = self.shared.begin_step();
                let mut out = std::mem::take(&mut self.out);
                self.engine.step_into(&mut out).map_err(|e| {
                    ApiError::new(ErrorKind::Internal, format!("the engine failed: {e}"))
                })?;
                let now = self.shared.end_step(begin);
                for event in out.drain_events() {
                    self.dispatch(event, now);
                }
                self.out = out;
            }
            self.publish();
        }
    }

    fn apply(&mut self, command: Command) {
        match command {
            Command::Submit {
                requests,
                permits,
                arrived,
                sink,
                reply,
            } => {
                let outcome = self.submit(requests, permits, arrived, &sink);
                // A client that left meanwhile aborts by its own guard.
                let _ = reply.send(outcome);
            }
            Command::Abort(id) => self.engine.abort(id),
            Command::KvLoaded(id, outcome) => self.engine.kv_loaded(id, outcome),
            Command::ReleaseHeld(id) => {
                self.engine.release_held(id);
            }
            Command::Stop => {}
        }
    }

    /// All of them, or none.
    fn submit(
        &mut self,
        requests: Vec<NewRequest>,
        mut permits: OwnedSemaphorePermit,
        arrived: Instant,
        sink: &mpsc::Sender<ChoiceEvent>,
    ) -> Result<(), ApiError> {
        let mut taken = Vec::with_capacity(requests.len());
        for new in requests {
            let id = new.request.id;
            if let Err(error) = self.engine.submit(new.request) {
                for id in taken {
                    self.entries.remove(&id);
                    self.engine.abort(id);
                }
                return Err(error);
            }
            taken.push(id);
            let entry = Entry {
                choice: new.choice,
                sink: sink.clone(),
                prefill_cached: new.claim.as_ref().map_or(0, |claim| claim.prefill_cached()),
                claim: new.claim,
                arrived,
                last_token: None,
                first_token: None,
                tokens: 0,
                _permit: permits.split(1),
            };
            self.entries.insert(id, entry);
        }
        Ok(())
    }

    fn dispatch(&mut self, event: Event, now: Instant) {
        match event {
            Event::Output {
                id,
                prompt_logprobs,
                tokens,
                text,
                finish,
            } => {
                let held = finish
                    .as_ref()
                    .and_then(|f| f.held.clone())
                    .map(|kv| HeldBlocks {
                        id,
                        kv,
                        engine: Some(EngineHandle(Arc::clone(&self.shared))),
                    });
                let Some(entry) = self.entries.get_mut(&id) else {
                    return;
                };
                // With all of the prompt in the cache nothing was fetched: prefill's copy is of no use.
                entry.claim = None;
                let end = finish.map(|finish| End {
                    reason: finish.reason,
                    output_tokens: finish.output_tokens,
                    cached: cached_anywhere(finish.sources, entry.prefill_cached),
                    sources: finish.sources,
                    held,
                });
                if let Some(End {
                    reason: FinishReason::Error(error),
                    ..
                }) = &end
                {
                    tracing::error!(request = id.0, %error, "a request failed");
                }
                entry.measure(&self.metrics, &tokens, end.as_ref(), now);
                let last = end.is_some();
                let event = ChoiceEvent {
                    choice: entry.choice,
                    prompt_logprobs,
                    tokens,
                    text,
                    end,
                };
                // The channel has room for all that a request may send, so a failure means that
                // nobody reads any more.
                let sent = entry.sink.try_send(event).is_ok();
                if last {
                    self.entries.remove(&id);
                } else if !sent {
                    self.engine.abort(id);
                }
            }
            Event::KvFetch {
                id,
                blocks,
                positions,
            } => {
                let claim = self
                    .entries
                    .get_mut(&id)
                    .and_then(|entry| entry.claim.take());
                let sent = claim.is_some_and(|claim| {
                    self.fetches
                        .try_send(Fetch::Start {
                            id,
                            claim,
                            blocks,
                            positions,
                        })
                        .is_ok()
                });
                if !sent {
                    let error =
                        ApiError::new(ErrorKind::Internal, "the KV fetch could not be started");
                    self.engine.kv_loaded(id, KvOutcome::Failed(error));
                }
            }
            Event::KvFetchCancel { id } => {
                if self.fetches.try_send(Fetch::Cancel { id }).is_err() {
                    // No fetcher, so nothing writes to the blocks.
                    let error = ApiError::new(ErrorKind::Internal, "no fetcher");
                    self.engine.kv_loaded(id, KvOutcome::Failed(error));
                }
            }
        }
    }

    fn publish(&mut self) {
        let stats = self.engine.stats();
        if stats != self.published {
            self.metrics.publish(&self.published, &stats);
            self.published = stats;
            self.shared.publish(stats);
        }
    }
}

impl Entry {
    fn measure(
        &mut self,
        metrics: &EngineMetrics,
        tokens: &[OutputToken],
        end: Option<&End>,
        now: Instant,
    ) {
        if !tokens.is_empty() {
            match self.last_token {
                None => {
                    self.first_token = Some(now);
                    metrics.first_token(now - self.arrived);
                }
                Some(last) => metrics.next_tokens(now - last, tokens.len()),
            }
            self.last_token = Some(now);
            self.tokens += u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        }
        if let Some(end) = end {
            let decode = self.first_token.map(|first| now - first);
            metrics.finished(
                &end.reason,
                now - self.arrived,
                decode,
                self.tokens,
                end.sources,
            );
        }
    }
}

impl HeldBlocks {
    /// They are somebody else's to release now, by [`EngineHandle::release_held`].
    pub(crate) fn keep(mut self) {
        self.engine = None;
    }
}

impl Drop for HeldBlocks {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.take() {
            engine.release_held(self.id);
        }
    }
}

/// What neither instance computed for this request. A peer's number counts only as far as its KV was used.
fn cached_anywhere(sources: PromptSources, prefill_cached: u32) -> u32 {
    let handed_over = sources.cached + sources.remote;
    match sources.remote {
        0 => sources.cached,
        _ => sources.cached.max(prefill_cached.min(handed_over)),
    }
}

/// The message of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
