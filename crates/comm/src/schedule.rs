//! Who exchanges with whom in a call. Pure.
//!
//! A domain is the ranks that share memory: those of a node, or one rank alone where memory is not shared.
//!
//! - Reduction: inside each domain, then among the first ranks of the domains, then from these to their domains.
//! - Flat gather and all-to-all: inside the domain, and with every rank outside.
//! - Two-stage gather: with the ranks of the same place on other nodes, then, inside the node, all that came so.

use crate::topology::Topology;
use std::ops::Range;

/// Peers of one rank by the part they have in a call, ascending. The rank itself is in none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peers {
    /// First ranks of the other domains; empty if the rank is not the first of its own.
    pub(crate) leaders: Vec<u32>,
    /// All ranks outside the domain.
    pub(crate) remote: Vec<u32>,
    /// Ranks of other nodes with the same local rank.
    pub(crate) column: Vec<u32>,
    /// Ranks of the same node outside the domain.
    pub(crate) mates: Vec<u32>,
}

/// The ranks that share memory with `rank`, itself among them.
pub(crate) fn domain(topology: &Topology, rank: u32, shares: bool) -> Range<u32> {
    match shares {
        true => topology.ranks_of(topology.node_of(rank)),
        false => rank..rank + 1,
    }
}

/// The rank on `node` with the local rank of `rank`, on nodes of one size.
pub(crate) fn on_node(topology: &Topology, rank: u32, node: u32) -> u32 {
    topology.ranks_of(node).start + topology.local_rank(rank)
}

impl Peers {
    pub(crate) fn new(topology: &Topology, rank: u32, shares: bool) -> Self {
        let own = domain(topology, rank, shares);
        let outside = |other: &u32| !own.contains(other);
        let node = topology.ranks_of(topology.node_of(rank));
        let first = |other: &u32| domain(topology, *other, shares).start == *other;
        let all = || (0..topology.world()).filter(outside);
        Self {
            leaders: match own.start == rank {
                true => all().filter(first).collect(),
                false => Vec::new(),
            },
            remote: all().collect(),
            column: topology.column(rank).into_iter().filter(outside).collect(),
            mates: node.filter(outside).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    type Items = BTreeSet<u32>;

    /// A message that a rank sends once it has received all of the stage before.
    struct Message {
        stage: usize,
        from: u32,
        to: u32,
        bytes: usize,
    }

    /// Delivers the messages of all stages in an order that `choices` picks; a rank sends its part of a stage when all
    /// of the stages before have reached it. Returns what every rank has in the end and the bytes between nodes.
    fn run(
        topology: &Topology,
        messages: &[Message],
        sends: impl Fn(&Message, &[Items]) -> Items,
        choices: &[prop::sample::Index],
    ) -> (Vec<Items>, usize) {
        let mut have: Vec<Items> = (0..topology.world())
            .map(|rank| Items::from([rank]))
            .collect();
        let mut left: Vec<usize> = (0..messages.len()).collect();
        let (mut between, mut turn) = (0, 0);
        while !left.is_empty() {
            let ready: Vec<usize> = (0..left.len())
                .filter(|&place| {
                    let message = &messages[left[place]];
                    !left.iter().any(|&other| {
                        messages[other].stage < message.stage && messages[other].to == message.from
                    })
                })
                .collect();
            assert!(
                !ready.is_empty(),
                "a circle of messages that wait for each other"
            );
            let place = ready[choices[turn % choices.len()].index(ready.len())];
            turn += 1;
            let message = &messages[left.swap_remove(place)];
            let items = sends(message, &have);
            if topology.node_of(message.from) != topology.node_of(message.to) {
                between += items.len() * message.bytes;
            }
            have[message.to as usize].extend(items);
        }
        (have, between)
    }

    fn message(stage: usize, from: u32, to: u32) -> Message {
        let bytes = 1;
        Message {
            stage,
            from,
            to,
            bytes,
        }
    }

    /// The messages of a stage: from every rank to the peers that `of` names.
    fn stage(
        topology: &Topology,
        stage: usize,
        of: impl Fn(u32) -> Vec<u32>,
    ) -> impl Iterator<Item = Message> {
        (0..topology.world())
            .flat_map(move |from| of(from).into_iter().map(move |to| (from, to)))
            .map(move |(from, to)| message(stage, from, to))
            .collect::<Vec<_>>()
            .into_iter()
    }

    fn inside(topology: &Topology, rank: u32, shares: bool) -> Vec<u32> {
        domain(topology, rank, shares)
            .filter(|&other| other != rank)
            .collect()
    }

    proptest! {
        /// In any order of delivery a reduction brings every rank's values to every rank.
        #[test]
        fn a_reduction_reaches_all(
            counts in prop::collection::vec(1_u32..5, 1..5),
            shares: bool,
            choices in prop::collection::vec(any::<prop::sample::Index>(), 1..50),
        ) {
            let topology = Topology::new(&counts).unwrap();
            let peers = |rank| Peers::new(&topology, rank, shares);
            let mut messages: Vec<Message> = Vec::new();
            messages.extend(stage(&topology, 0, |rank| inside(&topology, rank, shares)));
            messages.extend(stage(&topology, 1, |rank| peers(rank).leaders));
            messages.extend(stage(&topology, 2, |rank| {
                match domain(&topology, rank, shares).start == rank {
                    true => inside(&topology, rank, shares),
                    false => Vec::new(),
                }
            }));
            let (have, _) = run(&topology, &messages, |m, have| have[m.from as usize].clone(), &choices);
            let all: Items = (0..topology.world()).collect();
            prop_assert!(have.iter().all(|items| *items == all));
        }

        /// In any order of delivery both gathers bring all parts to all ranks, and two stages send one share of the
        /// flat one's bytes between nodes.
        #[test]
        fn both_gathers_reach_all_and_two_stages_send_less(
            nodes in 1_usize..5,
            per_node in 1_u32..5,
            shares: bool,
            choices in prop::collection::vec(any::<prop::sample::Index>(), 1..50),
        ) {
            let topology = Topology::new(&vec![per_node; nodes]).unwrap();
            let peers = |rank| Peers::new(&topology, rank, shares);
            let all: Items = (0..topology.world()).collect();
            let mut flat: Vec<Message> = Vec::new();
            flat.extend(stage(&topology, 0, |rank| inside(&topology, rank, shares)));
            flat.extend(stage(&topology, 0, |rank| peers(rank).remote));
            let own = |m: &Message, _: &[Items]| Items::from([m.from]);
            let (have, flat_bytes) = run(&topology, &flat, own, &choices);
            prop_assert!(have.iter().all(|items| *items == all));

            let mut staged: Vec<Message> = Vec::new();
            staged.extend(stage(&topology, 0, |rank| peers(rank).column));
            staged.extend(stage(&topology, 1, |rank| match shares {
                true => inside(&topology, rank, true),
                false => peers(rank).mates,
            }));
            let column = |m: &Message, have: &[Items]| match m.stage {
                0 => Items::from([m.from]),
                _ => {
                    let nodes = 0..topology.nodes();
                    let items: Items = nodes.map(|node| on_node(&topology, m.from, node)).collect();
                    assert!(items.is_subset(&have[m.from as usize]), "sends what it has not");
                    items
                }
            };
            let (have, staged_bytes) = run(&topology, &staged, column, &choices);
            prop_assert!(have.iter().all(|items| *items == all));
            prop_assert_eq!(staged_bytes * per_node as usize, flat_bytes);
        }
    }
}
