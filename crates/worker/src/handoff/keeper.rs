//! What an importer does beside fetching: renews handles in use, sends releases, closes idle
//! connections.

use crate::handoff::importer::{Importer, Shared};
use crate::handoff::params::RemoteHandle;
use crate::handoff::peers::Peer;
use crate::handoff::wire::{RENEW_CAP, Request, WireHandle};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

/// Renewals per lease.
pub(crate) const RENEWALS: u32 = 6;
/// Peers that are sent releases at the same time.
const RELEASED_AT_ONCE: usize = 32;
/// Releases that wait for one peer; more are left to their leases.
const WAITING_CAP: usize = 256;
/// Renewals are no more frequent than this.
pub(crate) const SHORTEST_TICK: Duration = Duration::from_millis(10);
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
        let importer = Importer {
            shared: Arc::clone(&self.shared),
        };
        let mut releases = pin!(serve_releases(&importer, self.releases, &shutdown));
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = renewals(&self.shared) => {}
            () = &mut releases => return,
        }
        if timeout(LAST_RELEASES, releases).await.is_err() {
            tracing::info!("some KV was not released in time; its leases end by themselves");
        }
    }
}

/// Sends releases as they come, one after the other to a peer, to few peers at a time; after `shutdown`
/// those that wait, and ends.
async fn serve_releases(
    importer: &Importer,
    mut queue: mpsc::Receiver<Arc<RemoteHandle>>,
    shutdown: &CancellationToken,
) {
    // A peer that does not answer must not keep those of others waiting.
    let mut waiting: BTreeMap<Peer, Vec<Arc<RemoteHandle>>> = BTreeMap::new();
    let mut busy: BTreeSet<Peer> = BTreeSet::new();
    let mut running = FuturesUnordered::new();
    loop {
        while running.len() < RELEASED_AT_ONCE
            && let Some(peer) = waiting.keys().find(|&peer| !busy.contains(peer)).cloned()
            && let Some(handles) = waiting.remove(&peer)
        {
            busy.insert(peer.clone());
            running.push(release(importer, peer, handles));
        }
        if queue.is_closed() && queue.is_empty() && running.is_empty() {
            return;
        }
        tokio::select! {
            () = shutdown.cancelled(), if !queue.is_closed() => queue.close(),
            Some(handle) = queue.recv() => {
                let handles = waiting.entry(handle.peer.clone()).or_default();
                match handles.len() < WAITING_CAP {
                    true => handles.push(handle),
                    false => importer.shared.counters.releases_lost.add(1),
                }
            }
            Some(peer) = running.next() => {
                busy.remove(&peer);
            }
            // The queue is closed and empty, and nothing runs.
            else => {}
        }
    }
}

/// Releases handles of one peer; the first failure to reach it ends the attempt. Returns the peer.
async fn release(importer: &Importer, peer: Peer, handles: Vec<Arc<RemoteHandle>>) -> Peer {
    for (done, handle) in handles.iter().enumerate() {
        if let Err(error) = importer.release(handle).await {
            let lost = handles.len() - done;
            tracing::info!(%peer, lost, %error, "KV not released; its leases end by themselves");
            // This one is counted already.
            importer.shared.counters.releases_lost.add(lost as u64 - 1);
            break;
        }
    }
    peer
}

/// Renews handles in use, each peer's by themselves: one that hangs delays nobody else's.
async fn renewals(shared: &Shared) {
    let mut renewed: BTreeMap<Peer, Instant> = BTreeMap::new();
    let mut busy: BTreeSet<Peer> = BTreeSet::new();
    let mut running = FuturesUnordered::new();
    loop {
        shared.pool.sweep();
        let now = Instant::now();
        let mut look = now + shared.config.renew_every.max(SHORTEST_TICK);
        let mut used = BTreeSet::new();
        {
            let mut claims = shared.claims.lock();
            let mut due: BTreeMap<Peer, Vec<Arc<RemoteHandle>>> = BTreeMap::new();
            for (handle, claimed) in claims.live.values() {
                let peer = &handle.peer;
                used.insert(peer.clone());
                if busy.contains(peer) {
                    continue;
                }
                let last = renewed.get(peer).max(Some(claimed)).unwrap_or(claimed);
                let next = *last + shared.renew_every(handle);
                if next <= now {
                    due.entry(peer.clone()).or_default();
                } else {
                    look = look.min(next);
                }
            }
            for (handle, _) in claims.live.values() {
                // With one of a peer's all of them.
                if let Some(handles) = due.get_mut(&handle.peer) {
                    handles.push(Arc::clone(handle));
                }
            }
            claims.next_look = Some(look);
            for (peer, handles) in due {
                busy.insert(peer.clone());
                renewed.insert(peer.clone(), now);
                running.push(renew(shared, peer, handles));
            }
        }
        renewed.retain(|peer, _| used.contains(peer));
        tokio::select! {
            () = sleep_until(look) => {}
            () = shared.hurry.notified() => {}
            Some(peer) = running.next() => {
                busy.remove(&peer);
            }
        }
    }
}

/// Renews handles of one peer, and returns it. One that does not answer is found out by whoever fetches
/// from it.
async fn renew(shared: &Shared, peer: Peer, handles: Vec<Arc<RemoteHandle>>) -> Peer {
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
            tracing::debug!(%peer, %error, "KV leases not renewed");
            break;
        }
    }
    peer
}
