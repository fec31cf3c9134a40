//! One task of a product: some rows of x by some rows of w, on one thread.
//!
//! x is packed into groups of at most [`Simd::TILE_ROWS`] rows; w is read where it lies, four rows at a time, and
//! widened in registers, or once into a copy where that was measured to be faster ([`Simd::COPIES_BF16`]). A register
//! tile holds the lanes of all products of a group with four rows of w over one block of k.

use std::ops::Range;

use super::K_BLOCK;
use crate::reference::LANES as STEP;
use crate::simd::{Element, Simd, simd_kernel, widen};
use crate::{DType, Matrix};

/// Rows of w in a register tile.
pub(crate) const TILE_COLS: usize = 4;

/// The largest [`Simd::TILE_ROWS`].
const MAX_TILE_ROWS: usize = 6;

/// Most rows of x of a task: their packed block of k stays in the second-level cache.
pub(crate) const TASK_ROWS: usize = 128;

/// Most values of x that are packed over all of k at once, for the same reason.
const WHOLE_VALUES: usize = 1 << 17;

/// How far before its use a weight is asked for; measured for rows that come from memory.
const PREFETCH_BYTES: usize = 512;

/// Values of a widened copy of four rows of w over one block of k.
const COPY_VALUES: usize = TILE_COLS * K_BLOCK;

/// A product y = x · wᵀ in raw parts; strides in elements, from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) x: *const f32,
    pub(crate) x_stride: usize,
    pub(crate) rows: usize,
    pub(crate) w: &'a Matrix,
    pub(crate) y: *mut f32,
    pub(crate) y_stride: usize,
}

// SAFETY: the pointers are only used by tasks, which read x and write disjoint parts of y; whoever builds a Product
// holds the borrows of both for as long as tasks run.
unsafe impl Sync for Product<'_> {}

