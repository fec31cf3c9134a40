//! Tiles with AVX-512: a line is one register.

use std::arch::x86_64::*;

use super::dot::{Dot, Level};
use super::pack::SMALLEST_BITS;
use super::tile::MAX_ROWS;
use crate::simd::{Avx512Level, without_small_bf16};

/// From so many rows on lines are asked for so far ahead.
const AHEAD_ROWS: usize = 9;
const AHEAD_BYTES: usize = 3072;

pub(crate) struct Int8<const BF16: bool>;
pub(crate) struct Bf16<const BF16: bool>;
pub(crate) struct F32<const BF16: bool>;

impl<const BF16: bool> Level for Avx512Level<BF16> {
    type Int8 = Int8<BF16>;
    type Bf16 = Bf16<BF16>;
    type F32 = F32<BF16>;
}

/// One instruction (or its equal) per line and row.
///
/// # Safety
/// As for [`Dot`].
trait Step {
    /// Whether sums may be split into chains and added in the end without a change.
    const EXACT: bool;
    unsafe fn step(sum: __m512i, x: *const u32, line: __m512i) -> __m512i;
}

impl<const BF16: bool> Step for Int8<BF16> {
    const EXACT: bool = true;

    #[inline(always)]
    unsafe fn step(sum: __m512i, x: *const u32, line: __m512i) -> __m512i {
        // SAFETY: the caller's duty. The stored weights are the unsigned factor.
        unsafe { _mm512_dpbusd_epi32(sum, line, _mm512_set1_epi32(x.cast::<i32>().read())) }
    }
}

impl<const BF16: bool> Step for Bf16<BF16> {
    const EXACT: bool = false;

    #[inline(always)]
    unsafe fn step(sum: __m512i, x: *const u32, line: __m512i) -> __m512i {
        // SAFETY: the caller's duty; a vector of bf16 is 64 bytes of plain bits.
        unsafe {
            let x = _mm512_set1_epi32(x.cast::<i32>().read());
            let sum = _mm512_castsi512_ps(sum);
            if BF16 {
                let line = std::mem::transmute::<__m512i, __m512bh>(line);
                let x = std::mem::transmute::<__m512i, __m512bh>(x);
                return _mm512_castps_si512(_mm512_dpbf16_ps(sum, line, x));
            }
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let second = |v| _mm512_castsi512_ps(_mm512_and_si512(v, upper));
            let first = |v| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v));
            let sum = _mm512_fmadd_ps(second(line), second(x), sum);
            _mm512_castps_si512(_mm512_fmadd_ps(first(line), first(x), sum))
        }
    }
}

impl<const BF16: bool> Step for F32<BF16> {
    const EXACT: bool = false;

    #[inline(always)]
    unsafe fn step(sum: __m512i, x: *const u32, line: __m512i) -> __m512i {
        // SAFETY: the caller's duty.
        unsafe {
            let x = _mm512_set1_ps(x.cast::<f32>().read());
            let sum = _mm512_fmadd_ps(_mm512_castsi512_ps(line), x, _mm512_castsi512_ps(sum));
            _mm512_castps_si512(sum)
        }
    }
}

/// One register per row beside the line: the cells come as broadcast memory operands, so the multiplier is the limit from
/// a few rows on. With few rows lines are not asked for ahead, since the hardware follows the one stream better; with
/// many it stays too close behind.
///
/// # Safety
/// As for [`Dot::tile`].
#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and chain"
)]
#[inline(always)]
unsafe fn sums<T: Step, const R: usize, const CHAINS: usize>(
    x: *const u32,
    lines: *const u8,
    count: usize,
) -> [__m512i; R] {
    // SAFETY: the caller's duty.
    unsafe {
        let mut sums = [[_mm512_setzero_si512(); CHAINS]; R];
        let whole = count / CHAINS * CHAINS;
        let mut place = 0;
        while place < whole {
            for chain in 0..CHAINS {
                let line = lines.add((place + chain) * 64);
                if R >= AHEAD_ROWS {
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD_BYTES).cast());
                }
                let line = _mm512_loadu_si512(line.cast());
                for row in 0..R {
                    let x = x.add((place + chain) * R + row);
                    sums[row][chain] = T::step(sums[row][chain], x, line);
                }
            }
            place += CHAINS;
        }
        while place < count {
            let line = _mm512_loadu_si512(lines.add(place * 64).cast());
            for row in 0..R {
                sums[row][0] = T::step(sums[row][0], x.add(place * R + row), line);
            }
            place += 1;
        }
        let mut out = [_mm512_setzero_si512(); R];
        for row in 0..R {
            out[row] = sums[row][0];
            for chain in 1..CHAINS {
                out[row] = _mm512_add_epi32(out[row], sums[row][chain]);
            }
        }
        out
    }
}

