//! What a rank's step asks of the other ranks of its instance. The engine has no sockets: whoever runs it brings the way.

use crate::ExecError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tag of the memory that all ranks need.
const MEMORY_TAG: u32 = 0;

/// Where a call stands. All ranks make the same calls at the same places, in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Turn of the group; never goes back.
    pub turn: u64,
    /// Place in the turn.
    pub tag: u32,
}

/// How two ranks' values become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// Their sum.
    Sum,
    /// The larger one.
    Max,
    /// The smaller one.
    Min,
}

/// The ways to the other ranks. Every wait has a deadline, and after an error every call fails.
pub trait Exchange: Send {
    /// This rank.
    fn rank(&self) -> u32;

    /// Number of ranks, at least 1.
    fn ranks(&self) -> u32;

    /// Replaces each value by what its op makes of it over all ranks.
    ///
    /// # Errors
    /// A rank died, stalled, or is in another call; the message names it.
    fn reduce(
        &mut self,
        place: Place,
        ops: &[Combine],
        values: &mut [u64],
    ) -> Result<(), ExchangeError>;

    /// Sends each rank its part of `send`, which holds the parts in the order of ranks, `counts` bytes long, and takes
    /// from each rank, itself included, at most `limit` bytes.
    ///
    /// # Errors
    /// As [`Self::reduce`]; also a part that is longer.
    fn all_to_all(
        &mut self,
        place: Place,
        send: &[u8],
        counts: &[usize],
        limit: usize,
    ) -> Result<(), ExchangeError>;

    /// Sends `mine`, at most `limit` bytes, to all ranks, and takes from each, itself included, at most as much.
    ///
    /// # Errors
    /// As [`Self::all_to_all`].
    fn all_gather(&mut self, place: Place, mine: &[u8], limit: usize) -> Result<(), ExchangeError>;

    /// What `rank` sent in the last [`Self::all_to_all`] or [`Self::all_gather`], at an address that is a multiple of 8;
    /// empty for a rank that does not exist.
    fn received(&self, rank: u32) -> &[u8];

    /// Nodes that the ranks are on, as many on each, in the order of ranks; 1 if that is not so or not known.
    fn nodes(&self) -> u32 {
        1
    }
}

/// The ranks cannot go on together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ExchangeError {
    /// The rank at fault.
    pub rank: u32,
    /// Which rank, what became of it, and where.
    pub message: String,
}

/// The ways to the other ranks, as the parts of one rank share them.
pub struct RankLink {
    rank: u32,
    ranks: u32,
    nodes: u32,
    exchange: Mutex<Box<dyn Exchange>>,
    turn: AtomicU64,
    /// Rows that every rank's part of a gather has room for; 0: as many as it has.
    padded_rows: AtomicUsize,
    sent: [AtomicU64; 3],
    moves: Mutex<ExpertMoves>,
}

/// Bytes that a rank has sent to others, each counted once per rank that it was sent to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentBytes {
    /// Rows for experts, with what is wanted of them.
    pub rows: u64,
    /// Outputs of experts.
    pub outputs: u64,
    /// Weights of experts that changed their seat.
    pub weights: u64,
}

/// Experts that changed their seats since a rank was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertMoves {
    /// Times that placements were derived from loads.
    pub plans: u64,
    /// Layers whose placement changed.
    pub layers: u64,
    /// Seats of this rank that got another expert.
    pub seats: u64,
    /// Rows of the fullest rank over those of a mean one, by the loads and the placements of the last plan: as layers were
    /// placed before it, the worst of them. 0 before the first plan with rows.
    pub balance_before: f64,
    /// The same as the plan placed them.
    pub balance_after: f64,
}

/// What is counted in [`SentBytes`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sent {
    Rows,
    Outputs,
    Weights,
}

impl RankLink {
    /// Over `exchange`.
    pub fn new(exchange: Box<dyn Exchange>) -> Self {
        Self {
            rank: exchange.rank(),
            ranks: exchange.ranks().max(1),
            nodes: exchange.nodes().max(1),
            exchange: Mutex::new(exchange),
            turn: AtomicU64::new(0),
            padded_rows: AtomicUsize::new(0),
            sent: Default::default(),
            moves: Mutex::default(),
        }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks, at least 1.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Nodes that the ranks are on.
    pub(crate) fn nodes(&self) -> u32 {
        self.nodes
    }

    /// What this rank has sent since it was made.
    pub fn sent(&self) -> SentBytes {
        let [rows, outputs, weights] = [Sent::Rows, Sent::Outputs, Sent::Weights]
            .map(|what| self.sent[what as usize].load(Ordering::Relaxed));
        SentBytes {
            rows,
            outputs,
            weights,
        }
    }

    /// How experts changed their seats.
    pub fn moves(&self) -> ExpertMoves {
        *self.moves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts changes of seats.
    pub(crate) fn count_moves(&self, count: impl FnOnce(&mut ExpertMoves)) {
        count(&mut self.moves.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Counts parts of an exchange, in the order of ranks, but what a rank sends itself.
    pub(crate) fn count(&self, what: Sent, parts: impl Iterator<Item = usize>) {
        let others = parts
            .enumerate()
            .filter(|(to, _)| *to != self.rank as usize);
        let bytes: usize = others.map(|(_, bytes)| bytes).sum();
        self.sent[what as usize].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Sets how many rows the parts of gathers have room for from now on, the same on all ranks; none: each rank sends
    /// what it has.
    pub(crate) fn pad_rows(&self, rows: Option<usize>) {
        self.padded_rows.store(rows.unwrap_or(0), Ordering::Relaxed);
    }

    /// See [`Self::pad_rows`]; 0: none.
    pub(crate) fn padded_rows(&self) -> usize {
        self.padded_rows.load(Ordering::Relaxed)
    }

    /// Adds up what the ranks of a node need in memory, for the largest part of any rank, and the least that any of them
    /// sees available: `(needed, available)` in bytes, the same on all ranks. To be called before weights are read, by
    /// all; none goes on before all have come.
    ///
    /// # Errors
    /// As [`Exchange::reduce`].
    pub fn add_up_memory(&self, needed: u64, available: u64) -> Result<(u64, u64), ExchangeError> {
        let mut values = [needed, available];
        let ops = [Combine::Max, Combine::Min];
        self.open()
            .reduce(self.place(MEMORY_TAG), &ops, &mut values)?;
        let here = self.ranks / self.nodes.max(1);
        Ok((values[0].saturating_mul(here.into()), values[1]))
    }

    /// Begins the next turn: places are counted from here.
    pub(crate) fn next_turn(&self) {
        self.turn.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn place(&self, tag: u32) -> Place {
        Place {
            turn: self.turn.load(Ordering::Relaxed),
            tag,
        }
    }

    /// The ways, for one thread at a time.
    pub(crate) fn open(&self) -> MutexGuard<'_, Box<dyn Exchange>> {
        self.exchange.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for RankLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankLink")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

impl From<ExchangeError> for ExecError {
    fn from(error: ExchangeError) -> Self {
        Self::RankLost {
            rank: error.rank,
            message: error.message,
        }
    }
}