simd_kernel! {
    /// Computes y[rows, cols] of a product.
    pub(crate) fn run_task = task(product: &Product<'_>, rows: Range<usize>, cols: Range<usize>, scratch: &mut [f32])
}

/// Values of scratch that [`run_task`] needs for so many rows.
pub(crate) fn scratch_length(rows: usize, k: usize) -> usize {
    let packed = if packs_whole(rows, k) {
        k.next_multiple_of(STEP)
    } else {
        K_BLOCK
    };
    COPY_VALUES + rows * packed
}

fn packs_whole(rows: usize, k: usize) -> bool {
    rows * k <= WHOLE_VALUES || k <= K_BLOCK
}

/// # Safety
/// The product's pointers are valid for its strides and shapes, rows and cols are inside it, scratch has
/// [`scratch_length`] values, and no other thread touches that part of y.
#[inline(always)]
unsafe fn task<S: Simd>(
    product: &Product<'_>,
    rows: Range<usize>,
    cols: Range<usize>,
    scratch: &mut [f32],
) {
    // SAFETY: the caller's duty; `rows` moves the two row pointers inside their buffers.
    unsafe {
        let x = product.x.add(rows.start * product.x_stride);
        let y = product.y.add(rows.start * product.y_stride);
        let part = Product {
            x,
            y,
            rows: rows.len(),
            ..*product
        };
        let scratch = scratch.as_mut_ptr();
        match product.w.dtype() {
            DType::F32 => typed_task::<S, f32>(&part, cols, scratch),
            DType::Bf16 => typed_task::<S, u16>(&part, cols, scratch),
        }
    }
}

#[inline(always)]
unsafe fn typed_task<S: Simd, E: Element>(
    product: &Product<'_>,
    cols: Range<usize>,
    copy: *mut f32,
) {
    let (rows, k) = (product.rows, product.w.cols());
    let blocks = k.div_ceil(K_BLOCK);
    // SAFETY: behind the copy the scratch holds one block of all rows in whole steps, or all blocks; the rest is the
    // caller's duty.
    unsafe {
        let packed = copy.add(COPY_VALUES);
        if packs_whole(rows, k) {
            // Few rows (decode): one pass over w, four rows of it read to their end before the next four.
            for block in 0..blocks {
                pack::<S>(product, block, packed.add(block * K_BLOCK * rows));
            }
            for col in cols.clone().step_by(TILE_COLS) {
                for block in 0..blocks {
                    let packed = packed.add(block * K_BLOCK * rows);
                    four_columns::<S, E>(product, block, col, cols.end, packed, copy, None);
                }
            }
        } else {
            // Pieces of rows that are far apart: neither the hardware nor the tile foresees the next ones.
            let ahead = Some(TILE_COLS * k);
            for block in 0..blocks {
                pack::<S>(product, block, packed);
                for col in cols.clone().step_by(TILE_COLS) {
                    four_columns::<S, E>(product, block, col, cols.end, packed, copy, ahead);
                }
            }
        }
    }
}

/// Start and length of a block of k.
#[inline(always)]
fn block_of(k: usize, block: usize) -> (usize, usize) {
    let start = block * K_BLOCK;
    (start, K_BLOCK.min(k - start))
}

/// Rows of group `group` when `rows` are dealt out evenly.
#[inline(always)]
fn group_rows(rows: usize, groups: usize, group: usize) -> Range<usize> {
    rows * group / groups..rows * (group + 1) / groups
}

/// Packs one block of k of all rows, group by group.
#[inline(always)]
unsafe fn pack<S: Simd>(product: &Product<'_>, block: usize, to: *mut f32) {
    let (start, length) = block_of(product.w.cols(), block);
    let groups = product.rows.div_ceil(S::TILE_ROWS);
    for group in 0..groups {
        let group = group_rows(product.rows, groups, group);
        // SAFETY: the caller grants room for all rows of whole steps.
        unsafe {
            let x = product.x.add(group.start * product.x_stride + start);
            let to = to.add(group.start * length.next_multiple_of(STEP));
            pack_rows::<S>(x, product.x_stride, group.len(), length, to);
        }
    }
}

/// Copies `length` values of each row: for each step of sixteen, the rows one after the other; zeros behind the end.
///
/// # Safety
/// `x` has `rows` rows of `length` values at `stride`, `to` room for as many whole steps.
#[inline(always)]
unsafe fn pack_rows<S: Simd>(
    x: *const f32,
    stride: usize,
    rows: usize,
    length: usize,
    to: *mut f32,
) {
    for row in 0..rows {
        for step in 0..length.div_ceil(STEP) {
            for part in 0..S::PARTS {
                let lane = part * S::LANES;
                // SAFETY: the caller's duty.
                unsafe {
                    let v = load_until::<S, f32>(
                        x.add(row * stride + step * STEP),
                        lane,
                        length - step * STEP,
                    );
                    S::store(to.add((step * rows + row) * STEP + lane), v);
                }
            }
        }
    }
}

/// Values `lane ..` of a step of which `end` exist; zeros behind.
#[inline(always)]
unsafe fn load_until<S: Simd, E: Element>(step: *const E, lane: usize, end: usize) -> S::V {
    // SAFETY: the caller's duty; only values before `end` are read.
    unsafe {
        if lane + S::LANES <= end {
            E::load::<S>(step.add(lane))
        } else if lane < end {
            E::load_part::<S>(step.add(lane), end - lane)
        } else {
            S::splat(0.0)
        }
    }
}

/// All rows by up to four rows of w, from `col` on, over one block of k. `ahead` tells how far behind a
/// weight the one lies that is needed one call later and should be asked for now.
#[inline(always)]
unsafe fn four_columns<S: Simd, E: Element>(
    product: &Product<'_>,
    block: usize,
    col: usize,
    end: usize,
    packed: *const f32,
    copy: *mut f32,
    ahead: Option<usize>,
) {
    let k = product.w.cols();
    let (start, length) = block_of(k, block);
    let count = TILE_COLS.min(end - col);
    let w = product.w.bytes().as_ptr().cast::<E>();
    let mut columns = [w; TILE_COLS];
    for (i, column) in columns.iter_mut().enumerate() {
        // SAFETY: clamped to existing rows of w; the extra results are not stored.
        unsafe {
            *column = w.add((col + i.min(count - 1)) * k + start);
        }
        if let Some(ahead) = ahead {
            for line in (0..length).step_by(64 / size_of::<E>()) {
                // SAFETY: a prefetch has no needs.
                unsafe { S::prefetch(column.wrapping_add(ahead + line).cast()) };
            }
        }
    }
    // SAFETY: the copy has room for four rows of a block; y has `count` columns from `col` on in every row.
    unsafe {
        let y = product.y.add(col);
        if E::NARROW && S::COPIES_BF16 && product.rows > S::TILE_ROWS {
            let mut wide = [copy.cast_const(); TILE_COLS];
            for (i, (column, wide)) in columns.iter().zip(&mut wide).enumerate() {
                widen::<S, E>(*column, length, copy.add(i * K_BLOCK));
                *wide = copy.add(i * K_BLOCK);
            }
            all_groups::<S, f32>(product, packed, wide, length, y, count, block == 0);
        } else {
            all_groups::<S, E>(product, packed, columns, length, y, count, block == 0);
        }
    }
}

/// All rows by `count` of four columns over one block, into y from there on.
#[inline(always)]
unsafe fn all_groups<S: Simd, E: Element>(
    product: &Product<'_>,
    packed: *const f32,
    columns: [*const E; TILE_COLS],
    length: usize,
    y: *mut f32,
    count: usize,
    first: bool,
) {
    let groups = product.rows.div_ceil(S::TILE_ROWS);
    for group in 0..groups {
        let group = group_rows(product.rows, groups, group);
        let mut sums = [[0.0; TILE_COLS]; MAX_TILE_ROWS];
        // SAFETY: packed holds every row's block; y has `count` values in every row.
        unsafe {
            let x = packed.add(group.start * length.next_multiple_of(STEP));
            group_tile::<S, E>(x, group.len(), columns, length, &mut sums);
            for (row, sums) in group.zip(&sums) {
                put(y.add(row * product.y_stride), sums, count, first);
            }
        }
    }
}

/// Stores the first block's sums, adds the others'.
#[inline(always)]
unsafe fn put(y: *mut f32, sums: &[f32; TILE_COLS], count: usize, first: bool) {
    // SAFETY: the caller grants `count` values.
    unsafe {
        if count < TILE_COLS {
            for (col, sum) in sums.iter().enumerate().take(count) {
                let y = y.add(col);
                y.write(if first { *sum } else { y.read() + sum });
            }
            return;
        }
        let y = y.cast::<[f32; TILE_COLS]>();
        if first {
            y.write_unaligned(*sums);
        } else {
            let mut total = y.read_unaligned();
            for (total, sum) in total.iter_mut().zip(sums) {
                *total += sum;
            }
            y.write_unaligned(total);
        }
    }
}

/// Sums of products of a packed group with four columns over `length` values, into the first `rows` entries.
///
/// # Safety
/// `x` is packed by [`pack_rows`] with 1 ..= TILE_ROWS rows; columns have `length` values.
#[inline(always)]
unsafe fn group_tile<S: Simd, E: Element>(
    x: *const f32,
    rows: usize,
    columns: [*const E; TILE_COLS],
    length: usize,
    sums: &mut [[f32; TILE_COLS]; MAX_TILE_ROWS],
) {
    // A group of more rows than TILE_ROWS never occurs; the comparison keeps its tile from being compiled.
    macro_rules! tile_of {
        ($($rows:literal)*) => {
            match rows {
                $($rows if $rows <= S::TILE_ROWS => {
                    // SAFETY: the caller's duty.
                    let tile = unsafe { tile::<S, E, $rows>(x, columns, length) };
                    sums[..$rows].copy_from_slice(&tile);
                })*
                _ => {}
            }
        };
    }
    tile_of!(1 2 3 4 5 6);
}

#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and column"
)]
#[inline(always)]
unsafe fn tile<S: Simd, E: Element, const ROWS: usize>(
    x: *const f32,
    columns: [*const E; TILE_COLS],
    length: usize,
) -> [[f32; TILE_COLS]; ROWS] {
    let (whole, tail) = (length / STEP, length % STEP);
    // SAFETY: the caller grants packed x of whole steps and columns of `length` values.
    unsafe {
        let zero = S::splat(0.0);
        let mut parts = [[[zero; 4]; TILE_COLS]; ROWS];
        for part in 0..S::PARTS {
            let lane = part * S::LANES;
            let mut sums = [[zero; TILE_COLS]; ROWS];
            for step in 0..whole {
                let mut rows = [zero; ROWS];
                for row in 0..ROWS {
                    rows[row] = S::load(x.add((step * ROWS + row) * STEP + lane));
                }
                for col in 0..TILE_COLS {
                    let w = columns[col].wrapping_add(step * STEP + lane);
                    S::prefetch(w.cast::<u8>().wrapping_add(PREFETCH_BYTES));
                    let w = E::load::<S>(w);
                    for row in 0..ROWS {
                        sums[row][col] = S::fma(rows[row], w, sums[row][col]);
                    }
                }
            }
            if tail > 0 {
                for col in 0..TILE_COLS {
                    let w = load_until::<S, E>(columns[col].add(whole * STEP), lane, tail);
                    for row in 0..ROWS {
                        let x = S::load(x.add((whole * ROWS + row) * STEP + lane));
                        sums[row][col] = S::fma(x, w, sums[row][col]);
                    }
                }
            }
            for row in 0..ROWS {
                for col in 0..TILE_COLS {
                    parts[row][col][part] = sums[row][col];
                }
            }
        }
        let mut out = [[0.0; TILE_COLS]; ROWS];
        for row in 0..ROWS {
            let [a, b, c, d] = parts[row];
            out[row] = S::add_lanes4([
                S::fold_parts(a),
                S::fold_parts(b),
                S::fold_parts(c),
                S::fold_parts(d),
            ]);
        }
        out
    }
}
