//! The front half of a rank: who reads what a request puts out, and what is counted of it.

use super::handle::{EngineHandle, Shared};
use crate::handoff::ReleaseOutcome;
use crate::kv::{Claim, RankLedger};
use crate::metrics::EngineMetrics;
use crate::rank::{Lease, News, Order};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use twinfer_engine::{
    Event, FinishReason, HeldKv, KvOutcome, OutputToken, PromptSources, Request, RequestId,
    TokenLogprobs,
};
use twinfer_protocol::{ApiError, BlockId, ErrorKind, KvRelease};

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
    /// Of an engine in this process.
    KvLoaded(RequestId, KvOutcome),
    ReleaseHeld {
        rank: u32,
        id: RequestId,
    },
    /// To a rank that is a process of its own: lease what a request left.
    Lease {
        rank: u32,
        lease: Box<Lease>,
        /// The handle, as JSON.
        reply: oneshot::Sender<Result<String, ApiError>>,
    },
    /// To such a rank: end a lease early.
    EndLease {
        rank: u32,
        release: KvRelease,
        reply: Option<oneshot::Sender<ReleaseOutcome>>,
    },
    /// To such a rank: release KV elsewhere that no request will read.
    Disclaim {
        handle: String,
    },
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
    /// Room for the log-probabilities of `tokens`, until they have been sent.
    pub(crate) room: Option<OwnedSemaphorePermit>,
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
    /// Whose blocks they are.
    pub(crate) rank: u32,
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
    /// It was ended here; the rank does not know yet.
    over: bool,
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
    /// Leases that are awaited, by request.
    leases: HashMap<RequestId, oneshot::Sender<Result<String, ApiError>>>,
    /// Ends of leases that are awaited, by ticket.
    ends: HashMap<u64, oneshot::Sender<ReleaseOutcome>>,
    /// What is known of the handoff of a rank that is a process of its own.
    ledger: Option<Arc<RankLedger>>,
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
            leases: HashMap::new(),
            ends: HashMap::new(),
            ledger: None,
            fetches,
            metrics,
        }
    }

    /// For a rank that is a process of its own and hands KV over itself.
    pub(crate) fn with_ledger(mut self, ledger: Arc<RankLedger>) -> Self {
        self.ledger = Some(ledger);
        self
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
            Command::ReleaseHeld { id, .. } => Some(Order::ReleaseHeld(id)),
            Command::Lease { lease, reply, .. } => {
                self.leases.insert(lease.id, reply);
                Some(Order::Lease(lease))
            }
            Command::EndLease { release, reply, .. } => {
                self.tickets += 1;
                let ticket = self.tickets;
                if let Some(reply) = reply {
                    self.ends.insert(ticket, reply);
                }
                Some(Order::EndLease { ticket, release })
            }
            Command::Disclaim { handle } => Some(Order::Disclaim(handle)),
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
        let mut claims = Vec::new();
        for new in requests {
            let id = new.request.id;
            ids.push(id);
            let handle = new.claim.as_ref().and_then(|claim| claim.hand_over());
            claims.extend(handle.map(|handle| (id, handle)));
            let entry = Entry {
                choice: new.choice,
                sink: sink.clone(),
                prefill_cached: new.claim.as_ref().map_or(0, |claim| claim.prefill_cached()),
                claim: new.claim,
                arrived,
                last_token: None,
                first_token: None,
                tokens: 0,
                over: false,
                _permit: permits.split(1),
            };
            self.entries.insert(id, entry);
            engines.push(new.request);
        }
        self.pending.insert(ticket, Pending { ids, reply });
        Order::Submit {
            ticket,
            requests: engines,
            claims,
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
            News::Leased(id, leased) => self.leased(id, leased),
            News::LeaseEnded(ticket, outcome) => {
                if let Some(reply) = self.ends.remove(&ticket) {
                    // Who asked may be gone.
                    let _ = reply.send(outcome);
                }
            }
            News::Freed(_) | News::Fetched(_) | News::Handoff(_) => {
                if let Some(ledger) = &self.ledger {
                    ledger.hear(self.rank, news);
                }
            }
            // The group's.
            News::Slept(_) | News::Asks(_) => {}
        }
    }

    /// A lease that nobody waits for any more ends at once.
    fn leased(&mut self, id: RequestId, leased: Result<(KvRelease, String), ApiError>) {
        let reply = self.leases.remove(&id);
        let (release, handle) = match leased {
            Ok((release, handle)) => (Some(release), Ok(handle)),
            Err(error) => (None, Err(error)),
        };
        let heard = reply.is_some_and(|reply| reply.send(handle).is_ok());
        if let Some(release) = release.filter(|_| !heard) {
            self.shared.push(Command::EndLease {
                rank: self.rank,
                release,
                reply: None,
            });
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
                mut tokens,
                mut text,
                finish,
            } => {
                let held = finish
                    .as_ref()
                    .and_then(|f| f.held.clone())
                    .map(|kv| HeldBlocks {
                        id,
                        kv,
                        rank: self.rank,
                        engine: Some(EngineHandle::of(&self.shared)),
                    });
                let last = finish.is_some();
                let Some(entry) = self.entries.get_mut(&id) else {
                    return;
                };
                if entry.over {
                    if last {
                        self.remove(id);
                    }
                    return;
                }
                // With all of the prompt in the cache nothing was fetched: prefill's copy is of no use.
                entry.claim = None;
                let mut end = finish.map(|finish| End {
                    reason: finish.reason,
                    output_tokens: finish.output_tokens,
                    cached: cached_anywhere(finish.sources, entry.prefill_cached),
                    sources: finish.sources,
                    held,
                });
                let room = match self.shared.scores().take_output(scores(&tokens)) {
                    Ok(room) => room,
                    Err(error) => {
                        // What has come is given up: it is kept nowhere.
                        tokens.clear();
                        text.clear();
                        entry.over = true;
                        end = Some(End {
                            reason: FinishReason::Error(error),
                            output_tokens: entry.tokens,
                            sources: PromptSources::default(),
                            cached: 0,
                            held: None,
                        });
                        None
                    }
                };
                if let Some(End {
                    reason: FinishReason::Error(error),
                    ..
                }) = &end
                {
                    tracing::error!(request = id.0, %error, "a request failed");
                }
                entry.measure(&self.metrics, &tokens, end.as_ref(), now);
                let over = entry.over;
                let event = ChoiceEvent {
                    choice: entry.choice,
                    prompt_logprobs,
                    tokens,
                    text,
                    end,
                    room,
                };
                // The channel has room for all that a request may send, so a failure means that
                // nobody reads any more.
                let sent = entry.sink.try_send(event).is_ok();
                if last {
                    self.remove(id);
                } else if !sent || over {
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
            engine.release_held(self.rank, self.id);
        }
    }
}

