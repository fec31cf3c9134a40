//! What an importer does beside fetching: renews handles in use, sends releases, closes idle
//! connections.

use crate::handoff::importer::{Importer, Shared};
use crate::handoff::params::RemoteHandle;
use crate::handoff::peers::Peer;
use crate::handoff::wire::{RENEW_CAP, Request, WireHandle};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
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

/// Releases that wait, by peer; peers take turns in the order in which their first one came.
struct Waiting<T> {
    by_peer: BTreeMap<Peer, Vec<T>>,
    /// Peers that have some and are not being served.
    turns: VecDeque<Peer>,
    busy: BTreeSet<Peer>,
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
            let lost = self.shared.unsettled.swap(0, Ordering::Relaxed);
            self.shared.counters.releases_lost.add(lost);
            tracing::info!(
                lost,
                "KV not released in time; its leases end by themselves"
            );
        }
    }
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self {
            by_peer: BTreeMap::new(),
            turns: VecDeque::new(),
            busy: BTreeSet::new(),
        }
    }
}

impl<T> Waiting<T> {
    /// False if too many wait for this peer.
    fn push(&mut self, peer: &Peer, release: T) -> bool {
        let releases = self.by_peer.entry(peer.clone()).or_default();
        if releases.len() >= WAITING_CAP {
            return false;
        }
        releases.push(release);
        if releases.len() == 1 && !self.busy.contains(peer) {
            self.turns.push_back(peer.clone());
        }
        true
    }

    /// The peer whose turn it is, with all that waits for it; it is busy until [`Self::done`].
    fn next(&mut self) -> Option<(Peer, Vec<T>)> {
        let peer = self.turns.pop_front()?;
        let releases = self.by_peer.remove(&peer)?;
        self.busy.insert(peer.clone());
        Some((peer, releases))
    }

    fn done(&mut self, peer: Peer) {
        self.busy.remove(&peer);
        if self.by_peer.contains_key(&peer) {
            self.turns.push_back(peer);
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
    let mut waiting = Waiting::default();
    let mut running = FuturesUnordered::new();
    loop {
        while running.len() < RELEASED_AT_ONCE
            && let Some((peer, handles)) = waiting.next()
        {
            running.push(release(importer, peer, handles));
        }
        if queue.is_closed() && queue.is_empty() && running.is_empty() {
            return;
        }
        tokio::select! {
            () = shutdown.cancelled(), if !queue.is_closed() => queue.close(),
            Some(handle) = queue.recv() => {
                let peer = handle.peer.clone();
                if !waiting.push(&peer, handle) {
                    importer.shared.unsettled.fetch_sub(1, Ordering::Relaxed);
                    importer.shared.counters.releases_lost.add(1);
                }
            }
            Some(peer) = running.next() => waiting.done(peer),
            // The queue is closed and empty, and nothing runs.
            else => {}
        }
    }
}

/// Releases handles of one peer; the first failure to reach it ends the attempt. Returns the peer.
async fn release(importer: &Importer, peer: Peer, handles: Vec<Arc<RemoteHandle>>) -> Peer {
    let unsettled = &importer.shared.unsettled;
    for (done, handle) in handles.iter().enumerate() {
        let released = importer.release(handle).await;
        unsettled.fetch_sub(1, Ordering::Relaxed);
        if let Err(error) = released {
            let lost = handles.len() - done;
            tracing::info!(%peer, lost, %error, "KV not released; its leases end by themselves");
            // This one is counted already.
            let others = lost as u64 - 1;
            unsettled.fetch_sub(others, Ordering::Relaxed);
            importer.shared.counters.releases_lost.add(others);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(port: u16) -> Peer {
        Peer::parse(&format!("127.0.0.1:{port}")).unwrap()
    }

    #[test]
    fn peers_take_turns_and_none_is_served_twice_at_once() {
        let mut waiting = Waiting::default();
        for port in [9, 3, 7] {
            assert!(waiting.push(&peer(port), port));
        }
        let (first, releases) = waiting.next().unwrap();
        assert_eq!((&first, &releases[..]), (&peer(9), &[9][..]));
        // More for one that is busy waits for its next turn, behind those that came before.
        assert!(waiting.push(&first, 10) && waiting.push(&first, 11));
        assert_eq!(waiting.next().unwrap().0, peer(3));
        assert!(waiting.push(&peer(1), 1));
        waiting.done(first);
        let order: Vec<Peer> = std::iter::from_fn(|| Some(waiting.next()?.0)).collect();
        assert_eq!(order, [peer(7), peer(1), peer(9)]);
    }

    #[test]
    fn a_peer_has_so_many_waiting_at_most() {
        let mut waiting = Waiting::default();
        let taken = (0..WAITING_CAP + 5).filter(|&n| waiting.push(&peer(1), n));
        assert_eq!(taken.count(), WAITING_CAP);
        assert_eq!(waiting.next().unwrap().1.len(), WAITING_CAP);
        assert!(waiting.next().is_none());
    }
}
