//! The trait that a rank's engine thread calls, and what moves bytes behind it.

use crate::call::{At, Op, Route};
use crate::error::{Cause, CommError};
use crate::parts::Parts;
use crate::topology::Topology;
use std::time::{Duration, Instant};

/// Most values of one [`Collective::all_reduce`].
pub const MAX_REDUCE: usize = 256;

/// Payload that this rank gave to peers, by where they are. A byte that two peers read counts twice, over whatever it
/// travelled; heads and frames do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes to ranks of the same node.
    pub intra_node: u64,
    /// Bytes to ranks of other nodes.
    pub inter_node: u64,
    /// Calls of collectives that came to their end.
    pub calls: u64,
}

/// Collectives of a group of ranks. Synchronous: called from the rank's engine thread, which they block.
///
/// All ranks make the same calls in the same order, at the same places ([`At`]): a rank that differs is named. A call
/// ends with an error when a rank has died, does not come within [`Collective::set_patience`], is in another call or
/// sends what can't be; from then on every call of every rank ends with an error.
pub trait Collective: Send {
    /// This rank.
    fn rank(&self) -> u32;

    /// Where all ranks are.
    fn topology(&self) -> &Topology;

    /// Sets how long a rank is waited for, from the next call on. Who waits for somebody who waits in turn does so up
    /// to three seconds longer, so that those who know best name the rank that is missing.
    fn set_patience(&mut self, patience: Duration);

    /// Replaces each of `values` by what `ops` make of it over all ranks. `ops` has one op for all values or one for
    /// each. At most [`MAX_REDUCE`] values. Allocates nothing.
    ///
    /// # Errors
    /// See [`Collective`]; `values` is of no use then.
    fn all_reduce(&mut self, at: At, ops: &[Op], values: &mut [u64]) -> Result<(), CommError>;

    /// Gathers `mine` of all ranks, of one size, into `all`, in the order of ranks; `all` has `world × mine.len()`
    /// bytes. Padding different sizes to one is the caller's.
    ///
    /// # Errors
    /// See [`Collective`].
    fn all_gather(
        &mut self,
        at: At,
        route: Route,
        mine: &[u8],
        all: &mut [u8],
    ) -> Result<(), CommError>;

    /// Gathers `mine` of all ranks, of any size up to `limit`, into `all`.
    ///
    /// # Errors
    /// See [`Collective`]. No rank's length is allocated before it was found to be at most `limit`.
    fn all_gather_v(
        &mut self,
        at: At,
        route: Route,
        mine: &[u8],
        limit: usize,
        all: &mut Parts,
    ) -> Result<(), CommError>;

    /// Sends to each rank its part of `send`, which holds the parts in the order of ranks, `counts` bytes long, and
    /// receives into `received` what each rank sent here, at most `limit` bytes from each.
    ///
    /// # Errors
    /// See [`Collective`]. No rank's length is allocated before it was found to be at most `limit`.
    fn all_to_all(
        &mut self,
        at: At,
        send: &[u8],
        counts: &[usize],
        limit: usize,
        received: &mut Parts,
    ) -> Result<(), CommError>;

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// See [`Collective`].
    fn barrier(&mut self, at: At) -> Result<(), CommError>;

    /// What this rank gave so far.
    fn traffic(&self) -> Traffic;
}

/// How long a stage of a call waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub(crate) until: Instant,
    /// What is added where the one waited for may himself wait for another.
    pub(crate) grace: Duration,
}

/// What a call offers to peers and where it wants what they offer. Asked by the ways that bytes take (shared memory,
/// TCP), which know nothing of the call.
pub(crate) trait Ends {
    /// Piece `piece` for `to`.
    fn offer(&self, to: u32, piece: u32) -> &[u8];

    /// Room for `length` bytes, which are piece `piece` of `from`. Called at least once for each piece, and again as
    /// its bytes come: the same room each time. Nothing is allocated for a length that is refused.
    fn room(&mut self, from: u32, piece: u32, length: u64) -> Result<&mut [u8], Cause>;
}
