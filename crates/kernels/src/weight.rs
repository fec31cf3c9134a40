//! Packed weights: one layout for every batch size.
//!
//! # Layout
//!
//! A *panel* is sixteen output columns of y = x · wᵀ, the last one filled up with zeros. A panel is a sequence of
//! *lines* of 64 bytes, one per group of k: sixteen columns by four k of int8, or by two k of bf16, a column's values
//! beside each other. Panels follow each other, so a product reads its weights as one stream. int8 values are stored
//! with 128 added, as the unsigned operand of dot-product instructions; behind all panels lie one f32 scale and one
//! i32 addend per column.

mod content;
mod packing;

pub use content::WeightContent;

use std::sync::Arc;

use crate::error::ensure_shape;
use crate::{DType, KernelError, Matrix, WeightBytes};

/// Columns of a panel.
pub(crate) const PANEL: usize = 16;
/// Bytes of a line.
pub(crate) const LINE: usize = 64;

/// What a product computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compute {
    /// f32 by the definition of [`crate::linear`]; weights stay as stored, f32 or bf16.
    F32,
    /// Both factors rounded to bf16, sums in f32 (see [`crate::product`]).
    Bf16,
    /// Both factors int8, sums exact in i32, scaled in f32 (see [`crate::product`]).
    W8A8,
}

/// How rows of x become int8.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// Each row has its own scale: its largest magnitude / 127.
    PerToken,
    /// One scale and offset for all rows, from the checkpoint: q = clamp(rint(x / scale + offset), −128, 127).
    Static {
        /// `input_scale`, above 0.
        scale: f32,
        /// `input_offset`, −128 ..= 127.
        offset: i32,
    },
}

/// How packed bytes are to be read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Format {
    /// Row-major `[n, k]`, computed in f32.
    Plain(DType),
    /// Panels of bf16.
    Bf16,
    /// Panels of int8.
    Int8(Activation),
}

/// Quantised rows `[n, k]` of a checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Int8Rows<'a> {
    /// n · k values, row by row.
    pub values: &'a [i8],
    /// One entry per row.
    pub scales: RowScales<'a>,
}

/// What turns an integer sum into a value of y.
#[derive(Debug, Clone, Copy)]
pub enum RowScales<'a> {
    /// The scale S of each row (`weight_scale`): y = Σ q·Q · s · S, where s is the activation's scale; with a static
    /// activation the offset's part is taken out, y = (Σ q·Q − offset · Σ Q) · s · S.
    Channel(&'a [f32]),
    /// For static activations only: y = (Σ q·Q + bias) · scale, where `bias` (`quant_bias`) already holds the offset's
    /// part and the layer's own bias, and `scale` is `deq_scale`.
    Dequant {
        /// `deq_scale`.
        scale: &'a [f32],
        /// `quant_bias`.
        bias: &'a [i32],
    },
}

/// A packed weight `[n, k]` of y = x · wᵀ (+ bias); cheap to clone.
#[derive(Clone)]
pub struct Weight {
    form: Form,
    rows: usize,
    cols: usize,
    /// Padded to whole panels.
    bias: Option<Arc<[f32]>>,
}

#[derive(Clone)]
pub(crate) enum Form {
    Plain(Matrix),
    Panels(Panels),
}

/// Packed bytes inside shared ones.
#[derive(Clone)]
pub(crate) struct Panels {
    owner: Arc<dyn WeightBytes>,
    offset: usize,
    length: usize,
    /// `None`: bf16.
    pub(crate) activation: Option<Activation>,
}

/// Memory aligned to lines.
struct Lines {
    lines: Vec<Line>,
    length: usize,
}

#[repr(C, align(64))]
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
struct Line([u8; LINE]);

impl WeightBytes for Lines {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.length]
    }

    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Some(self.as_mut_slice())
    }
}

impl Lines {
    fn new(length: usize) -> Self {
        let lines = vec![Line([0; LINE]); length.div_ceil(LINE)];
        Self { lines, length }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.length]
    }
}

impl Format {
    /// The format [`Weight::pack`] gives weights stored as `stored`.
    pub fn of(compute: Compute, stored: DType) -> Self {
        match compute {
            Compute::F32 => Self::Plain(stored),
            Compute::Bf16 => Self::Bf16,
            Compute::W8A8 => Self::Int8(Activation::PerToken),
        }
    }

    /// What products with such weights compute in.
    pub fn compute(self) -> Compute {
        match self {
            Self::Plain(_) => Compute::F32,
            Self::Bf16 => Compute::Bf16,
            Self::Int8(_) => Compute::W8A8,
        }
    }

    /// Values of k in a line.
    fn line_values(self) -> usize {
        match self {
            Self::Plain(_) => 1,
            Self::Bf16 => 2,
            Self::Int8(_) => 4,
        }
    }
}

