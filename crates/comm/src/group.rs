//! The collectives, over the ways that a group has: shared memory among the ranks of its domain, TCP to all others.
//! Who exchanges with whom stands in `schedule`.
//!
//! A rank that is missing is to be named by those who wait for it, and not those by others who wait for them. So who
//! waits for somebody that may wait in turn does so a little longer.

use crate::board::Board;
use crate::call::{At, Call, Head, Misuse, Op, Reached, Route, Sequence, ops_code};
use crate::collective::{Collective, Ends, MAX_REDUCE, Traffic, Wait};
use crate::ends::{GatherEnds, Out, ReduceEnds, ToAllEnds, padded};
use crate::error::{Cause, CommError, Failure, misused};
use crate::mesh::{Mesh, Stop};
use crate::parts::Parts;
use crate::schedule::{Peers, domain};
use crate::topology::{PeerClass, Topology};
use crate::watch::Watch;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use twinfer_protocol::Epoch;

/// How a group waits and what memory it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long a rank is waited for in a collective.
    pub patience: Duration,
    /// How long a rank spins before it sleeps, at most 20 µs: only on cores of its own. Zero: not at all.
    pub spin: Duration,
    /// Bytes of a slot of shared memory; each rank has two. Larger messages take several rounds.
    pub slot_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(10),
            spin: Duration::ZERO,
            slot_bytes: 512 << 10,
        }
    }
}

/// One rank's end of a group.
#[derive(Debug)]
pub struct Group {
    rank: u32,
    topology: Arc<Topology>,
    /// Some ranks share memory and are connected to others over TCP.
    domains: bool,
    /// Ranks that share this rank's board.
    domain: Range<u32>,
    sequence: Sequence,
    patience: Duration,
    peers: Peers,
    /// Values of the other leaders, in their order.
    incoming: Vec<u64>,
    /// Where the parts of an all-to-all start.
    offsets: Vec<usize>,
    traffic: Traffic,
    failed: Option<CommError>,
    stopper: Stopper,
    // The watch uses the board's memory and stops before it is left.
    _watch: Option<Watch>,
    board: Option<Board>,
    mesh: Option<Mesh>,
}

/// What a group is made of.
pub(crate) struct Wiring {
    pub(crate) rank: u32,
    pub(crate) topology: Arc<Topology>,
    pub(crate) epoch: Epoch,
    pub(crate) options: Options,
    /// Ranks of a node share memory; the same on every rank.
    pub(crate) shares: bool,
    /// The board, if memory is shared and the node has other ranks.
    pub(crate) board: Option<Board>,
    pub(crate) watch: Option<Watch>,
    pub(crate) mesh: Option<Mesh>,
    pub(crate) stop: Arc<Stop>,
}

/// Ends a group from another thread: a wait in progress ends at once, and every call after it.
#[derive(Clone, Debug)]
pub struct Stopper {
    rank: u32,
    stop: Arc<Stop>,
    shared: Option<Arc<crate::board::Shared>>,
}

impl Stopper {
    /// This rank is to stop.
    pub fn stop(&self) {
        self.end(self.rank, Cause::Stopped);
    }

    /// Somebody who watches the ranks knows that `rank` has died.
    pub fn lost(&self, rank: u32) {
        self.end(rank, Cause::Died);
    }

    fn end(&self, rank: u32, cause: Cause) {
        let failure = Failure {
            rank,
            cause,
            reporter: self.rank,
            during: None,
            last: None,
        };
        self.stop.stop(failure);
        if let Some(shared) = &self.shared {
            shared.fail(&failure);
        }
    }
}

