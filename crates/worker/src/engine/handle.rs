use super::desk::{ChoiceEvent, Command, NewRequest};
use super::mailbox::Mailbox;
use super::stall::StallDetector;
use crate::metrics::EngineMetrics;
use crate::rank::{Balancer, RankStats, RankView};
use crate::room::ScoreRoom;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, mpsc, oneshot};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use twinfer_engine::{KvOutcome, RequestId};
use twinfer_protocol::{ApiError, ErrorKind};

/// Events of a choice beside those with tokens: its end, and one to spare.
const EXTRA_EVENTS: usize = 2;

/// The engine, of one rank or several, seen from elsewhere. Clones are handles of the same one.
#[derive(Clone, Debug)]
pub(crate) struct EngineHandle(pub(super) Arc<Shared>);

#[derive(Debug)]
pub(crate) struct Shared {
    mailbox: Mailbox<Command>,
    admission: Arc<Semaphore>,
    places: Places,
    ranks: Mutex<Ranks>,
    progress: Arc<AtomicU64>,
    /// Of all answers.
    scores: ScoreRoom,
    base: Instant,
    detector: Mutex<StallDetector>,
    failure: OnceLock<ApiError>,
    failed: CancellationToken,
    /// The thread has ended, well or not.
    ended: Mutex<bool>,
    end: Condvar,
}

/// What may be inside an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    /// Sequences inside one rank at the same time, running and waiting.
    pub(crate) capacity: u32,
    /// Those of them that run.
    pub(crate) slots: u32,
    /// Tokens of a KV block.
    pub(crate) block_size: u32,
}

/// What is known of the ranks.
#[derive(Debug)]
struct Ranks {
    balancer: Balancer,
    /// Sequences that each was given and that have not ended.
    inside: Vec<u32>,
    stats: Vec<RankStats>,
}

/// Places in the engine for the sequences of one HTTP request.
#[derive(Debug)]
pub(crate) struct Submission {
    engine: EngineHandle,
    permits: OwnedSemaphorePermit,
}

/// The sequences of one HTTP request while they run; dropping it aborts those that have not ended.
#[derive(Debug)]
pub(crate) struct Generation {
    engine: EngineHandle,
    rank: u32,
    events: mpsc::Receiver<ChoiceEvent>,
    failed: Pin<Box<WaitForCancellationFutureOwned>>,
    /// By choice; none when it has ended.
    running: Vec<Option<RequestId>>,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Submit { .. } => "Submit",
            Self::Abort { .. } => "Abort",
            Self::KvLoaded(..) => "KvLoaded",
            Self::ReleaseHeld { .. } => "ReleaseHeld",
            Self::Lease { .. } => "Lease",
            Self::EndLease { .. } => "EndLease",
            Self::Disclaim { .. } => "Disclaim",
            Self::Stop => "Stop",
            Self::Heard { .. } => "Heard",
            Self::Lost { .. } => "Lost",
        })
    }
}

impl EngineHandle {
    pub(crate) fn of(shared: &Arc<Shared>) -> Self {
        Self(Arc::clone(shared))
    }

    /// Sequences of one request that may be inside at the same time: they go to one rank.
    pub(crate) fn capacity(&self) -> u32 {
        self.0.places.capacity
    }

    /// Room for log-probabilities in all answers.
    pub(crate) fn scores(&self) -> &ScoreRoom {
        &self.0.scores
    }

    /// Takes places for `sequences`, at once or not at all.
    ///
    /// Errors: `Overloaded`; whatever the engine failed with.
    pub(crate) fn admit(&self, sequences: u32) -> Result<Submission, ApiError> {
        match Arc::clone(&self.0.admission).try_acquire_many_owned(sequences) {
            Ok(permits) => Ok(Submission {
                engine: self.clone(),
                permits,
            }),
            Err(TryAcquireError::NoPermits) => {
                let free = self.0.admission.available_permits();
                Err(ApiError::new(
                    ErrorKind::Overloaded,
                    format!(
                        "the queue is full: {sequences} sequences were asked for, {free} of {} places are free",
                        self.0.all_places()
                    ),
                ))
            }
            Err(TryAcquireError::Closed) => Err(self.failure()),
        }
    }

    /// Ends a request at its next step; unknown ones are ignored.
    fn abort(&self, rank: u32, id: RequestId) {
        self.0.push(Command::Abort { rank, id });
    }

    /// How a fetch or its cancellation ended: the blocks are not touched any more.
    pub(crate) fn kv_loaded(&self, id: RequestId, outcome: KvOutcome) {
        self.0.push(Command::KvLoaded(id, outcome));
    }

    /// Frees blocks that were held.
    pub(crate) fn release_held(&self, rank: u32, id: RequestId) {
        self.0.push(Command::ReleaseHeld { rank, id });
    }

