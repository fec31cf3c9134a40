//! KV elements as tiles of attention need them.

use crate::math::LOG2_E;
use crate::panels::{RowValue, SMALLEST_BITS, clean_pairs};
use crate::simd::{Simd, exp};
use crate::weight::PANEL;

/// All ones in not-a-number and infinity.
const BF16_EXPONENT: u16 = 0x7f80;

/// A stored KV element.
pub(super) trait KvValue: RowValue {
    /// The bits, in the lower half of a line's cell if it holds two.
    fn bits(self) -> u32;

    /// A line's cell; the upper half, if there is one, is masked.
    fn pair(lower: Self, upper: Self, mask: u32) -> u32;

    /// Small bf16 of a packed line become zero.
    fn clean(line: &mut [u32; PANEL]);

    /// Writes a cleaned line of sixteen values of one position, or of two.
    ///
    /// # Safety
    /// The processor has the instruction set, both rows have sixteen values, and `to` is writable.
    unsafe fn line<S: Simd>(lower: *const Self, upper: *const Self, to: *mut [u32; PANEL]);

    /// [`KvValue::line`] for two lines of thirty-two values.
    ///
    /// # Safety
    /// As there.
    unsafe fn two_lines<S: Simd>(
        lower: *const Self,
        upper: *const Self,
        to: [*mut [u32; PANEL]; 2],
    );

    /// Whether all values are finite.
    fn all_finite(values: &[Self]) -> bool;

    /// Factor on scores before [`KvValue::power`].
    const FACTOR: f32;

    /// e^v, or 2^v where [`KvValue::FACTOR`] makes that the same; 0 where that is too small for products.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn power<S: Simd>(v: S::V) -> S::V;

    /// The same to full precision, for factors on sums.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn exact_power<S: Simd>(v: S::V) -> S::V;

    /// Stores probabilities.
    ///
    /// # Safety
    /// The processor has the instruction set, and `to` room for a vector.
    unsafe fn put<S: Simd>(v: S::V, to: *mut Self);

    /// Stores the probabilities of two positions for sixteen rows: lines with a cell per row.
    ///
    /// # Safety
    /// The processor has the instruction set, whose vectors have sixteen lanes; `to` has room for the lines of two
    /// positions.
    unsafe fn put_lines<S: Simd>(first: S::V, second: S::V, to: *mut [u32; PANEL]);
}

impl KvValue for f32 {
    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }

    #[inline(always)]
    fn pair(lower: Self, _upper: Self, _mask: u32) -> u32 {
        lower.to_bits()
    }

    #[inline(always)]
    fn clean(_line: &mut [u32; PANEL]) {}

    #[inline(always)]
    unsafe fn line<S: Simd>(lower: *const f32, _upper: *const f32, to: *mut [u32; PANEL]) {
        for place in (0..PANEL).step_by(S::LANES) {
            // SAFETY: the caller's duty.
            unsafe { S::store(to.cast::<f32>().add(place), S::load(lower.add(place))) };
        }
    }

    #[inline(always)]
    unsafe fn two_lines<S: Simd>(lower: *const f32, upper: *const f32, to: [*mut [u32; PANEL]; 2]) {
        // SAFETY: the caller's duty.
        unsafe {
            Self::line::<S>(lower, upper, to[0]);
            Self::line::<S>(lower.add(PANEL), upper.add(PANEL), to[1]);
        }
    }

    #[inline(always)]
    fn all_finite(values: &[f32]) -> bool {
        // Without an early end the loop is one of vectors.
        values
            .iter()
            .fold(true, |all, value| all & value.is_finite())
    }

    const FACTOR: f32 = 1.0;

    #[inline(always)]
    unsafe fn power<S: Simd>(v: S::V) -> S::V {
        // SAFETY: the caller's duty.
        unsafe { exp::<S>(v) }
    }

    #[inline(always)]
    unsafe fn exact_power<S: Simd>(v: S::V) -> S::V {
        // SAFETY: the caller's duty.
        unsafe { exp::<S>(v) }
    }

    #[inline(always)]
    unsafe fn put<S: Simd>(v: S::V, to: *mut f32) {
        // SAFETY: the caller's duty.
        unsafe { S::store(to, v) }
    }

    #[inline(always)]
    unsafe fn put_lines<S: Simd>(first: S::V, second: S::V, to: *mut [u32; PANEL]) {
        // SAFETY: the caller's duty.
        unsafe {
            S::store(to.cast(), first);
            S::store(to.add(1).cast(), second);
        }
    }
}

impl KvValue for u16 {
    #[inline(always)]
    fn bits(self) -> u32 {
        u32::from(self)
    }

    #[inline(always)]
    fn pair(lower: Self, upper: Self, mask: u32) -> u32 {
        u32::from(lower) | ((u32::from(upper) << 16) & mask)
    }

    #[inline(always)]
    fn clean(line: &mut [u32; PANEL]) {
        clean_pairs(line);
    }

    #[inline(always)]
    unsafe fn line<S: Simd>(lower: *const u16, upper: *const u16, to: *mut [u32; PANEL]) {
        // SAFETY: the caller's duty.
        unsafe { S::pair_bf16(lower, upper, SMALLEST_BITS, to.cast()) };
    }

    #[inline(always)]
    unsafe fn two_lines<S: Simd>(lower: *const u16, upper: *const u16, to: [*mut [u32; PANEL]; 2]) {
        // SAFETY: the caller's duty.
        unsafe { S::pair_bf16_twice(lower, upper, SMALLEST_BITS, to.map(|to| to.cast())) }
    }

    #[inline(always)]
    fn all_finite(values: &[u16]) -> bool {
        let most = values
            .iter()
            .fold(0, |most, value| most.max(value & BF16_EXPONENT));
        most < BF16_EXPONENT
    }

    const FACTOR: f32 = LOG2_E;

    #[inline(always)]
    unsafe fn power<S: Simd>(v: S::V) -> S::V {
        // SAFETY: the caller's duty.
        unsafe { S::exp2_short(v) }
    }

    #[inline(always)]
    unsafe fn exact_power<S: Simd>(v: S::V) -> S::V {
        // SAFETY: the caller's duty.
        unsafe { exp::<S>(S::mul(v, S::splat(std::f32::consts::LN_2))) }
    }

    #[inline(always)]
    unsafe fn put<S: Simd>(v: S::V, to: *mut u16) {
        // SAFETY: the caller's duty.
        unsafe { S::put_bf16(to, v) }
    }

    #[inline(always)]
    unsafe fn put_lines<S: Simd>(first: S::V, second: S::V, to: *mut [u32; PANEL]) {
        // SAFETY: the caller's duty.
        unsafe { S::put_bf16_pairs(to.cast(), first, second) }
    }
}
