use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use twinfer_protocol::{ApiError, ErrorKind};

/// After the deadline, clients have this long to take the last event.
const FLUSH: Duration = Duration::from_secs(1);

/// Where a process stands between serving and gone; it only moves forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DrainState {
    /// Ready.
    Serving,
    /// Not ready any more; requests that arrive are still served, for those who have not noticed.
    Settling,
    /// Requests that arrive get 503 and Retry-After; running ones go on.
    Draining,
    /// Connections are closed.
    Closed,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainEnd {
    /// Every request completed.
    Complete,
    /// Some were ended at the deadline.
    Deadline,
    /// A second signal ended them.
    Forced,
}

/// A process's readiness and its requests in flight. Clones are handles of the same drain.
#[derive(Clone, Debug)]
pub struct Drain(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: watch::Sender<DrainState>,
    in_flight: AtomicUsize,
    idle: Notify,
    expired: CancellationToken,
    forced: CancellationToken,
}

/// One request in flight, until dropped.
#[derive(Debug)]
pub struct InFlight(Arc<Inner>);

impl Drain {
    /// In state [`DrainState::Serving`].
    pub fn new() -> Self {
        Self(Arc::new(Inner {
            state: watch::Sender::new(DrainState::Serving),
            in_flight: AtomicUsize::new(0),
            idle: Notify::new(),
            expired: CancellationToken::new(),
            forced: CancellationToken::new(),
        }))
    }

    /// Now.
    pub fn state(&self) -> DrainState {
        *self.0.state.borrow()
    }

    /// False from the first signal on: what `/ready` answers, together with the instance's own state.
    pub fn is_serving(&self) -> bool {
        self.state() == DrainState::Serving
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.0.in_flight.load(Ordering::SeqCst)
    }

    /// Counts a request in; [`crate::serve()`] does this.
    ///
    /// # Errors
    /// [`ErrorKind::Draining`] from [`DrainState::Draining`] on.
    pub fn enter(&self) -> Result<InFlight, ApiError> {
        self.0.in_flight.fetch_add(1, Ordering::SeqCst);
        let guard = InFlight(Arc::clone(&self.0));
        // The count is raised before the state is read and the state is set before the count is
        // read, so a request is either refused or waited for.
        if self.state() >= DrainState::Draining {
            Err(self.refusal())
        } else {
            Ok(guard)
        }
    }

    /// What a request gets that comes too late or is ended at the deadline.
    pub fn refusal(&self) -> ApiError {
        ApiError::new(
            ErrorKind::Draining,
            "this process is shutting down; send the request elsewhere",
        )
    }

    /// Waits until the state is reached or passed.
    pub async fn reached(&self, state: DrainState) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.0.state.subscribe().wait_for(|s| *s >= state).await;
    }

    /// Waits until running requests must end. [`crate::serve()`] ends them; others may watch too.
    pub fn expired(&self) -> WaitForCancellationFutureOwned {
        self.0.expired.clone().cancelled_owned()
    }

    /// Ends everything now: the second signal.
    pub fn end_now(&self) {
        self.0.forced.cancel();
        self.0.expired.cancel();
        self.advance(DrainState::Closed);
    }

    /// Drains: not ready at once, refuses requests after `settle`, ends those still running after
    /// `deadline` (both from now), and returns when [`DrainState::Closed`], a second later at most.
    pub async fn run(&self, settle: Duration, deadline: Duration) -> DrainEnd {
        let start = Instant::now();
        let deadline = start + deadline;
        self.advance(DrainState::Settling);
        tokio::select! {
            () = sleep_until((start + settle).min(deadline)) => {}
            () = self.0.forced.cancelled() => return DrainEnd::Forced,
        }
        self.advance(DrainState::Draining);
        let mut end = DrainEnd::Complete;
        tokio::select! {
            idle = timeout_at(deadline, self.idle()) => if idle.is_err() {
                end = DrainEnd::Deadline;
                self.0.expired.cancel();
                let _ = timeout_at(deadline + FLUSH, self.idle()).await;
            },
            () = self.0.forced.cancelled() => return DrainEnd::Forced,
        }
        self.0.expired.cancel();
        self.advance(DrainState::Closed);
        end
    }

    /// Waits for SIGTERM or SIGINT, then [`Self::run`]; a second signal is [`Self::end_now`].
    ///
    /// # Errors
    /// The signal handlers could not be installed.
    pub async fn on_signals(
        &self,
        settle: Duration,
        deadline: Duration,
    ) -> std::io::Result<DrainEnd> {
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        let mut next = async || {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
        };
        next().await;
        tracing::info!(in_flight = self.in_flight(), "signal: draining");
        tokio::select! {
            end = self.run(settle, deadline) => Ok(end),
            () = next() => {
                tracing::warn!(in_flight = self.in_flight(), "second signal: ending now");
                self.end_now();
                Ok(DrainEnd::Forced)
            }
        }
    }

    fn advance(&self, to: DrainState) {
        self.0.state.send_if_modified(|state| {
            let forward = to > *state;
            if forward {
                *state = to;
            }
            forward
        });
    }

    async fn idle(&self) {
        loop {
            let notified = self.0.idle.notified();
            if self.in_flight() == 0 {
                return;
            }
            notified.await;
        }
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.0.in_flight.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}