/// Log-probabilities of output.
fn scores(tokens: &[OutputToken]) -> u64 {
    let of = |token: &OutputToken| token.logprobs.as_ref().map_or(0, |(_, top)| 1 + top.len());
    tokens.iter().map(of).sum::<usize>() as u64
}

/// What neither instance computed for this request. A peer's number counts only as far as its KV was used.
fn cached_anywhere(sources: PromptSources, prefill_cached: u32) -> u32 {
    let handed_over = sources.cached + sources.remote;
    match sources.remote {
        0 => sources.cached,
        _ => sources.cached.max(prefill_cached.min(handed_over)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Places;
    use crate::metrics::InstanceMetrics;
    use crate::rank::RankStats;
    use crate::room::ScoreRoom;
    use tokio::sync::Semaphore;
    use twinfer_engine::{Finish, KvSource, Logprob, SamplingParams};

    /// Log-probabilities of one event of [`output`].
    const EACH: u64 = 5;

    struct Reader {
        desk: Desk,
        sink: mpsc::Sender<ChoiceEvent>,
        events: mpsc::Receiver<ChoiceEvent>,
        places: Arc<Semaphore>,
    }

    impl Reader {
        /// Beside a room for `scores` log-probabilities.
        fn new(scores: u64) -> Self {
            let room = ScoreRoom::new(scores * 256);
            let ranks = vec![RankStats::default()];
            let shared = Arc::new(Shared::new(Places::one(4), ranks, Arc::default(), room));
            let (sink, events) = mpsc::channel(64);
            Self {
                desk: Desk::new(0, shared, None, InstanceMetrics::new("m").engine),
                sink,
                events,
                places: Arc::new(Semaphore::new(4)),
            }
        }

        fn submit(&mut self, id: u64) {
            let request = Request {
                id: RequestId(id),
                prompt: [1].into(),
                resumed: 0,
                params: SamplingParams::greedy(8),
                kv: KvSource::Compute,
                hold_kv: false,
                cache_salt: None,
                leader: None,
            };
            let new = NewRequest {
                request,
                choice: id as u32,
                claim: None,
            };
            let order = self.desk.order(Command::Submit {
                rank: 0,
                requests: vec![new],
                permits: Arc::clone(&self.places).try_acquire_owned().unwrap(),
                arrived: Instant::now(),
                sink: self.sink.clone(),
                reply: oneshot::channel().0,
            });
            assert!(order.is_some());
        }

        /// A token of a request with log-probabilities, which may be its last.
        fn output(&mut self, id: u64, last: bool) {
            let one = Logprob {
                token: 1,
                logprob: -1.0,
                rank: 1,
            };
            let token = OutputToken {
                id: 1,
                logprobs: Some((one, vec![one; EACH as usize - 1])),
            };
            let finish = last.then(|| Finish {
                reason: FinishReason::Length,
                sources: PromptSources::default(),
                output_tokens: 1,
                held: None,
            });
            let event = Event::Output {
                id: RequestId(id),
                prompt_logprobs: Vec::new(),
                tokens: vec![token],
                text: "a".to_owned(),
                finish,
            };
            self.desk.hear(News::Event(event), Instant::now());
        }
    }

    fn is_overloaded(event: &ChoiceEvent) -> bool {
        let end = event.end.as_ref().map(|end| &end.reason);
        matches!(end, Some(FinishReason::Error(error)) if error.kind == ErrorKind::Overloaded)
    }

    #[test]
    fn output_that_nobody_reads_ends_with_an_error_when_its_log_probabilities_fill_the_room() {
        let mut reader = Reader::new(2 * EACH + 1);
        reader.submit(0);
        reader.output(0, false);
        reader.output(0, false);
        reader.output(0, false);
        reader.output(0, false);
        let first = reader.events.try_recv().unwrap();
        assert_eq!((first.tokens.len(), &*first.text), (1, "a"));
        let second = reader.events.try_recv().unwrap();
        assert!(second.end.is_none());
        let third = reader.events.try_recv().unwrap();
        assert!(is_overloaded(&third) && third.tokens.is_empty());
        // What the rank computed before it heard is told nobody; its place is kept until it has ended.
        assert!(reader.events.try_recv().is_err());
        assert_eq!(
            (reader.desk.entries.len(), reader.places.available_permits()),
            (1, 3)
        );
        reader.output(0, true);
        assert!(reader.events.try_recv().is_err());
        assert_eq!(
            (reader.desk.entries.len(), reader.places.available_permits()),
            (0, 4)
        );

        // Another finds room when what came was sent.
        reader.submit(1);
        drop((first, second));
        reader.output(1, false);
        reader.output(1, true);
        let events: Vec<ChoiceEvent> =
            std::iter::from_fn(|| reader.events.try_recv().ok()).collect();
        assert_eq!(events.len(), 2);
        assert!(
            events
                .iter()
                .all(|event| event.tokens.len() == 1 && !is_overloaded(event))
        );
    }

    #[test]
    fn the_last_output_that_finds_no_room_leaves_no_place_behind() {
        let mut reader = Reader::new(EACH - 1);
        reader.submit(0);
        reader.output(0, true);
        assert!(is_overloaded(&reader.events.try_recv().unwrap()));
        assert_eq!(
            (reader.desk.entries.len(), reader.places.available_permits()),
            (0, 4)
        );
    }
}
