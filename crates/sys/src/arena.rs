//! The memory of the KV cache: fixed blocks in one anonymous mapping, with borrow rules checked at run time.
//!
//! A block is written by one step, read by later steps and by handoff tasks on other threads. Which of these happens
//! when is decided far away from here, so the arena checks it as a `RefCell` would, one atomic word per block: a
//! conflicting borrow is an error, never a data race.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Units start at multiples of this many bytes (one cache line, one AVX-512 register).
pub const UNIT_ALIGN: usize = 64;

/// A block whose state is this has one writer; any other value counts readers.
const WRITER: u32 = u32::MAX;

/// Why a block could not be borrowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// The id is not below the number of blocks.
    #[error("block {block} does not exist: the arena has {blocks} blocks")]
    OutOfRange {
        /// The id asked for.
        block: u32,
        /// Number of blocks in the arena.
        blocks: u32,
    },
    /// The block is borrowed in a way that excludes this borrow.
    #[error("block {block} is {}", match .readers { 0 => "being written".to_owned(), n => format!("read by {n}") })]
    Busy {
        /// The id asked for.
        block: u32,
        /// Number of readers that hold it; 0 says that a writer does.
        readers: u32,
    },
}

/// `num_blocks` blocks of `layers` units of `unit_bytes` bytes. Pages are zero and take no memory until written.
///
/// The units of a block lie behind each other at a stride of [`BlockArena::unit_stride`] bytes.
#[derive(Debug)]
pub struct BlockArena {
    base: NonNull<u8>,
    mapped_bytes: usize,
    num_blocks: u32,
    layers: usize,
    unit_bytes: usize,
    unit_stride: usize,
    states: Box<[AtomicU32]>,
}

/// Shared borrow of one block; released on drop.
#[derive(Debug)]
pub struct BlockRead<'a> {
    arena: &'a BlockArena,
    block: u32,
}

/// Exclusive borrow of one block; released on drop.
#[derive(Debug)]
pub struct BlockWrite<'a> {
    arena: &'a BlockArena,
    block: u32,
}

// SAFETY: the mapping belongs to the arena alone and is not bound to a thread; all access to its bytes goes through
// guards that enforce shared-xor-exclusive per block with atomics.
unsafe impl Send for BlockArena {}
// SAFETY: as for Send; `&BlockArena` gives out bytes only through those guards.
unsafe impl Sync for BlockArena {}

impl BlockArena {
    /// Maps the arena. Address space is reserved at once, memory is taken as pages are written.
    ///
    /// # Errors
    /// `InvalidInput` when a size is 0 or the total overflows, otherwise what `mmap` reports.
    pub fn new(num_blocks: u32, layers: usize, unit_bytes: usize) -> io::Result<Self> {
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
        if num_blocks == 0 || layers == 0 || unit_bytes == 0 {
            return Err(invalid(format!(
                "a block arena needs sizes above 0, got {num_blocks} blocks, {layers} layers, {unit_bytes} bytes a unit"
            )));
        }
        let unit_stride = unit_bytes
            .checked_next_multiple_of(UNIT_ALIGN)
            .ok_or_else(|| invalid(format!("unit of {unit_bytes} bytes is too large")))?;
        let mapped_bytes = unit_stride
            .checked_mul(layers)
            .and_then(|block| block.checked_mul(num_blocks as usize))
            .filter(|&total| isize::try_from(total).is_ok())
            .ok_or_else(|| {
                invalid(format!(
                    "{num_blocks} blocks of {layers} units of {unit_bytes} bytes exceed the address space"
                ))
            })?;
        // SAFETY: a fresh private mapping at an address the kernel chooses aliases nothing.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        // Attention jumps from unit to unit: in small pages every row of KV would cost a walk of the page table. A wish:
        // without large pages all works the same.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { madvise(base, mapped_bytes, Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap returned the null address"))?;
        let states = (0..num_blocks).map(|_| AtomicU32::new(0)).collect();
        Ok(Self {
            base,
            mapped_bytes,
            num_blocks,
            layers,
            unit_bytes,
            unit_stride,
            states,
        })
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Units per block.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Bytes of a unit that may be used.
    pub fn unit_bytes(&self) -> usize {
        self.unit_bytes
    }

    /// Bytes from one unit to the next: `unit_bytes` rounded up to [`UNIT_ALIGN`].
    pub fn unit_stride(&self) -> usize {
        self.unit_stride
    }

    /// Bytes of address space the arena takes; the memory it takes at most.
    pub fn mapped_bytes(&self) -> usize {
        self.mapped_bytes
    }

    /// Borrows `block` for reading; any number of readers may hold it.
    ///
    /// # Errors
    /// [`BlockError::OutOfRange`], or [`BlockError::Busy`] while it is being written.
    pub fn read(&self, block: u32) -> Result<BlockRead<'_>, BlockError> {
        self.acquire_read(block)?;
        Ok(BlockRead { arena: self, block })
    }