    /// Sends a command; when nobody reads any more it is dropped.
    pub(crate) fn push(&self, command: Command) {
        self.0.push(command);
    }

    /// Counters and gauges of each rank after its last step.
    pub(crate) fn stats(&self) -> Vec<RankStats> {
        self.0.ranks.lock().stats.clone()
    }

    /// Resolves when the engine cannot go on.
    pub(crate) fn failed(&self) -> WaitForCancellationFutureOwned {
        self.0.failed.clone().cancelled_owned()
    }

    /// Can it not go on?
    pub(crate) fn has_failed(&self) -> bool {
        self.0.failed.is_cancelled()
    }

    /// Why it cannot go on.
    pub(crate) fn failure(&self) -> ApiError {
        let stopped = || ApiError::new(ErrorKind::Draining, "the engine has stopped");
        self.0.failure.get().cloned().unwrap_or_else(stopped)
    }

    /// Ends the thread after its current step and waits for that, at most `limit`; false if it is
    /// still running then.
    pub(crate) fn stop(&self, limit: Duration) -> bool {
        self.0.push(Command::Stop);
        let mut ended = self.0.ended.lock();
        let deadline = Instant::now() + limit;
        while !*ended {
            if self.0.end.wait_until(&mut ended, deadline).timed_out() {
                return *ended;
            }
        }
        true
    }
}

impl Submission {
    /// Hands the sequences over, as many as places were taken; resolves when the engine has taken
    /// them, a step later at most. Choices are numbered `0..`, one for each request in order.
    ///
    /// All go to one rank: to `pinned`, if given.
    ///
    /// Errors: the engine refused one of them, and none runs; no rank has room for all; or it cannot go on.
    pub(crate) async fn submit(
        self,
        requests: Vec<NewRequest>,
        arrived: Instant,
        pinned: Option<u32>,
    ) -> Result<Generation, ApiError> {
        let Self { engine, permits } = self;
        let rank = engine.0.enter(&requests, pinned)?;
        let room: usize = requests
            .iter()
            .map(|new| new.request.params.max_tokens as usize + EXTRA_EVENTS)
            .sum();
        let (sink, events) = mpsc::channel(room.clamp(1, Semaphore::MAX_PERMITS));
        let choices = requests
            .iter()
            .map(|new| new.choice as usize + 1)
            .max()
            .unwrap_or(0);
        let mut running = vec![None; choices];
        for new in &requests {
            if let Some(slot) = running.get_mut(new.choice as usize) {
                *slot = Some(new.request.id);
            }
        }
        let failed = Box::pin(engine.failed());
        // Made before the command is sent: if this future is dropped, the guard aborts.
        let mut generation = Generation {
            engine,
            rank,
            events,
            failed,
            running,
        };
        let (reply, answer) = oneshot::channel();
        let command = Command::Submit {
            rank,
            requests,
            permits,
            arrived,
            sink,
            reply,
        };
        if generation.engine.0.mailbox.push(command).is_err() {
            generation.running.clear();
            return Err(generation.engine.failure());
        }
        let taken = tokio::select! {
            taken = answer => taken.unwrap_or_else(|_| Err(generation.engine.failure())),
            () = &mut generation.failed => Err(generation.engine.failure()),
        };
        match taken {
            Ok(()) => Ok(generation),
            Err(error) => {
                generation.running.clear();
                Err(error)
            }
        }
    }
}

impl Generation {
    /// The next event of any choice; none when all have ended.
    ///
    /// Errors: the engine cannot go on.
    pub(crate) async fn next(&mut self) -> Result<Option<ChoiceEvent>, ApiError> {
        if self.running.iter().all(Option::is_none) {
            return Ok(None);
        }
        let event = tokio::select! {
            biased;
            event = self.events.recv() => event,
            () = &mut self.failed => None,
        };
        match event {
            Some(event) => Ok(Some(self.seen(event))),
            None => Err(self.engine.failure()),
        }
    }

    /// An event that is there already.
    pub(crate) fn ready(&mut self) -> Option<ChoiceEvent> {
        self.events.try_recv().ok().map(|event| self.seen(event))
    }

    /// Have all choices ended?
    pub(crate) fn is_over(&self) -> bool {
        self.running.iter().all(Option::is_none)
    }

    fn seen(&mut self, event: ChoiceEvent) -> ChoiceEvent {
        if event.end.is_some()
            && let Some(slot) = self.running.get_mut(event.choice as usize)
        {
            *slot = None;
        }
        event
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        for id in self.running.iter().flatten() {
            self.engine.abort(self.rank, *id);
        }
    }
}

impl Places {
    /// Of an engine whose only rank takes all.
    pub(crate) fn one(capacity: u32) -> Self {
        Self {
            capacity,
            slots: capacity,
            block_size: 1,
        }
    }
}

