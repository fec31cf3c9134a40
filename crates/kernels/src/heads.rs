//! Rows of heads inside a larger buffer.

use std::ops::Range;

use crate::KernelError;
use crate::error::ensure_shape;

/// A view of `[rows, heads, width]` values where a row's heads lie at a fixed stride: either dense or a part of every
/// head, such as the `nope` and `rope` parts of a query.
#[derive(Debug, Clone, Copy)]
pub struct HeadRows<'a> {
    data: &'a [f32],
    rows: usize,
    heads: usize,
    width: usize,
    head_stride: usize,
    offset: usize,
}

impl<'a> HeadRows<'a> {
    /// All of `data` as `[rows, heads, width]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] unless heads and width are above 0 and `data` is a whole number of rows.
    pub fn dense(data: &'a [f32], heads: usize, width: usize) -> Result<Self, KernelError> {
        Self::part(data, heads, width, 0..width)
    }

    /// The columns `range` of every head, where `data` is `[rows, heads, head_width]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] unless `range` is a non-empty part of a head, heads is above 0 and `data` is a whole
    /// number of rows.
    pub fn part(
        data: &'a [f32],
        heads: usize,
        head_width: usize,
        range: Range<usize>,
    ) -> Result<Self, KernelError> {
        ensure_shape!(
            range.start < range.end && range.end <= head_width,
            "columns {range:?} of heads of width {head_width}"
        );
        let row = heads.checked_mul(head_width).filter(|&row| row > 0);
        ensure_shape!(
            row.is_some_and(|row| data.len().is_multiple_of(row)),
            "{} values are no whole rows of {heads} heads of width {head_width}",
            data.len()
        );
        let rows = row.map_or(0, |row| data.len() / row);
        Ok(Self {
            data,
            rows,
            heads,
            width: range.len(),
            head_stride: head_width,
            offset: range.start,
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Heads of a row.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Values of a head.
    pub fn width(&self) -> usize {
        self.width
    }

    /// One head of one row; both must be in range.
    pub(crate) fn head(&self, row: usize, head: usize) -> &'a [f32] {
        let start = (row * self.heads + head) * self.head_stride + self.offset;
        &self.data[start..start + self.width]
    }

    /// Elements from a row to the next.
    pub(crate) fn row_stride(&self) -> usize {
        self.heads * self.head_stride
    }

    /// The values from one head of the first row on.
    pub(crate) fn starting_at(&self, head: usize) -> &'a [f32] {
        self.data
            .get(head * self.head_stride + self.offset..)
            .unwrap_or_default()
    }
}
