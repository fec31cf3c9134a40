//! Which rank gets a request. Pure: what is known of the ranks comes as arguments.

use std::collections::HashMap;
use twinfer_engine::{BlockChain, BlockKey};
use twinfer_protocol::{ApiError, ErrorKind, RankLoad, TokenId};

/// Prefixes that are remembered per generation; two generations are kept.
const REMEMBERED: usize = 1 << 16;
/// Sequences that a rank with the longest shared prefix may have more than the emptiest one.
const SPILL: u32 = 4;

/// A rank, as the front sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankView {
    /// As it last said.
    pub(crate) load: RankLoad,
    /// Sequences that it was given and that have not ended: what it has not said yet included.
    pub(crate) inside: u32,
}

/// Remembers who served which prefix.
#[derive(Debug)]
pub(crate) struct Balancer {
    /// Sequences that run at the same time on a rank.
    slots: u32,
    /// Sequences that may be inside a rank.
    room: u32,
    block_size: usize,
    recent: HashMap<BlockKey, u32>,
    older: HashMap<BlockKey, u32>,
    /// Whose turn it is among equals.
    next: u32,
}

impl Balancer {
    pub(crate) fn new(slots: u32, room: u32, block_size: u32) -> Self {
        Self {
            slots,
            room,
            block_size: block_size.max(1) as usize,
            recent: HashMap::new(),
            older: HashMap::new(),
            next: 0,
        }
    }

    /// The rank for `sequences` of one request, whose first prompt is `prompt`: `pinned`, if given; else the one that
    /// last served the longest part of the prompt, unless others are clearly emptier; else the one with the fewest
    /// waiting, then the fewest running; equals take turns.
    ///
    /// Errors: `Overloaded`, when there is no room.
    pub(crate) fn pick(
        &mut self,
        ranks: &[RankView],
        sequences: u32,
        prompt: &[TokenId],
        salt: Option<&str>,
        pinned: Option<u32>,
    ) -> Result<u32, ApiError> {
        let mut chain = BlockChain::new(0, salt, false);
        let keys: Vec<BlockKey> =
            std::iter::from_fn(|| chain.next(prompt, self.block_size)).collect();
        let rank = match pinned {
            Some(rank) => Some(rank).filter(|rank| {
                let view = ranks.get(*rank as usize);
                view.is_some_and(|view| self.has_room(view, sequences))
            }),
            None => self.best(ranks, sequences, &keys),
        };
        let Some(rank) = rank else {
            let which = match pinned {
                Some(rank) => format!("the queue of rank {rank} is full"),
                None => "the queues of all ranks are full".to_owned(),
            };
            let message = format!("{which}: {sequences} sequences were asked for");
            return Err(ApiError::new(ErrorKind::Overloaded, message));
        };
        self.remember(&keys, rank);
        Ok(rank)
    }

    fn has_room(&self, view: &RankView, sequences: u32) -> bool {
        view.inside.saturating_add(sequences) <= self.room
    }

    fn best(&mut self, ranks: &[RankView], sequences: u32, keys: &[BlockKey]) -> Option<u32> {
        let blocks = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        // Waiting and running, when these have come too.
        let weight = |view: &RankView| {
            let after = view.inside.saturating_add(sequences);
            let no_slot = after.saturating_sub(self.slots);
            let kv = view.load.kv_blocks;
            let free = kv.total.saturating_sub(kv.used).saturating_sub(kv.held);
            let no_blocks = if free < blocks { sequences } else { 0 };
            (no_slot.max(no_blocks), after)
        };
        let count = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        let turn = self.next;
        let order = |rank: u32| (rank + count - turn % count.max(1)) % count.max(1);
        let with_room = ranks
            .iter()
            .zip(0_u32..)
            .filter(|(view, _)| self.has_room(view, sequences));
        let (emptiest, first) =
            with_room.min_by_key(|(view, rank)| (weight(view), order(*rank)))?;
        let served = keys.iter().rev().find_map(|key| {
            let known = self.recent.get(key).or_else(|| self.older.get(key));
            known.copied()
        });
        if let Some(rank) = served
            && let Some(view) = ranks.get(rank as usize)
            && self.has_room(view, sequences)
            && weight(view).0 <= weight(emptiest).0
            && view.inside <= emptiest.inside.saturating_add(SPILL)
        {
            return Some(rank);
        }
        self.next = first + 1;
        Some(first)
    }

