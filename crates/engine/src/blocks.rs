//! Book-keeping of a rank's KV blocks: who has which, and which prefix a full one contains; never what
//! is in them.
//!
//! A block has two counts. `refs` counts the running sequences that read or write it, `holds` the
//! finished requests that keep it for a decode instance. A full block may have a key, the name of its
//! content ([`BlockKey`]); sequences that begin with that content share it. A block without owners is
//! free: without a key it is on the free list, with one it is cached and on the list of least recent use,
//! from which it is taken when the free list is empty. A sequence's blocks are freed last block first, so
//! that of a cached text the end goes before its beginning.

use crate::prefix::BlockKey;
use std::collections::HashMap;
use twinfer_protocol::{BlockId, KvBlockCounts};

/// End of the list of least recent use.
const NONE: BlockId = BlockId::MAX;

/// The blocks of one rank. All operations are O(blocks named); none allocates after `new`, beside the
/// caller's tables.
#[derive(Clone, Debug)]
pub struct BlockPool {
    block_size: usize,
    blocks: Vec<Block>,
    /// Last freed is handed out first: its lines are the warmest.
    free: Vec<BlockId>,
    by_key: HashMap<BlockKey, BlockId>,
    cached: Lru,
    used: u32,
    held: u32,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    owners: Owners,
    key: Option<BlockKey>,
    /// Neighbours in the list of least recent use.
    older: BlockId,
    newer: BlockId,
}

#[derive(Clone, Copy, Debug, Default)]
struct Owners {
    refs: u32,
    holds: u32,
}

/// Ends and length of the list of least recent use.
#[derive(Clone, Copy, Debug)]
struct Lru {
    oldest: BlockId,
    newest: BlockId,
    len: usize,
}

