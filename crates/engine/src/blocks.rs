//! Book-keeping of a rank's KV blocks: who has which, never what is in them.
//!
//! A block has two counts. `refs` counts the running sequences that read or write it, `holds` the
//! finished requests that keep it for a decode instance. Sequences can share a block (`retain`), which
//! is what a prefix cache needs. A block without either is free; a prefix cache would put a hash on it
//! there and count it as cached until it is handed out again.

use twinfer_protocol::{BlockId, KvBlockCounts};

/// The blocks of one rank. All operations are O(blocks named); none allocates after `new`, beside the
/// caller's tables.
#[derive(Clone, Debug)]
pub struct BlockPool {
    block_size: usize,
    blocks: Vec<Owners>,
    /// Last freed is handed out first: its lines are the warmest.
    free: Vec<BlockId>,
    used: u32,
    held: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Owners {
    refs: u32,
    holds: u32,
}

impl BlockPool {
    /// `num_blocks` free blocks of `block_size` tokens each; a `block_size` of 0 counts as 1.
    pub fn new(num_blocks: u32, block_size: usize) -> Self {
        Self {
            block_size: block_size.max(1),
            blocks: vec![Owners::default(); num_blocks as usize],
            free: (0..num_blocks).rev().collect(),
            used: 0,
            held: 0,
        }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks that `tokens` positions take.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Positions the whole pool has room for.
    pub fn capacity_tokens(&self) -> usize {
        self.blocks.len() * self.block_size
    }

    /// Blocks that can be handed out now.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Appends `n` blocks to `table`, all or none: false and nothing changed if there are fewer.
    pub fn allocate(&mut self, table: &mut Vec<BlockId>, n: usize) -> bool {
        let Some(rest) = self.free.len().checked_sub(n) else {
            return false;
        };
        let start = table.len();
        table.extend(self.free.drain(rest..).rev());
        for &id in &table[start..] {
            self.blocks[id as usize].refs = 1;
        }
        self.used += count(n);
        true
    }

    /// One more sequence shares these blocks, which are in use or held.
    pub fn retain(&mut self, table: &[BlockId]) {
        self.change(table, |owners| owners.refs += 1);
    }

    /// A sequence gives these blocks back.
    pub fn release(&mut self, table: &[BlockId]) {
        self.change(table, |owners| owners.refs = owners.refs.saturating_sub(1));
    }

    /// A sequence has finished and its blocks are kept for a decode instance.
    pub fn hold(&mut self, table: &[BlockId]) {
        self.change(table, |owners| {
            owners.refs = owners.refs.saturating_sub(1);
            owners.holds += 1;
        });
    }

    /// The decode instance has read these blocks or has given up.
    pub fn release_held(&mut self, table: &[BlockId]) {
        self.change(table, |owners| {
            owners.holds = owners.holds.saturating_sub(1)
        });
    }

    /// Gauges. A block that is both in use and held counts as used. Nothing is cached yet.
    pub fn counts(&self) -> KvBlockCounts {
        KvBlockCounts {
            total: count(self.blocks.len()),
            used: self.used,
            cached: 0,
            held: self.held,
        }
    }

    /// Applies `change` to each block, and moves it between the classes used, held and free.
    fn change(&mut self, table: &[BlockId], change: impl Fn(&mut Owners)) {
        for &id in table {
            let Some(owners) = self.blocks.get_mut(id as usize) else {
                debug_assert!(false, "block {id} is not of this pool");
                continue;
            };
            let before = *owners;
            debug_assert!(before.refs + before.holds > 0, "block {id} is free");
            change(owners);
            let after = *owners;
            self.used = self.used + u32::from(after.is_used()) - u32::from(before.is_used());
            self.held = self.held + u32::from(after.is_held()) - u32::from(before.is_held());
            if after.is_free() && !before.is_free() {
                self.free.push(id);
            }
        }
    }

    /// Recounts everything from the blocks themselves; `tables` are the tables of all sequences, `held`
    /// those of all held requests. For tests and debug builds.
    ///
    /// # Errors
    /// What does not add up.
    pub fn audit<'a>(
        &self,
        tables: impl Iterator<Item = &'a [BlockId]>,
        held: impl Iterator<Item = &'a [BlockId]>,
    ) -> Result<(), String> {
        let mut expect = vec![Owners::default(); self.blocks.len()];
        for &id in tables.flatten() {
            expect
                .get_mut(id as usize)
                .ok_or(format!("block {id} does not exist"))?
                .refs += 1;
        }
        for &id in held.flatten() {
            expect
                .get_mut(id as usize)
                .ok_or(format!("block {id} does not exist"))?
                .holds += 1;
        }
        let mut on_free_list = vec![false; self.blocks.len()];
        for &id in &self.free {
            if std::mem::replace(&mut on_free_list[id as usize], true) {
                return Err(format!("block {id} is on the free list twice"));
            }
        }
        for (id, (is, want)) in self.blocks.iter().zip(&expect).enumerate() {
            if (is.refs, is.holds) != (want.refs, want.holds) {
                return Err(format!("block {id} is {is:?}, its owners are {want:?}"));
            }
            if is.is_free() != on_free_list[id] {
                return Err(format!(
                    "block {id} is {is:?}, on the free list: {}",
                    on_free_list[id]
                ));
            }
        }
        let used = count(expect.iter().filter(|o| o.is_used()).count());
        let holds = count(expect.iter().filter(|o| o.is_held()).count());
        if (self.used, self.held) != (used, holds) {
            return Err(format!(
                "counts are {}/{}, should be {used}/{holds}",
                self.used, self.held
            ));
        }
        Ok(())
    }
}

impl Owners {
    fn is_used(self) -> bool {
        self.refs > 0
    }

