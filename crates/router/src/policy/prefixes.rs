//! Which instance has computed the beginning of a prompt last. Bounded: what was not used for long is forgotten.

use super::work::Side;
use crate::registry::InstanceId;
use std::collections::HashMap;

/// Blocks remembered, in two generations of half as many.
const MAX_BLOCKS: usize = 1 << 17;

/// The owners of blocks. A block's key stands for all blocks before it too.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    young: HashMap<(Side, u64), InstanceId>,
    old: HashMap<(Side, u64), InstanceId>,
}

impl Prefixes {
    /// The owner of the longest prefix whose owner fits.
    pub(super) fn owner(
        &self,
        side: Side,
        prefix: &[u64],
        fits: impl Fn(InstanceId) -> bool,
    ) -> Option<InstanceId> {
        let owner = |key: &u64| {
            let key = (side, *key);
            let owner = self.young.get(&key).or_else(|| self.old.get(&key));
            owner.copied().filter(|&owner| fits(owner))
        };
        prefix.iter().rev().find_map(owner)
    }

    /// This instance has the blocks now.
    pub(super) fn learn(&mut self, side: Side, prefix: &[u64], owner: InstanceId) {
        for &key in prefix {
            if self.young.len() >= MAX_BLOCKS / 2 {
                self.old = std::mem::take(&mut self.young);
            }
            self.young.insert((side, key), owner);
        }
    }

    pub(super) fn forget(&mut self, owner: InstanceId) {
        self.young.retain(|_, other| *other != owner);
        self.old.retain(|_, other| *other != owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_counts_and_memory_is_bounded() {
        let mut prefixes = Prefixes::default();
        let (a, b) = (InstanceId(0), InstanceId(1));
        prefixes.learn(Side::Prefill, &[1, 2, 3], a);
        prefixes.learn(Side::Prefill, &[1, 9], b);
        let owner = |prefix: &[u64]| prefixes.owner(Side::Prefill, prefix, |_| true);
        assert_eq!(owner(&[1, 2, 3, 4]), Some(a));
        assert_eq!(owner(&[1, 7]), Some(b), "the last one that computed it");
        assert_eq!(owner(&[8]), None);
        assert_eq!(prefixes.owner(Side::Decode, &[1], |_| true), None);
        assert_eq!(
            prefixes.owner(Side::Prefill, &[1, 2], |id| id == b),
            Some(b)
        );
        for key in 0..1_000_000 {
            prefixes.learn(Side::Decode, &[key], a);
        }
        assert!(prefixes.young.len() + prefixes.old.len() <= MAX_BLOCKS);
        prefixes.forget(a);
        assert!(prefixes.young.is_empty() && prefixes.old.is_empty());
    }
}
