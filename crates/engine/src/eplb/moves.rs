//! From one placement to the next.

use super::EplbShape;
use crate::placement::ExpertPlacement;
use std::collections::{BTreeMap, BTreeSet};
use twinfer_protocol::ApiError;

/// A seat that gets other weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Seat.
    pub seat: u32,
    /// Its expert from now on.
    pub expert: u32,
    /// Seat that had this expert before.
    pub from: u32,
}

/// What moves send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveCost {
    /// Experts copied inside a rank.
    pub local: u64,
    /// Experts sent inside a node.
    pub inner: u64,
    /// Experts sent to another node.
    pub outer: u64,
    /// Bytes sent between ranks.
    pub bytes: u64,
    /// Most experts that one rank gets: what it must have room for beside its own until the layer switches.
    pub most_per_rank: u64,
}

/// What has to be copied for a layer to change from `old` to `new`, in order of the seats. Every copy is taken
/// from where the expert sat before, so the old weights must stay until all moves of the layer are done.
/// Sources are on the same rank if possible, else on the same node, else anywhere; of several the rank that
/// sends least.
///
/// # Errors
/// The placements are of different shapes.
pub fn moves(
    old: &ExpertPlacement,
    new: &ExpertPlacement,
    shape: &EplbShape,
) -> Result<Vec<Move>, ApiError> {
    if !new.has_shape_of(old) {
        return Err(ApiError::invalid(
            "expert_placement",
            "moves between placements of different shapes",
        ));
    }
    let per_node = shape.ranks_per_node();
    let node_of = |rank: u32| rank as usize / per_node;
    let mut sent = vec![0u32; old.ranks() as usize];
    let mut all = Vec::new();
    for (seat, (before, expert)) in (0..).zip(old.seats().iter().zip(new.seats())) {
        if before == expert {
            continue;
        }
        let rank = new.rank_of(seat);
        let distance = |from: u32| match old.rank_of(from) {
            own if own == rank => 0,
            near if node_of(near) == node_of(rank) => 1,
            _ => 2,
        };
        let sources = old.seats_of(*expert).iter().copied();
        let source = sources.min_by_key(|from| {
            let sender = old.rank_of(*from) as usize;
            (
                distance(*from),
                sent.get(sender).copied().unwrap_or(0),
                *from,
            )
        });
        // Every expert of a placement has a seat.
        let Some(from) = source else {
            continue;
        };
        if distance(from) > 0 {
            sent[old.rank_of(from) as usize] += 1;
        }
        all.push(Move {
            seat,
            expert: *expert,
            from,
        });
    }
    Ok(all)
}

/// Moves between ranks at the same time: each rank sends one expert at most, and gets one at most.
pub type Round = Vec<Move>;

/// The moves between ranks in as few rounds as the first fit gives, so that a rank needs room for one expert on its way
/// in each direction. Moves inside a rank are in no round.
pub fn rounds(placement: &ExpertPlacement, moves: &[Move]) -> Vec<Round> {
    let mut rounds: Vec<Round> = Vec::new();
    // Ranks that send and get in each round.
    let mut busy: Vec<(BTreeSet<u32>, BTreeSet<u32>)> = Vec::new();
    for step in moves {
        let (from, to) = (placement.rank_of(step.from), placement.rank_of(step.seat));
        if from == to {
            continue;
        }
        let free = busy
            .iter()
            .position(|(send, get)| !send.contains(&from) && !get.contains(&to));
        let at = free.unwrap_or(rounds.len());
        if free.is_none() {
            rounds.push(Round::new());
            busy.push(Default::default());
        }
        rounds[at].push(*step);
        busy[at].0.insert(from);
        busy[at].1.insert(to);
    }
    rounds
}

