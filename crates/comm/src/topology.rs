//! Which rank is on which node. Pure.

use std::ops::Range;

/// Most ranks of a group.
pub const MAX_WORLD: u32 = 1024;

/// Ranks are numbered through node by node: the ranks of a node follow each other, local rank 0 first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// First rank of each node, and the number of all ranks behind the last.
    starts: Vec<u32>,
}

/// Numbers that are no topology.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{counts:?} ranks per node; allowed are at least 1 each and at most {MAX_WORLD} together")]
pub struct TopologyError {
    counts: Vec<u32>,
}

/// A kind of peer, by where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerClass {
    /// On the same node.
    IntraNode,
    /// On another node.
    InterNode,
}

impl Topology {
    /// From the number of ranks on each node.
    ///
    /// # Errors
    /// No node, a node without ranks, or more than [`MAX_WORLD`] ranks.
    pub fn new(counts: &[u32]) -> Result<Self, TopologyError> {
        let mut starts = vec![0];
        let mut total = 0_u32;
        for &count in counts {
            total = total.saturating_add(count);
            starts.push(total);
        }
        if counts.is_empty() || counts.contains(&0) || total > MAX_WORLD {
            return Err(TopologyError {
                counts: counts.iter().take(64).copied().collect(),
            });
        }
        Ok(Self { starts })
    }

    /// `ranks` ranks on one node.
    ///
    /// # Errors
    /// As [`Topology::new`].
    pub fn one_node(ranks: u32) -> Result<Self, TopologyError> {
        Self::new(&[ranks])
    }

    /// Number of all ranks.
    pub fn world(&self) -> u32 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u32 {
        (self.starts.len() - 1) as u32
    }

    /// Ranks of `node`; none for a node that does not exist.
    pub fn ranks_of(&self, node: u32) -> Range<u32> {
        let bound = |node: usize| self.starts.get(node).copied().unwrap_or(self.world());
        bound(node as usize)..bound(node as usize + 1)
    }

    /// Numbers of ranks, node by node.
    pub fn counts(&self) -> Vec<u32> {
        (0..self.nodes())
            .map(|node| self.ranks_of(node).len() as u32)
            .collect()
    }

    /// Node of `rank`; the last one for a rank that does not exist.
    pub fn node_of(&self, rank: u32) -> u32 {
        let after = self.starts.partition_point(|&start| start <= rank);
        (after.saturating_sub(1) as u32).min(self.nodes() - 1)
    }

    /// Place of `rank` among those of its node.
    pub fn local_rank(&self, rank: u32) -> u32 {
        rank.saturating_sub(self.ranks_of(self.node_of(rank)).start)
    }

    /// First rank of the node of `rank`.
    pub fn leader_of(&self, rank: u32) -> u32 {
        self.ranks_of(self.node_of(rank)).start
    }

    /// Whether all nodes have the same number of ranks.
    pub fn is_even(&self) -> bool {
        let first = self.ranks_of(0).len();
        (1..self.nodes()).all(|node| self.ranks_of(node).len() == first)
    }

    /// Where two ranks are to each other.
    pub fn class(&self, a: u32, b: u32) -> PeerClass {
        match self.node_of(a) == self.node_of(b) {
            true => PeerClass::IntraNode,
            false => PeerClass::InterNode,
        }
    }

    /// The ranks with the local rank of `rank` on all nodes that have it, ascending; `rank` among them.
    pub fn column(&self, rank: u32) -> Vec<u32> {
        let local = self.local_rank(rank);
        (0..self.nodes())
            .map(|node| self.ranks_of(node))
            .filter(|ranks| local < ranks.len() as u32)
            .map(|ranks| ranks.start + local)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_rank_has_one_place(counts in prop::collection::vec(1_u32..9, 1..6)) {
            let topology = Topology::new(&counts).unwrap();
            prop_assert_eq!(topology.world(), counts.iter().sum::<u32>());
            prop_assert_eq!(topology.counts(), counts.clone());
            let mut rank = 0;
            for (node, &count) in counts.iter().enumerate() {
                for local in 0..count {
                    prop_assert_eq!(topology.node_of(rank), node as u32);
                    prop_assert_eq!(topology.local_rank(rank), local);
                    prop_assert_eq!(topology.leader_of(rank), rank - local);
                    let column = topology.column(rank);
                    prop_assert!(column.contains(&rank) && column.is_sorted());
                    prop_assert!(column.iter().all(|&other| topology.local_rank(other) == local));
                    rank += 1;
                }
            }
            prop_assert_eq!(topology.is_even(), counts.iter().all(|&count| count == counts[0]));
        }
    }

    #[test]
    fn impossible_counts_are_refused() {
        for counts in [&[][..], &[0], &[4, 0, 4], &[1025], &[u32::MAX, u32::MAX]] {
            assert!(Topology::new(counts).is_err(), "{counts:?}");
        }
        assert_eq!(Topology::one_node(MAX_WORLD).unwrap().world(), MAX_WORLD);
    }
}