impl Activation {
    /// Longest int8 row k: k products of −128 and −128 fit an i32; with a static offset k of 255 and 128.
    pub const fn longest_row(self) -> usize {
        let step = match self {
            Self::PerToken => 128,
            Self::Static { .. } => 255,
        };
        i32::MAX as usize / (128 * step)
    }
}

impl Weight {
    /// Bytes of a packed `[n, k]`, `None` on overflow; for the memory plan, before anything is allocated.
    pub fn packed_bytes(format: Format, n: usize, k: usize) -> Option<usize> {
        if let Format::Plain(dtype) = format {
            return n.checked_mul(k)?.checked_mul(dtype.size());
        }
        let columns = n.checked_next_multiple_of(PANEL)?;
        let lines = k
            .div_ceil(format.line_values())
            .checked_mul(columns / PANEL)?;
        let tail = match format {
            Format::Int8(_) => columns.checked_mul(8)?,
            _ => 0,
        };
        lines.checked_mul(LINE)?.checked_add(tail)
    }

    /// Packs matrices of the same k below each other: one product, one stream of weights. One matrix for
    /// [`Compute::F32`] is taken as it lies, without a copy.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when there is none, or k differs.
    pub fn pack(compute: Compute, parts: &[&Matrix]) -> Result<Self, KernelError> {
        let (n, k, stored) = joint_shape(parts)?;
        if let (Compute::F32, [only]) = (compute, parts) {
            return Ok(Self {
                form: Form::Plain((*only).clone()),
                rows: n,
                cols: k,
                bias: None,
            });
        }
        let format = Format::of(compute, stored);
        let mut lines = Lines::new(checked_bytes(format, n, k)?);
        Self::pack_into(compute, parts, lines.as_mut_slice())?;
        Self::from_packed(format, n, k, Arc::new(lines), 0)
    }

    /// [`Weight::pack`] into memory of the caller's, to be read with [`Weight::from_packed`]; the format is
    /// [`Format::of`] the first part's type, or of f32 when types differ.
    ///
    /// # Errors
    /// As [`Weight::pack`], and unless `out` has [`Weight::packed_bytes`].
    pub fn pack_into(
        compute: Compute,
        parts: &[&Matrix],
        out: &mut [u8],
    ) -> Result<(), KernelError> {
        let (n, k, stored) = joint_shape(parts)?;
        let format = Format::of(compute, stored);
        check_room(format, n, k, out)?;
        match format {
            Format::Plain(dtype) => packing::plain(dtype, parts, out),
            Format::Bf16 => packing::bf16(k, parts, out),
            Format::Int8(_) => packing::quantize(n, k, parts, out),
        }
    }

