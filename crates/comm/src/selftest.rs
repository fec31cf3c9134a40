//! What all ranks do together before weights are loaded: every collective, with contents that are known.

use crate::call::{At, Op, Route};
use crate::collective::Collective;
use crate::error::CommError;
use crate::parts::Parts;
use twinfer_protocol::Epoch;

/// Bytes of the gathers, from each rank: nothing, less than a word, more than a slot of the default size.
const SIZES: [usize; 5] = [0, 1, 63, 4096, (600 << 10) + 5];
/// Mark of the calls of the test.
const TAG: u32 = 0x7e57_0000;

/// Why a group is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelfTestError {
    /// A collective did not come to its end.
    #[error("start-up test of the ranks: {0}")]
    Failed(#[from] CommError),
    /// A collective came to its end with other values than it should have.
    #[error(
        "start-up test of the ranks: {call} ended with other values than it should on rank {rank}, in the part of rank {of}"
    )]
    Wrong {
        /// The collective.
        call: &'static str,
        /// The rank that noticed.
        rank: u32,
        /// Whose bytes they should be.
        of: u32,
    },
}

/// Runs every collective at step 0 of `epoch` and checks what comes out. All ranks call it, before step 1. When one
/// finds a wrong value all end with an error.
///
/// # Errors
/// [`SelfTestError`].
pub fn start_up_test(group: &mut dyn Collective, epoch: Epoch) -> Result<(), SelfTestError> {
    let wrong = run(group, epoch)?;
    // What one rank found wrong no rank goes on with: 0 is nothing, else the finder + 1.
    let mut found = [wrong.map_or(0, |_| u64::from(group.rank()) + 1)];
    group.all_reduce(At::new(epoch, 0, TAG + 99), &[Op::Max], &mut found)?;
    match (wrong, found) {
        (Some((call, of)), _) => Err(SelfTestError::Wrong {
            call,
            rank: group.rank(),
            of,
        }),
        (None, [0]) => Ok(()),
        (None, [finder]) => Err(SelfTestError::Wrong {
            call: "a collective",
            rank: u32::try_from(finder - 1).unwrap_or(u32::MAX),
            of: group.rank(),
        }),
    }
}

/// A byte that stands at `place` of what `from` sends to `to`.
fn byte(from: u32, to: u32, place: usize) -> u8 {
    (from.wrapping_mul(31)
        ^ to.wrapping_mul(17)
        ^ (place as u32).wrapping_mul(7)
        ^ (place as u32 >> 8)) as u8
}

fn bytes(from: u32, to: u32, length: usize) -> Vec<u8> {
    (0..length).map(|place| byte(from, to, place)).collect()
}

fn are(part: &[u8], from: u32, to: u32, length: usize) -> bool {
    let mut places = part.iter().enumerate();
    part.len() == length && places.all(|(place, &found)| found == byte(from, to, place))
}

/// The first collective with a wrong value, and whose part it is in.
fn run(group: &mut dyn Collective, epoch: Epoch) -> Result<Option<(&'static str, u32)>, CommError> {
    let (rank, world) = (group.rank(), group.topology().world());
    let routes: &[Route] = match group.topology().is_even() {
        true => &[Route::Flat, Route::TwoStage],
        false => &[Route::Flat],
    };
    let mut tag = TAG;
    let mut at = || {
        tag += 1;
        At::new(epoch, 0, tag)
    };
    let mut wrong = None;
    group.barrier(at())?;
    let mut values = [u64::from(rank) + 1, u64::from(rank), u64::from(rank) + 5];
    group.all_reduce(at(), &[Op::Sum, Op::Max, Op::Min], &mut values)?;
    let ranks = u64::from(world);
    if values != [ranks * (ranks + 1) / 2, ranks - 1, 5] {
        wrong = wrong.or(Some(("all-reduce", rank)));
    }
    let mut parts = Parts::new(world);
    for &route in routes {
        for size in SIZES {
            let mut all = vec![0; size * world as usize];
            group.all_gather(at(), route, &bytes(rank, 0, size), &mut all)?;
            for (from, part) in (0..world).zip(all.chunks(size.max(1))) {
                if !are(part, from, 0, size) {
                    wrong = wrong.or(Some(("all-gather", from)));
                }
            }
            // Sizes that differ from rank to rank, one of them 0.
            let of = |from: u32| size * from as usize / world as usize;
            let mine = bytes(rank, 1, of(rank));
            group.all_gather_v(at(), route, &mine, size, &mut parts)?;
            for (from, part) in (0..world).zip(parts.iter()) {
                if !are(part, from, 1, of(from)) {
                    wrong = wrong.or(Some(("all-gather of any sizes", from)));
                }
            }
        }
    }
    for size in SIZES {
        let of = |from: u32, to: u32| match (from + to).is_multiple_of(3) {
            true => 0,
            false => size / world as usize + (from * 3 + to) as usize,
        };
        let counts: Vec<usize> = (0..world).map(|to| of(rank, to)).collect();
        let send: Vec<u8> = (0..world)
            .flat_map(|to| bytes(rank, to, of(rank, to)))
            .collect();
        let limit = size + 4 * world as usize;
        group.all_to_all(at(), &send, &counts, limit, &mut parts)?;
        for (from, part) in (0..world).zip(parts.iter()) {
            if !are(part, from, rank, of(from, rank)) {
                wrong = wrong.or(Some(("all-to-all", from)));
            }
        }
    }
    group.barrier(at())?;
    Ok(wrong)
}