impl BlockPool {
    /// `num_blocks` free blocks of `block_size` tokens each; a `block_size` of 0 counts as 1.
    pub fn new(num_blocks: u32, block_size: usize) -> Self {
        let block = Block {
            owners: Owners::default(),
            key: None,
            older: NONE,
            newer: NONE,
        };
        Self {
            block_size: block_size.max(1),
            blocks: vec![block; num_blocks as usize],
            free: (0..num_blocks).rev().collect(),
            // Twice as much as is ever in it, so that it cleans itself up in place.
            by_key: HashMap::with_capacity(2 * num_blocks as usize),
            cached: Lru {
                oldest: NONE,
                newest: NONE,
                len: 0,
            },
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

    /// Blocks that can be handed out now, cached ones included.
    pub fn available(&self) -> usize {
        self.free.len() + self.cached.len
    }

    /// Appends `n` blocks to `table`, all or none: false and nothing changed if there are fewer. Cached
    /// ones go last, the least recently used first; their content is forgotten.
    pub fn allocate(&mut self, table: &mut Vec<BlockId>, n: usize) -> bool {
        if n > self.available() {
            return false;
        }
        for _ in 0..n {
            let Some(id) = self.free.pop().or_else(|| self.evict()) else {
                return false;
            };
            self.blocks[id as usize].owners.refs = 1;
            table.push(id);
        }
        self.used += count(n);
        true
    }

    /// How many of these keys, from the first on, have a block; and how many of those blocks are free.
    pub fn lookup(&self, keys: &[BlockKey]) -> (usize, usize) {
        let mut free = 0;
        for (hit, key) in keys.iter().enumerate() {
            match self.by_key.get(key) {
                Some(&id) => free += usize::from(self.blocks[id as usize].owners.is_free()),
                None => return (hit, free),
            }
        }
        (keys.len(), free)
    }

    /// Appends the blocks of these keys to `table`, one more sequence sharing them, up to the first key
    /// without a block. Returns how many.
    pub fn share(&mut self, keys: &[BlockKey], table: &mut Vec<BlockId>) -> usize {
        for (hit, key) in keys.iter().enumerate() {
            let Some(&id) = self.by_key.get(key) else {
                return hit;
            };
            if self.blocks[id as usize].owners.is_free() {
                self.unlink(id);
            }
            self.change(id, |owners| owners.refs += 1);
            table.push(id);
        }
        keys.len()
    }

    /// Names the content of a block that is in use, full and computed. If another block has that name
    /// already, this one stays nameless.
    pub fn name(&mut self, id: BlockId, key: BlockKey) {
        let Some(block) = self.blocks.get_mut(id as usize) else {
            debug_assert!(false, "block {id} is not of this pool");
            return;
        };
        debug_assert!(block.owners.is_used(), "block {id} is not in use");
        if block.key.is_none()
            && let std::collections::hash_map::Entry::Vacant(entry) = self.by_key.entry(key)
        {
            entry.insert(id);
            block.key = Some(key);
        }
    }

    /// A sequence gives these blocks back.
    pub fn release(&mut self, table: &[BlockId]) {
        for &id in table.iter().rev() {
            self.change(id, |owners| owners.refs = owners.refs.saturating_sub(1));
        }
    }

    /// A sequence has finished and its blocks are kept for a decode instance.
    pub fn hold(&mut self, table: &[BlockId]) {
        for &id in table {
            self.change(id, |owners| {
                owners.refs = owners.refs.saturating_sub(1);
                owners.holds += 1;
            });
        }
    }

    /// The decode instance has read these blocks or has given up.
    pub fn release_held(&mut self, table: &[BlockId]) {
        for &id in table.iter().rev() {
            self.change(id, |owners| owners.holds = owners.holds.saturating_sub(1));
        }
    }

    /// Gauges. A block that is both in use and held counts as used.
    pub fn counts(&self) -> KvBlockCounts {
        KvBlockCounts {
            total: count(self.blocks.len()),
            used: self.used,
            cached: count(self.cached.len),
            held: self.held,
        }
    }

    /// Applies `change` to a block, and moves it between the classes used, held, cached and free.
    fn change(&mut self, id: BlockId, change: impl Fn(&mut Owners)) {
        let Some(block) = self.blocks.get_mut(id as usize) else {
            debug_assert!(false, "block {id} is not of this pool");
            return;
        };
        let before = block.owners;
        change(&mut block.owners);
        let (after, named) = (block.owners, block.key.is_some());
        self.used = self.used + u32::from(after.is_used()) - u32::from(before.is_used());
        self.held = self.held + u32::from(after.is_held()) - u32::from(before.is_held());
        if after.is_free() && !before.is_free() {
            if named {
                self.link_newest(id);
            } else {
                self.free.push(id);
            }
        }
    }

    /// Takes the least recently used cached block; its content is forgotten.
    fn evict(&mut self) -> Option<BlockId> {
        let id = self.cached.oldest;
        let key = self.blocks.get_mut(id as usize)?.key.take();
        self.unlink(id);
        if let Some(key) = key {
            self.by_key.remove(&key);
        }
        Some(id)
    }

    fn link_newest(&mut self, id: BlockId) {
        let before = self.cached.newest;
        let block = &mut self.blocks[id as usize];
        (block.older, block.newer) = (before, NONE);
        match self.blocks.get_mut(before as usize) {
            Some(block) => block.newer = id,
            None => self.cached.oldest = id,
        }
        self.cached.newest = id;
        self.cached.len += 1;
    }

    fn unlink(&mut self, id: BlockId) {
        let Block { older, newer, .. } = self.blocks[id as usize];
        match self.blocks.get_mut(older as usize) {
            Some(block) => block.newer = newer,
            None => self.cached.oldest = newer,
        }
        match self.blocks.get_mut(newer as usize) {
            Some(block) => block.older = older,
            None => self.cached.newest = older,
        }
        self.cached.len -= 1;
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
        let mut listed = vec![0; self.blocks.len()];
        for &id in &self.free {
            listed[id as usize] += 1;
            if self.blocks[id as usize].key.is_some() {
                return Err(format!("block {id} is cached and on the free list"));
            }
        }
        let mut at = self.cached.oldest;
        let mut before = NONE;
        for _ in 0..self.cached.len {
            let block = self.blocks.get(at as usize).ok_or("the list ends early")?;
            if block.key.is_none() || block.older != before {
                return Err(format!("block {at} is on the wrong list: {block:?}"));
            }
            listed[at as usize] += 1;
            (before, at) = (at, block.newer);
        }
        if (before, at) != (self.cached.newest, NONE) {
            return Err("the list of cached blocks does not end where it should".to_owned());
        }
        for (id, (block, want)) in self.blocks.iter().zip(&expect).enumerate() {
            let is = block.owners;
            if (is.refs, is.holds) != (want.refs, want.holds) {
                return Err(format!("block {id} is {is:?}, its owners are {want:?}"));
            }
            if u32::from(is.is_free()) != listed[id] {
                return Err(format!("block {id} is {is:?}, listed {} times", listed[id]));
            }
            let named = block.key.and_then(|key| self.by_key.get(&key));
            if block.key.is_some() && named != Some(&count(id)) {
                return Err(format!("block {id} has the name of {named:?}"));
            }
        }
        let used = count(expect.iter().filter(|o| o.is_used()).count());
        let holds = count(expect.iter().filter(|o| o.is_held()).count());
        let names = self.blocks.iter().filter(|b| b.key.is_some()).count();
        if (self.used, self.held, self.by_key.len()) != (used, holds, names) {
            return Err(format!(
                "counts are {}/{}/{}, should be {used}/{holds}/{names}",
                self.used,
                self.held,
                self.by_key.len()
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
mod tests;
