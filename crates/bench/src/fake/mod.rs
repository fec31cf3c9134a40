//! Fake workers: scripted peers that speak as vLLM, vLLM-Ascend and twinfer instances do, with
//! scripted times, bytes and faults. They record what they were asked.
//!
//! They write to the socket themselves instead of through an HTTP library, so that a test decides
//! which bytes leave in which segment and how a connection ends.
//!
//! A prefill worker holds what a request left there until somebody fetches or releases it
//! ([`FakeWorker::held`]); a decode worker fetches from the prefill worker that the handle names,
//! over the route `POST /fake/pull`, which stands in for the KV channel.

mod answer;
mod plan;
mod record;
mod serve;
mod wire;

pub use plan::Script;
pub use record::{ConnectionEvent, ConnectionWhat, RecordedRequest};

use parking_lot::Mutex;
use serve::State;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
pub use twinfer_config::{Dialect, FakeConfig, FakeFault, FaultKind};
pub use twinfer_protocol::Role;

/// A running fake worker. Dropping it ends it.
pub struct FakeWorker {
    addr: SocketAddr,
    state: Arc<State>,
    stop: CancellationToken,
    tasks: Mutex<TaskTracker>,
}

/// Serves until `shutdown` ends: `twinfer fake`.
///
/// # Errors
/// The address cannot be bound.
pub async fn run(
    config: FakeConfig,
    shutdown: impl Future<Output = ()>,
    on_ready: impl FnOnce(SocketAddr),
) -> io::Result<()> {
    let worker = FakeWorker::start(config).await?;
    on_ready(worker.addr());
    shutdown.await;
    worker.stop().await;
    Ok(())
}

impl FakeWorker {
    /// Binds and serves in the background of the current runtime.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn start(config: FakeConfig) -> io::Result<Self> {
        let listener = TcpListener::bind((config.host.as_str(), config.port)).await?;
        let addr = listener.local_addr()?;
        let state = Arc::new(State::new(config, addr));
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        tasks.spawn(serve::accept(
            listener,
            Arc::clone(&state),
            stop.clone(),
            tasks.clone(),
        ));
        Ok(Self {
            addr,
            state,
            stop,
            tasks: Mutex::new(tasks),
        })
    }

    /// A prefill worker of a dialect on a free port, else by default values.
    ///
    /// # Errors
    /// No port can be bound.
    pub async fn prefill(dialect: Dialect) -> io::Result<Self> {
        Self::start(FakeConfig {
            role: Role::Prefill,
            dialect,
            ..FakeConfig::default()
        })
        .await
    }

    /// A decode worker of a dialect on a free port, else by default values.
    ///
    /// # Errors
    /// No port can be bound.
    pub async fn decode(dialect: Dialect) -> io::Result<Self> {
        Self::start(FakeConfig {
            role: Role::Decode,
            dialect,
            ..FakeConfig::default()
        })
        .await
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Every request so far that is no probe: inference, tokenize, `/twinfer/kv/release`.
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.state.log.requests()
    }

    /// Requests of inference routes so far.
    pub fn served(&self) -> u64 {
        self.state.served.load(Ordering::Acquire)
    }

    /// What happened to connections so far.
    pub fn connections(&self) -> Vec<ConnectionEvent> {
        self.state.log.connections()
    }

    /// Connections open now.
    pub fn open_connections(&self) -> usize {
        self.state.open.load(Ordering::Acquire)
    }

    /// Requests of inference routes that are being answered now.
    pub fn in_flight(&self) -> usize {
        self.state.in_flight.load(Ordering::Acquire)
    }

    /// Requests whose client went away before the answer ended.
    pub fn abandoned(&self) -> usize {
        self.state.abandoned.load(Ordering::Acquire)
    }

    /// `remote_request_id`s whose KV is held for a decode worker now.
    pub fn held(&self) -> Vec<String> {
        self.state.held()
    }

    /// Handles that a decode worker has fetched from here so far.
    pub fn pulls(&self) -> u64 {
        self.state.pulls.load(Ordering::Acquire)
    }

    /// Handles given back by `/twinfer/kv/release` so far.
    pub fn releases(&self) -> u64 {
        self.state.releases.load(Ordering::Acquire)
    }

    /// The next requests of inference routes are answered by these scripts, one each; later ones as
    /// the configuration says.
    pub fn script(&self, scripts: impl IntoIterator<Item = Script>) {
        self.state.scripts.lock().extend(scripts);
    }

    /// What `/health` and `/ready` answer: 200 or 503.
    pub fn set_ready(&self, ready: bool) {
        self.state.ready.store(ready, Ordering::Release);
    }

    /// Waits until `condition` holds; false when it does not within `limit`.
    pub async fn wait_until(
        &self,
        limit: Duration,
        mut condition: impl FnMut(&Self) -> bool,
    ) -> bool {
        let mut changes = self.state.log.changes();
        let waiting = async {
            while !condition(self) {
                // The short wake-up covers conditions that look at more than this worker.
                let _ = tokio::time::timeout(Duration::from_millis(20), changes.changed()).await;
            }
        };
        tokio::time::timeout(limit, waiting).await.is_ok()
    }

    /// Ends all connections and gives the port back.
    pub async fn stop(&self) {
        self.stop.cancel();
        let tasks = self.tasks.lock().clone();
        tasks.close();
        tasks.wait().await;
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
