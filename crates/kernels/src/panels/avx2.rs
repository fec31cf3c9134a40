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

#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and part"
)]
impl Dot for Int8 {
    type S = Avx2;
    type Value = i8;
    type Cell = [i16; 4];
    const K: usize = 4;
    const ROWS: usize = 3;

    #[inline(always)]
    unsafe fn cell(values: *const i8) -> [i16; 4] {
        // SAFETY: the caller grants four values.
        unsafe { values.cast::<[i8; 4]>().read().map(i16::from) }
    }

    #[inline(always)]
    unsafe fn tile<const R: usize>(
        x: *const [i16; 4],
        lines: *const u8,
        count: usize,
        out: *mut [u32; 16],
    ) {
        // SAFETY: the caller's duty.
        unsafe {
            // A quarter of a line is four columns; each has two partial sums, of the first two k and the others.
            let mut sums = [[_mm256_setzero_si256(); 4]; R];
            for place in 0..count {
                let line = lines.add(place * 64);
                for quarter in 0..4 {
                    let w = _mm_loadu_si128(line.add(quarter * 16).cast());
                    let w = _mm256_cvtepu8_epi16(w);
                    for row in 0..R {
                        let x = x.add(place * R + row).cast::<i64>().read();
                        let products = _mm256_madd_epi16(w, _mm256_set1_epi64x(x));
                        sums[row][quarter] = _mm256_add_epi32(sums[row][quarter], products);
                    }
                }
            }
            for row in 0..R {
                let [a, b, c, d] = sums[row];
                let out = out.add(row).cast::<__m256i>();
                for (half, pair) in [_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d)]
                    .into_iter()
                    .enumerate()
                {
                    let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(pair);
                    _mm256_storeu_si256(out.add(half), ordered);
                }
            }
        }
    }
}

#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and part"
)]
impl Dot for Bf16 {
    type S = Avx2;
    type Value = u16;
    type Cell = [f32; 2];
    const K: usize = 2;
    const ROWS: usize = 5;

    #[inline(always)]
    unsafe fn cell(values: *const u16) -> [f32; 2] {
        // SAFETY: the caller grants two values.
        let values = unsafe { values.cast::<[u16; 2]>().read() };
        values.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    unsafe fn tile<const R: usize>(
        x: *const [f32; 2],
        lines: *const u8,
        count: usize,
        out: *mut [u32; 16],
    ) {
        // SAFETY: the caller's duty.
        unsafe {
            let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let mut sums = [[_mm256_setzero_ps(); 2]; R];
            for place in 0..count {
                let line = lines.add(place * 64);
                for half in 0..2 {
                    let w = _mm256_loadu_si256(line.add(half * 32).cast());
                    let second = _mm256_castsi256_ps(_mm256_and_si256(w, upper));
                    let first = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w));
                    for row in 0..R {
                        let [x0, x1] = x.add(place * R + row).read();
                        let sum = sums[row][half];
                        let sum = _mm256_fmadd_ps(second, _mm256_set1_ps(x1), sum);
                        sums[row][half] = _mm256_fmadd_ps(first, _mm256_set1_ps(x0), sum);
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
