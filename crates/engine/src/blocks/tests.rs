use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

fn key(n: u128) -> BlockKey {
    BlockKey(n)
}

fn allocate(pool: &mut BlockPool, n: usize) -> Vec<BlockId> {
    let mut table = Vec::new();
    assert!(pool.allocate(&mut table, n));
    table
}

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

/// One more owner, as [`BlockPool::share`] makes one of each block that it finds.
fn retain(pool: &mut BlockPool, table: &[BlockId]) {
    for &id in table {
        pool.change(id, |owners| owners.refs += 1);
    }
}

#[test]
fn a_shared_block_is_free_only_after_its_last_owner() {
    let counts = |used, cached, held| KvBlockCounts {
        total: 2,
        used,
        cached,
        held,
    };
    for named in [false, true] {
        let mut pool = BlockPool::new(2, 16);
        let table = allocate(&mut pool, 1);
        if named {
            pool.name(table[0], key(7));
        }
        retain(&mut pool, &table);
        pool.hold(&table);
        assert_eq!(pool.counts(), counts(1, 0, 0));
        pool.release(&table);
        assert_eq!(pool.counts(), counts(0, 0, 1));
        assert_eq!(pool.available(), 1);
        pool.release_held(&table);
        assert_eq!(pool.counts(), counts(0, u32::from(named), 0));
        assert_eq!(pool.available(), 2);
    }
}

#[test]
fn a_cached_block_is_found_until_its_room_is_needed_and_the_least_recently_used_goes_first() {
    let mut pool = BlockPool::new(4, 16);
    let table = allocate(&mut pool, 3);
    for (&id, n) in table.iter().zip(0..) {
        pool.name(id, key(n));
    }
    let keys = [key(0), key(1), key(2), key(3)];
    assert_eq!(pool.lookup(&keys), (3, 0));
    pool.release(&table);
    assert_eq!(pool.lookup(&keys), (3, 3));
    assert_eq!(pool.counts().cached, 3);
    // The block without content goes first, then the end of the text.
    let other = allocate(&mut pool, 2);
    assert_eq!(other, [3, table[2]]);
    assert_eq!(pool.lookup(&keys), (2, 2));
    // Use makes the others younger than what is freed before them.
    let mut again = Vec::new();
    assert_eq!(pool.share(&keys, &mut again), 2);
    assert_eq!(again, table[..2]);
    pool.name(other[1], key(9));
    pool.release(&other);
    pool.release(&again);
    assert_eq!(allocate(&mut pool, 2), [other[0], other[1]]);
    assert_eq!(pool.lookup(&keys), (2, 2));
    assert_eq!(pool.lookup(&[key(9)]), (0, 0));
}

#[test]
fn a_second_block_of_the_same_content_stays_nameless() {
    let mut pool = BlockPool::new(2, 16);
    let (a, b) = (allocate(&mut pool, 1), allocate(&mut pool, 1));
    pool.name(a[0], key(1));
    pool.name(b[0], key(1));
    pool.release(&b);
    assert_eq!(pool.counts().cached, 0);
    let mut shared = Vec::new();
    assert_eq!(pool.share(&[key(1)], &mut shared), 1);
    assert_eq!(shared, a);
}

/// What the pool should do, kept in the plainest way: the content of each block, and the cached ones in
/// the order in which they were freed.
#[derive(Default)]
struct Model {
    content: HashMap<BlockId, u128>,
    cached: VecDeque<BlockId>,
}

impl Model {
    fn is_free(pool: &BlockPool, id: BlockId) -> bool {
        pool.blocks[id as usize].owners.is_free()
    }

    fn freed(&mut self, pool: &BlockPool, table: &[BlockId]) {
        for &id in table.iter().rev() {
            if Self::is_free(pool, id)
                && self.content.contains_key(&id)
                && !self.cached.contains(&id)
            {
                self.cached.push_back(id);
            }
        }
    }
}

proptest! {
    /// Whatever sequences do, every block has the owners it should have, no block is handed out twice, a
    /// name leads to the block that was given it last and was not handed out since, and the least
    /// recently used goes first.
    #[test]
    fn every_block_is_accounted_for(
        total in 1u32..24,
        ops in prop::collection::vec((0u8..7, 0usize..8, 0usize..6), 0..160),
    ) {
        let mut pool = BlockPool::new(total, 16);
        let mut model = Model::default();
        let mut tables: Vec<Vec<BlockId>> = Vec::new();
        let mut held: Vec<Vec<BlockId>> = Vec::new();
        for (op, which, n) in ops {
            let pick = |len: usize| which % len.max(1);
            match op {
                0 => {
                    let mut table = Vec::new();
                    let (available, free) = (pool.available(), pool.free.len());
                    let owned: Vec<_> = (0..total).filter(|&id| !Model::is_free(&pool, id)).collect();
                    prop_assert_eq!(pool.allocate(&mut table, n), n <= available);
                    prop_assert!(table.iter().all(|id| !owned.contains(id)));
                    if !table.is_empty() {
                        let evicted: Vec<_> = model.cached.drain(..n.saturating_sub(free)).collect();
                        prop_assert_eq!(&table[n - evicted.len()..], &evicted[..]);
                        model.content.retain(|id, _| !evicted.contains(id));
                    }
                    tables.push(table);
                }
                1 if !tables.is_empty() => {
                    let table = tables.swap_remove(pick(tables.len()));
                    pool.release(&table);
                    model.freed(&pool, &table);
                }
                2 if !tables.is_empty() => {
                    let table = tables[pick(tables.len())].clone();
                    retain(&mut pool, &table);
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
                    model.freed(&pool, &table);
                }
                5 if !tables.is_empty() => {
                    // Content 10 * n + place, so that different tables bring the same names.
                    for (&id, place) in tables[pick(tables.len())].iter().zip(0..) {
                        let name = 10 * n as u128 + place;
                        pool.name(id, key(name));
                        if !model.content.contains_key(&id) && !model.content.values().any(|&c| c == name) {
                            model.content.insert(id, name);
                        }
                    }
                }
                6 => {
                    let keys: Vec<_> = (0..4).map(|place| key(10 * n as u128 + place)).collect();
                    let (hit, free) = pool.lookup(&keys);
                    let mut table = Vec::new();
                    let before = pool.available();
                    prop_assert_eq!(pool.share(&keys, &mut table), hit);
                    prop_assert_eq!(before - pool.available(), free);
                    for (id, key) in table.iter().zip(&keys) {
                        prop_assert_eq!(model.content.get(id), Some(&key.0));
                    }
                    model.cached.retain(|id| !table.contains(id));
                    tables.push(table);
                }
                _ => {}
            }
            let audit = pool.audit(
                tables.iter().map(Vec::as_slice),
                held.iter().map(Vec::as_slice),
            );
            prop_assert_eq!(audit, Ok(()));
            prop_assert_eq!(pool.counts().cached as usize, model.cached.len());
        }
    }
}
