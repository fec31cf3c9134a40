//! Memory that several processes write and read at the same time, as atomic words, and futexes to wait on them.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;

/// The words of 64 bits begin at a multiple of this many bytes.
const LINE: usize = 64;

/// A file without a name (`memfd`), mapped for reading and writing: words of 32 bits to wait on ([`futex_wait`]), then
/// words of 64 bits for everything else. Other processes map it by its descriptor; it is gone when the last one ends,
/// however it ends.
///
/// All access is atomic, so what a foreign process writes at a wrong moment is a wrong value here and nothing worse.
#[derive(Debug)]
pub struct SharedWords {
    base: NonNull<u8>,
    mapped: usize,
    control: usize,
    data: usize,
    file: OwnedFd,
}

// SAFETY: the mapping belongs to this value, is bound to no thread, and its bytes are reached as atomics only.
unsafe impl Send for SharedWords {}
// SAFETY: as for Send.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Makes the file, all zeros, of a length that can't change any more: `control` words of 32 bits and `data` words of
    /// 64 bits.
    ///
    /// # Errors
    /// `InvalidInput` when a number is 0 or the length exceeds the address space; what the system reports otherwise.
    pub fn create(name: &CStr, control: usize, data: usize) -> io::Result<Self> {
        let length = length(control, data)?;
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, length as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, length, control, data)
    }

    /// Maps a file that another process made with the same numbers.
    ///
    /// # Errors
    /// `InvalidData` when the file has another length or may be made shorter; what the system reports otherwise.
    pub fn open(file: OwnedFd, control: usize, data: usize) -> io::Result<Self> {
        let length = length(control, data)?;
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let found = fstat(&file)?.st_size;
        if u64::try_from(found).ok() != Some(length as u64) {
            return Err(invalid(format!(
                "shared memory of {found} bytes; it should have {length}"
            )));
        }
        let seals = fcntl_get_seals(&file).map_err(|_| invalid("no shared memory".to_owned()))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(invalid(
                "shared memory that its maker may shorten".to_owned(),
            ));
        }
        Self::map(file, length, control, data)
    }

    fn map(file: OwnedFd, length: usize, control: usize, data: usize) -> io::Result<Self> {
        // SAFETY: a mapping at an address the kernel chooses aliases no Rust object; the file is sealed against
        // becoming shorter, so every page of it stays readable.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap returned the null address"))?;
        Ok(Self {
            base,
            mapped: length,
            control,
            data,
            file,
        })
    }

    /// The words of 32 bits.
    pub fn control(&self) -> &[AtomicU32] {
        // SAFETY: the mapping begins with `control` words of 32 bits, page-aligned, initialised (zero pages), and only
        // ever reached as atomics for as long as this value lives.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.control) }
    }

    /// The words of 64 bits.
    pub fn data(&self) -> &[AtomicU64] {
        // SAFETY: as above; the offset is that of `length`, a multiple of 64, and the words of 32 bits end before it.
        unsafe {
            let start = self.base.as_ptr().add(data_offset(self.control));
            std::slice::from_raw_parts(start.cast(), self.data)
        }
    }

    /// The file, to be passed on.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and all borrows of its words have ended.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

fn data_offset(control: usize) -> usize {
    (control * size_of::<AtomicU32>()).next_multiple_of(LINE)
}

fn length(control: usize, data: usize) -> io::Result<usize> {
    control
        .checked_mul(size_of::<AtomicU32>())
        .and_then(|bytes| bytes.checked_next_multiple_of(LINE))
        .zip(data.checked_mul(size_of::<AtomicU64>()))
        .and_then(|(control, data)| control.checked_add(data))
        .filter(|&length| control > 0 && data > 0 && isize::try_from(length).is_ok())
        .ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("shared memory of {control} words of 32 bits and {data} of 64 bits"),
            )
        })
}

/// Sleeps until somebody wakes `word`, at most `timeout`; not at all when it isn't `expected` any more. Returns early
/// without a reason at times: look at the word again. Works between processes that share the word's memory.
///
/// # Errors
/// What `futex` reports beyond a changed word, an interruption and the end of the time.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) -> io::Result<()> {
    let timeout = futex::Timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    match futex::wait(word, futex::Flags::empty(), expected, Some(&timeout)) {
        Ok(())
        | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::TIMEDOUT) => {
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Wakes everybody who sleeps on `word`, in any process; their number.
///
/// # Errors
/// What `futex` reports.
pub fn futex_wake_all(word: &AtomicU32) -> io::Result<usize> {
    Ok(futex::wake(
        word,
        futex::Flags::empty(),
        i32::MAX.unsigned_abs(),
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn two_mappings_of_a_file_show_the_same_words() {
        let first = SharedWords::create(c"test", 3, 10).unwrap();
        let file = first.file().try_clone_to_owned().unwrap();
        let second = SharedWords::open(file, 3, 10).unwrap();
        assert_eq!((second.control().len(), second.data().len()), (3, 10));
        assert!(first.data().iter().all(|w| w.load(Ordering::Relaxed) == 0));
        first.control()[2].store(7, Ordering::Release);
        first.data()[0].store(1, Ordering::Release);
        first.data()[9].store(u64::MAX, Ordering::Release);
        assert_eq!(second.control()[2].load(Ordering::Acquire), 7);
        let seen = [0, 1, 9].map(|place: usize| second.data()[place].load(Ordering::Acquire));
        assert_eq!(seen, [1, 0, u64::MAX]);
    }

    #[test]
    fn files_of_another_length_or_kind_are_refused() {
        let words = SharedWords::create(c"test", 16, 8).unwrap();
        let file = || words.file().try_clone_to_owned().unwrap();
        for (control, data) in [(16, 9), (17, 8), (0, 8), (16, 0), (usize::MAX, 1)] {
            assert!(
                SharedWords::open(file(), control, data).is_err(),
                "{control} {data}"
            );
        }
        assert!(std::fs::File::from(file()).set_len(0).is_err());
        let unsealed = memfd_create(c"test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&unsealed, 128).unwrap();
        assert!(SharedWords::open(unsealed, 16, 8).is_err());
        let no_memory = std::fs::File::open("/proc/self/status").unwrap();
        assert!(SharedWords::open(no_memory.into(), 16, 8).is_err());
    }

    #[test]
    fn a_sleeper_is_woken_and_a_changed_word_is_not_slept_on() {
        let words = SharedWords::create(c"test", 1, 1).unwrap();
        let word = &words.control()[0];
        futex_wait(word, 1, Duration::from_secs(60)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while word.load(Ordering::Acquire) == 0 {
                    futex_wait(word, 0, Duration::from_secs(60)).unwrap();
                }
            });
            word.store(1, Ordering::Release);
            futex_wake_all(word).unwrap();
        });
    }
}
