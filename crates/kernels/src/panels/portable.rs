//! Tiles in plain Rust that compilers turn into the vectors of any processor.

use super::dot::{Dot, Level};
use crate::simd::Portable;

pub(crate) struct Int8;
pub(crate) struct Bf16;
pub(crate) struct F32;

impl Level for Portable {
    type Int8 = Int8;
    type Bf16 = Bf16;
    type F32 = F32;
}

/// By itself, so that what it is compiled to depends on no caller.
///
/// # Safety
/// As for [`Dot::tile`].
#[inline(never)]
unsafe fn int8_tile<const R: usize>(
    x: *const [i16; 4],
    lines: *const u8,
    count: usize,
    out: *mut [u32; 16],
) {
    let mut sums = [[0i32; 16]; R];
    for place in 0..count {
        // SAFETY: the caller grants `count` lines and cells.
        let w = unsafe { lines.cast::<[u32; 16]>().add(place).read_unaligned() };
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as above.
            let x = unsafe { x.add(place * R + row).read() };
            for (sum, w) in sums.iter_mut().zip(&w) {
                // Factors that fit sixteen bits: compilers know cheaper products for them.
                let product = |k: usize| ((w >> (8 * k)) & 0xff) as i32 * i32::from(x[k]);
                let pairs = (product(0) + product(1)) + (product(2) + product(3));
                *sum = sum.wrapping_add(pairs);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        // SAFETY: the caller grants R results.
        unsafe { out.add(row).write(sums.map(|sum| sum as u32)) };
    }
}

impl Dot for Int8 {
    type S = Portable;
    type Value = i8;
    type Cell = [i16; 4];
    const K: usize = 4;
    const ROWS: usize = 2;

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
        unsafe { int8_tile::<R>(x, lines, count, out) }
    }
}

impl Dot for Bf16 {
    type S = Portable;
    type Value = u16;
    type Cell = [f32; 2];
    const K: usize = 2;
    const ROWS: usize = 1;

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
        let mut sums = [[0.0f32; 16]; R];
        for place in 0..count {
            // SAFETY: the caller grants `count` lines and cells.
            let (w, x) = unsafe {
                let w = lines.cast::<[u32; 16]>().add(place).read_unaligned();
                (w, x.add(place * R).cast::<[[f32; 2]; R]>().read())
            };
            for (sums, [x0, x1]) in sums.iter_mut().zip(&x) {
                for (sum, w) in sums.iter_mut().zip(&w) {
                    // Products of two bf16 are exact, so a fused multiply-add rounds the same.
                    *sum += f32::from_bits(w & 0xffff_0000) * x1;
                    *sum += f32::from_bits(w << 16) * x0;
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            // SAFETY: the caller grants R results.
            unsafe { out.add(row).write(sums.map(f32::to_bits)) };
        }
    }
}

impl Dot for F32 {
    type S = Portable;
    type Value = f32;
    type Cell = f32;
    const K: usize = 1;
    const ROWS: usize = 1;

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
        let mut sums = [[0.0f32; 16]; R];
        for place in 0..count {
            // SAFETY: the caller grants `count` lines and cells.
            let (w, x) = unsafe {
                let w = lines.cast::<[f32; 16]>().add(place).read_unaligned();
                (w, x.add(place * R).cast::<[f32; R]>().read())
            };
            for (sums, x) in sums.iter_mut().zip(&x) {
                for (sum, w) in sums.iter_mut().zip(&w) {
                    *sum = w.mul_add(*x, *sum);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            // SAFETY: the caller grants R results.
            unsafe { out.add(row).write(sums.map(f32::to_bits)) };
        }
    }
}