/// [`sums`] into memory.
///
/// # Safety
/// As for [`Dot::tile`].
#[inline(always)]
unsafe fn tile<T: Step, const R: usize, const CHAINS: usize>(
    x: *const u32,
    lines: *const u8,
    count: usize,
    out: *mut [u32; 16],
) {
    // SAFETY: the caller's duty.
    unsafe {
        let sums = sums::<T, R, CHAINS>(x, lines, count);
        for (row, sum) in sums.into_iter().enumerate() {
            _mm512_storeu_si512(out.add(row).cast(), sum);
        }
    }
}

/// Four panels side by side: the sums of few rows alone would wait for each other.
///
/// # Safety
/// As for [`Dot::tile_by_four`].
#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and panel"
)]
#[inline(always)]
unsafe fn by_four<T: Step, const R: usize>(
    x: *const u32,
    lines: *const u8,
    panel_bytes: usize,
    count: usize,
    out: *mut [[u32; 16]; MAX_ROWS],
) {
    // SAFETY: the caller's duty.
    unsafe {
        let mut sums = [[_mm512_setzero_si512(); 4]; R];
        for place in 0..count {
            for panel in 0..4 {
                let line = lines.add(panel * panel_bytes + place * 64);
                let line = _mm512_loadu_si512(line.cast());
                for row in 0..R {
                    sums[row][panel] = T::step(sums[row][panel], x.add(place * R + row), line);
                }
            }
        }
        for panel in 0..4 {
            for row in 0..R {
                let out = out.add(panel).cast::<[u32; 16]>().add(row);
                _mm512_storeu_si512(out.cast(), sums[row][panel]);
            }
        }
    }
}

/// `to[i][j]` = cell i of column j; with `CLEAN` bf16 of small magnitude become zero.
///
/// # Safety
/// Every column has `count` cells of four bytes, `to` room for as many lines.
#[inline(always)]
unsafe fn transpose<const CLEAN: bool>(columns: [*const u8; 16], count: usize, to: *mut [u32; 16]) {
    let whole = count / 16 * 16;
    // SAFETY: the caller's duty; masked loads do not touch what the mask excludes.
    unsafe {
        for start in (0..whole).step_by(16) {
            // No closures: they would not be inlined with their instruction set.
            let mut rows = [_mm512_setzero_si512(); 16];
            for i in 0..16 {
                rows[i] = _mm512_loadu_si512(columns[i].add(start * 4).cast());
                if CLEAN {
                    rows[i] = without_small_bf16(rows[i], SMALLEST_BITS);
                }
            }
            for (line, v) in transposed(rows).into_iter().enumerate() {
                _mm512_storeu_si512(to.add(start + line).cast(), v);
            }
        }
        if whole < count {
            let mask = (1u16 << (count - whole)) - 1;
            let mut rows = [_mm512_setzero_si512(); 16];
            for i in 0..16 {
                rows[i] = _mm512_maskz_loadu_epi32(mask, columns[i].add(whole * 4).cast());
                if CLEAN {
                    rows[i] = without_small_bf16(rows[i], SMALLEST_BITS);
                }
            }
            let lines = transposed(rows);
            for (line, v) in lines.into_iter().enumerate().take(count - whole) {
                _mm512_storeu_si512(to.add(whole + line).cast(), v);
            }
        }
    }
}

