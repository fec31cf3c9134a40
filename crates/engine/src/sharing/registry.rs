//! The small files by which instances find each other's packed weights.
//!
//! A file begins with a record of [`RECORD`] bytes in which the one that packs says how far it is; then follow lines of
//! process and descriptor of those that have the weights. Whoever reads or writes those lines holds the file's lock.
//! Lines of processes that ended are stale and harmless: what they lead to is checked before it is used.

use super::segment::{SHARED_NAME, Segment};
use crate::Progress;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::park_timeout;
use std::time::{Duration, Instant};
use twinfer_sys::SealedPages;

/// Bytes of the packer's record.
const RECORD: usize = 64;
/// Largest file that is read; a line takes some twenty bytes.
const MAX_FILE: u64 = 1 << 20;
/// Files looked at by one start for leftovers.
const MAX_SWEPT: usize = 1000;
/// Time between two looks at a lock that is held.
const LOOK: Duration = Duration::from_millis(20);

/// How long to wait for an instance that packs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Longest time without progress.
    pub(crate) stalled: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            stalled: Duration::from_secs(60),
        }
    }
}

/// Who is to pack.
#[derive(Debug)]
pub(crate) enum Claim {
    /// Nobody else has them: pack, then [`PackLock::publish`].
    Pack(PackLock),
    /// They are there.
    Ready(Arc<Segment>),
    /// They cannot be shared, because of this.
    Private(String),
}

/// The right to pack, until dropped.
#[derive(Debug)]
pub(crate) struct PackLock {
    file: File,
    path: PathBuf,
    others: Vec<Holder>,
}

/// A line of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    pid: u32,
    number: u32,
}

/// This process's line, as long as it has the weights.
#[derive(Debug)]
pub(super) struct Member {
    path: PathBuf,
    holder: Holder,
}

/// Finds the packed weights named `key`, or gets the right to pack them. While another instance packs, waits and
/// reports that one's progress.
pub(crate) fn claim(
    dir: &Path,
    key: &str,
    patience: Patience,
    progress: Option<Progress<'_>>,
) -> Claim {
    let attempt = check_dir(dir).and_then(|()| {
        sweep(dir, key);
        try_claim(&dir.join(key), key, patience, progress)
    });
    attempt.unwrap_or_else(|error| Claim::Private(format!("{}: {error}", dir.display())))
}

fn try_claim(
    path: &Path,
    key: &str,
    patience: Patience,
    progress: Option<Progress<'_>>,
) -> io::Result<Claim> {
    let Some(file) = locked(path, patience, progress)? else {
        let waited = patience.stalled.as_secs();
        return Ok(Claim::Private(format!(
            "another instance packs the same weights and made no progress for {waited} s"
        )));
    };
    let mut others = Vec::new();
    let mut found = None;
    for holder in read_holders(&file)? {
        match SealedPages::open(holder.pid, holder.number, SHARED_NAME) {
            Ok(pages) if found.is_none() => {
                found = Segment::read(pages, key).ok();
                others.push(holder);
            }
            Ok(_) => others.push(holder),
            Err(_) => {}
        }
    }
    let lock = PackLock {
        file,
        path: path.to_owned(),
        others,
    };
    match found {
        // Others find those that were there before.
        Some(segment) => Ok(Claim::Ready(lock.publish(segment).0)),
        None => Ok(Claim::Pack(lock)),
    }
}

/// Opens and locks a file, which is made if it is not there; none when its owner makes no progress.
fn locked(
    path: &Path,
    patience: Patience,
    progress: Option<Progress<'_>>,
) -> io::Result<Option<File>> {
    let mut seen = [0; RECORD];
    let mut since = Instant::now();
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error),
            }
            let mut record = [0; RECORD];
            let _ = file.read_at(&mut record, 0)?;
            if record != seen {
                seen = record;
                since = Instant::now();
                if let (Some(progress), Some((done, total))) = (progress, parse_record(&record)) {
                    progress(done, total);
                }
            } else if since.elapsed() > patience.stalled {
                return Ok(None);
            }
            park_timeout(LOOK);
        }
        // The last one that has weights removes the file.
        if is_at(&file, path) {
            return Ok(Some(file));
        }
        if since.elapsed() > patience.stalled {
            return Ok(None);
        }
    }
}

impl PackLock {
    /// Tells those who wait how far packing is, and that this process lives. `beat` differs from call to call.
    pub(crate) fn progress(&self, done: u64, total: u64, beat: u64) {
        let mut record = format!("{done} {total} {beat}").into_bytes();
        record.resize(RECORD, b' ');
        // Who waits then gives up early, which costs memory, not answers.
        let _ = self.file.write_all_at(&record, 0);
    }

    /// Makes sealed weights known and gives up the lock. An error means that nobody will find them here; they are as
    /// good for this process.
    pub(crate) fn publish(self, mut segment: Segment) -> (Arc<Segment>, io::Result<()>) {
        let holder = Holder {
            pid: std::process::id(),
            number: segment.number(),
        };
        let holders: Vec<Holder> = self.others.iter().copied().chain([holder]).collect();
        let written = write_holders(&self.file, &holders);
        segment.join(Member {
            path: self.path.clone(),
            holder,
        });
        (Arc::new(segment), written)
    }
}

