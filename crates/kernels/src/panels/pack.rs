//! Rows of x as products need them: quantised or rounded, in cells that meet a line.

use super::dot::Dot;
use crate::convert::round_bits;
use crate::error::ensure_shape;
use crate::reference::LANES;
use crate::rows::load_padded;
use crate::simd::{Simd, simd_kernel};
use crate::{Activation, Isa, KernelError};

/// bf16 products take values of a smaller magnitude for zero. All sums are then multiples of 2^-126, so that none is
/// subnormal and instruction sets that flush subnormals give the same bits as those that do not.
pub(crate) const SMALLEST: f32 = f32::from_bits((127 - 56) << 23);

/// The same as bf16.
pub(crate) const SMALLEST_BITS: u16 = (127 - 56) << 7;

/// The smallest magnitude a row's scale is made from; a row of zeros has a scale too.
const SMALLEST_ROW: f32 = 1e-10;

/// Values packed at a time.
const CHUNK: usize = 64;

/// How a row became cells; the product's sums are corrected by it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RowState {
    /// Factor on integer sums; NaN for a row with a value that is not finite.
    pub(crate) scale: f32,
    /// Part of the integer sums that comes from the 128 added to stored weights.
    pub(crate) excess: i32,
}

impl RowState {
    /// From the sum of integers that are in no lane, and the sums by lanes.
    ///
    /// # Safety
    /// The processor has the instruction set.
    #[inline(always)]
    unsafe fn new<S: Simd>(steps: Steps, mut sum: i32, sums: S::V) -> Self {
        // Every lane is a whole number below 2^24 in magnitude, for any k below 2^21.
        let mut lanes = [0.0f32; LANES];
        // SAFETY: a vector has at most sixteen lanes.
        unsafe { S::store(lanes.as_mut_ptr(), sums) };
        for lane in lanes {
            sum = sum.wrapping_add(lane as i32);
        }
        Self {
            scale: steps.scale,
            excess: sum.wrapping_mul(128),
        }
    }
}

/// How values of a row are quantised; nothing for other kinds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    divisor: f32,
    offset: f32,
    lowest: f32,
    /// Factor on sums.
    scale: f32,
}

/// Elements that rows of x are packed as.
///
/// # Safety
/// All functions: the processor has the instruction set, and `x` has the values named.
pub(crate) trait Value: Copy + Default {
    unsafe fn steps<S: Simd>(activation: Activation, x: *const f32, length: usize) -> Steps;
    /// Turns `count` <= CHUNK values into the first entries of `to`, which are behind it of no meaning. Integers are
    /// added to `sums` by lanes, or returned added if there are fewer than CHUNK.
    unsafe fn chunk<S: Simd>(
        steps: Steps,
        x: *const f32,
        count: usize,
        to: &mut [Self; CHUNK],
        sums: &mut S::V,
    ) -> i32;
}

const NO_STEPS: Steps = Steps {
    divisor: 1.0,
    offset: 0.0,
    lowest: 0.0,
    scale: 1.0,
};

impl Value for i8 {
    #[inline(always)]
    unsafe fn steps<S: Simd>(activation: Activation, x: *const f32, length: usize) -> Steps {
        // SAFETY: the caller's duty.
        let (largest, bad) = unsafe { magnitude::<S>(x, length) };
        match activation {
            Activation::PerToken => {
                let largest = if largest > SMALLEST_ROW {
                    largest
                } else {
                    SMALLEST_ROW
                };
                let divisor = largest / 127.0;
                Steps {
                    divisor,
                    offset: 0.0,
                    lowest: -127.0,
                    scale: divisor + bad,
                }
            }
            Activation::Static { scale, offset } => Steps {
                divisor: scale,
                offset: offset as f32,
                lowest: -128.0,
                scale: 1.0 + bad,
            },
        }
    }

