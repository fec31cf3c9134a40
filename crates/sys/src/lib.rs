//! What the operating system offers and safe Rust does not: the KV block arena over an anonymous mapping, files of
//! strangers, memory in large pages, what the allocator keeps, memory that processes share (sealed, or with futexes), descriptor passing, thread
//! affinity, memory limits, and supervision of child processes by pidfd.
//!
//! This crate and `kernels` are the only ones with `unsafe`; every such block states why it is sound.
//! Linux only.

mod affinity;
mod allocator;
mod arena;
mod descriptors;
pub mod file;
mod large;
mod memory;
mod process;
mod sealed;
mod shared;

pub use affinity::{available_cpus, cgroup_cpu_quota, pin_thread};
pub use allocator::return_freed_memory;
pub use arena::{BlockArena, BlockError, BlockRead, BlockWrite, UNIT_ALIGN};
pub use descriptors::{
    MAX_DESCRIPTORS, PeerCredentials, peer_credentials, receive_descriptors, send_descriptors,
};
pub use large::{LargePages, Piece, Pieces};
pub use memory::{MemoryInfo, available_memory, last_level_cache_bytes, memory_info};
pub use process::{ExitStatus, PidFd, set_parent_death_signal};
pub use sealed::SealedPages;
pub use shared::{SharedWords, futex_wait, futex_wake_all};