impl Drop for PackLock {
    fn drop(&mut self) {
        // Nothing was made known: leave no file behind. Who waits for this one's lock sees that it is gone.
        if is_at(&self.file, &self.path)
            && read_holders(&self.file).is_ok_and(|holders| holders.is_empty())
        {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // A line that stays when another instance has the lock just now is removed by a later start.
        let Ok(file) = File::options().read(true).write(true).open(&self.path) else {
            return;
        };
        if file.try_lock().is_err() || !is_at(&file, &self.path) {
            return;
        }
        let others = read_holders(&file).unwrap_or_default();
        let others: Vec<Holder> = others.into_iter().filter(|h| *h != self.holder).collect();
        let _ = match others.is_empty() {
            true => std::fs::remove_file(&self.path),
            false => write_holders(&file, &others),
        };
    }
}

/// Removes files whose processes have ended.
fn sweep(dir: &Path, but: &str) {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten().take(MAX_SWEPT) {
        let path = entry.path();
        if path.file_name().is_some_and(|name| name == but) {
            continue;
        }
        let Ok(file) = File::options().read(true).write(true).open(&path) else {
            continue;
        };
        if file.try_lock().is_err() || !is_at(&file, &path) {
            continue;
        }
        let alive =
            |holder: &Holder| SealedPages::open(holder.pid, holder.number, SHARED_NAME).is_ok();
        if read_holders(&file).is_ok_and(|holders| !holders.iter().any(alive)) {
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// A directory of this user alone, made if it is not there.
fn check_dir(dir: &Path) -> io::Result<()> {
    if let Err(error) = DirBuilder::new().mode(0o700).create(dir)
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(error);
    }
    let meta = std::fs::symlink_metadata(dir)?;
    let user = std::fs::metadata("/proc/self")?.uid();
    if !meta.is_dir() || meta.uid() != user || meta.mode() & 0o077 != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "is not a directory of this user alone (mode 0700)",
        ));
    }
    Ok(())
}

fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), std::fs::symlink_metadata(path)) else {
        return false;
    };
    (open.dev(), open.ino()) == (named.dev(), named.ino())
}

fn parse_record(record: &[u8]) -> Option<(u64, u64)> {
    let text = std::str::from_utf8(record).ok()?;
    let mut numbers = text.split_whitespace().map(|word| word.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

fn read_holders(file: &File) -> io::Result<Vec<Holder>> {
    let length = file.metadata()?.len();
    if length > MAX_FILE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a list of {length} bytes"),
        ));
    }
    let mut text = vec![0; usize::try_from(length).unwrap_or(0).saturating_sub(RECORD)];
    file.read_exact_at(&mut text, RECORD as u64)?;
    let text = String::from_utf8_lossy(&text);
    Ok(text
        .lines()
        .filter_map(|line| {
            let (pid, number) = line.split_once(' ')?;
            Some(Holder {
                pid: pid.parse().ok()?,
                number: number.parse().ok()?,
            })
        })
        .collect())
}

fn write_holders(file: &File, holders: &[Holder]) -> io::Result<()> {
    let mut text = vec![b' '; RECORD];
    for holder in holders {
        text.extend_from_slice(format!("{} {}\n", holder.pid, holder.number).as_bytes());
    }
    file.set_len(0)?;
    file.write_all_at(&text, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn soon() -> Patience {
        Patience {
            stalled: Duration::from_millis(200),
        }
    }

    #[test]
    fn one_packs_and_others_wait_for_it_with_its_progress_or_give_up() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("shared");
        let Claim::Pack(lock) = claim(&dir, "k", soon(), None) else {
            panic!("nobody has them")
        };
        lock.progress(7, 9, 0);
        let seen = Mutex::new(Vec::new());
        let told = |done, total| seen.lock().unwrap().push((done, total));
        // Progress keeps it waiting, a standstill does not.
        let Claim::Private(reason) = claim(&dir, "k", soon(), Some(&told)) else {
            panic!("the lock is held")
        };
        assert!(reason.contains("no progress"), "{reason}");
        assert_eq!(seen.into_inner().unwrap(), [(7, 9)]);
        assert!(matches!(claim(&dir, "other", soon(), None), Claim::Pack(_)));
        drop(lock);
        assert!(matches!(claim(&dir, "k", soon(), None), Claim::Pack(_)));
        let left: Vec<_> = std::fs::read_dir(&dir).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn lines_that_lead_nowhere_are_ignored_and_their_files_removed() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("shared");
        check_dir(&dir).unwrap();
        let own = std::process::id();
        let lines = format!(
            "{:64}{own} 0\n{own} 99999\n4000000 1\nnonsense\n-1 -1\n",
            ""
        );
        for name in ["k", "old"] {
            std::fs::write(dir.join(name), &lines).unwrap();
        }
        let Claim::Pack(lock) = claim(&dir, "k", soon(), None) else {
            panic!("nobody has them")
        };
        assert!(!dir.join("old").exists(), "swept");
        assert!(lock.others.is_empty());
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let refused = claim(dir.path(), "k", soon(), None);
        assert!(matches!(refused, Claim::Private(reason) if reason.contains("0700")));
        let nowhere = dir.path().join("a/b");
        assert!(matches!(
            claim(&nowhere, "k", soon(), None),
            Claim::Private(_)
        ));
    }
}