impl Group {
    pub(crate) fn new(wiring: Wiring) -> Self {
        let Wiring {
            rank,
            topology,
            epoch,
            options,
            shares,
            board,
            watch,
            mesh,
            stop,
        } = wiring;
        let domain = domain(&topology, rank, shares);
        let peers = Peers::new(&topology, rank, shares);
        let domains = shares && topology.nodes() > 1 && topology.world() > topology.nodes();
        Self {
            rank,
            sequence: Sequence::new(epoch),
            patience: options.patience,
            incoming: vec![0; peers.leaders.len() * MAX_REDUCE],
            offsets: Vec::with_capacity(topology.world() as usize),
            traffic: Traffic::default(),
            failed: None,
            stopper: Stopper {
                rank,
                stop,
                shared: board.as_ref().map(|board| Arc::clone(board.shared())),
            },
            peers,
            topology,
            domains,
            domain,
            _watch: watch,
            board,
            mesh,
        }
    }

    /// Incarnation of the instance that the group belongs to: that of every call.
    pub fn epoch(&self) -> Epoch {
        self.sequence.epoch()
    }

    /// Lets another thread end the group.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// The error that ended the group.
    pub fn error(&self) -> Option<&CommError> {
        self.failed.as_ref()
    }

    /// Numbers a call, does it, and ends the group when it fails.
    fn call(
        &mut self,
        at: At,
        call: Call,
        body: impl FnOnce(&mut Self, Reached, Deadlines) -> Result<(), Failure>,
    ) -> Result<(), CommError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let (reached, outcome) = self.sequence.begin(at, call);
        let deadlines = Deadlines::new(self.patience, self.domains);
        let outcome = match (self.stopper.stop.failure(), outcome) {
            (Some(failure), _) => Err(failure),
            (None, Err(misuse)) => Err(misused(self.rank, reached, misuse)),
            (None, Ok(())) => body(self, reached, deadlines),
        };
        match outcome {
            Ok(()) => {
                self.traffic.calls += 1;
                Ok(())
            }
            Err(failure) => Err(self.fail(failure)),
        }
    }

    fn fail(&mut self, failure: Failure) -> CommError {
        let mut first = failure;
        if let Some(board) = &self.board {
            board.shared().fail(&failure);
            // What the first of the node to notice found is what all of it tell.
            first = board.shared().failure().unwrap_or(failure);
        }
        first.during = first.during.or(failure.during);
        if let Some(mesh) = &mut self.mesh {
            mesh.announce(&first);
        }
        let error = CommError::from(first);
        self.failed = Some(error.clone());
        error
    }

    fn check(&self, reached: Reached, fits: bool, misuse: Misuse) -> Result<(), Failure> {
        match fits {
            true => Ok(()),
            false => Err(misused(self.rank, reached, misuse)),
        }
    }

    fn world(&self) -> usize {
        self.topology.world() as usize
    }

    fn count(&mut self, to: u32, bytes: usize) {
        let place = match self.topology.class(self.rank, to) {
            PeerClass::IntraNode => &mut self.traffic.intra_node,
            PeerClass::InterNode => &mut self.traffic.inter_node,
        };
        *place += bytes as u64;
    }

    /// Other ranks of the domain.
    fn count_domain(&mut self, bytes: usize) {
        for to in self.domain.clone() {
            if to != self.rank {
                self.count(to, bytes);
            }
        }
    }

    fn reduce(
        &mut self,
        reached: Reached,
        ops: &[Op],
        values: &mut [u64],
        deadlines: Deadlines,
    ) -> Result<(), Failure> {
        let head = Head {
            reached,
            detail: ops_code(ops),
            length: 0,
        };
        let op_of = |place: usize| match ops {
            [op] => *op,
            _ => ops.get(place).copied().unwrap_or(Op::Sum),
        };
        let bytes = size_of_val(values);
        if let Some(board) = &mut self.board {
            board.reduce(&head, values, op_of, deadlines.board())?;
            self.count_domain(bytes);
        }
        if self.peers.remote.is_empty() {
            return Ok(());
        }
        if let (Some(mesh), false) = (&mut self.mesh, self.peers.leaders.is_empty()) {
            let mut ends = ReduceEnds {
                values,
                incoming: &mut self.incoming,
                leaders: &self.peers.leaders,
            };
            let wait = deadlines.leaders();
            mesh.exchange(&head, 0, &self.peers.leaders, wait, &mut ends)?;
            for theirs in self
                .incoming
                .chunks_exact(MAX_REDUCE)
                .take(self.peers.leaders.len())
            {
                for (place, (value, theirs)) in values.iter_mut().zip(theirs).enumerate() {
                    *value = op_of(place).apply(*value, *theirs);
                }
            }
            for place in 0..self.peers.leaders.len() {
                self.count(self.peers.leaders[place], bytes);
            }
        }
        if let Some(board) = &mut self.board {
            board.broadcast(&head, values, deadlines.board())?;
            if self.domain.start == self.rank {
                self.count_domain(bytes);
            }
        }
        Ok(())
    }

    fn gather(
        &mut self,
        reached: Reached,
        route: Route,
        mine: &[u8],
        mut out: Out<'_>,
        deadlines: Deadlines,
    ) -> Result<(), Failure> {
        let topology = Arc::clone(&self.topology);
        let head = Head {
            reached,
            detail: 0,
            length: 0,
        };
        let (rank, limit) = (self.rank, out.limit());
        out.room(rank, mine.len() as u64)
            .map(|room| room.copy_from_slice(mine))
            .map_err(|_| misused(rank, reached, Misuse::Lengths))?;
        let mut ends = GatherEnds {
            topology: &topology,
            rank,
            mine,
            out,
            columns: false,
        };
        if route == Route::Flat {
            if let Some(board) = &mut self.board {
                board.stream(&head, 1, 0..1, limit, deadlines.board(), &mut ends)?;
                self.count_domain(mine.len());
            }
            if let Some(mesh) = &mut self.mesh {
                mesh.exchange(&head, 0, &self.peers.remote, deadlines.mesh(), &mut ends)?;
                for place in 0..self.peers.remote.len() {
                    self.count(self.peers.remote[place], mine.len());
                }
            }
            return Ok(());
        }
        let even = topology.is_even();
        self.check(reached, even, Misuse::UnevenNodes)?;
        if let (Some(mesh), false) = (&mut self.mesh, self.peers.column.is_empty()) {
            mesh.exchange(&head, 0, &self.peers.column, deadlines.mesh(), &mut ends)?;
            for place in 0..self.peers.column.len() {
                self.count(self.peers.column[place], mine.len());
            }
        }
        ends.columns = true;
        let nodes = topology.nodes();
        let column: usize = (0..nodes).map(|node| ends.offer(rank, node).len()).sum();
        let head = head.with_detail(1);
        if let Some(board) = &mut self.board {
            let most = limit.saturating_mul(nodes.into());
            board.stream(&head, nodes, 0..nodes, most, deadlines.board(), &mut ends)?;
            self.count_domain(column);
        } else if let (Some(mesh), false) = (&mut self.mesh, self.peers.mates.is_empty()) {
            for node in 0..nodes {
                let head = head.with_detail(1 + node);
                // A mate that does not come may wait for one of its column.
                let wait = deadlines.wait(2);
                mesh.exchange(&head, node, &self.peers.mates, wait, &mut ends)?;
            }
            for place in 0..self.peers.mates.len() {
                self.count(self.peers.mates[place], column);
            }
        }
        Ok(())
    }
}