    #[inline(always)]
    unsafe fn chunk<S: Simd>(
        steps: Steps,
        x: *const f32,
        count: usize,
        to: &mut [i8; CHUNK],
        sums: &mut S::V,
    ) -> i32 {
        // SAFETY: the caller's duty; a whole vector fits wherever it starts below CHUNK.
        unsafe {
            let (divisor, offset) = (S::splat(steps.divisor), S::splat(steps.offset));
            let (lowest, highest) = (S::splat(steps.lowest), S::splat(127.0));
            let magic = S::splat(crate::math::ROUND_MAGIC);
            let whole = count == CHUNK;
            for place in (0..count).step_by(S::LANES) {
                let v = if whole {
                    S::load(x.add(place))
                } else {
                    load_padded::<S>(x, place, count, 0.0)
                };
                let v = S::larger(S::add(S::div(v, divisor), offset), lowest);
                let v = S::sub(S::add(S::smaller(v, highest), magic), magic);
                S::store_i8(to.as_mut_ptr().add(place), v);
                if whole {
                    *sums = S::add(*sums, v);
                }
            }
            if whole {
                return 0;
            }
        }
        to[..count].iter().map(|&value| i32::from(value)).sum()
    }
}

impl Value for u16 {
    #[inline(always)]
    unsafe fn steps<S: Simd>(_activation: Activation, _x: *const f32, _length: usize) -> Steps {
        NO_STEPS
    }

    #[inline(always)]
    unsafe fn chunk<S: Simd>(
        _steps: Steps,
        x: *const f32,
        count: usize,
        to: &mut [u16; CHUNK],
        _sums: &mut S::V,
    ) -> i32 {
        for place in (0..count).step_by(S::LANES) {
            // SAFETY: as above.
            unsafe {
                let v = load_padded::<S>(x, place, count, 0.0);
                S::put_bf16(to.as_mut_ptr().add(place), S::without_small(v, SMALLEST));
            }
        }
        0
    }
}

impl Value for f32 {
    #[inline(always)]
    unsafe fn steps<S: Simd>(_activation: Activation, _x: *const f32, _length: usize) -> Steps {
        NO_STEPS
    }

    #[inline(always)]
    unsafe fn chunk<S: Simd>(
        _steps: Steps,
        x: *const f32,
        count: usize,
        to: &mut [f32; CHUNK],
        _sums: &mut S::V,
    ) -> i32 {
        for place in (0..count).step_by(S::LANES) {
            // SAFETY: as above.
            unsafe {
                S::store(
                    to.as_mut_ptr().add(place),
                    load_padded::<S>(x, place, count, 0.0),
                );
            }
        }
        0
    }
}

/// The largest magnitude, and 0, or NaN when a value is not finite.
#[inline(always)]
unsafe fn magnitude<S: Simd>(x: *const f32, length: usize) -> (f32, f32) {
    // SAFETY: the caller grants `length` values.
    unsafe {
        let zero = S::splat(0.0);
        let (mut largest, mut bad) = (zero, zero);
        for place in (0..length).step_by(S::LANES) {
            let v = load_padded::<S>(x, place, length, 0.0);
            largest = S::larger(S::larger(v, S::sub(zero, v)), largest);
            bad = S::fma(v, zero, bad);
        }
        let (mut lanes, mut bads) = ([0.0; LANES], [0.0; LANES]);
        S::store(lanes.as_mut_ptr(), largest);
        S::store(bads.as_mut_ptr(), bad);
        let mut result = (0.0, 0.0);
        for (lane, bad) in lanes.into_iter().zip(bads) {
            result.0 = if lane > result.0 { lane } else { result.0 };
            result.1 += bad;
        }
        result
    }
}

/// Packs one row into cells `to[i · stride]`, one per line, zeros behind the end.
///
/// # Safety
/// The processor has the instruction set, `x` has `length` values, and `to` room for all cells at `stride`.
#[inline(always)]
pub(crate) unsafe fn pack_row<D: Dot>(
    activation: Activation,
    x: *const f32,
    length: usize,
    to: *mut D::Cell,
    stride: usize,
) -> RowState
where
    D::Value: Value,
{
    // SAFETY: the caller's duty.
    unsafe {
        let steps = D::Value::steps::<D::S>(activation, x, length);
        let mut sum = 0i32;
        let mut sums = D::S::splat(0.0);
        let mut values = [D::Value::default(); CHUNK];
        let mut to = to;
        for start in (0..length).step_by(CHUNK) {
            let count = CHUNK.min(length - start);
            let rest = D::Value::chunk::<D::S>(steps, x.add(start), count, &mut values, &mut sums);
            if count < CHUNK {
                sum = rest;
                values[count..].fill(D::Value::default());
            }
            for cell in 0..count.div_ceil(D::K) {
                to.write(D::cell(values.as_ptr().add(cell * D::K)));
                to = to.wrapping_add(stride);
            }
        }
        RowState::new::<D::S>(steps, sum, sums)
    }
}

