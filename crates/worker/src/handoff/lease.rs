//! Who may still read a prompt's KV, and until when. Pure: `now` is an argument, on a monotonic clock
//! that starts anywhere.
//!
//! A lease is no fence. It says how long blocks are kept for somebody who has not come yet; a reader
//! that has come pins them, and they are given back only when no reader is left. What a late reader
//! may still ask for is answered by tombstones: released, expired, or never given out.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Identity of one registration at one incarnation of an exporter.
///
/// The generation grows by one per registration, so that a repeated attempt of the same request has
/// another one; the nonce is random, so that a handle cannot be guessed from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandleId {
    /// Counts registrations, from 1.
    pub generation: u64,
    /// Drawn at registration.
    pub nonce: u64,
}

/// A text that is no [`HandleId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAHandle;

/// Why a handle cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    /// Released, or read to the end.
    Released,
    /// The lease ended before anybody read it.
    Expired,
    /// Given out once, but so long ago that its end is forgotten.
    Forgotten,
    /// Never given out by this incarnation.
    Unknown,
}

/// Bounds of a [`LeaseTable`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeaseConfig {
    /// How long a registration or a renewal keeps the blocks.
    pub(crate) lease: Duration,
    /// Ended handles whose end is remembered.
    pub(crate) tombstones: usize,
}

/// What became of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Release<T> {
    /// The item is free now.
    Freed(T),
    /// Readers pin it: the last one that ends frees it.
    Deferred,
    /// It ended before.
    Gone(Gone),
}

/// A reader's hold on a lease. Must be given back to [`LeaseTable::end_read`].
#[derive(Debug)]
#[must_use]
pub(crate) struct Pin {
    generation: u64,
}

/// All leases of an exporter; `T` is what a lease keeps.
#[derive(Debug)]
pub(crate) struct LeaseTable<T> {
    config: LeaseConfig,
    leases: HashMap<u64, Lease<T>>,
    /// Leases that can expire; one that ended but is pinned is not among them.
    deadlines: BTreeSet<(Duration, u64)>,
    tombstones: HashMap<u64, (u64, Gone)>,
    buried: VecDeque<u64>,
    last_generation: u64,
    readers: usize,
    expired: u64,
}

#[derive(Debug)]
struct Lease<T> {
    nonce: u64,
    item: T,
    deadline: Duration,
    readers: u32,
    ended: Option<Gone>,
}

impl Pin {
    /// A pin is good for one end.
    fn spend(self) -> u64 {
        self.generation
    }
}

impl Gone {
    /// Word for messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Forgotten => "released or expired long ago",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for HandleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kv-{}-{:016x}", self.generation, self.nonce)
    }
}

impl FromStr for HandleId {
    type Err = NotAHandle;

    fn from_str(text: &str) -> Result<Self, NotAHandle> {
        let rest = text.strip_prefix("kv-").ok_or(NotAHandle)?;
        let (generation, nonce) = rest.split_once('-').ok_or(NotAHandle)?;
        let id = Self {
            generation: generation.parse().map_err(|_| NotAHandle)?,
            nonce: u64::from_str_radix(nonce, 16).map_err(|_| NotAHandle)?,
        };
        // Signs, leading zeros and upper case would give one handle several names.
        (id.to_string() == text).then_some(id).ok_or(NotAHandle)
    }
}

impl<T> LeaseTable<T> {
    pub(crate) fn new(config: LeaseConfig) -> Self {
        Self {
            config,
            leases: HashMap::new(),
            deadlines: BTreeSet::new(),
            tombstones: HashMap::new(),
            buried: VecDeque::new(),
            last_generation: 0,
            readers: 0,
            expired: 0,
        }
    }

    /// The identity of the next registration, needed to seal what it will stand for.
    pub(crate) fn reserve(&mut self, nonce: u64) -> HandleId {
        self.last_generation += 1;
        HandleId {
            generation: self.last_generation,
            nonce,
        }
    }

    /// Starts the lease of a reserved identity.
    pub(crate) fn register(&mut self, now: Duration, id: HandleId, item: T) {
        let deadline = now.saturating_add(self.config.lease);
        self.leases.insert(
            id.generation,
            Lease {
                nonce: id.nonce,
                item,
                deadline,
                readers: 0,
                ended: None,
            },
        );
        self.deadlines.insert((deadline, id.generation));
    }

    /// Pins a lease for a reader. Refused when it has ended, even if blocks are still there for
    /// another reader.
    pub(crate) fn begin_read(&mut self, now: Duration, id: HandleId) -> Result<(Pin, &T), Gone> {
        self.check(now, id)?;
        let lease = self.leases.get_mut(&id.generation).ok_or(Gone::Unknown)?;
        lease.readers += 1;
        self.readers += 1;
        Ok((
            Pin {
                generation: id.generation,
            },
            &lease.item,
        ))
    }