    /// Borrows `block` for writing, alone.
    ///
    /// # Errors
    /// [`BlockError::OutOfRange`], or [`BlockError::Busy`] while anyone else holds it.
    pub fn write(&self, block: u32) -> Result<BlockWrite<'_>, BlockError> {
        self.acquire_write(block)?;
        Ok(BlockWrite { arena: self, block })
    }

    /// Number of blocks that are borrowed now, by readers or a writer. For gauges and leak tests.
    pub fn borrowed_blocks(&self) -> usize {
        self.states
            .iter()
            .filter(|state| state.load(Ordering::Relaxed) != 0)
            .count()
    }

    fn state(&self, block: u32) -> Result<&AtomicU32, BlockError> {
        self.states
            .get(block as usize)
            .ok_or(BlockError::OutOfRange {
                block,
                blocks: self.num_blocks,
            })
    }

    fn acquire_read(&self, block: u32) -> Result<(), BlockError> {
        self.state(block)?
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |state| {
                // One below WRITER stays unused, so that a count can never turn into a writer.
                (state < WRITER - 1).then_some(state + 1)
            })
            .map(|_| ())
            .map_err(|state| BlockError::Busy {
                block,
                readers: if state == WRITER { 0 } else { state },
            })
    }

    fn acquire_write(&self, block: u32) -> Result<(), BlockError> {
        self.state(block)?
            .compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed)
            .map(|_| ())
            .map_err(|state| BlockError::Busy {
                block,
                readers: if state == WRITER { 0 } else { state },
            })
    }

    fn release_read(&self, block: u32) {
        if let Some(state) = self.states.get(block as usize) {
            state.fetch_sub(1, Ordering::Release);
        }
    }

    fn release_write(&self, block: u32) {
        if let Some(state) = self.states.get(block as usize) {
            state.store(0, Ordering::Release);
        }
    }

    /// Address of a unit; `None` when `layer` is out of range.
    fn unit_ptr(&self, block: u32, layer: usize) -> Option<NonNull<u8>> {
        if block >= self.num_blocks || layer >= self.layers {
            return None;
        }
        let offset = (block as usize * self.layers + layer) * self.unit_stride;
        // SAFETY: block and layer are in range, so the offset lies inside the mapping (checked in `new`).
        Some(unsafe { self.base.add(offset) })
    }

    /// # Safety
    /// The caller holds a borrow of `block` (shared or exclusive) for as long as the slice lives.
    unsafe fn unit(&self, block: u32, layer: usize) -> Option<&[u8]> {
        let ptr = self.unit_ptr(block, layer)?;
        // SAFETY: `unit_bytes` bytes from the start of a unit are inside the mapping and initialised (zero pages);
        // the caller's borrow keeps writers away.
        Some(unsafe { std::slice::from_raw_parts(ptr.as_ptr(), self.unit_bytes) })
    }

    /// # Safety
    /// The caller holds the exclusive borrow of `block` for as long as the slice lives and makes no second slice of it.
    #[expect(
        clippy::mut_from_ref,
        reason = "exclusiveness is that of the block guard, not of the arena"
    )]
    unsafe fn unit_mut(&self, block: u32, layer: usize) -> Option<&mut [u8]> {
        let ptr = self.unit_ptr(block, layer)?;
        // SAFETY: as in `unit`; the caller's exclusive borrow keeps readers and other writers away.
        Some(unsafe { std::slice::from_raw_parts_mut(ptr.as_ptr(), self.unit_bytes) })
    }
}

impl Drop for BlockArena {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping made in `new`; guards borrow the arena, so none lives.
        // A failure could only mean that the mapping is already gone; there is nothing to do about it here.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
    }
}

impl BlockRead<'_> {
    /// The block this guard holds.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// The bytes of one layer's unit; `None` when `layer` is not below the arena's number of layers.
    pub fn unit(&self, layer: usize) -> Option<&[u8]> {
        // SAFETY: the guard holds a shared borrow of the block and outlives the slice.
        unsafe { self.arena.unit(self.block, layer) }
    }
}

impl Drop for BlockRead<'_> {
    fn drop(&mut self) {
        self.arena.release_read(self.block);
    }
}

