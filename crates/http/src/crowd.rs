//! Connections on which no request runs: where all places are taken, the one that has been idle longest
//! makes room. Otherwise clients that only connect would keep everybody else out.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// An idle connection is left alone for so long: its request may be on its way, or its answer still in
/// the buffers.
const GRACE: Duration = Duration::from_secs(1);

/// The idle connections of a listener, by the order in which they became idle.
#[derive(Debug, Default)]
pub(crate) struct Crowd(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    last: u64,
    idle: BTreeMap<u64, (Instant, CancellationToken)>,
}

/// One connection; idle but for the time of a [`Busy`].
#[derive(Debug)]
pub(crate) struct Seat {
    crowd: Arc<Crowd>,
    end: CancellationToken,
    number: Mutex<u64>,
}

/// A request runs on the connection.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Seat>);

impl Crowd {
    /// A new connection.
    pub(crate) fn seat(self: &Arc<Self>) -> Arc<Seat> {
        let end = CancellationToken::new();
        let number = Mutex::new(self.enter(&end));
        Arc::new(Seat {
            crowd: Arc::clone(self),
            end,
            number,
        })
    }

    /// Ends the connection that has been idle longest, if any has been for a while.
    pub(crate) fn evict(&self) {
        let mut queue = self.0.lock();
        if let Some(first) = queue.idle.first_entry()
            && first.get().0.elapsed() >= GRACE
        {
            first.remove().1.cancel();
        }
    }

    fn enter(&self, end: &CancellationToken) -> u64 {
        let mut queue = self.0.lock();
        queue.last += 1;
        let number = queue.last;
        queue.idle.insert(number, (Instant::now(), end.clone()));
        number
    }

    fn leave(&self, number: u64) {
        self.0.lock().idle.remove(&number);
    }
}

impl Seat {
    /// A request has come.
    pub(crate) fn busy(self: &Arc<Self>) -> Busy {
        self.crowd.leave(*self.number.lock());
        Busy(Arc::clone(self))
    }

    /// Ends when the connection has to make room.
    pub(crate) async fn evicted(&self) {
        self.end.cancelled().await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.crowd.leave(*self.number.lock());
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let seat = &self.0;
        *seat.number.lock() = seat.crowd.enter(&seat.end);
    }
}
