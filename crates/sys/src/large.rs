//! Memory in large pages, for weights: read front to back they come almost twice as fast as in pages of 4 KiB.

use crate::SealedPages;
use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// Size and alignment of large pages; right for x86-64 and aarch64 with small pages of 4 KiB, else only a wish.
pub(crate) const LARGE: usize = 2 << 20;
/// Bytes that are moved to large pages between two signs of life.
const COLLAPSED_AT_ONCE: usize = 64 << 20;

/// A zeroed mapping, aligned to 2 MiB, that the kernel was asked to back with large pages. Without them it works the
/// same, slower.
#[derive(Debug)]
pub struct LargePages {
    base: NonNull<u8>,
    length: usize,
    mapped: usize,
    file: Option<OwnedFd>,
}

// SAFETY: the mapping belongs to this value alone, and so does the file behind it, if there is one, as long as this value
// lives: its descriptor is given to nobody. `&self` only reads, `&mut self` writes.
unsafe impl Send for LargePages {}
// SAFETY: as above.
unsafe impl Sync for LargePages {}

impl LargePages {
    /// Memory of this process alone.
    ///
    /// # Errors
    /// `InvalidInput` when `length` is 0 or exceeds the address space; otherwise what `mmap` reports.
    pub fn private(length: usize) -> io::Result<Self> {
        let (base, mapped) = reserve(length)?;
        let pages = Self {
            base,
            length,
            mapped,
            file: None,
        };
        // SAFETY: replaces this value's own reservation.
        unsafe {
            mmap_anonymous(
                base.as_ptr().cast(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )?;
        }
        pages.advise();
        Ok(pages)
    }

    /// Memory in a file without a name (`memfd`), for [`Pieces::seal`].
    fn shared(name: &CStr, length: usize) -> io::Result<Self> {
        let (base, mapped) = reserve(length)?;
        let mut pages = Self {
            base,
            length,
            mapped,
            file: None,
        };
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, mapped as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        // SAFETY: replaces this value's own reservation; the file cannot shrink under it.
        unsafe {
            mmap(
                base.as_ptr().cast(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                &file,
                0,
            )?;
        }
        pages.file = Some(file);
        pages.advise();
        Ok(pages)
    }

    /// Length asked for.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Always false: a length of 0 is refused.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// All bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the mapping is readable for `length` bytes as long as this value lives.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) }
    }

    /// All bytes, to fill them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.length) }
    }

    /// Makes what has been written lie in large pages now, also where the system's settings do not give them by
    /// themselves (shared memory, usually): call it once after filling. Takes the time of a copy; returns whether it
    /// worked.
    pub fn collapse(&self) -> bool {
        self.collapse_part(0, self.mapped)
    }

    fn collapse_part(&self, offset: usize, length: usize) -> bool {
        let length = length.min(self.mapped.saturating_sub(offset));
        // SAFETY: advice on this value's own mapping, of which the range is a part, changes no content.
        let outcome = unsafe {
            let start = self.base.as_ptr().add(offset.min(self.mapped));
            libc::madvise(start.cast(), length, libc::MADV_COLLAPSE)
        };
        outcome == 0
    }

    /// Unmaps the memory; its file stays.
    fn into_file(mut self) -> Option<OwnedFd> {
        self.file.take()
    }

    fn advise(&self) {
        // Refused by kernels built without large pages: nothing is lost but speed.
        // SAFETY: advice on this value's own mapping changes no content.
        let _ = unsafe {
            madvise(
                self.base.as_ptr().cast(),
                self.mapped,
                Advice::LinuxHugepage,
            )
        };
    }
}

impl Drop for LargePages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and all borrows of its bytes have ended.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

/// Address space without memory: where it begins, aligned, and its length in whole large pages.
pub(crate) fn reserve(length: usize) -> io::Result<(NonNull<u8>, usize)> {
    let invalid = || {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a mapping of {length} bytes"),
        )
    };
    let mapped = length
        .checked_next_multiple_of(LARGE)
        .filter(|&mapped| mapped > 0 && mapped <= isize::MAX as usize - LARGE)
        .ok_or_else(invalid)?;
    // SAFETY: a fresh private mapping at an address the kernel chooses aliases nothing; the parts before and behind the
    // aligned one are given back.
    unsafe {
        let whole = mmap_anonymous(
            std::ptr::null_mut(),
            mapped + LARGE,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )?
        .cast::<u8>();
        let before = whole.align_offset(LARGE);
        let base = whole.add(before);
        if before > 0 {
            munmap(whole.cast(), before)?;
        }
        if before < LARGE {
            munmap(base.add(mapped).cast(), LARGE - before)?;
        }
        let base = NonNull::new(base);
        Ok((base.ok_or_else(invalid)?, mapped))
    }
}

/// Memory in large pages that is given out piece by piece, from any thread, each piece once.
#[derive(Debug)]
pub struct Pieces {
    pages: Arc<LargePages>,
    next: AtomicUsize,
}

/// A part of [`Pieces`], aligned to 64 bytes. The memory lives as long as any of its pieces.
#[derive(Debug)]
pub struct Piece {
    pages: Arc<LargePages>,
    offset: usize,
    length: usize,
}

