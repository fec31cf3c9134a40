//! What each call offers and where it wants what comes. Lengths are checked here, before anything is allocated.

use crate::collective::{Ends, MAX_REDUCE};
use crate::error::Cause;
use crate::parts::Parts;
use crate::schedule::on_node;
use crate::topology::Topology;

/// Bytes that a piece of `length` takes in a slot.
pub(crate) fn padded(length: usize) -> u64 {
    (length as u64).saturating_add(8)
}

/// All-reduce among leaders: everybody gets the same values.
pub(crate) struct ReduceEnds<'a> {
    pub(crate) values: &'a [u64],
    pub(crate) incoming: &'a mut [u64],
    pub(crate) leaders: &'a [u32],
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
pub(crate) enum Out<'a> {
    Equal { all: &'a mut [u8], each: usize },
    Any { parts: &'a mut Parts, limit: usize },
}

impl Out<'_> {
    /// Most bytes a rank's part takes in a slot.
    pub(crate) fn limit(&self) -> u64 {
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

    pub(crate) fn room(&mut self, rank: u32, length: u64) -> Result<&mut [u8], Cause> {
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

fn part_room(parts: &mut Parts, rank: u32, length: u64, limit: usize) -> Result<&mut [u8], Cause> {
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
pub(crate) struct GatherEnds<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) rank: u32,
    pub(crate) mine: &'a [u8],
    pub(crate) out: Out<'a>,
    pub(crate) columns: bool,
}

impl GatherEnds<'_> {
    fn on_node(&self, rank: u32, node: u32) -> u32 {
        on_node(self.topology, rank, node)
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
pub(crate) struct ToAllEnds<'a> {
    pub(crate) send: &'a [u8],
    pub(crate) counts: &'a [usize],
    pub(crate) offsets: &'a [usize],
    pub(crate) received: &'a mut Parts,
    pub(crate) limit: usize,
}

impl<'a> ToAllEnds<'a> {
    pub(crate) fn part_for(&self, to: u32) -> &'a [u8] {
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
