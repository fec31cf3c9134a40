//! Packed weights that the instances of a node share.
//!
//! The first instance packs a model into memory without a name (`memfd`), seals it, so that nobody can change it any
//! more, and writes its process and descriptor into a small file named after everything that the packed bytes depend
//! on. Others find the file, open the memory through `/proc` and map it. The file is locked while somebody packs: others
//! wait, and when the packer dies the lock goes to the next, who packs. What is sealed is whole; nothing else is ever
//! mapped. The memory belongs to no file system and is gone with the last process that has it.

mod registry;
mod segment;

pub(crate) use registry::{Claim, PackLock, Patience, claim};
pub(crate) use segment::{Entry, Recorder, SHARED_NAME, Segment, shared_room};

use crate::weights::Checkpoint;
use std::fmt::Write;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use twinfer_config::ModelConfig;
use twinfer_kernels::numerics_class;
use xxhash_rust::xxh3::Xxh3;

/// Version of the layout of a shared segment and of what is kept in it.
const LAYOUT: u32 = 1;

/// What became of the wish to share packed weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Not asked for.
    Off,
    /// Packed here, for others to map.
    Packed,
    /// Another instance's were mapped.
    Mapped,
    /// Packed for this process alone, because of this.
    Private(String),
}

/// Where instances of this user on this node find each other's packed weights: `twinfer-UID` in `/dev/shm`. Only small
/// files lie there, whatever the size of weights.
pub fn default_share_dir() -> PathBuf {
    let user = std::fs::metadata("/proc/self").map_or(0, |meta| meta.uid());
    PathBuf::from(format!("/dev/shm/twinfer-{user}"))
}

/// Name of all that packed bytes depend on: the program (packing may differ between two builds), numerics, config, what
/// is packed how, and the weight files, told by device, inode, size and times of change, so that no byte of them has to
/// be read. `rest` is what the caller adds. None if a file's times cannot be had.
pub(crate) fn key(config: &ModelConfig, checkpoint: &Checkpoint, rest: &str) -> Option<String> {
    let program = std::fs::metadata("/proc/self/exe").ok()?;
    let mut hash = HashText(Xxh3::new());
    write!(
        hash,
        "{LAYOUT} {} {} {} {} {} {} {rest} {config:?} ",
        numerics_class(),
        program.dev(),
        program.ino(),
        program.size(),
        program.mtime(),
        program.mtime_nsec(),
    )
    .ok()?;
    checkpoint.write_identity(&mut hash).ok()?;
    Some(format!("{:032x}", hash.0.digest128()))
}

/// Hashes text as it is written.
struct HashText(Xxh3);

impl Write for HashText {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.update(text.as_bytes());
        Ok(())
    }
}