impl Collective for Group {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn topology(&self) -> &Topology {
        &self.topology
    }

    fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    fn all_reduce(&mut self, at: At, ops: &[Op], values: &mut [u64]) -> Result<(), CommError> {
        self.call(at, Call::AllReduce, |group, reached, deadlines| {
            let few = values.len() <= MAX_REDUCE;
            group.check(reached, few, Misuse::TooManyValues)?;
            let fits = ops.len() == 1 || ops.len() == values.len();
            group.check(reached, fits, Misuse::Lengths)?;
            group.reduce(reached, ops, values, deadlines)
        })
    }

    fn all_gather(
        &mut self,
        at: At,
        route: Route,
        mine: &[u8],
        all: &mut [u8],
    ) -> Result<(), CommError> {
        self.call(at, Call::AllGather(route), |group, reached, deadlines| {
            let fits = mine.len().checked_mul(group.world()) == Some(all.len());
            group.check(reached, fits, Misuse::Lengths)?;
            let out = Out::Equal {
                all,
                each: mine.len(),
            };
            group.gather(reached, route, mine, out, deadlines)
        })
    }

    fn all_gather_v(
        &mut self,
        at: At,
        route: Route,
        mine: &[u8],
        limit: usize,
        all: &mut Parts,
    ) -> Result<(), CommError> {
        self.call(at, Call::AllGatherV(route), |group, reached, deadlines| {
            group.check(reached, mine.len() <= limit, Misuse::Lengths)?;
            all.fit(group.topology.world());
            let out = Out::Any { parts: all, limit };
            group.gather(reached, route, mine, out, deadlines)
        })
    }

