//! The front half of a rank: who reads what a request puts out, and what is counted of it.

use super::handle::{EngineHandle, Shared};
use crate::kv::Claim;
use crate::metrics::EngineMetrics;
use crate::rank::{News, Order};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use twinfer_engine::{
    Event, FinishReason, HeldKv, KvOutcome, OutputToken, PromptSources, Request, RequestId,
    TokenLogprobs,
};
use twinfer_protocol::{ApiError, BlockId, ErrorKind};

/// One sequence of a submission.
#[derive(Debug)]
pub(crate) struct NewRequest {
    pub(crate) request: Request,
    /// Index of the choice in the answer.
    pub(crate) choice: u32,
    /// Where its KV is, if it is remote.
    pub(crate) claim: Option<Arc<Claim>>,
}

pub(crate) enum Command {
    Submit {
        rank: u32,
        requests: Vec<NewRequest>,
        /// One per request.
        permits: OwnedSemaphorePermit,
        arrived: Instant,
        sink: mpsc::Sender<ChoiceEvent>,
        reply: oneshot::Sender<Result<(), ApiError>>,
    },
    Abort {
        rank: u32,
        id: RequestId,
    },
    KvLoaded(RequestId, KvOutcome),
    ReleaseHeld(RequestId),
    Stop,
    /// A rank that is a process of its own says something.
    Heard {
        rank: u32,
        news: Vec<News>,
    },
    /// It is gone, or as good as gone.
    Lost {
        rank: u32,
        why: String,
    },
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

/// A submission whose answer is awaited.
struct Pending {
    ids: Vec<RequestId>,
    reply: oneshot::Sender<Result<(), ApiError>>,
}

/// Requests of one rank on their way to and from it.
pub(crate) struct Desk {
    rank: u32,
    shared: Arc<Shared>,
    entries: HashMap<RequestId, Entry>,
    pending: HashMap<u64, Pending>,
    tickets: u64,
    /// Where fetches go; none where KV comes from nowhere else.
    fetches: Option<mpsc::Sender<Fetch>>,
    metrics: EngineMetrics,
}

impl Desk {
    pub(crate) fn new(
        rank: u32,
        shared: Arc<Shared>,
        fetches: Option<mpsc::Sender<Fetch>>,
        metrics: EngineMetrics,
    ) -> Self {
        Self {
            rank,
            shared,
            entries: HashMap::new(),
            pending: HashMap::new(),
            tickets: 0,
            fetches,
            metrics,
        }
    }

    /// Requests that are not over.
    pub(crate) fn open(&self) -> usize {
        self.entries.len()
    }

    /// The order to the rank for a command; none for what is no order.
    pub(crate) fn order(&mut self, command: Command) -> Option<Order> {
        match command {
            Command::Submit {
                requests,
                permits,
                arrived,
                sink,
                reply,
                ..
            } => Some(self.submit(requests, permits, arrived, &sink, reply)),
            Command::Abort { id, .. } => Some(Order::Abort(id)),
            Command::KvLoaded(id, outcome) => Some(Order::KvLoaded(id, outcome)),
            Command::ReleaseHeld(id) => Some(Order::ReleaseHeld(id)),
            Command::Stop => Some(Order::Stop),
            Command::Heard { .. } | Command::Lost { .. } => None,
        }
    }

    fn submit(
        &mut self,
        requests: Vec<NewRequest>,
        mut permits: OwnedSemaphorePermit,
        arrived: Instant,
        sink: &mpsc::Sender<ChoiceEvent>,
        reply: oneshot::Sender<Result<(), ApiError>>,
    ) -> Order {
        self.tickets += 1;
        let ticket = self.tickets;
        let mut ids = Vec::with_capacity(requests.len());
        let mut engines = Vec::with_capacity(requests.len());
        for new in requests {
            let id = new.request.id;
            ids.push(id);
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
            engines.push(new.request);
        }
        self.pending.insert(ticket, Pending { ids, reply });
        Order::Submit {
            ticket,
            requests: engines,
        }
    }

    /// Takes in what the rank says.
    pub(crate) fn hear(&mut self, news: News, now: Instant) {
        match news {
            News::Taken { ticket, outcome } => {
                let Some(Pending { ids, reply }) = self.pending.remove(&ticket) else {
                    return;
                };
                if outcome.is_err() {
                    for id in ids {
                        self.remove(id);
                    }
                }
                // A client that left meanwhile aborts by its own guard.
                let _ = reply.send(outcome);
            }
            News::Event(event) => self.dispatch(event, now),
            News::Stats(stats) => {
                self.shared.publish(self.rank, *stats, &self.metrics);
            }
            News::Slept(_) => {}
        }
    }

    fn remove(&mut self, id: RequestId) {
        if self.entries.remove(&id).is_some() {
            self.shared.leave(self.rank, 1);
        }
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
                        engine: Some(EngineHandle::of(&self.shared)),
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
                    self.remove(id);
                } else if !sent {
                    let rank = self.rank;
                    self.shared.push(Command::Abort { rank, id });
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
                    self.fetches.as_ref().is_some_and(|fetches| {
                        fetches
                            .try_send(Fetch::Start {
                                id,
                                claim,
                                blocks,
                                positions,
                            })
                            .is_ok()
                    })
                });
                if !sent {
                    let error =
                        ApiError::new(ErrorKind::Internal, "the KV fetch could not be started");
                    self.shared
                        .push(Command::KvLoaded(id, KvOutcome::Failed(error)));
                }
            }
            Event::KvFetchCancel { id } => {
                let sent = self
                    .fetches
                    .as_ref()
                    .map(|f| f.try_send(Fetch::Cancel { id }).is_ok());
                if sent != Some(true) {
                    // No fetcher, so nothing writes to the blocks.
                    let error = ApiError::new(ErrorKind::Internal, "no fetcher");
                    self.shared
                        .push(Command::KvLoaded(id, KvOutcome::Failed(error)));
                }
            }
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
