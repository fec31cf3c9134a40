//! KV elements as tiles of attention need them.

use crate::panels::{RowValue, SMALLEST};
use crate::simd::Simd;
use crate::weight::PANEL;

/// A stored KV element.
pub(super) trait KvValue: RowValue {
    /// The bits, in the lower half of a line's cell if it holds two.
    fn bits(self) -> u32;

    /// A line's cell; the upper half, if there is one, is masked.
    fn pair(lower: Self, upper: Self, mask: u32) -> u32;

    /// Prepares packed lines, small bf16 becoming zero; whether all values are finite.
    fn clean(lines: &mut [[u32; PANEL]]) -> bool;

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
    fn clean(lines: &mut [[u32; PANEL]]) -> bool {
        const EXPONENT: u32 = 0x7f80_0000;
        let mut bad = 0;
        for line in lines {
            for cell in line {
                bad |= u32::from(*cell & EXPONENT == EXPONENT);
            }
        }
        bad == 0
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
    fn clean(lines: &mut [[u32; PANEL]]) -> bool {
        const EXPONENT: u16 = 0x7f80;
        let smallest = (SMALLEST.to_bits() >> 16) as u16;
        let mut bad = 0;
        for line in lines {
            let values: &mut [u16] = bytemuck::cast_slice_mut(line);
            for value in values {
                let exponent = *value & EXPONENT;
                bad |= u16::from(exponent == EXPONENT);
                *value = if exponent < smallest { 0 } else { *value };
            }
        }
        bad == 0
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