/// The transpose of sixteen by sixteen cells.
#[inline(always)]
unsafe fn transposed(rows: [__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: the caller has AVX-512.
    unsafe {
        // Inside each quarter of 128 bits: four by four.
        let mut pairs = [_mm512_setzero_si512(); 16];
        for i in 0..8 {
            pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
        }
        let mut fours = [_mm512_setzero_si512(); 16];
        for i in 0..4 {
            let [a, b, c, d] = [
                pairs[4 * i],
                pairs[4 * i + 1],
                pairs[4 * i + 2],
                pairs[4 * i + 3],
            ];
            fours[4 * i] = _mm512_unpacklo_epi64(a, c);
            fours[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
            fours[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
            fours[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        // fours[4g + i] holds in quarter q: cell 4q + i of columns 4g .. 4g + 4. Then the quarters: four by four.
        let mut lines = [_mm512_setzero_si512(); 16];
        for i in 0..4 {
            let [a, b, c, d] = [fours[i], fours[4 + i], fours[8 + i], fours[12 + i]];
            let low = _mm512_shuffle_i32x4::<0x44>(a, b);
            let high = _mm512_shuffle_i32x4::<0xee>(a, b);
            let low2 = _mm512_shuffle_i32x4::<0x44>(c, d);
            let high2 = _mm512_shuffle_i32x4::<0xee>(c, d);
            lines[i] = _mm512_shuffle_i32x4::<0x88>(low, low2);
            lines[4 + i] = _mm512_shuffle_i32x4::<0xdd>(low, low2);
            lines[8 + i] = _mm512_shuffle_i32x4::<0x88>(high, high2);
            lines[12 + i] = _mm512_shuffle_i32x4::<0xdd>(high, high2);
        }
        lines
    }
}

macro_rules! dot {
    ($kind:ident, $value:ty, $k:literal) => {
        impl<const BF16: bool> Dot for $kind<BF16> {
            type S = Avx512Level<BF16>;
            type Value = $value;
            type Cell = u32;
            const K: usize = $k;
            const ROWS: usize = 16;
            const PANELS_ARE_CELLS: bool = true;

            #[inline(always)]
            unsafe fn cell(values: *const $value) -> u32 {
                // SAFETY: the caller grants K values, four bytes.
                unsafe { values.cast::<u32>().read_unaligned() }
            }

            #[inline(always)]
            unsafe fn cells(
                values: *const $value,
                stride: usize,
                rows: usize,
                lines: usize,
                to: *mut u32,
            ) {
                // SAFETY: the caller's duty; values of rows lie in whole cells.
                unsafe {
                    if rows == 16 {
                        let rows = std::array::from_fn(|row| values.add(row * stride).cast());
                        transpose::<false>(rows, lines, to.cast());
                        return;
                    }
                    for row in 0..rows {
                        let row_values = values.add(row * stride).cast::<u32>();
                        for line in 0..lines {
                            let cell = row_values.add(line).read_unaligned();
                            to.add(line * rows + row).write(cell);
                        }
                    }
                }
            }

            #[inline(always)]
            unsafe fn columns(columns: [*const u8; 16], count: usize, to: *mut [u32; 16]) {
                // SAFETY: the caller's duty.
                unsafe { transpose::<false>(columns, count, to) }
            }

            #[inline(always)]
            unsafe fn key_columns(columns: [*const u8; 16], count: usize, to: *mut [u32; 16]) {
                // SAFETY: the caller's duty.
                unsafe {
                    if $k == 2 {
                        transpose::<true>(columns, count, to);
                    } else {
                        transpose::<false>(columns, count, to);
                    }
                }
            }

            #[inline(always)]
            unsafe fn tile<const R: usize>(
                x: *const u32,
                lines: *const u8,
                count: usize,
                out: *mut [u32; 16],
            ) {
                // SAFETY: the caller's duty. Chains hide the latency of the few sums of few rows.
                unsafe {
                    if Self::EXACT && R == 1 {
                        tile::<Self, R, 4>(x, lines, count, out);
                    } else if Self::EXACT && R <= 3 {
                        tile::<Self, R, 2>(x, lines, count, out);
                    } else {
                        tile::<Self, R, 1>(x, lines, count, out);
                    }
                }
            }

            #[inline(always)]
            unsafe fn tile_onto(
                x: *const u32,
                lines: *const u8,
                count: usize,
                fresh: bool,
                keep: __m512,
                to: *mut [f32; 16],
            ) {
                // SAFETY: the caller's duty.
                unsafe {
                    let sums = sums::<Self, MAX_ROWS, 1>(x, lines, count);
                    for (row, sum) in sums.into_iter().enumerate() {
                        let to = to.add(row).cast::<f32>();
                        let before = if fresh {
                            _mm512_setzero_ps()
                        } else {
                            _mm512_loadu_ps(to)
                        };
                        let sum = _mm512_castsi512_ps(sum);
                        _mm512_storeu_ps(to, _mm512_fmadd_ps(before, keep, sum));
                    }
                }
            }

            #[inline(always)]
            unsafe fn tile_by_four<const R: usize>(
                x: *const u32,
                lines: *const u8,
                panel_bytes: usize,
                count: usize,
                out: *mut [[u32; 16]; MAX_ROWS],
            ) {
                // SAFETY: the caller's duty.
                unsafe { by_four::<Self, R>(x, lines, panel_bytes, count, out) }
            }
        }
    };
}

dot!(Int8, i8, 4);
dot!(Bf16, u16, 2);
dot!(F32, f32, 1);