    fn all_to_all(
        &mut self,
        at: At,
        send: &[u8],
        counts: &[usize],
        limit: usize,
        received: &mut Parts,
    ) -> Result<(), CommError> {
        self.call(at, Call::AllToAll, |group, reached, deadlines| {
            let mut total = 0_usize;
            group.offsets.clear();
            for &count in counts {
                group.offsets.push(total);
                total = total.saturating_add(count);
            }
            let fits = counts.len() == group.world() && total == send.len();
            group.check(reached, fits, Misuse::Lengths)?;
            received.fit(group.topology.world());
            let mut ends = ToAllEnds {
                send,
                counts,
                offsets: &group.offsets,
                received,
                limit,
            };
            let head = Head {
                reached,
                detail: 0,
                length: 0,
            };
            let own = ends.part_for(group.rank);
            if let Some(room) = ends.received.part_mut(group.rank) {
                room.set_len(own.len());
                room.as_mut_slice().copy_from_slice(own);
            }
            if let Some(board) = &mut group.board {
                let members = group.domain.len() as u32;
                let mine = group.rank - group.domain.start;
                let most = padded(limit).saturating_mul(members.into());
                let wait = deadlines.board();
                board.stream(&head, members, mine..mine + 1, most, wait, &mut ends)?;
            }
            if let Some(mesh) = &mut group.mesh {
                mesh.exchange(&head, 0, &group.peers.remote, deadlines.mesh(), &mut ends)?;
            }
            for (to, &count) in (0..).zip(counts) {
                if to != group.rank {
                    group.count(to, count);
                }
            }
            Ok(())
        })
    }

    fn barrier(&mut self, at: At) -> Result<(), CommError> {
        self.call(at, Call::Barrier, |group, reached, deadlines| {
            group.reduce(reached, &[Op::Sum], &mut [], deadlines)
        })
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }
}

/// Until when the stages of a call wait. Grows with what the ranks waited for may wait for themselves:
///
/// - on a board, for a rank of the domain: not longer, unless that rank gives signs that it waits for ranks outside;
/// - for a rank of another domain: until it has named a rank of its own domain;
/// - for the leader of another domain: until its ranks have named a rank of a third domain.
#[derive(Clone, Copy)]
struct Deadlines {
    first: Instant,
    grace: Duration,
    /// Some ranks outside share memory with others.
    domains: bool,
}

impl Deadlines {
    fn new(patience: Duration, domains: bool) -> Self {
        Self {
            first: Instant::now() + patience,
            grace: (patience / 8).clamp(Duration::from_millis(50), Duration::from_millis(500)),
            domains,
        }
    }

    fn wait(self, graces: u32) -> Wait {
        Wait {
            until: self.first + self.grace * graces,
            grace: self.grace,
        }
    }

    fn board(self) -> Wait {
        self.wait(0)
    }

    fn mesh(self) -> Wait {
        self.wait(if self.domains { 2 } else { 0 })
    }

    fn leaders(self) -> Wait {
        self.wait(if self.domains { 4 } else { 0 })
    }
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;
