//! Admission: so many requests in flight, so many that wait, in turn by client. Pure but for the wait itself.
//!
//! A client with many requests waits behind its own: turns go round among clients. Where the queue is full, who has most
//! in it gives a place up for who has fewer.

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// A client, as its key tells; all without one are the same.
pub(crate) type Client = u32;
/// One that waits.
type Ticket = u64;

/// Numbers and queues.
#[derive(Debug)]
struct State {
    max_inside: u32,
    max_waiting: usize,
    inside: u32,
    waiting: usize,
    next: Ticket,
    queues: BTreeMap<Client, VecDeque<Ticket>>,
    /// Clients that wait, the next first.
    turns: VecDeque<Client>,
}

/// What becomes of one that arrives.
#[derive(Debug, PartialEq, Eq)]
enum Arrival {
    In,
    Wait(Ticket),
    /// It waits, and the other has lost its place.
    Instead(Ticket, Ticket),
    Full,
}

/// The gate of a router.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    /// Told true when inside, false when the place is lost.
    waiters: Mutex<HashMap<Ticket, oneshot::Sender<bool>>>,
    limit: Duration,
}

/// One request inside, until dropped.
#[derive(Debug)]
pub(crate) struct Inside(Arc<Gate>);

/// Why a request is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Nobody may wait any more.
    Full,
    /// It has waited too long.
    Waited,
}

/// One that waits; leaves the queue when dropped.
struct Waiting<'a> {
    gate: &'a Arc<Gate>,
    client: Client,
    ticket: Ticket,
    told: oneshot::Receiver<bool>,
    over: bool,
}

impl State {
    fn arrive(&mut self, client: Client) -> Arrival {
        if self.inside < self.max_inside && self.waiting == 0 {
            self.inside += 1;
            return Arrival::In;
        }
        let mut lost = None;
        if self.waiting >= self.max_waiting {
            let own = self.queues.get(&client).map_or(0, VecDeque::len);
            let most = self.queues.iter().max_by_key(|(_, queue)| queue.len());
            match most.map(|(other, queue)| (*other, queue.len())) {
                Some((other, length)) if length > own + 1 => lost = self.pop_back(other),
                _ => return Arrival::Full,
            }
        }
        self.next += 1;
        let ticket = self.next;
        let queue = self.queues.entry(client).or_default();
        if queue.is_empty() {
            self.turns.push_back(client);
        }
        queue.push_back(ticket);
        self.waiting += 1;
        match lost {
            Some(lost) => Arrival::Instead(ticket, lost),
            None => Arrival::Wait(ticket),
        }
    }

    /// One has left; who comes in instead.
    fn leave(&mut self) -> Option<Ticket> {
        self.inside -= 1;
        let client = self.turns.pop_front()?;
        let queue = self.queues.get_mut(&client)?;
        let ticket = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(&client);
        } else {
            self.turns.push_back(client);
        }
        self.waiting -= 1;
        self.inside += 1;
        Some(ticket)
    }

    /// True if it was still waiting.
    fn cancel(&mut self, client: Client, ticket: Ticket) -> bool {
        let Some(queue) = self.queues.get_mut(&client) else {
            return false;
        };
        let Some(at) = queue.iter().position(|other| *other == ticket) else {
            return false;
        };
        queue.remove(at);
        self.waiting -= 1;
        self.tidy(client);
        true
    }

    fn pop_back(&mut self, client: Client) -> Option<Ticket> {
        let ticket = self.queues.get_mut(&client)?.pop_back()?;
        self.waiting -= 1;
        self.tidy(client);
        Some(ticket)
    }

    fn tidy(&mut self, client: Client) {
        if self.queues.get(&client).is_some_and(VecDeque::is_empty) {
            self.queues.remove(&client);
            self.turns.retain(|other| *other != client);
        }
    }
}

impl Gate {
    /// `limit` is the longest wait.
    pub(crate) fn new(max_inside: u32, max_waiting: u32, limit: Duration) -> Self {
        Self {
            state: Mutex::new(State {
                max_inside,
                max_waiting: max_waiting as usize,
                inside: 0,
                waiting: 0,
                next: 0,
                queues: BTreeMap::new(),
                turns: VecDeque::new(),
            }),
            waiters: Mutex::default(),
            limit,
        }
    }

    /// Requests inside, and waiting.
    pub(crate) fn counts(&self) -> (u32, usize) {
        let state = self.state.lock();
        (state.inside, state.waiting)
    }

    /// Lets a request in, now or in its turn.
    pub(crate) async fn enter(self: &Arc<Self>, client: Client) -> Result<Inside, Refused> {
        let (tell, told) = oneshot::channel();
        let ticket = {
            // Told under the lock of the state, so that nobody is told before it can be.
            let mut state = self.state.lock();
            match state.arrive(client) {
                Arrival::In => return Ok(Inside(Arc::clone(self))),
                Arrival::Full => return Err(Refused::Full),
                Arrival::Wait(ticket) => {
                    self.waiters.lock().insert(ticket, tell);
                    ticket
                }
                Arrival::Instead(ticket, lost) => {
                    let mut waiters = self.waiters.lock();
                    waiters.insert(ticket, tell);
                    if let Some(lost) = waiters.remove(&lost) {
                        // One that is not there any more needs no word.
                        let _ = lost.send(false);
                    }
                    ticket
                }
            }
        };
        let mut waiting = Waiting {
            gate: self,
            client,
            ticket,
            told,
            over: false,
        };
        let told = tokio::time::timeout(self.limit, &mut waiting.told).await;
        match told {
            Ok(Ok(true)) => {
                waiting.over = true;
                Ok(Inside(Arc::clone(self)))
            }
            Ok(_) => {
                waiting.over = true;
                Err(Refused::Full)
            }
            Err(_) => Err(Refused::Waited),
        }
    }

    fn leave(&self) {
        let mut state = self.state.lock();
        while let Some(ticket) = state.leave() {
            let waiter = self.waiters.lock().remove(&ticket);
            if waiter.is_some_and(|waiter| waiter.send(true).is_ok()) {
                return;
            }
            // It went away just now: the next one.
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let waited = {
            let mut state = self.gate.state.lock();
            self.gate.waiters.lock().remove(&self.ticket);
            state.cancel(self.client, self.ticket)
        };
        // It was let in, or has lost its place, and did not hear of it.
        if !waited && self.told.try_recv() == Ok(true) {
            self.gate.leave();
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.leave();
    }
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
