//! Files from strangers: a model directory is data, and must not make its reader hang, run out of memory or read
//! what lies elsewhere.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Why a file was not taken. Completes a sentence that names the file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be opened or read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A folder, pipe, device or socket.
    #[error("is not a regular file")]
    NotRegular,
    /// More than the reader takes.
    #[error("has {bytes} bytes; at most {most} are allowed")]
    TooLarge {
        /// Size.
        bytes: u64,
        /// Limit.
        most: u64,
    },
    /// A link that leaves its directory.
    #[error("is a link out of the model directory, to {}", .0.display())]
    LinkOut(PathBuf),
    /// A link whose target does not exist.
    #[error("is a link to {}, which does not exist", .0.display())]
    LinkToNothing(PathBuf),
    /// What Git LFS leaves in place of a file that it has not fetched.
    #[error(
        "is a Git LFS pointer, not the file itself: expected {} bytes, found {bytes}; run `git lfs pull`",
        expected.map_or_else(|| "more".to_owned(), |expected| expected.to_string())
    )]
    LfsPointer {
        /// Size of the file itself, as the pointer has it.
        expected: Option<u64>,
        /// Size of the pointer.
        bytes: u64,
    },
}

impl FileError {
    /// Is there simply no such file?
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

/// Opens a regular file for reading; does not wait for the writer of a pipe.
///
/// # Errors
/// [`FileError::Io`], [`FileError::NotRegular`].
pub fn open_regular(path: &Path) -> Result<(File, Metadata), FileError> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|error| match error.raw_os_error() {
            // What a socket answers.
            Some(libc::ENXIO) => FileError::NotRegular,
            _ => FileError::Io(error),
        })?;
    let meta = file.metadata()?;
    if meta.is_file() {
        Ok((file, meta))
    } else {
        Err(FileError::NotRegular)
    }
}

/// The whole of a regular file of at most `most` bytes that is no Git LFS pointer.
///
/// # Errors
/// Every variant but those of links.
pub fn read_regular(path: &Path, most: u64) -> Result<Vec<u8>, FileError> {
    let (file, meta) = open_regular(path)?;
    let too_large = |bytes| Err(FileError::TooLarge { bytes, most });
    if meta.len() > most {
        return too_large(meta.len());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(meta.len()).unwrap_or(0));
    // It may grow meanwhile.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return too_large(bytes.len() as u64);
    }
    refuse_lfs_pointer(&bytes, bytes.len() as u64)?;
    Ok(bytes)
}

/// Refuses the pointer that Git LFS leaves in place of a file. `start` is the file's beginning, `bytes` its size.
///
/// # Errors
/// [`FileError::LfsPointer`].
pub fn refuse_lfs_pointer(start: &[u8], bytes: u64) -> Result<(), FileError> {
    if !start.starts_with(b"version https://git-lfs") {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&start[..start.len().min(1024)]);
    let expected = text.lines().find_map(|line| line.strip_prefix("size "));
    Err(FileError::LfsPointer {
        expected: expected.and_then(|size| size.trim().parse().ok()),
        bytes,
    })
}

/// The path of a file of a model directory, after links: it must stay inside, so that a model from a stranger cannot
/// make its reader read other files. The Hugging Face hub's cache is one directory in this sense:
/// `snapshots/<revision>/` links into `blobs/` of the same repository.
///
/// # Errors
/// [`FileError::Io`], with `NotFound` if there is no such name; [`FileError::LinkOut`],
/// [`FileError::LinkToNothing`].
pub fn inside(dir: &Path, name: &str) -> Result<PathBuf, FileError> {
    let path = dir.join(name);
    let real = match fs::canonicalize(&path) {
        Ok(real) => real,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(match fs::read_link(&path) {
                Ok(target) => FileError::LinkToNothing(target),
                Err(_) => FileError::Io(error),
            });
        }
        Err(error) => return Err(FileError::Io(error)),
    };
    let root = fs::canonicalize(dir)?;
    if real.starts_with(&root) {
        return Ok(real);
    }
    let blobs = root
        .parent()
        .filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"))
        .and_then(Path::parent)
        .map(|repository| repository.join("blobs"));
    if blobs.is_some_and(|blobs| real.starts_with(blobs)) {
        return Ok(real);
    }
    Err(FileError::LinkOut(real))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn folder(name: &str) -> PathBuf {
        let path =
            std::env::temp_dir().join(format!("twinfer-sys-file-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn pipes_sockets_folders_and_large_files_are_refused_at_once() {
        let dir = folder("kinds");
        let pipe = dir.join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        let socket = dir.join("socket");
        let _bound = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [&pipe, &socket, &dir] {
            assert!(matches!(read_regular(path, 10), Err(FileError::NotRegular)));
        }
        let file = dir.join("file");
        fs::write(&file, b"0123456789").unwrap();
        assert_eq!(read_regular(&file, 10).unwrap(), b"0123456789");
        let refused = read_regular(&file, 9).unwrap_err().to_string();
        assert_eq!(refused, "has 10 bytes; at most 9 are allowed");
        assert!(read_regular(&dir.join("none"), 9).unwrap_err().is_absent());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn an_lfs_pointer_tells_the_size_of_the_file() {
        let dir = folder("lfs");
        let file = dir.join("tokenizer.json");
        let text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9085657\n";
        fs::write(&file, text).unwrap();
        let refused = read_regular(&file, 1 << 20).unwrap_err().to_string();
        assert!(
            refused.contains("expected 9085657 bytes, found 72"),
            "{refused}"
        );
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn links_stay_inside_or_in_the_blobs_of_the_same_repository() {
        let root = folder("links");
        let (snapshot, blobs) = (root.join("snapshots/abc"), root.join("blobs"));
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join("1"), "x").unwrap();
        fs::write(root.join("secret"), "x").unwrap();
        symlink("../../blobs/1", snapshot.join("a")).unwrap();
        symlink("a", snapshot.join("b")).unwrap();
        symlink("../../secret", snapshot.join("c")).unwrap();
        symlink("nowhere", snapshot.join("d")).unwrap();
        assert!(inside(&snapshot, "a").is_ok() && inside(&snapshot, "b").is_ok());
        assert!(matches!(inside(&snapshot, "c"), Err(FileError::LinkOut(_))));
        assert!(matches!(
            inside(&snapshot, "d"),
            Err(FileError::LinkToNothing(_))
        ));
        assert!(inside(&snapshot, "e").unwrap_err().is_absent());
        // The same links, but not in the layout of the hub's cache.
        let plain = root.join("plain");
        fs::create_dir_all(&plain).unwrap();
        symlink("../blobs/1", plain.join("a")).unwrap();
        assert!(matches!(inside(&plain, "a"), Err(FileError::LinkOut(_))));
        fs::remove_dir_all(root).unwrap();
    }
}
