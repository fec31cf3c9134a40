//! Memory that was filled once and that nobody can change any more, mapped by any number of processes.
//!
//! It is a `memfd`: no file system limits its size, it counts once however many map it, and it is gone with the last
//! process that has it, however that one ends. Another process opens it through `/proc`, which the kernel allows to the
//! same user only.

use crate::large::{LARGE, reserve};
use rustix::fs::{FileType, Mode, OFlags, SealFlags};
use rustix::fs::{fcntl_add_seals, fcntl_get_seals, fstat, open};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

/// Nothing can be written, cut off or added, and that cannot be undone.
const UNCHANGEABLE: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW);

/// Shared memory that cannot change.
#[derive(Debug)]
pub struct SealedPages {
    base: NonNull<u8>,
    length: usize,
    file: OwnedFd,
}

// SAFETY: the bytes are only read, and the seals keep everybody from writing them.
unsafe impl Send for SealedPages {}
// SAFETY: as above.
unsafe impl Sync for SealedPages {}

impl SealedPages {
    /// Seals a `memfd` that is mapped nowhere for writing.
    pub(crate) fn seal(file: OwnedFd) -> io::Result<Self> {
        fcntl_add_seals(&file, UNCHANGEABLE | SealFlags::SEAL)?;
        Self::map(file)
    }

    /// Maps the sealed memory `name` that process `pid` of the same user has under its descriptor `number`.
    ///
    /// # Errors
    /// `NotFound` when there is no such process or descriptor; `InvalidData` when it is something else, or not sealed;
    /// what the system reports.
    pub fn open(pid: u32, number: u32, name: &CStr) -> io::Result<Self> {
        let wrong = |what: &str| {
            let message = format!("descriptor {number} of process {pid} {what}");
            io::Error::new(io::ErrorKind::InvalidData, message)
        };
        let path = format!("/proc/{pid}/fd/{number}");
        // Looked at before it is opened: opening a device may do something.
        let target = std::fs::read_link(&path)?;
        let expected = format!("/memfd:{} (deleted)", name.to_string_lossy());
        if target.as_os_str() != expected.as_str() {
            return Err(wrong("is no shared memory of that name"));
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = open(&path, flags, Mode::empty())?;
        if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(wrong("is no shared memory"));
        }
        if !fcntl_get_seals(&file)?.contains(UNCHANGEABLE) {
            return Err(wrong("is not sealed"));
        }
        Self::map(file)
    }

    /// The file is sealed.
    fn map(file: OwnedFd) -> io::Result<Self> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "sealed memory of no size");
        let size = usize::try_from(fstat(&file)?.st_size).map_err(|_| invalid())?;
        if size == 0 || !size.is_multiple_of(LARGE) {
            return Err(invalid());
        }
        let (base, length) = reserve(size)?;
        let pages = Self { base, length, file };
        // Private, since some kernels refuse shared mappings of what cannot be written; no page is ever copied.
        // SAFETY: replaces this value's own reservation, which is as long as the file, which cannot shrink.
        unsafe {
            mmap(
                base.as_ptr().cast(),
                length,
                ProtFlags::READ,
                MapFlags::PRIVATE | MapFlags::FIXED,
                &pages.file,
                0,
            )?;
            // Refused by kernels built without large pages: nothing is lost but speed.
            let _ = madvise(base.as_ptr().cast(), length, Advice::LinuxHugepage);
        }
        Ok(pages)
    }

    /// All bytes; whole large pages, zeroed behind what was written.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the mapping is readable for `length` bytes as long as this value lives, and nobody can write to it.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.length) }
    }

    /// The descriptor's number, for [`SealedPages::open`] in another process.
    pub fn number(&self) -> u32 {
        self.file.as_raw_fd().unsigned_abs()
    }
}

impl Drop for SealedPages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and all borrows of its bytes have ended.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pieces;
    use std::fs::File;
    use std::io::Write;

    const NAME: &CStr = c"twinfer-test";

    fn filled() -> Pieces {
        let pieces = Pieces::shared(NAME, 5 << 20).unwrap();
        let mut piece = pieces.take(3 << 20).unwrap();
        for (place, byte) in piece.as_mut_slice().iter_mut().enumerate() {
            *byte = (place % 251) as u8;
        }
        pieces
    }

    #[test]
    fn sealed_memory_is_opened_by_its_number_and_cannot_be_changed() {
        let mut beats = 0;
        let sealed = filled().seal(|| beats += 1).unwrap();
        assert_eq!(beats, 1);
        let other = SealedPages::open(std::process::id(), sealed.number(), NAME).unwrap();
        for pages in [&sealed, &other] {
            let bytes = pages.as_slice();
            assert_eq!(bytes.len(), 6 << 20);
            let mut filled = bytes[..3 << 20].iter().enumerate();
            assert!(filled.all(|(place, &byte)| byte == (place % 251) as u8));
            assert!(bytes[3 << 20..].iter().all(|&byte| byte == 0));
        }
        // Not even through a descriptor that was opened for writing.
        let path = format!("/proc/self/fd/{}", sealed.number());
        if let Ok(mut file) = File::options().write(true).open(path) {
            assert!(file.write_all(&[1]).is_err());
            assert!(file.set_len(0).is_err() && file.set_len(1 << 30).is_err());
        }
        drop(sealed);
        assert_eq!(
            other.as_slice()[250],
            250,
            "it lives as long as somebody has it"
        );
    }

    #[test]
    fn a_piece_that_is_left_keeps_memory_from_being_sealed() {
        let pieces = filled();
        let piece = pieces.take(1).unwrap();
        let error = pieces.seal(|| {}).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        drop(piece);
        let private = Pieces::private(1).unwrap();
        assert!(private.seal(|| {}).is_err());
    }

    #[test]
    fn what_is_not_sealed_memory_is_refused() {
        let open = |number: i32| SealedPages::open(std::process::id(), number.unsigned_abs(), NAME);
        let unsealed =
            rustix::fs::memfd_create(NAME, rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, LARGE as u64).unwrap();
        assert_eq!(
            open(unsealed.as_raw_fd()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        let (pipe, _end) = rustix::pipe::pipe().unwrap();
        assert!(open(pipe.as_raw_fd()).is_err());
        let file = File::open("/proc/self/exe").unwrap();
        assert!(open(file.as_raw_fd()).is_err());
        assert_eq!(open(99_999).unwrap_err().kind(), io::ErrorKind::NotFound);
        let named = filled().seal(|| {}).unwrap();
        assert!(SealedPages::open(std::process::id(), named.number(), c"other").is_err());
    }
}
