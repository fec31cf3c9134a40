//! KV elements as tiles of attention need them.

use crate::panels::{RowValue, SMALLEST};
use crate::simd::Simd;
use crate::weight::PANEL;

/// All ones in not-a-number and infinity.
const F32_EXPONENT: u32 = 0x7f80_0000;
const BF16_EXPONENT: u16 = 0x7f80;

/// A stored KV element.
pub(super) trait KvValue: RowValue {
    /// The bits, in the lower half of a line's cell if it holds two.
    fn bits(self) -> u32;

    /// A line's cell; the upper half, if there is one, is masked.
    fn pair(lower: Self, upper: Self, mask: u32) -> u32;

    /// A packed line with small bf16 as zero. `most` collects each place's largest exponent, for
    /// [`KvValue::all_finite`].
    fn clean(line: [u32; PANEL], most: &mut [u32; PANEL]) -> [u32; PANEL];

    /// Whether all values of the lines behind `most`, zeros before the first, are finite.
    fn all_finite(most: &[u32; PANEL]) -> bool;

    /// Stores probabilities and returns them as stored.
    ///
    /// # Safety
    /// The processor has the instruction set, and `to` room for a vector.
    unsafe fn put<S: Simd>(v: S::V, to: *mut Self) -> S::V;
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
    fn clean(line: [u32; PANEL], most: &mut [u32; PANEL]) -> [u32; PANEL] {
        for (most, cell) in most.iter_mut().zip(line) {
            *most = (*most).max(cell & F32_EXPONENT);
        }
        line
    }

    #[inline(always)]
    fn all_finite(most: &[u32; PANEL]) -> bool {
        most.iter().all(|most| *most < F32_EXPONENT)
    }

    #[inline(always)]
    unsafe fn put<S: Simd>(v: S::V, to: *mut f32) -> S::V {
        // SAFETY: the caller's duty.
        unsafe { S::store(to, v) };
        v
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
    fn clean(mut line: [u32; PANEL], most: &mut [u32; PANEL]) -> [u32; PANEL] {
        let smallest = (SMALLEST.to_bits() >> 16) as u16;
        let values: &mut [u16; 2 * PANEL] = bytemuck::cast_mut(&mut line);
        let most: &mut [u16; 2 * PANEL] = bytemuck::cast_mut(most);
        for (most, value) in most.iter_mut().zip(values) {
            let exponent = *value & BF16_EXPONENT;
            *most = (*most).max(exponent);
            *value = if exponent < smallest { 0 } else { *value };
        }
        line
    }

    #[inline(always)]
    fn all_finite(most: &[u32; PANEL]) -> bool {
        let most: &[u16; 2 * PANEL] = bytemuck::cast_ref(most);
        most.iter().all(|most| *most < BF16_EXPONENT)
    }

    #[inline(always)]
    unsafe fn put<S: Simd>(v: S::V, to: *mut u16) -> S::V {
        // SAFETY: the caller's duty.
        unsafe {
            S::store_bf16(to, S::without_small(v, SMALLEST));
            S::load_bf16(to)
        }
    }
}
