//! Runtimes and signals.

use crate::exit::{Code, Failure};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use twinfer_http::{MAX_CONNECTIONS, OWN_DESCRIPTORS};

/// All on the calling thread: enough where little happens, and what starts processes must not move
/// between threads, since the kernel ties a child's life to the thread that started it.
pub(crate) fn single() -> Result<Runtime, Failure> {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| failed(&error))
}

fn failed(error: &std::io::Error) -> Failure {
    Failure::new(
        Code::Internal,
        format!("the asynchronous runtime cannot start: {error}"),
    )
}

/// Signals that ask for the end.
pub(crate) struct StopSignals([Signal; 3]);

impl StopSignals {
    /// From here on these signals do not end the process by themselves.
    pub(crate) fn new() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| Failure::new(Code::Internal, format!("signals: {error}")))
        };
        Ok(Self([
            listen(SignalKind::interrupt())?,
            listen(SignalKind::terminate())?,
            listen(SignalKind::hangup())?,
        ]))
    }

    /// The next one.
    pub(crate) async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }

    /// Counts signals up in `stop`, for ever.
    pub(crate) async fn count(mut self, stop: &watch::Sender<u32>) {
        loop {
            self.next().await;
            stop.send_modify(|count| *count += 1);
        }
    }
}

/// Raises the limit of open files (`ulimit -n`), as far as the system lets it, to what `peers`
/// connections to instances take beside those of clients: of `clients` that are served, and of as many
/// idle ones as a listener takes. What serves almost nobody does not start.
pub(crate) fn make_room(clients: u64, peers: u64) -> Result<(), Failure> {
    let own = peers.saturating_add(OWN_DESCRIPTORS);
    let needed = own.saturating_add(clients);
    let wanted = own.saturating_add(clients.max(MAX_CONNECTIONS as u64));
    let mut limit = getrlimit(Resource::Nofile);
    // None is no limit.
    if limit.current.is_none_or(|limit| limit >= wanted) {
        return Ok(());
    }
    let raised = match limit.maximum {
        Some(most) => most.min(wanted),
        None => wanted,
    };
    limit.current = Some(raised);
    let refused = setrlimit(Resource::Nofile, limit).is_err();
    let have = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if have < OWN_DESCRIPTORS {
        return Err(Failure::new(
            Code::Unavailable,
            format!(
                "{have} files may be open (ulimit -n); at least {OWN_DESCRIPTORS} are needed, {needed} for all connections \
                 that the flags allow"
            ),
        ));
    }
    if refused || have < needed {
        tracing::warn!(
            "{have} files may be open (ulimit -n); {needed} are needed for all connections that the flags allow"
        );
    }
    Ok(())
}

/// Threads for HTTP; computing has threads of its own.
const HTTP_THREADS: usize = 2;
/// For what still runs when all is done: a model that is being read cannot be interrupted.
const LAST: Duration = Duration::from_millis(500);

/// For processes that serve many connections.
pub(crate) fn several() -> Result<Runtime, Failure> {
    Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .enable_all()
        .build()
        .map_err(|error| failed(&error))
}

/// Ends a runtime without waiting for what cannot be ended.
pub(crate) fn end(runtime: Runtime) {
    runtime.shutdown_timeout(LAST);
}