    /// Packs int8 rows of a checkpoint, parts below each other.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when lengths do not fit, [`RowScales::Dequant`] comes with per-token activations, or
    /// a static scale or offset is out of range.
    pub fn pack_int8(
        k: usize,
        parts: &[Int8Rows<'_>],
        activation: Activation,
    ) -> Result<Self, KernelError> {
        let n = packing::int8_rows(k, parts, activation)?;
        let format = Format::Int8(activation);
        let mut lines = Lines::new(checked_bytes(format, n, k)?);
        packing::int8(n, k, parts, activation, lines.as_mut_slice());
        Self::from_packed(format, n, k, Arc::new(lines), 0)
    }

    /// [`Weight::pack_int8`] into memory of the caller's.
    ///
    /// # Errors
    /// As [`Weight::pack_int8`], and unless `out` has [`Weight::packed_bytes`].
    pub fn pack_int8_into(
        k: usize,
        parts: &[Int8Rows<'_>],
        activation: Activation,
        out: &mut [u8],
    ) -> Result<(), KernelError> {
        let n = packing::int8_rows(k, parts, activation)?;
        check_room(Format::Int8(activation), n, k, out)?;
        packing::int8(n, k, parts, activation, out);
        Ok(())
    }

    /// A weight inside bytes that were packed before: one [`twinfer_sys::LargePages`] for all weights of a model is
    /// best, since decode reads weights from large pages almost twice as fast as from small ones. Speed wants `offset`
    /// and the bytes aligned to 64.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when a dimension is 0 or the bytes behind `offset` are too few.
    pub fn from_packed(
        format: Format,
        n: usize,
        k: usize,
        owner: Arc<dyn WeightBytes>,
        offset: usize,
    ) -> Result<Self, KernelError> {
        ensure_shape!(
            n > 0 && k > 0,
            "weight [{n}, {k}]: dimensions must be above 0"
        );
        let length = checked_bytes(format, n, k)?;
        let held = owner.bytes().len();
        ensure_shape!(
            offset.checked_add(length).is_some_and(|end| end <= held),
            "packed weight [{n}, {k}] of {format:?} at byte {offset} needs more than the {held} bytes there are"
        );
        let form = match format {
            Format::Plain(dtype) => Form::Plain(Matrix::from_shared(n, k, dtype, owner, offset)?),
            Format::Bf16 => Form::Panels(Panels {
                owner,
                offset,
                length,
                activation: None,
            }),
            Format::Int8(activation) => {
                packing::check_activation(activation)?;
                Form::Panels(Panels {
                    owner,
                    offset,
                    length,
                    activation: Some(activation),
                })
            }
        };
        Ok(Self {
            form,
            rows: n,
            cols: k,
            bias: None,
        })
    }

    /// The same weight with a bias that products add to every row of y, rounded after everything else.
    ///
    /// # Errors
    /// [`KernelError::Shape`] unless there are n values.
    pub fn with_bias(mut self, mut bias: Vec<f32>) -> Result<Self, KernelError> {
        ensure_shape!(
            bias.len() == self.rows,
            "{} bias values for {self:?}",
            bias.len()
        );
        bias.resize(self.rows.next_multiple_of(PANEL), 0.0);
        self.bias = Some(bias.into());
        Ok(self)
    }

    /// Output features n.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features k.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes a product reads.
    pub fn size_bytes(&self) -> usize {
        match &self.form {
            Form::Plain(matrix) => matrix.size_bytes(),
            Form::Panels(panels) => panels.length,
        }
    }

    /// How the bytes are packed.
    pub fn format(&self) -> Format {
        match &self.form {
            Form::Plain(matrix) => Format::Plain(matrix.dtype()),
            Form::Panels(panels) => panels.activation.map_or(Format::Bf16, Format::Int8),
        }
    }

    /// What products with this weight compute in.
    pub fn compute(&self) -> Compute {
        self.format().compute()
    }

    /// Writes one row of w as f32: what products compute with, so f32 as it was, bf16 as it was rounded, int8 times its
    /// scale. For the embedding of a tied head.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when the row does not exist or `out` is not one row long.
    pub fn dense_row_f32(&self, row: usize, out: &mut [f32]) -> Result<(), KernelError> {
        ensure_shape!(
            row < self.rows && out.len() == self.cols,
            "row {row} of {self:?} into {} values",
            out.len()
        );
        match &self.form {
            Form::Plain(matrix) => matrix.dense_row_f32(row, out),
            Form::Panels(panels) => {
                packing::unpack_row(
                    self.format(),
                    self.rows,
                    self.cols,
                    panels.bytes(),
                    row,
                    out,
                );
                Ok(())
            }
        }
    }

    pub(crate) fn form(&self) -> &Form {
        &self.form
    }

    /// The bias, padded to whole panels.
    pub(crate) fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }
}

impl Panels {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.owner.bytes()[self.offset..self.offset + self.length]
    }

    /// None when somebody else has the memory too.
    fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let bytes = Arc::get_mut(&mut self.owner)?.bytes_mut()?;
        bytes.get_mut(self.offset..self.offset + self.length)
    }
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Weight[{}, {}] {:?}{}",
            self.rows,
            self.cols,
            self.format(),
            if self.bias.is_some() { " + bias" } else { "" }
        )
    }
}

/// n, k and the common type of matrices below each other.
fn joint_shape(parts: &[&Matrix]) -> Result<(usize, usize, DType), KernelError> {
    let Some(first) = parts.first() else {
        return Err(KernelError::Shape("a weight of no matrices".to_owned()));
    };
    let mut rows = 0;
    let mut stored = first.dtype();
    for part in parts {
        ensure_shape!(
            part.cols() == first.cols(),
            "{part:?} below {first:?} in one weight"
        );
        rows += part.rows();
        if part.dtype() != stored {
            stored = DType::F32;
        }
    }
    Ok((rows, first.cols(), stored))
}

fn checked_bytes(format: Format, n: usize, k: usize) -> Result<usize, KernelError> {
    if let Format::Int8(activation) = format {
        let most = activation.longest_row();
        ensure_shape!(
            k <= most,
            "int8 rows of {k} values: sums of more than {most} do not fit 32 bits"
        );
    }
    Weight::packed_bytes(format, n, k).ok_or_else(|| {
        KernelError::Shape(format!("weight [{n}, {k}] is larger than memory can be"))
    })
}

fn check_room(format: Format, n: usize, k: usize, out: &[u8]) -> Result<(), KernelError> {
    let needed = checked_bytes(format, n, k)?;
    ensure_shape!(
        out.len() == needed,
        "weight [{n}, {k}] of {format:?} takes {needed} bytes, not {}",
        out.len()
    );
    Ok(())
}