    fn remember(&mut self, keys: &[BlockKey], rank: u32) {
        for key in keys {
            if self.recent.len() >= REMEMBERED {
                self.older = std::mem::take(&mut self.recent);
            }
            self.recent.insert(*key, rank);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use twinfer_protocol::KvBlockCounts;

    fn view(inside: u32) -> RankView {
        RankView {
            inside,
            load: RankLoad {
                kv_blocks: KvBlockCounts {
                    total: 100,
                    ..KvBlockCounts::default()
                },
                ..RankLoad::default()
            },
        }
    }

    fn prompt(name: TokenId, length: usize) -> Vec<TokenId> {
        vec![name; length]
    }

    #[test]
    fn equals_take_turns_and_the_emptiest_comes_first() {
        let mut balancer = Balancer::new(4, 8, 16);
        let idle = [view(0), view(0), view(0)];
        let picked: Vec<u32> = (0..6)
            .map(|i| balancer.pick(&idle, 1, &prompt(i, 3), None, None).unwrap())
            .collect();
        assert_eq!(picked, [0, 1, 2, 0, 1, 2]);
        let busy = [view(2), view(1), view(2)];
        assert_eq!(
            balancer.pick(&busy, 1, &prompt(9, 3), None, None).unwrap(),
            1
        );
    }

    #[test]
    fn a_shared_prefix_draws_until_others_are_clearly_emptier() {
        let mut balancer = Balancer::new(16, 32, 16);
        let idle = [view(0), view(0)];
        let long = prompt(1, 40);
        let first = balancer.pick(&idle, 1, &long, None, None).unwrap();
        for _ in 0..3 {
            assert_eq!(balancer.pick(&idle, 1, &long, None, None).unwrap(), first);
        }
        let mut busy = idle;
        busy[first as usize].inside = SPILL;
        assert_eq!(balancer.pick(&busy, 1, &long, None, None).unwrap(), first);
        busy[first as usize].inside = SPILL + 1;
        let spilled = balancer.pick(&busy, 1, &long, None, None).unwrap();
        assert_ne!(spilled, first);
        // From then on it is found there.
        assert_eq!(balancer.pick(&idle, 1, &long, None, None).unwrap(), spilled);
        // Another salt shares nothing.
        let mut others = std::collections::BTreeSet::new();
        for salt in ["a", "b"] {
            others.insert(balancer.pick(&idle, 1, &long, Some(salt), None).unwrap());
        }
        assert_eq!(others.len(), 2);
    }

    #[test]
    fn a_rank_without_free_blocks_is_passed_over() {
        let mut balancer = Balancer::new(4, 8, 16);
        let mut ranks = [view(0), view(1)];
        ranks[0].load.kv_blocks.used = 99;
        let picked = balancer.pick(&ranks, 1, &prompt(1, 64), None, None);
        assert_eq!(picked.unwrap(), 1);
    }

    proptest! {
        #[test]
        fn no_rank_gets_more_than_it_has_room_for(
            inside in prop::collection::vec(0_u32..10, 1..6),
            requests in prop::collection::vec((1_u32..5, 0_u32..3, prop::option::of(0_u32..6)), 0..40),
        ) {
            let mut balancer = Balancer::new(3, 9, 4);
            let mut ranks: Vec<RankView> = inside.iter().map(|n| view(*n)).collect();
            for (sequences, name, pinned) in requests {
                let fits = |view: &RankView| view.inside + sequences <= 9;
                match balancer.pick(&ranks, sequences, &prompt(name, 9), None, pinned) {
                    Ok(rank) => {
                        prop_assert!(pinned.is_none_or(|pinned| pinned == rank));
                        prop_assert!(fits(&ranks[rank as usize]));
                        ranks[rank as usize].inside += sequences;
                    }
                    Err(error) => {
                        prop_assert_eq!(error.kind, ErrorKind::Overloaded);
                        match pinned {
                            None => prop_assert!(!ranks.iter().any(fits)),
                            Some(rank) => prop_assert!(!ranks.get(rank as usize).is_some_and(fits)),
                        }
                    }
                }
            }
        }
    }
}
