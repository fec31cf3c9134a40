use super::desk::{Desk, Fetch};
use super::handle::{EngineHandle, Places, Shared};
use crate::metrics::EngineMetrics;
use crate::rank::{Patience, RankCore};
use crate::room::{ScoreRoom, answer_bytes};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use twinfer_engine::Engine;
use twinfer_protocol::{ApiError, ErrorKind};

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

struct EngineThread {
    core: RankCore,
    desk: Desk,
    shared: Arc<Shared>,
}

/// Runs the engine in the calling thread until it is stopped or cannot go on; `running` gets its handle
/// before the first step.
pub(crate) fn run(parts: EngineParts, running: impl FnOnce(EngineHandle)) {
    let mut core = RankCore::alone(parts.engine);
    let stats = core.stats();
    let shared = Arc::new(Shared::new(
        Places::one(parts.capacity),
        vec![stats],
        parts.progress,
        ScoreRoom::new(answer_bytes()),
    ));
    // What warm-up counted is no client's.
    parts.metrics.publish(&stats.engine, &stats.engine);
    let mut thread = EngineThread {
        core,
        desk: Desk::new(0, Arc::clone(&shared), Some(parts.fetches), parts.metrics),
        shared: Arc::clone(&shared),
    };
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
    running(EngineHandle::of(&shared));
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
        let (mut inbox, mut news) = (VecDeque::new(), Vec::new());
        loop {
            let idle = self.core.patience() == Patience::Wait;
            if !self.shared.take(idle, &mut inbox) {
                return Ok(());
            }
            for command in inbox.drain(..) {
                if let Some(order) = self.desk.order(command) {
                    self.core.apply(order, &mut news);
                }
            }
            let mut now = Instant::now();
            match self.core.patience() {
                Patience::End => return Ok(()),
                Patience::Wait => {}
                Patience::Step => {
                    let begin = self.shared.begin_step();
                    self.core.step(&mut news).map_err(|e| {
                        ApiError::new(ErrorKind::Internal, format!("the engine failed: {e}"))
                    })?;
                    now = self.shared.end_step(begin);
                }
            }
            self.core.publish(&mut news);
            for news in news.drain(..) {
                self.desk.hear(news, now);
            }
        }
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