    fn is_held(self) -> bool {
        self.refs == 0 && self.holds > 0
    }

    fn is_free(self) -> bool {
        self.refs == 0 && self.holds == 0
    }
}

/// Block counts fit u32 because block ids do.
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn allocation_is_all_or_nothing() {
        let mut pool = BlockPool::new(3, 16);
        let mut table = Vec::new();
        assert!(!pool.allocate(&mut table, 4));
        assert!(table.is_empty());
        assert_eq!(pool.available(), 3);
        assert!(pool.allocate(&mut table, 3));
        assert_eq!(table, [0, 1, 2]);
        assert!(!pool.allocate(&mut table, 1));
        assert!(pool.allocate(&mut table, 0));
    }

    #[test]
    fn a_shared_block_is_free_only_after_its_last_owner() {
        let mut pool = BlockPool::new(2, 16);
        let mut table = Vec::new();
        assert!(pool.allocate(&mut table, 1));
        pool.retain(&table);
        pool.hold(&table);
        assert_eq!(
            pool.counts(),
            KvBlockCounts {
                total: 2,
                used: 1,
                cached: 0,
                held: 0
            }
        );
        pool.release(&table);
        assert_eq!(
            pool.counts(),
            KvBlockCounts {
                total: 2,
                used: 0,
                cached: 0,
                held: 1
            }
        );
        assert_eq!(pool.available(), 1);
        pool.release_held(&table);
        assert_eq!(
            pool.counts(),
            KvBlockCounts {
                total: 2,
                used: 0,
                cached: 0,
                held: 0
            }
        );
        assert_eq!(pool.available(), 2);
    }

    proptest! {
        /// Whatever sequences do, every block has the owners it should have.
        #[test]
        fn every_block_is_accounted_for(
            total in 1u32..24,
            ops in prop::collection::vec((0u8..5, 0usize..8, 0usize..6), 0..120),
        ) {
            let mut pool = BlockPool::new(total, 16);
            let mut tables: Vec<Vec<BlockId>> = Vec::new();
            let mut held: Vec<Vec<BlockId>> = Vec::new();
            for (op, which, n) in ops {
                let pick = |len: usize| which % len.max(1);
                match op {
                    0 => {
                        let mut table = Vec::new();
                        let free = pool.available();
                        prop_assert_eq!(pool.allocate(&mut table, n), n <= free);
                        tables.push(table);
                    }
                    1 if !tables.is_empty() => {
                        let table = tables.swap_remove(pick(tables.len()));
                        pool.release(&table);
                    }
                    2 if !tables.is_empty() => {
                        let table = tables[pick(tables.len())].clone();
                        pool.retain(&table);
                        tables.push(table);
                    }
                    3 if !tables.is_empty() => {
                        let table = tables.swap_remove(pick(tables.len()));
                        pool.hold(&table);
                        held.push(table);
                    }
                    4 if !held.is_empty() => {
                        let table = held.swap_remove(pick(held.len()));
                        pool.release_held(&table);
                    }
                    _ => {}
                }
                let audit = pool.audit(
                    tables.iter().map(Vec::as_slice),
                    held.iter().map(Vec::as_slice),
                );
                prop_assert_eq!(audit, Ok(()));
            }
        }
    }
}