    /// Ends a read. With `release` the reader has all it wants and nobody else is to come. Returns
    /// the item when it became free.
    pub(crate) fn end_read(&mut self, now: Duration, pin: Pin, release: bool) -> Option<T> {
        let generation = pin.spend();
        let lease = self.leases.get_mut(&generation)?;
        lease.readers = lease.readers.saturating_sub(1);
        self.readers = self.readers.saturating_sub(1);
        let (readers, overdue) = (lease.readers, now >= lease.deadline);
        if release {
            self.end(generation, Gone::Released);
        } else if readers == 0 && overdue {
            self.end(generation, Gone::Expired);
        }
        self.free(generation)
    }

    /// Makes the lease last its full length from now; never shortens it. Returns the new deadline.
    pub(crate) fn renew(&mut self, now: Duration, id: HandleId) -> Result<Duration, Gone> {
        self.check(now, id)?;
        let lease = self.leases.get_mut(&id.generation).ok_or(Gone::Unknown)?;
        let before = lease.deadline;
        lease.deadline = before.max(now.saturating_add(self.config.lease));
        let after = lease.deadline;
        self.deadlines.remove(&(before, id.generation));
        self.deadlines.insert((after, id.generation));
        Ok(after)
    }

    /// Ends a lease early. Idempotent: only one call can free the item.
    pub(crate) fn release(&mut self, now: Duration, id: HandleId) -> Release<T> {
        match self.check(now, id) {
            Ok(()) => {}
            // Past its deadline but not swept yet: this call frees it.
            Err(Gone::Expired) if self.unswept(id) => {}
            Err(gone) => return Release::Gone(gone),
        }
        self.end(id.generation, Gone::Released);
        self.free(id.generation)
            .map_or(Release::Deferred, Release::Freed)
    }

    /// Ends every lease whose deadline has passed and returns the items that became free.
    pub(crate) fn expire(&mut self, now: Duration) -> Vec<T> {
        let mut freed = Vec::new();
        while let Some(&(deadline, generation)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.end(generation, Gone::Expired);
            freed.extend(self.free(generation));
        }
        freed
    }

    /// When [`Self::expire`] has something to do next.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// Leases whose item has not been given back.
    pub(crate) fn held(&self) -> usize {
        self.leases.len()
    }

    /// Pins that have not been given back.
    pub(crate) fn readers(&self) -> usize {
        self.readers
    }

    /// Leases that ended by time, since start.
    pub(crate) fn expired(&self) -> u64 {
        self.expired
    }

    /// Can the lease be read now?
    fn check(&self, now: Duration, id: HandleId) -> Result<(), Gone> {
        let generation = id.generation;
        match self.leases.get(&generation) {
            Some(lease) if lease.nonce == id.nonce => match lease.ended {
                Some(gone) => Err(gone),
                None if now >= lease.deadline => Err(Gone::Expired),
                None => Ok(()),
            },
            Some(_) => Err(Gone::Unknown),
            None => Err(match self.tombstones.get(&generation) {
                Some(&(nonce, gone)) if nonce == id.nonce => gone,
                Some(_) => Gone::Unknown,
                None if generation == 0 || generation > self.last_generation => Gone::Unknown,
                None => Gone::Forgotten,
            }),
        }
    }

    fn unswept(&self, id: HandleId) -> bool {
        self.leases
            .get(&id.generation)
            .is_some_and(|lease| lease.ended.is_none())
    }

    /// From now on nobody new may read it; the first reason stands.
    fn end(&mut self, generation: u64, reason: Gone) {
        if let Some(lease) = self.leases.get_mut(&generation)
            && lease.ended.is_none()
        {
            lease.ended = Some(reason);
            self.expired += u64::from(reason == Gone::Expired);
            self.deadlines.remove(&(lease.deadline, generation));
        }
    }

    /// Takes the item out if the lease has ended and no reader is left.
    fn free(&mut self, generation: u64) -> Option<T> {
        let lease = self.leases.get(&generation)?;
        let reason = lease.ended?;
        if lease.readers > 0 {
            return None;
        }
        let lease = self.leases.remove(&generation)?;
        self.tombstones.insert(generation, (lease.nonce, reason));
        self.buried.push_back(generation);
        if self.buried.len() > self.config.tombstones
            && let Some(oldest) = self.buried.pop_front()
        {
            self.tombstones.remove(&oldest);
        }
        Some(lease.item)
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
