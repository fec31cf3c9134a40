//! Connections to many ranks, and the exchange of one frame each way with some of them.

use crate::board::Shared;
use crate::call::{Head, Reached};
use crate::collective::{Ends, Wait};
use crate::error::{Cause, Failure};
use crate::link::{Link, Trouble};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// Events taken from the system at once.
const EVENTS: usize = 64;
/// Mark of the event that stops the group; ranks are smaller.
const STOP: u64 = u64::MAX;
/// Signs of a wait in each grace: more than one, since they are looked for once in each.
const SIGNS: u32 = 3;

/// All connections of one rank.
pub(crate) struct Mesh {
    rank: u32,
    /// By rank.
    links: Vec<Option<Box<Link>>>,
    epoll: OwnedFd,
    stop: Arc<Stop>,
    /// What ranks share that wait for this one while it waits here.
    shared: Option<Arc<Shared>>,
    ended: bool,
}

/// Lets another thread end a wait.
#[derive(Debug)]
pub(crate) struct Stop {
    event: OwnedFd,
    failure: Mutex<Option<Failure>>,
}

impl Stop {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            failure: Mutex::new(None),
        })
    }

    /// The first failure counts.
    pub(crate) fn stop(&self, failure: Failure) {
        self.failure.lock().get_or_insert(failure);
        // An eventfd takes a first 1 always.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        *self.failure.lock()
    }
}

impl Mesh {
    /// `links` to other ranks of a group of `world`.
    pub(crate) fn new(
        rank: u32,
        world: u32,
        links: Vec<Link>,
        stop: Arc<Stop>,
        shared: Option<Arc<Shared>>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut places: Vec<Option<Box<Link>>> = (0..world).map(|_| None).collect();
        let edges = epoll::EventFlags::IN
            | epoll::EventFlags::OUT
            | epoll::EventFlags::RDHUP
            | epoll::EventFlags::ET;
        for link in links {
            let data = epoll::EventData::new_u64(link.rank.into());
            epoll::add(&epoll, link.stream(), data, edges)?;
            if let Some(place) = places.get_mut(link.rank as usize) {
                *place = Some(Box::new(link));
            }
        }
        let data = epoll::EventData::new_u64(STOP);
        epoll::add(&epoll, &stop.event, data, epoll::EventFlags::IN)?;
        Ok(Self {
            rank,
            links: places,
            epoll,
            stop,
            shared,
            ended: false,
        })
    }

    /// Sends each of `peers` what `ends` offers and receives as much from each: piece `piece`.
    pub(crate) fn exchange(
        &mut self,
        head: &Head,
        piece: u32,
        peers: &[u32],
        wait: Wait,
        ends: &mut dyn Ends,
    ) -> Result<(), Failure> {
        if let Some(shared) = &self.shared {
            shared.go_away();
        }
        let outcome = self.pass(head, piece, peers, wait, ends);
        if let Some(shared) = &self.shared {
            shared.come_back();
        }
        outcome
    }

    fn pass(
        &mut self,
        head: &Head,
        piece: u32,
        peers: &[u32],
        wait: Wait,
        ends: &mut dyn Ends,
    ) -> Result<(), Failure> {
        if let Some(failure) = self.stop.failure() {
            return Err(failure);
        }
        let started = Instant::now();
        for &peer in peers {
            let rank = self.rank;
            let Some(link) = self.links.get_mut(peer as usize).and_then(Option::as_mut) else {
                return Err(self.failure(peer, Cause::Died, head.reached));
            };
            let payload = ends.offer(peer, piece);
            link.begin(rank, head, payload);
            link.push(payload);
        }
        let mut until = wait.until;
        loop {
            if self.advance(head, piece, ends)? {
                return Ok(());
            }
            let mut next = until;
            if let Some(shared) = &self.shared {
                shared.still_away();
                next = until.min(Instant::now() + wait.grace / SIGNS);
            }
            if self.wait(next, head.reached)? || next < until {
                continue;
            }
            let mut missing = self.links.iter().flatten().filter(|link| !link.finished());
            let rank = missing.next().map_or(self.rank, |link| link.rank);
            // Of several some may wait for the others: these know better who is missing.
            if until == wait.until && missing.next().is_some() {
                until += wait.grace;
                continue;
            }
            let cause = Cause::stalled(started.elapsed());
            return Err(self.failure(rank, cause, head.reached));
        }
    }

    /// Moves what can be moved; whether the exchange is done.
    fn advance(&mut self, head: &Head, piece: u32, ends: &mut dyn Ends) -> Result<bool, Failure> {
        let mut done = true;
        for place in 0..self.links.len() {
            let Some(link) = &mut self.links[place] else {
                continue;
            };
            let outcome = match link.finished() {
                true => link.listen(),
                false => {
                    link.push(ends.offer(link.rank, piece));
                    link.pull(head, piece, ends)
                }
            };
            match outcome {
                Ok(()) => done &= link.finished(),
                Err(Trouble::Told(failure)) => return Err(failure),
                Err(Trouble::Cause(cause)) => {
                    let rank = link.rank;
                    return Err(self.failure(rank, cause, head.reached));
                }
            }
        }
        Ok(done)
    }

    /// Sleeps until a socket is ready; false when the time is over.
    fn wait(&mut self, until: Instant, during: Reached) -> Result<bool, Failure> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let left = Timespec {
            tv_sec: left.as_secs().min(1 << 30) as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut space = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
        let events = match epoll::wait(&self.epoll, &mut space, Some(&left)) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => return Ok(true),
            Err(error) => {
                let error: io::Error = error.into();
                return Err(self.failure(self.rank, error.into(), during));
            }
        };
        for event in events {
            let data = event.data.u64();
            if data == STOP {
                if let Some(failure) = self.stop.failure() {
                    return Err(failure);
                }
                continue;
            }
            let flags = event.flags;
            let hangup = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
            let place = usize::try_from(data).ok();
            if let Some(link) = place.and_then(|place| self.links.get_mut(place)?.as_mut()) {
                link.ready(
                    flags.contains(epoll::EventFlags::IN),
                    flags.contains(epoll::EventFlags::OUT),
                    flags.intersects(hangup),
                );
            }
        }
        Ok(true)
    }

    fn failure(&self, rank: u32, cause: Cause, during: Reached) -> Failure {
        let link = self.links.get(rank as usize).and_then(Option::as_ref);
        Failure {
            rank,
            cause,
            reporter: self.rank,
            during: Some(during),
            last: link.and_then(|link| link.last),
        }
    }

    /// Tells all peers why the group has ended; once.
    pub(crate) fn announce(&mut self, failure: &Failure) {
        if !std::mem::replace(&mut self.ended, true) {
            for link in self.links.iter_mut().flatten() {
                link.tell_failure(self.rank, failure);
            }
        }
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh")
            .field("rank", &self.rank)
            .field("links", &self.links)
            .finish_non_exhaustive()
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        if !self.ended {
            for link in self.links.iter_mut().flatten() {
                link.tell_bye(self.rank);
            }
        }
    }
}
