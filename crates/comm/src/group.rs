//! The collectives, over the ways that a group has: shared memory among the ranks of its domain, TCP to all others.
//!
//! A domain is the ranks that share a board: those of a node, or one rank alone where memory is not shared. In a call
//! that goes through several stages, each stage waits a little longer than the one before, so that the rank that is
//! missing is named by those who wait for it and not by those who wait for these.

use crate::board::Board;
use crate::call::{At, Call, Head, Misuse, Op, Reached, Route, Sequence, ops_code};
use crate::collective::{Collective, Ends, MAX_REDUCE, Traffic};
use crate::error::{Cause, CommError, Failure, misused};
use crate::mesh::{Mesh, Stop};
use crate::parts::Parts;
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
    /// Ranks that share this rank's board.
    domain: Range<u32>,
    sequence: Sequence,
    patience: Duration,
    lists: Lists,
    /// Values of the other leaders, in the order of [`Lists::leaders`].
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

/// Peers by the part they have in a call. This rank is in none.
#[derive(Debug, Default)]
struct Lists {
    /// First ranks of the other domains; empty if this one is not the first of its own.
    leaders: Vec<u32>,
    /// All ranks outside the domain.
    remote: Vec<u32>,
    /// Ranks of other nodes with this local rank.
    column: Vec<u32>,
    /// Ranks of this node outside the domain.
    mates: Vec<u32>,
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

impl Lists {
    fn new(rank: u32, topology: &Topology, domain: &Range<u32>, shares: bool) -> Self {
        let outside = |other: &u32| !domain.contains(other);
        let node = topology.ranks_of(topology.node_of(rank));
        let leaders = (0..topology.world())
            .filter(outside)
            .filter(|&other| !shares || topology.leader_of(other) == other);
        Self {
            leaders: match domain.start == rank {
                true => leaders.collect(),
                false => Vec::new(),
            },
            remote: (0..topology.world()).filter(outside).collect(),
            column: topology.column(rank).into_iter().filter(outside).collect(),
            mates: node.filter(outside).collect(),
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
        let domain = match shares {
            true => topology.ranks_of(topology.node_of(rank)),
            false => rank..rank + 1,
        };
        let lists = Lists::new(rank, &topology, &domain, shares);
        Self {
            rank,
            sequence: Sequence::new(epoch),
            patience: options.patience,
            incoming: vec![0; lists.leaders.len() * MAX_REDUCE],
            offsets: Vec::with_capacity(topology.world() as usize),
            traffic: Traffic::default(),
            failed: None,
            stopper: Stopper {
                rank,
                stop,
                shared: board.as_ref().map(|board| Arc::clone(board.shared())),
            },
            lists,
            topology,
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
        let deadlines = Deadlines::new(self.patience);
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
            board.reduce(&head, values, op_of, deadlines.stage(0))?;
            self.count_domain(bytes);
        }
        if self.lists.remote.is_empty() {
            return Ok(());
        }
        if let (Some(mesh), false) = (&mut self.mesh, self.lists.leaders.is_empty()) {
            let mut ends = ReduceEnds {
                values,
                incoming: &mut self.incoming,
                leaders: &self.lists.leaders,
            };
            let until = deadlines.stage(1);
            mesh.exchange(&head, 0, &self.lists.leaders, until, &mut ends)?;
            for theirs in self
                .incoming
                .chunks_exact(MAX_REDUCE)
                .take(self.lists.leaders.len())
            {
                for (place, (value, theirs)) in values.iter_mut().zip(theirs).enumerate() {
                    *value = op_of(place).apply(*value, *theirs);
                }
            }
            for place in 0..self.lists.leaders.len() {
                self.count(self.lists.leaders[place], bytes);
            }
        }
        if let Some(board) = &mut self.board {
            board.broadcast(&head, values, deadlines.stage(2))?;
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
                board.stream(&head, 1, 0..1, limit, deadlines.stage(0), &mut ends)?;
                self.count_domain(mine.len());
            }
            if let Some(mesh) = &mut self.mesh {
                let until = deadlines.stage(1);
                mesh.exchange(&head, 0, &self.lists.remote, until, &mut ends)?;
                for place in 0..self.lists.remote.len() {
                    self.count(self.lists.remote[place], mine.len());
                }
            }
            return Ok(());
        }
        let even = topology.is_even();
        self.check(reached, even, Misuse::UnevenNodes)?;
        if let (Some(mesh), false) = (&mut self.mesh, self.lists.column.is_empty()) {
            let until = deadlines.stage(0);
            mesh.exchange(&head, 0, &self.lists.column, until, &mut ends)?;
            for place in 0..self.lists.column.len() {
                self.count(self.lists.column[place], mine.len());
            }
        }
        ends.columns = true;
        let nodes = topology.nodes();
        let column: usize = (0..nodes).map(|node| ends.offer(rank, node).len()).sum();
        let head = head.with_detail(1);
        if let Some(board) = &mut self.board {
            let most = limit.saturating_mul(nodes.into());
            board.stream(&head, nodes, 0..nodes, most, deadlines.stage(1), &mut ends)?;
            self.count_domain(column);
        } else if let (Some(mesh), false) = (&mut self.mesh, self.lists.mates.is_empty()) {
            for node in 0..nodes {
                let head = head.with_detail(1 + node);
                let until = deadlines.stage(1);
                mesh.exchange(&head, node, &self.lists.mates, until, &mut ends)?;
            }
            for place in 0..self.lists.mates.len() {
                self.count(self.lists.mates[place], column);
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
            let own = ends.offer(group.rank, 0);
            let room = ends.received.part_mut(group.rank);
            if let Some(room) = room {
                room.set_len(own.len());
                room.as_mut_slice().copy_from_slice(own);
            }
            if let Some(board) = &mut group.board {
                let members = group.domain.len() as u32;
                let mine = group.rank - group.domain.start;
                let most = padded(limit).saturating_mul(members.into());
                let until = deadlines.stage(0);
                board.stream(&head, members, mine..mine + 1, most, until, &mut ends)?;
            }
            if let Some(mesh) = &mut group.mesh {
                let until = deadlines.stage(1);
                mesh.exchange(&head, 0, &group.lists.remote, until, &mut ends)?;
            }
            for to in (0..group.topology.world()).filter(|&to| to != group.rank) {
                group.count(to, counts[to as usize]);
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

/// Until when the stages of a call wait.
#[derive(Clone, Copy)]
struct Deadlines {
    first: Instant,
    grace: Duration,
}

impl Deadlines {
    fn new(patience: Duration) -> Self {
        Self {
            first: Instant::now() + patience,
            grace: (patience / 8).clamp(Duration::from_millis(50), Duration::from_millis(500)),
        }
    }

    fn stage(self, stage: u32) -> Instant {
        self.first + self.grace * stage
    }
}

/// Bytes that a piece of `length` takes in a slot.
fn padded(length: usize) -> u64 {
    (length as u64).saturating_add(8)
}

/// All-reduce among leaders: everybody gets the same values.
struct ReduceEnds<'a> {
    values: &'a [u64],
    incoming: &'a mut [u64],
    leaders: &'a [u32],
}

impl Ends for ReduceEnds<'_> {
    fn offer(&self, _to: u32, _piece: u32) -> &[u8] {
        bytemuck::cast_slice(self.values)
    }

    fn room(&mut self, from: u32, _piece: u32, length: u64) -> Result<&mut [u8], Cause> {
        let expected = size_of_val(self.values) as u64;
        if length != expected {
            let got = length;
            return Err(Cause::Unequal { expected, got });
        }
        let place = self.leaders.binary_search(&from);
        let start = place.map_err(|_| Cause::Damaged)? * MAX_REDUCE;
        let room = self.incoming.get_mut(start..start + self.values.len());
        room.map(bytemuck::cast_slice_mut).ok_or(Cause::Damaged)
    }
}

/// Where a gather's bytes go.
enum Out<'a> {
    Equal { all: &'a mut [u8], each: usize },
    Any { parts: &'a mut Parts, limit: usize },
}

impl Out<'_> {
    /// Most bytes a rank's part takes in a slot.
    fn limit(&self) -> u64 {
        padded(match self {
            Self::Equal { each, .. } => *each,
            Self::Any { limit, .. } => *limit,
        })
    }

    fn bytes(&self, rank: u32) -> &[u8] {
        match self {
            Self::Equal { all, each } => {
                let start = rank as usize * each;
                all.get(start..start + each).unwrap_or_default()
            }
            Self::Any { parts, .. } => parts.part(rank),
        }
    }

    fn room(&mut self, rank: u32, length: u64) -> Result<&mut [u8], Cause> {
        match self {
            Self::Equal { all, each } => {
                let (expected, start) = (*each as u64, rank as usize * *each);
                if length != expected {
                    let got = length;
                    return Err(Cause::Unequal { expected, got });
                }
                all.get_mut(start..start + *each).ok_or(Cause::Damaged)
            }
            Self::Any { parts, limit } => part_room(parts, rank, length, *limit),
        }
    }
}

fn part_room(
    parts: &mut Parts,
    rank: u32,
    length: u64,
    limit: usize,
) -> Result<&mut [u8], Cause> {
    let length = usize::try_from(length)
        .ok()
        .filter(|&length| length <= limit)
        .ok_or(Cause::TooLong {
            limit: limit as u64,
            got: length,
        })?;
    let part = parts.part_mut(rank).ok_or(Cause::Damaged)?;
    part.set_len(length);
    Ok(part.as_mut_slice())
}

/// A gather: this rank's bytes to everybody; or, in the second stage, the bytes of its column.
struct GatherEnds<'a> {
    topology: &'a Topology,
    rank: u32,
    mine: &'a [u8],
    out: Out<'a>,
    columns: bool,
}

impl GatherEnds<'_> {
    /// The rank on `node` with the local rank of `rank`.
    fn on_node(&self, rank: u32, node: u32) -> u32 {
        self.topology.ranks_of(node).start + self.topology.local_rank(rank)
    }
}

impl Ends for GatherEnds<'_> {
    fn offer(&self, _to: u32, piece: u32) -> &[u8] {
        match self.columns {
            true => self.out.bytes(self.on_node(self.rank, piece)),
            false => self.mine,
        }
    }

    fn room(&mut self, from: u32, piece: u32, length: u64) -> Result<&mut [u8], Cause> {
        let of = match self.columns {
            true => self.on_node(from, piece),
            false => from,
        };
        self.out.room(of, length)
    }
}

/// An all-to-all: a part for each rank, a part from each.
struct ToAllEnds<'a> {
    send: &'a [u8],
    counts: &'a [usize],
    offsets: &'a [usize],
    received: &'a mut Parts,
    limit: usize,
}

impl<'a> ToAllEnds<'a> {
    fn part_for(&self, to: u32) -> &'a [u8] {
        let place = to as usize;
        self.offsets
            .get(place)
            .zip(self.counts.get(place))
            .and_then(|(&start, &count)| self.send.get(start..start + count))
            .unwrap_or_default()
    }
}

impl Ends for ToAllEnds<'_> {
    fn offer(&self, to: u32, _piece: u32) -> &[u8] {
        self.part_for(to)
    }

    fn room(&mut self, from: u32, _piece: u32, length: u64) -> Result<&mut [u8], Cause> {
        part_room(self.received, from, length, self.limit)
    }
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;