/// Alignment of pieces: a line of the cache.
const PIECE_ALIGN: usize = 64;

impl Pieces {
    /// `length` zeroed bytes of this process alone.
    ///
    /// # Errors
    /// As [`LargePages::private`].
    pub fn private(length: usize) -> io::Result<Self> {
        Ok(Self {
            pages: Arc::new(LargePages::private(length)?),
            next: AtomicUsize::new(0),
        })
    }

    /// `length` zeroed bytes in a file without a name, which shows as `/memfd:name`. Filled and sealed, other processes
    /// can map them.
    ///
    /// # Errors
    /// What `memfd_create`, `ftruncate` and `mmap` report; `Unsupported` when such memory cannot be had in large pages
    /// although private memory can: reading it would be slower.
    pub fn shared(name: &CStr, length: usize) -> io::Result<Self> {
        let mut pages = LargePages::shared(name, length)?;
        if let Some(first) = pages.as_mut_slice().first_mut() {
            // Written, so that there is a page to move.
            *first = 0;
        }
        if !pages.collapse_part(0, LARGE) && private_large_pages() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "shared memory cannot be had in large pages here",
            ));
        }
        Ok(Self {
            pages: Arc::new(pages),
            next: AtomicUsize::new(0),
        })
    }

    /// Makes shared bytes unchangeable, for this process as for all others. All pieces must be gone. `alive` is called
    /// now and then: moving to large pages takes the time of a copy.
    ///
    /// # Errors
    /// `ResourceBusy` when a piece is left; `InvalidInput` when the memory is private; what sealing or mapping reports.
    pub fn seal(self, mut alive: impl FnMut()) -> io::Result<SealedPages> {
        let used = self.next.into_inner();
        let pages = Arc::try_unwrap(self.pages)
            .map_err(|_| io::Error::new(io::ErrorKind::ResourceBusy, "a piece is still in use"))?;
        for offset in (0..used).step_by(COLLAPSED_AT_ONCE) {
            let left = (used - offset).min(COLLAPSED_AT_ONCE);
            // Refused where memory is short of large pages: nothing is lost but speed.
            pages.collapse_part(offset, left.next_multiple_of(LARGE));
            alive();
        }
        let file = pages.into_file().ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "private memory is not shared")
        })?;
        SealedPages::seal(file)
    }

    /// The next `length` bytes; none when so many are not left.
    pub fn take(&self, length: usize) -> Option<Piece> {
        let step = length.checked_next_multiple_of(PIECE_ALIGN)?;
        let offset = self
            .next
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                next.checked_add(step)
                    .filter(|end| *end <= self.pages.mapped)
            })
            .ok()?;
        Some(Piece {
            pages: Arc::clone(&self.pages),
            offset,
            length,
        })
    }
}

impl Piece {
    /// Where it begins in the whole.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range lies inside the mapping, was given to this piece alone, and nothing else ever forms a
        // reference to it: the pages are private to `Pieces`, which only gives out ranges.
        unsafe {
            let start = self.pages.base.as_ptr().add(self.offset);
            std::slice::from_raw_parts(start, self.length)
        }
    }

    /// Its bytes, to fill them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow of this piece is the only one.
        unsafe {
            let start = self.pages.base.as_ptr().add(self.offset);
            std::slice::from_raw_parts_mut(start, self.length)
        }
    }
}

/// Does private memory come in large pages when it is asked for?
fn private_large_pages() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|text| !text.contains("[never]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_aligned_and_keeps_what_is_written() {
        for mut pages in [
            LargePages::private(5 << 20).unwrap(),
            LargePages::shared(c"test", 5 << 20).unwrap(),
        ] {
            assert_eq!(pages.len(), 5 << 20);
            assert!((pages.as_slice().as_ptr() as usize).is_multiple_of(LARGE));
            assert!(pages.as_slice().iter().all(|&byte| byte == 0));
            for (place, byte) in pages.as_mut_slice().iter_mut().enumerate() {
                *byte = (place % 251) as u8;
            }
            pages.collapse();
            let mut bytes = pages.as_slice().iter().enumerate();
            assert!(bytes.all(|(place, &byte)| byte == (place % 251) as u8));
        }
    }

    #[test]
    fn pieces_are_aligned_and_apart_and_outlive_their_whole() {
        let pieces = Pieces::private(1000).unwrap();
        let mut first = pieces.take(100).unwrap();
        let mut second = pieces.take(1).unwrap();
        assert!(pieces.take(LARGE).is_none() && pieces.take(usize::MAX).is_none());
        drop(pieces);
        first.as_mut_slice().fill(1);
        second.as_mut_slice().fill(2);
        assert!(first.as_slice().iter().all(|byte| *byte == 1) && first.as_slice().len() == 100);
        assert_eq!(second.as_slice(), [2]);
        for piece in [&first, &second] {
            assert!((piece.as_slice().as_ptr() as usize).is_multiple_of(PIECE_ALIGN));
        }
    }

    #[test]
    fn impossible_lengths_are_refused() {
        for length in [0, usize::MAX, isize::MAX as usize] {
            assert!(LargePages::private(length).is_err());
            assert!(LargePages::shared(c"test", length).is_err());
        }
    }
}