impl BlockWrite<'_> {
    /// The block this guard holds.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// The bytes of one layer's unit; `None` when `layer` is not below the arena's number of layers.
    pub fn unit(&self, layer: usize) -> Option<&[u8]> {
        // SAFETY: the guard holds the exclusive borrow, and `&self` keeps `unit_mut` from being called.
        unsafe { self.arena.unit(self.block, layer) }
    }

    /// The bytes of one layer's unit for writing; `None` as in `unit`.
    pub fn unit_mut(&mut self, layer: usize) -> Option<&mut [u8]> {
        // SAFETY: the guard holds the exclusive borrow, and `&mut self` makes this the only slice of it.
        unsafe { self.arena.unit_mut(self.block, layer) }
    }
}

impl Drop for BlockWrite<'_> {
    fn drop(&mut self) {
        self.arena.release_write(self.block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_block_has_one_writer_or_many_readers() {
        let arena = BlockArena::new(3, 2, 100).unwrap();
        let first = arena.read(1).unwrap();
        let second = arena.read(1).unwrap();
        assert_eq!(
            arena.write(1).unwrap_err(),
            BlockError::Busy {
                block: 1,
                readers: 2
            }
        );
        drop(first);
        assert_eq!(
            arena.write(1).unwrap_err(),
            BlockError::Busy {
                block: 1,
                readers: 1
            }
        );
        drop(second);
        let writer = arena.write(1).unwrap();
        assert_eq!(
            arena.read(1).unwrap_err(),
            BlockError::Busy {
                block: 1,
                readers: 0
            }
        );
        assert_eq!(
            arena.write(1).unwrap_err(),
            BlockError::Busy {
                block: 1,
                readers: 0
            }
        );
        assert!(arena.read(0).is_ok() && arena.write(2).is_ok());
        drop(writer);
        assert!(arena.read(1).is_ok());
        assert_eq!(arena.borrowed_blocks(), 0);
    }

    #[test]
    fn ids_and_layers_out_of_range_are_refused() {
        let arena = BlockArena::new(3, 2, 100).unwrap();
        assert_eq!(
            arena.read(3).unwrap_err(),
            BlockError::OutOfRange {
                block: 3,
                blocks: 3
            }
        );
        assert_eq!(
            arena.write(u32::MAX).unwrap_err(),
            BlockError::OutOfRange {
                block: u32::MAX,
                blocks: 3
            }
        );
        let mut block = arena.write(2).unwrap();
        assert!(block.unit(2).is_none() && block.unit_mut(usize::MAX).is_none());
    }

    #[test]
    fn sizes_of_zero_and_overflow_are_refused() {
        for (blocks, layers, bytes) in [
            (0, 1, 1),
            (1, 0, 1),
            (1, 1, 0),
            (u32::MAX, usize::MAX / 2, 1 << 20),
            (1, 1, usize::MAX),
        ] {
            let error = BlockArena::new(blocks, layers, bytes).unwrap_err();
            assert_eq!(
                error.kind(),
                io::ErrorKind::InvalidInput,
                "{blocks} {layers} {bytes}"
            );
        }
    }

    #[test]
    fn units_are_aligned_disjoint_and_keep_what_is_written() {
        let arena = BlockArena::new(4, 3, 100).unwrap();
        for block in 0..4 {
            let mut guard = arena.write(block).unwrap();
            for layer in 0..3 {
                let unit = guard.unit_mut(layer).unwrap();
                assert_eq!((unit.len(), unit.as_ptr() as usize % UNIT_ALIGN), (100, 0));
                assert!(unit.iter().all(|&byte| byte == 0));
                unit.fill((block * 3) as u8 + layer as u8 + 1);
            }
        }
        for block in 0..4 {
            let guard = arena.read(block).unwrap();
            for layer in 0..3 {
                let expected = (block * 3) as u8 + layer as u8 + 1;
                assert!(
                    guard
                        .unit(layer)
                        .unwrap()
                        .iter()
                        .all(|&byte| byte == expected)
                );
            }
        }
    }

    #[test]
    fn concurrent_borrowers_never_see_a_torn_block() {
        let arena = Arc::new(BlockArena::new(1, 1, 256).unwrap());
        let workers: Vec<_> = (0..4u8)
            .map(|worker| {
                let arena = Arc::clone(&arena);
                std::thread::spawn(move || {
                    for round in 0..2000u32 {
                        if (round + u32::from(worker)).is_multiple_of(3) {
                            if let Ok(mut guard) = arena.write(0) {
                                guard.unit_mut(0).unwrap().fill(worker);
                            }
                        } else if let Ok(guard) = arena.read(0) {
                            let unit = guard.unit(0).unwrap();
                            assert!(unit.iter().all(|&byte| byte == unit[0]));
                        }
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        assert_eq!(arena.borrowed_blocks(), 0);
    }
}
