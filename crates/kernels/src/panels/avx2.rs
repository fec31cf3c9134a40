//! Tiles with AVX2.

use std::arch::x86_64::*;

use super::dot::{Dot, Level};
use crate::simd::Avx2;

/// int8 as sixteen-bit factors: `vpmaddwd` is exact for any values, which the eight-bit multiply-add is not.
pub(crate) struct Int8;
pub(crate) struct Bf16;
pub(crate) struct F32;

impl Level for Avx2 {
    type Int8 = Int8;
    type Bf16 = Bf16;
    type F32 = F32;
}

/// Sums of `R` rows by `QUARTERS` quarters of a panel from `first` on. A quarter of a line is four columns; each has two
/// partial sums, of the first two k and of the others.
///
/// # Safety
/// As for [`Dot::tile`].
#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and quarter"
)]
#[inline(always)]
unsafe fn int8_quarters<const R: usize, const QUARTERS: usize>(
    x: *const [i16; 4],
    lines: *const u8,
    count: usize,
    first: usize,
    out: *mut [u32; 16],
) {
    // SAFETY: the caller's duty.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); QUARTERS]; R];
        for place in 0..count {
            let mut w = [_mm256_setzero_si256(); QUARTERS];
            for quarter in 0..QUARTERS {
                let line = lines.add(place * 64 + (first + quarter) * 16);
                w[quarter] = _mm256_cvtepu8_epi16(_mm_loadu_si128(line.cast()));
            }
            for row in 0..R {
                let x = _mm256_set1_epi64x(x.add(place * R + row).cast::<i64>().read());
                for quarter in 0..QUARTERS {
                    let products = _mm256_madd_epi16(w[quarter], x);
                    sums[row][quarter] = _mm256_add_epi32(sums[row][quarter], products);
                }
            }
        }
        for row in 0..R {
            for pair in 0..QUARTERS / 2 {
                let joined = _mm256_hadd_epi32(sums[row][pair * 2], sums[row][pair * 2 + 1]);
                let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(joined);
                let out = out.add(row).cast::<__m256i>().add(first / 2 + pair);
                _mm256_storeu_si256(out, ordered);
            }
        }
    }
}

impl Dot for Int8 {
    type S = Avx2;
    type Value = i8;
    type Cell = [i16; 4];
    const K: usize = 4;
    const ROWS: usize = 5;

    #[inline(always)]
    unsafe fn cell(values: *const i8) -> [i16; 4] {
        // SAFETY: the caller grants four values.
        let [a, b, c, d] = unsafe { values.cast::<[i8; 4]>().read() };
        [i16::from(a), i16::from(b), i16::from(c), i16::from(d)]
    }

    #[inline(always)]
    unsafe fn tile<const R: usize>(
        x: *const [i16; 4],
        lines: *const u8,
        count: usize,
        out: *mut [u32; 16],
    ) {
        // SAFETY: the caller's duty. Registers hold the sums of two rows by a panel, or of five by half of it.
        unsafe {
            if R <= 2 {
                int8_quarters::<R, 4>(x, lines, count, 0, out);
            } else {
                int8_quarters::<R, 2>(x, lines, count, 0, out);
                int8_quarters::<R, 2>(x, lines, count, 2, out);
            }
        }
    }
}

/// Sums of `R` rows by `HALVES` halves of a panel from `first` on.
///
/// # Safety
/// As for [`Dot::tile`].
#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and half"
)]
#[inline(always)]
unsafe fn bf16_halves<const R: usize, const HALVES: usize>(
    x: *const [f32; 2],
    lines: *const u8,
    count: usize,
    first: usize,
    out: *mut [u32; 16],
) {
    // SAFETY: the caller's duty.
    unsafe {
        let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        let mut sums = [[_mm256_setzero_ps(); HALVES]; R];
        for place in 0..count {
            for half in 0..HALVES {
                let w = lines.add(place * 64 + (first + half) * 32);
                let w = _mm256_loadu_si256(w.cast());
                let w1 = _mm256_castsi256_ps(_mm256_and_si256(w, upper));
                let w0 = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w));
                for row in 0..R {
                    let x = x.add(place * R + row).cast::<f32>();
                    let sum = sums[row][half];
                    let sum = _mm256_fmadd_ps(w1, _mm256_broadcast_ss(&*x.add(1)), sum);
                    sums[row][half] = _mm256_fmadd_ps(w0, _mm256_broadcast_ss(&*x), sum);
                }
            }
        }
        for row in 0..R {
            for half in 0..HALVES {
                let out = out.add(row).cast::<f32>().add((first + half) * 8);
                _mm256_storeu_ps(out, sums[row][half]);
            }
        }
    }
}

impl Dot for Bf16 {
    type S = Avx2;
    type Value = u16;
    type Cell = [f32; 2];
    const K: usize = 2;
    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn cell(values: *const u16) -> [f32; 2] {
        // SAFETY: the caller grants two values.
        let [a, b] = unsafe { values.cast::<[u16; 2]>().read() };
        [
            f32::from_bits(u32::from(a) << 16),
            f32::from_bits(u32::from(b) << 16),
        ]
    }

    #[inline(always)]
    unsafe fn tile<const R: usize>(
        x: *const [f32; 2],
        lines: *const u8,
        count: usize,
        out: *mut [u32; 16],
    ) {
        // SAFETY: the caller's duty. With many rows registers hold the sums of half a panel.
        unsafe {
            if R <= 2 {
                bf16_halves::<R, 2>(x, lines, count, 0, out);
            } else {
                bf16_halves::<R, 1>(x, lines, count, 0, out);
                bf16_halves::<R, 1>(x, lines, count, 1, out);
            }
        }
    }
}

#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and part"
)]
impl Dot for F32 {
    type S = Avx2;
    type Value = f32;
    type Cell = f32;
    const K: usize = 1;
    const ROWS: usize = 6;

    #[inline(always)]
    unsafe fn cell(values: *const f32) -> f32 {
        // SAFETY: the caller grants a value.
        unsafe { values.read() }
    }

    #[inline(always)]
    unsafe fn tile<const R: usize>(
        x: *const f32,
        lines: *const u8,
        count: usize,
        out: *mut [u32; 16],
    ) {
        // SAFETY: the caller's duty.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); 2]; R];
            for place in 0..count {
                let line = lines.add(place * 64).cast::<f32>();
                let w = [_mm256_loadu_ps(line), _mm256_loadu_ps(line.add(8))];
                for row in 0..R {
                    let x = _mm256_set1_ps(x.add(place * R + row).read());
                    for half in 0..2 {
                        sums[row][half] = _mm256_fmadd_ps(w[half], x, sums[row][half]);
                    }
                }
            }
            for row in 0..R {
                let out = out.add(row).cast::<f32>();
                _mm256_storeu_ps(out, sums[row][0]);
                _mm256_storeu_ps(out.add(8), sums[row][1]);
            }
        }
    }
}
