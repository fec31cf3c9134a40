//! Placeholder.
/// KV memory.
#[derive(Debug)]
pub struct BlockArena;
