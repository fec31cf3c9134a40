//! Kinds of dot products and the instruction sets that compute them.

use super::pack::SMALLEST_BITS;
use super::tile::MAX_ROWS;
use crate::simd::Simd;

/// An instruction set's three kinds of dot products.
pub(crate) trait Level: Simd {
    /// int8 by int8, sums in i32, four k to a line.
    type Int8: Dot<S = Self, Value = i8>;
    /// bf16 by bf16, sums in f32, two k to a line: per line first the second k, then the first, each fused.
    type Bf16: Dot<S = Self, Value = u16>;
    /// f32 by f32, fused, one k to a line.
    type F32: Dot<S = Self, Value = f32>;
}

/// One kind of dot product on one instruction set.
///
/// # Safety
/// All functions: the processor has the instruction set, and pointers are valid for what is named.
pub(crate) trait Dot: 'static {
    type S: Simd;
    /// Values of x as packing writes them before they go into cells.
    type Value: Copy + Default;
    /// The values of x of one row that meet one line.
    type Cell: Copy;
    /// Values of k per line.
    const K: usize;
    /// Most rows of a tile.
    const ROWS: usize;
    /// Whether the lines of a panel are also the cells of its columns as rows of a tile of sixteen, and a line is one
    /// vector: then either side of a product can be its rows.
    const PANELS_ARE_CELLS: bool = false;

    /// The cell of K values.
    unsafe fn cell(values: *const Self::Value) -> Self::Cell;

    /// Cells of `rows` rows of `stride` values, `lines` in each: cell (line, row) at `to[line * rows + row]`.
    #[inline(always)]
    unsafe fn cells(
        values: *const Self::Value,
        stride: usize,
        rows: usize,
        lines: usize,
        to: *mut Self::Cell,
    ) {
        for row in 0..rows {
            for line in 0..lines {
                // SAFETY: the caller's duty.
                unsafe {
                    let cell = Self::cell(values.add(row * stride + line * Self::K));
                    to.add(line * rows + row).write(cell);
                }
            }
        }
    }

    /// Lines of sixteen columns of `count` cells of four bytes each: the transpose.
    #[inline(always)]
    unsafe fn columns(columns: [*const u8; 16], count: usize, to: *mut [u32; 16]) {
        for line in 0..count {
            // SAFETY: the caller's duty.
            unsafe {
                let cells = columns.map(|column| column.cast::<u32>().add(line).read_unaligned());
                to.add(line).write(cells);
            }
        }
    }

    /// [`Dot::columns`] of bf16 in pairs with small magnitudes as zero; of other values as they are.
    #[inline(always)]
    unsafe fn key_columns(columns: [*const u8; 16], count: usize, to: *mut [u32; 16]) {
        // SAFETY: the caller's duty.
        unsafe {
            Self::columns(columns, count, to);
            if Self::K == 2 {
                for line in std::slice::from_raw_parts_mut(to, count) {
                    clean_pairs(line);
                }
            }
        }
    }

    /// Sums of `R` rows by one panel over `count` lines into `out[row]`, as the bits of i32 or f32. Cell (line, row)
    /// lies at `x[line * R + row]`.
    unsafe fn tile<const R: usize>(
        x: *const Self::Cell,
        lines: *const u8,
        count: usize,
        out: *mut [u32; 16],
    );

    /// `to[row]` ← `to[row]` · `keep`, 0 in its place if `fresh`, + the sums of f32 of [`Dot::tile`], fused, for sixteen
    /// rows. Only with [`Dot::PANELS_ARE_CELLS`].
    #[inline(always)]
    unsafe fn tile_onto(
        x: *const Self::Cell,
        lines: *const u8,
        count: usize,
        fresh: bool,
        keep: <Self::S as Simd>::V,
        to: *mut [f32; 16],
    ) {
        let mut sums = [[0u32; 16]; MAX_ROWS];
        // SAFETY: the caller's duty.
        unsafe {
            Self::tile::<MAX_ROWS>(x, lines, count, sums.as_mut_ptr());
            for (row, sum) in sums.iter().enumerate() {
                let to = to.add(row).cast();
                let before = if fresh {
                    Self::S::splat(0.0)
                } else {
                    Self::S::load(to)
                };
                let sum = Self::S::load(sum.as_ptr().cast());
                Self::S::store(to, Self::S::fma(before, keep, sum));
            }
        }
    }

    /// [`Dot::tile`] by four panels that begin `panel_bytes` apart: row r by panel p into `out[p][r]`. `R` is at most 4.
    #[inline(always)]
    unsafe fn tile_by_four<const R: usize>(
        x: *const Self::Cell,
        lines: *const u8,
        panel_bytes: usize,
        count: usize,
        out: *mut [[u32; 16]; MAX_ROWS],
    ) {
        for panel in 0..4 {
            // SAFETY: the caller's duty.
            unsafe {
                let lines = lines.add(panel * panel_bytes);
                Self::tile::<R>(x, lines, count, out.add(panel).cast());
            }
        }
    }
}

/// Magnitudes of bf16 below [`SMALLEST_BITS`] become zero.
#[inline(always)]
pub(crate) fn clean_pairs(line: &mut [u32; 16]) {
    let values: &mut [u16; 32] = bytemuck::cast_mut(line);
    for value in values {
        *value = if *value & 0x7fff < SMALLEST_BITS {
            0
        } else {
            *value
        };
    }
}

/// Defines `unsafe fn name(isa, args)`, which runs the kernel generic over [`Level`] compiled for that instruction set.
macro_rules! panel_kernel {
    (
        $(#[$attribute:meta])*
        $vis:vis fn $name:ident = $kernel:ident ( $($arg:ident : $type:ty),* $(,)? )
    ) => {
        $(#[$attribute])*
        ///
        /// # Safety
        /// That of the kernel it enters.
        $vis unsafe fn $name(isa: $crate::Isa, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma")]
            unsafe fn avx512_bf16($($arg: $type),*) {
                // SAFETY: the caller's duty.
                unsafe { $kernel::<$crate::simd::Avx512Bf16>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
            unsafe fn avx512($($arg: $type),*) {
                // SAFETY: the caller's duty.
                unsafe { $kernel::<$crate::simd::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $type),*) {
                // SAFETY: the caller's duty.
                unsafe { $kernel::<$crate::simd::Avx2>($($arg),*) }
            }
            match isa.0 {
                // SAFETY: an Isa of this kind exists only where the processor has its features.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Kind::Avx512Bf16 => unsafe { avx512_bf16($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Kind::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Kind::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: the caller's duty.
                $crate::isa::Kind::Portable => unsafe { $kernel::<$crate::simd::Portable>($($arg),*) },
            }
        }
    };
}
pub(crate) use panel_kernel;
