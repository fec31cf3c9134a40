use std::ops::Range;
use std::sync::atomic::AtomicU64;
use twinfer_kernels::{DType, ThreadTeam};

/// Consecutive rows of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    /// Rows of the step's buffers.
    pub(crate) rows: Range<usize>,
    /// Position of the first of them.
    pub(crate) position: usize,
}

/// What a step computes on, beside the weights.
#[derive(Clone, Copy)]
pub(crate) struct Step<'a> {
    pub(crate) team: &'a ThreadTeam,
    /// In order of rows, without gaps.
    pub(crate) spans: &'a [Span],
    /// Rows of all spans.
    pub(crate) rows: usize,
    pub(crate) kv_type: DType,
    pub(crate) block_size: usize,
    /// Grows with every layer.
    pub(crate) progress: &'a AtomicU64,
}