/// Packs the rows of a tile, at most sixteen, into cells `to[line · rows + row]`, zeros behind the end.
///
/// # Safety
/// The processor has the instruction set, every row has `length` values, and `to` room for all cells.
#[inline(always)]
pub(crate) unsafe fn pack_tile<D: Dot>(
    activation: Activation,
    rows: &[*const f32],
    length: usize,
    to: *mut D::Cell,
    states: &mut [RowState; LANES],
) where
    D::Value: Value,
{
    let count = rows.len().min(LANES);
    // SAFETY: the caller's duty.
    unsafe {
        let (mut steps, mut rests) = ([NO_STEPS; LANES], [0; LANES]);
        let mut sums = [D::S::splat(0.0); LANES];
        let mut values = [[D::Value::default(); CHUNK]; LANES];
        for row in 0..count {
            steps[row] = D::Value::steps::<D::S>(activation, rows[row], length);
        }
        for start in (0..length).step_by(CHUNK) {
            let part = CHUNK.min(length - start);
            for row in 0..count {
                let (x, to, sums) = (rows[row].add(start), &mut values[row], &mut sums[row]);
                let rest = D::Value::chunk::<D::S>(steps[row], x, part, to, sums);
                if part < CHUNK {
                    rests[row] = rest;
                    to[part..].fill(D::Value::default());
                }
            }
            let to = to.add(start / D::K * count);
            D::cells(
                values.as_ptr().cast(),
                CHUNK,
                count,
                part.div_ceil(D::K),
                to,
            );
        }
        for row in 0..count {
            states[row] = RowState::new::<D::S>(steps[row], rests[row], sums[row]);
        }
    }
}

simd_kernel! {
    fn run_quantize = quantize(activation: Activation, x: *const f32, length: usize, to: *mut i8) -> f32
}

/// # Safety
/// Both pointers are valid for `length` values.
#[inline(always)]
unsafe fn quantize<S: Simd>(
    activation: Activation,
    x: *const f32,
    length: usize,
    to: *mut i8,
) -> f32 {
    // SAFETY: the caller's duty.
    unsafe {
        let steps = i8::steps::<S>(activation, x, length);
        let mut values = [0; CHUNK];
        let mut sums = S::splat(0.0);
        for start in (0..length).step_by(CHUNK) {
            let count = CHUNK.min(length - start);
            i8::chunk::<S>(steps, x.add(start), count, &mut values, &mut sums);
            to.add(start)
                .copy_from_nonoverlapping(values.as_ptr(), count);
        }
        steps.scale
    }
}

/// Quantises one row and returns its scale; lengths are equal.
pub(crate) fn quantize_row(isa: Isa, activation: Activation, x: &[f32], to: &mut [i8]) -> f32 {
    let length = x.len().min(to.len());
    // SAFETY: both slices have the length.
    unsafe { run_quantize(isa, activation, x.as_ptr(), length, to.as_mut_ptr()) }
}

/// The nearest bf16 of a value, small ones as zero.
pub(crate) fn round_small_bf16(value: f32) -> u16 {
    if value.abs() < SMALLEST {
        0
    } else {
        round_bits(value)
    }
}

/// What an int8 product makes of rows of x `[m, k]`: q `[m, k]` and one scale per row. Per token, with
/// a = max(max |x|, 1e-10): scale = a / 127 and q = clamp(rint(x / scale), −127, 127), halves to even. With static
/// activations q = clamp(rint(x / scale + offset), −128, 127) and the returned scale is 1. A row with a value that is
/// not finite has the scale NaN.
///
/// # Errors
/// [`KernelError::Shape`] unless k is above 0 and lengths fit.
pub fn quantize_rows(
    isa: Isa,
    activation: Activation,
    x: &[f32],
    k: usize,
    q: &mut [i8],
    scales: &mut [f32],
) -> Result<(), KernelError> {
    ensure_shape!(
        k > 0 && x.len() == q.len() && x.len() == scales.len().saturating_mul(k),
        "{} values in rows of {k} into {} integers and {} scales",
        x.len(),
        q.len(),
        scales.len()
    );
    for ((x, q), scale) in x.chunks(k).zip(q.chunks_mut(k)).zip(scales) {
        *scale = quantize_row(isa, activation, x, q);
    }
    Ok(())
}
