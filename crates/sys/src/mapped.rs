//! Read-only file mappings for model weights.

use crate::file::{FileError, open_regular};
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap};

/// How a mapped file will be read; passed on to the kernel as advice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// No hint.
    Normal,
    /// Front to back: read ahead far.
    Sequential,
    /// Jumping: don't read ahead.
    Random,
    /// All of it soon: start reading now.
    WillNeed,
}

/// A file mapped for reading.
///
/// The bytes are the file's own pages. A file that is changed in place while it is mapped changes under the reader, and
/// one that is truncated ends the process with `SIGBUS` at the next read behind its end: keeping files of a running
/// model unchanged is the operator's part (replace them by rename). [`MappedFile::unchanged`] tells afterwards whether
/// that held as far as length and modification time show.
#[derive(Debug)]
pub struct MappedFile {
    map: Option<Mmap>,
    file: File,
    path: PathBuf,
    before: Metadata,
}

impl MappedFile {
    /// Maps the whole file; an empty file maps to an empty slice.
    ///
    /// # Errors
    /// What opening or mapping reports; `InvalidInput` when the path is no regular file.
    pub fn open(path: &Path, access: Access) -> io::Result<Self> {
        let (file, before) = open_regular(path).map_err(FileError::into_io)?;
        let map = if before.len() == 0 {
            None
        } else {
            // SAFETY: the mapping is private and read-only. That no other process changes the file is a documented
            // duty of the operator; bytes that change are caught by checksums where they matter.
            let map = unsafe { Mmap::map(&file) }?;
            match access {
                Access::Normal => {}
                Access::Sequential => map.advise(Advice::Sequential)?,
                Access::Random => map.advise(Advice::Random)?,
                Access::WillNeed => map.advise(Advice::WillNeed)?,
            }
            Some(map)
        };
        Ok(Self {
            map,
            file,
            path: path.to_path_buf(),
            before,
        })
    }

    /// The bytes of the file.
    pub fn as_slice(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Length in bytes when it was mapped.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether the file was empty when it was mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the open file still has the length and modification time it had when it was mapped.
    ///
    /// # Errors
    /// What `fstat` reports.
    pub fn unchanged(&self) -> io::Result<bool> {
        let now = self.file.metadata()?;
        Ok(now.len() == self.before.len() && now.modified()? == self.before.modified()?)
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn temp(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("twinfer-sys-{}-{name}", std::process::id()))
    }

    #[test]
    fn maps_what_the_file_holds_and_notices_growth() {
        let path = temp("map");
        std::fs::write(&path, b"weights").unwrap();
        let map = MappedFile::open(&path, Access::WillNeed).unwrap();
        assert_eq!((map.as_slice(), map.len()), (&b"weights"[..], 7));
        assert!(map.unchanged().unwrap());
        File::options()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"more")
            .unwrap();
        assert!(!map.unchanged().unwrap());
        assert_eq!(map.len(), 7);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn an_empty_file_is_empty_and_a_directory_is_refused() {
        let path = temp("empty");
        std::fs::write(&path, b"").unwrap();
        assert!(MappedFile::open(&path, Access::Normal).unwrap().is_empty());
        std::fs::remove_file(path).unwrap();
        let error = MappedFile::open(&std::env::temp_dir(), Access::Normal).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(MappedFile::open(&temp("missing"), Access::Random).is_err());
    }
}