impl Shared {
    /// For ranks with these counters.
    pub(crate) fn new(
        places: Places,
        stats: Vec<RankStats>,
        progress: Arc<AtomicU64>,
        scores: ScoreRoom,
    ) -> Self {
        let Places {
            capacity,
            slots,
            block_size,
        } = places;
        Self {
            mailbox: Mailbox::new(),
            admission: Arc::new(Semaphore::new(capacity as usize * stats.len())),
            places,
            ranks: Mutex::new(Ranks {
                balancer: Balancer::new(slots, capacity, block_size),
                inside: vec![0; stats.len()],
                stats,
            }),
            progress,
            scores,
            base: Instant::now(),
            detector: Mutex::default(),
            failure: OnceLock::new(),
            failed: CancellationToken::new(),
            ended: Mutex::new(false),
            end: Condvar::new(),
        }
    }

    /// Room for log-probabilities.
    pub(super) fn scores(&self) -> &ScoreRoom {
        &self.scores
    }

    pub(super) fn begin_step(&self) -> Instant {
        let now = Instant::now();
        self.detector.lock().begin(now - self.base);
        now
    }

    pub(super) fn end_step(&self, begin: Instant) -> Instant {
        let now = Instant::now();
        self.detector.lock().end(now - begin);
        now
    }

    /// Takes a rank's counters, and counts what has changed in `metrics`.
    pub(super) fn publish(&self, rank: u32, stats: RankStats, metrics: &EngineMetrics) {
        let mut ranks = self.ranks.lock();
        let before = RankStats::total(&ranks.stats);
        if let Some(own) = ranks.stats.get_mut(rank as usize) {
            let old = std::mem::replace(own, stats);
            if ranks.stats.len() > 1 {
                metrics.publish_rank(rank, &old, &stats);
            }
        }
        metrics.publish(&before, &RankStats::total(&ranks.stats));
    }

    /// Picks a rank for all of `requests` and counts them in.
    fn enter(&self, requests: &[NewRequest], pinned: Option<u32>) -> Result<u32, ApiError> {
        let sequences = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        let mut ranks = self.ranks.lock();
        let Ranks {
            balancer,
            inside,
            stats,
        } = &mut *ranks;
        let rank = match requests.first() {
            // Admission has seen to it that there is room.
            _ if stats.len() == 1 => 0,
            None => 0,
            Some(NewRequest { request, .. }) => {
                let views: Vec<RankView> = stats
                    .iter()
                    .zip(inside.iter())
                    .map(|(stats, inside)| RankView {
                        load: stats.engine.load,
                        inside: *inside,
                    })
                    .collect();
                let salt = request.cache_salt.as_deref();
                balancer.pick(&views, sequences, &request.prompt, salt, pinned)?
            }
        };
        if let Some(inside) = inside.get_mut(rank as usize) {
            *inside += sequences;
        }
        Ok(rank)
    }

    /// Counts sequences of a rank out.
    pub(super) fn leave(&self, rank: u32, sequences: u32) {
        if let Some(inside) = self.ranks.lock().inside.get_mut(rank as usize) {
            *inside = inside.saturating_sub(sequences);
        }
    }

    fn all_places(&self) -> usize {
        self.places.capacity as usize * self.ranks.lock().stats.len()
    }

    /// Sends a command; when nobody reads any more it is dropped.
    pub(crate) fn push(&self, command: Command) {
        let _ = self.mailbox.push(command);
    }

    /// As [`Mailbox::take`].
    pub(crate) fn take(&self, wait: bool, into: &mut VecDeque<Command>) -> bool {
        self.mailbox.take(wait, into)
    }

    /// Nothing is taken any more, everybody who waits learns why; the first reason counts.
    pub(crate) fn fail(&self, error: ApiError) {
        tracing::error!(%error, "the engine cannot go on");
        let _ = self.failure.set(error);
        self.close();
        self.failed.cancel();
    }

    pub(crate) fn stopped(&self) {
        self.close();
        *self.ended.lock() = true;
        self.end.notify_all();
    }

    fn close(&self) {
        self.admission.close();
        self.mailbox.close();
    }

    /// Runs until the engine thread has ended or failed.
    pub(super) fn watch(&self, every: Duration) {
        let mut ended = self.ended.lock();
        while !*ended && !self.failed.is_cancelled() {
            self.end.wait_for(&mut ended, every);
            let now = self.base.elapsed();
            let stalled = self
                .detector
                .lock()
                .check(now, self.progress.load(Ordering::Relaxed));
            if let Some(still) = stalled {
                let message = format!("a step made no progress for {:.1} s", still.as_secs_f64());
                self.fail(ApiError::new(ErrorKind::Internal, message));
            }
        }
    }
}
