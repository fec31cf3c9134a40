//! Weights: a matrix as kernels see it, whatever holds its bytes.

use std::sync::Arc;

use half::bf16;

use crate::KernelError;
use crate::error::ensure_shape;

/// Type of a stored element, in weights and in KV units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32, little-endian.
    F32,
    /// The upper half of a binary32, little-endian.
    Bf16,
}

/// Bytes that live as long as someone uses them: a `Vec`, large pages, memory shared with other processes.
pub trait WeightBytes: Send + Sync + 'static {
    /// All bytes. Must be the same memory at every call.
    fn bytes(&self) -> &[u8];

    /// All bytes, to be written, if that can be.
    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        None
    }
}

/// Row-major weights `[rows, cols]` = `[n, k]` of y = x · wᵀ; cheap to clone.
///
/// Values as they are stored; packed and quantised ones are a [`crate::Weight`]'s.
#[derive(Clone)]
pub struct Matrix {
    owner: Arc<dyn WeightBytes>,
    /// Where the first element lies in the owner's bytes.
    offset: usize,
    rows: usize,
    cols: usize,
    dtype: DType,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl WeightBytes for twinfer_sys::LargePages {
    fn bytes(&self) -> &[u8] {
        self.as_slice()
    }
}

impl WeightBytes for twinfer_sys::Piece {
    fn bytes(&self) -> &[u8] {
        self.as_slice()
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Some(self.as_mut_slice())
    }
}

impl WeightBytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Some(self)
    }
}

impl WeightBytes for Vec<f32> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Some(bytemuck::cast_slice_mut(self))
    }
}

impl WeightBytes for Vec<bf16> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Some(bytemuck::cast_slice_mut(self))
    }
}

impl Matrix {
    /// A matrix that owns f32 values, row by row.
    ///
    /// # Errors
    /// [`KernelError::Shape`] unless there are rows · cols values and neither is 0.
    pub fn from_f32(rows: usize, cols: usize, values: Vec<f32>) -> Result<Self, KernelError> {
        ensure_shape!(
            rows.checked_mul(cols) == Some(values.len()),
            "matrix [{rows}, {cols}] from {} values",
            values.len()
        );
        Self::from_shared(rows, cols, DType::F32, Arc::new(values), 0)
    }

    /// A matrix that owns bf16 values, row by row.
    ///
    /// # Errors
    /// As [`Matrix::from_f32`].
    pub fn from_bf16(rows: usize, cols: usize, values: Vec<bf16>) -> Result<Self, KernelError> {
        ensure_shape!(
            rows.checked_mul(cols) == Some(values.len()),
            "matrix [{rows}, {cols}] from {} values",
            values.len()
        );
        Self::from_shared(rows, cols, DType::Bf16, Arc::new(values), 0)
    }

    /// A matrix inside bytes shared with others; `offset` is that of its first element and need
    /// not be aligned.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when a dimension is 0 or the matrix does not fit behind `offset`.
    pub fn from_shared(
        rows: usize,
        cols: usize,
        dtype: DType,
        owner: Arc<dyn WeightBytes>,
        offset: usize,
    ) -> Result<Self, KernelError> {
        ensure_shape!(
            rows > 0 && cols > 0,
            "matrix [{rows}, {cols}]: dimensions must be above 0"
        );
        let end = rows
            .checked_mul(cols)
            .and_then(|count| count.checked_mul(dtype.size()))
            .and_then(|length| length.checked_add(offset));
        let available = owner.bytes().len();
        ensure_shape!(
            end.is_some_and(|end| end <= available),
            "matrix [{rows}, {cols}] of {dtype:?} at byte {offset} needs more than the {available} bytes there are"
        );
        Ok(Self {
            owner,
            offset,
            rows,
            cols,
            dtype,
        })
    }

    /// Output features n.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features k.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Type of the stored elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes the weights take, which decode reads once per step.
    pub fn size_bytes(&self) -> usize {
        self.rows * self.row_bytes()
    }

    /// A transposed copy `[cols, rows]` with the same element type and values.
    pub fn transposed(&self) -> Self {
        let bytes = self.bytes();
        let size = self.dtype.size();
        let mut turned = vec![0u8; bytes.len()];
        for row in 0..self.rows {
            for col in 0..self.cols {
                let (from, to) = (
                    (row * self.cols + col) * size,
                    (col * self.rows + row) * size,
                );
                turned[to..to + size].copy_from_slice(&bytes[from..from + size]);
            }
        }
        Self {
            owner: Arc::new(turned),
            offset: 0,
            rows: self.cols,
            cols: self.rows,
            dtype: self.dtype,
        }
    }

    /// Writes one row as f32, as an embedding lookup does.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when the row does not exist or `out` is not one row long.
    pub fn dense_row_f32(&self, row: usize, out: &mut [f32]) -> Result<(), KernelError> {
        ensure_shape!(
            row < self.rows,
            "row {row} of a matrix with {} rows",
            self.rows
        );
        ensure_shape!(
            out.len() == self.cols,
            "row of {} values into {}",
            self.cols,
            out.len()
        );
        let start = row * self.row_bytes();
        crate::load_f32(
            self.dtype,
            &self.bytes()[start..start + self.row_bytes()],
            out,
        )
    }

    /// Bytes of one row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.cols * self.dtype.size()
    }

    /// The matrix's bytes, rows · row_bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.owner.bytes()[self.offset..self.offset + self.size_bytes()]
    }

    /// The same, to be written; none when somebody else has the memory too, or it cannot be written.
    pub(crate) fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let range = self.offset..self.offset + self.size_bytes();
        Arc::get_mut(&mut self.owner)?.bytes_mut()?.get_mut(range)
    }
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Matrix[{}, {}] {:?}", self.rows, self.cols, self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_checked() {
        assert!(Matrix::from_f32(2, 3, vec![0.0; 6]).is_ok());
        assert!(Matrix::from_f32(2, 3, vec![0.0; 7]).is_err());
        assert!(Matrix::from_bf16(0, 3, vec![]).is_err());
        assert!(Matrix::from_f32(usize::MAX, 2, vec![0.0; 2]).is_err());
        let bytes: Arc<dyn WeightBytes> = Arc::new(vec![0u8; 25]);
        assert!(Matrix::from_shared(2, 3, DType::F32, Arc::clone(&bytes), 1).is_ok());
        assert!(Matrix::from_shared(2, 3, DType::F32, Arc::clone(&bytes), 2).is_err());
        assert!(Matrix::from_shared(2, 3, DType::F32, Arc::clone(&bytes), usize::MAX).is_err());
        assert!(Matrix::from_shared(usize::MAX / 2, 2, DType::Bf16, bytes, 1).is_err());
    }

    #[test]
    fn rows_and_transposes_address_the_same_values() {
        let values: Vec<bf16> = (0..12u8)
            .map(|value| bf16::from_f32(f32::from(value)))
            .collect();
        let matrix = Matrix::from_bf16(4, 3, values).unwrap();
        let row = |matrix: &Matrix, row: usize| {
            let mut out = vec![0.0; matrix.cols()];
            matrix.dense_row_f32(row, &mut out).unwrap();
            out
        };
        assert_eq!(row(&matrix, 2), [6.0, 7.0, 8.0]);
        assert_eq!(row(&matrix.transposed(), 2), [2.0, 5.0, 8.0, 11.0]);
        assert!(matrix.dense_row_f32(4, &mut [0.0; 3]).is_err());
        assert!(matrix.dense_row_f32(0, &mut [0.0; 4]).is_err());
    }
}
