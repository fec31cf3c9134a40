//! What the allocator of the binary is told.

/// Gives memory that the calling thread has freed back to the system now, not a second later, where mimalloc is the
/// allocator; does nothing where another is.
pub fn return_freed_memory() {
    // SAFETY: it may be called from any thread at any time, and touches only memory that nobody holds.
    unsafe { libmimalloc_sys::mi_collect(true) }
}
