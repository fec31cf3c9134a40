//! What an importer does beside fetching: renews handles in use, sends releases, closes idle
//! connections.

use crate::handoff::importer::{Importer, Shared};
use crate::handoff::params::RemoteHandle;
use crate::handoff::peers::Peer;
use crate::handoff::wire::{RENEW_CAP, Request, WireHandle};
use futures_util::StreamExt;
use futures_util::stream::{self, FuturesUnordered};
use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tokio_util::sync::CancellationToken;

/// Peers that are spoken to at the same time, for renewals and for releases.
const AT_ONCE: usize = 8;
/// Renewals are no more frequent than this.
const SHORTEST_TICK: Duration = Duration::from_millis(10);
/// Releases that wait when the instance stops are sent within this time.
const LAST_RELEASES: Duration = Duration::from_secs(1);

/// Renews and releases for an importer. Run it once.
pub struct ImporterKeeper {
    shared: Arc<Shared>,
    releases: mpsc::Receiver<Arc<RemoteHandle>>,
}

impl ImporterKeeper {
    pub(crate) fn new(shared: Arc<Shared>, releases: mpsc::Receiver<Arc<RemoteHandle>>) -> Self {
        Self { shared, releases }
    }

    /// Works until `shutdown`; then sends the releases that wait and returns.
    pub async fn run(self, shutdown: CancellationToken) {
        let every = self.shared.config.renew_every.max(SHORTEST_TICK);
        let renewals = async {
            let mut ticks = interval_at(Instant::now() + every, every);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                self.shared.pool.sweep();
                renew(&self.shared).await;
            }
        };
        let importer = Importer {
            shared: Arc::clone(&self.shared),
        };
        let mut releases = pin!(serve_releases(&importer, self.releases, &shutdown));
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = renewals => {}
            () = &mut releases => return,
        }
        if timeout(LAST_RELEASES, releases).await.is_err() {
            tracing::info!("some KV was not released in time; its leases end by themselves");
        }
    }
}

/// Sends releases as they come, few at a time; after `shutdown` those that wait, and ends.
async fn serve_releases(
    importer: &Importer,
    mut queue: mpsc::Receiver<Arc<RemoteHandle>>,
    shutdown: &CancellationToken,
) {
    let mut running = FuturesUnordered::new();
    loop {
        tokio::select! {
            () = shutdown.cancelled(), if !queue.is_closed() => queue.close(),
            next = queue.recv(), if running.len() < AT_ONCE => match next {
                Some(handle) => running.push(release(importer, handle)),
                None => break,
            },
            Some(()) = running.next() => {}
        }
    }
    while running.next().await.is_some() {}
}

async fn release(importer: &Importer, handle: Arc<RemoteHandle>) {
    if let Err(error) = importer.release(&handle).await {
        tracing::info!(peer = %handle.peer, handle = %handle.id, %error, "KV not released; its lease ends by itself");
    }
}

/// Renews every handle in use. A peer that does not answer is found out by whoever fetches from it.
async fn renew(shared: &Shared) {
    let mut by_peer: BTreeMap<Peer, Vec<Arc<RemoteHandle>>> = BTreeMap::new();
    for handle in shared.claims.lock().live.values() {
        by_peer
            .entry(handle.peer.clone())
            .or_default()
            .push(Arc::clone(handle));
    }
    stream::iter(by_peer.values())
        .for_each_concurrent(AT_ONCE, |handles| async move {
            for handles in handles.chunks(RENEW_CAP) {
                let request = Request::Renew {
                    handles: handles
                        .iter()
                        .map(|handle| WireHandle::new(handle.epoch.0, handle.id))
                        .collect(),
                };
                let Some(first) = handles.first() else {
                    continue;
                };
                if let Err(error) = shared.ask(first, &request).await {
                    tracing::debug!(peer = %first.peer, %error, "KV leases not renewed");
                    return;
                }
            }
        })
        .await;
}