/// What `moves` send, with experts of `expert_bytes`.
pub fn cost(
    placement: &ExpertPlacement,
    moves: &[Move],
    shape: &EplbShape,
    expert_bytes: u64,
) -> MoveCost {
    let per_node = shape.ranks_per_node() as u32;
    let mut total = MoveCost::default();
    let mut gets = BTreeMap::<u32, u64>::new();
    for step in moves {
        let (to, from) = (placement.rank_of(step.seat), placement.rank_of(step.from));
        let count = match to {
            own if own == from => &mut total.local,
            near if near / per_node == from / per_node => &mut total.inner,
            _ => &mut total.outer,
        };
        *count += 1;
        *gets.entry(to).or_default() += 1;
    }
    total.bytes = (total.inner + total.outer).saturating_mul(expert_bytes);
    total.most_per_rank = gets.values().copied().max().unwrap_or(0);
    total
}

/// `new` with other names for its nodes, ranks and seats, all of which are alike to [`super::balance()`], so that
/// much stays where it is in `old`: nodes, then ranks inside them, are paired by what they have in common.
pub(super) fn keep_in_place(
    old: &ExpertPlacement,
    new: &ExpertPlacement,
    shape: &EplbShape,
) -> Result<ExpertPlacement, ApiError> {
    let own = new.seats_per_rank() as usize;
    let ranks: Vec<usize> = (0..new.ranks() as usize).collect();
    let (per_node, nodes) = match shape.is_hierarchical() {
        true => (shape.ranks_per_node(), shape.nodes as usize),
        false => (ranks.len(), 1),
    };
    let all: Vec<usize> = (0..nodes).collect();
    let new_nodes = pair(&all, &all, |a, b| {
        common(part(old, a, per_node * own), part(new, b, per_node * own))
    });
    let mut seats = Vec::with_capacity(new.seats().len());
    for (node, from) in new_nodes.into_iter().enumerate() {
        let here = &ranks[node * per_node..(node + 1) * per_node];
        let there = &ranks[from * per_node..(from + 1) * per_node];
        let paired = pair(here, there, |a, b| {
            common(part(old, a, own), part(new, b, own))
        });
        for (rank, from) in here.iter().zip(paired) {
            seats.extend(stay(part(old, *rank, own), part(new, from, own)));
        }
    }
    ExpertPlacement::new(new.experts(), new.ranks(), seats)
}

fn part(placement: &ExpertPlacement, index: usize, len: usize) -> &[u32] {
    placement
        .seats()
        .get(index * len..(index + 1) * len)
        .unwrap_or(&[])
}

/// For each of `left` one of `right`, each once: the pairs with most in common first, of equals the first.
fn pair(left: &[usize], right: &[usize], common: impl Fn(usize, usize) -> usize) -> Vec<usize> {
    let mut pairs: Vec<(usize, usize, usize)> = Vec::with_capacity(left.len() * right.len());
    for (at, a) in left.iter().enumerate() {
        pairs.extend(right.iter().map(|b| (common(*a, *b), at, *b)));
    }
    pairs.sort_by(|a, b| b.0.cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let mut of = vec![None; left.len()];
    let mut taken = BTreeSet::new();
    for (_, at, b) in pairs {
        if of[at].is_none() && taken.insert(b) {
            of[at] = Some(b);
        }
    }
    of.into_iter().flatten().collect()
}

/// Experts that two lists have in common, as often as both have them.
fn common(a: &[u32], b: &[u32]) -> usize {
    let (mut a, mut b) = (a.to_vec(), b.to_vec());
    a.sort_unstable();
    b.sort_unstable();
    let (mut i, mut j, mut count) = (0, 0, 0);
    while i < a.len() && j < b.len() {
        match a[i].cmp(&b[j]) {
            std::cmp::Ordering::Less => i += 1,
            std::cmp::Ordering::Greater => j += 1,
            std::cmp::Ordering::Equal => {
                (i, j, count) = (i + 1, j + 1, count + 1);
            }
        }
    }
    count
}

/// The experts of `new`, those that `old` has too in the same seats.
fn stay(old: &[u32], new: &[u32]) -> Vec<u32> {
    let mut rest = new.to_vec();
    let mut seats: Vec<Option<u32>> = old
        .iter()
        .map(|expert| {
            let at = rest.iter().position(|other| other == expert)?;
            Some(rest.remove(at))
        })
        .collect();
    let mut rest = rest.into_iter();
    for seat in &mut seats {
        if seat.is_none() {
            *seat = rest.next();
        }
    }
    seats.into_iter().flatten().collect()
}
