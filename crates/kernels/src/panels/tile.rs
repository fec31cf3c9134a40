//! Tiles of packed rows by panels, on one thread.

use std::ops::Range;

use super::dot::{Dot, Level, panel_kernel};
use super::pack::{RowState, Value, pack_tile};
use crate::Activation;
use crate::rows::silu_mul_kernel;
use crate::weight::{Form, Format, LINE, PANEL, Weight};

/// The most rows of a tile of any kind and instruction set.
pub(crate) const MAX_ROWS: usize = 16;

/// Bytes of the panels that tiles go along.
const BLOCK_BYTES: usize = 192 << 10;

/// A product with a packed weight in raw parts; strides in elements, from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) x: *const f32,
    pub(crate) x_stride: usize,
    /// Row i of the product is row `source[i]` of x; without it row i.
    pub(crate) source: Option<&'a [u32]>,
    pub(crate) rows: usize,
    /// Tiles that the rows are dealt out to.
    pub(crate) tiles: usize,
    /// Whether rows of x are `[gate | up]` of 2 k values, and the product is with silu(gate) · up.
    pub(crate) gated: bool,
    pub(crate) w: &'a Weight,
    pub(crate) y: Output,
    pub(crate) y_stride: usize,
    /// Rows packed before those of this product.
    pub(crate) first: usize,
}

/// Where results go.
#[derive(Clone, Copy)]
pub(crate) enum Output {
    Values(*mut f32),
    /// Integer sums as they are.
    Sums(*mut i32),
}

// SAFETY: the pointers are only used by tasks, which read x and write disjoint parts of y; whoever builds a Job holds
// the borrows of both for as long as tasks run.
unsafe impl Sync for Job<'_> {}

/// Some tiles of a product by some of its panels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) job: usize,
    pub(crate) tiles: (usize, usize),
    pub(crate) panels: (usize, usize),
}

/// Packed rows of all products of a call.
#[derive(Clone, Copy)]
pub(crate) struct Packed {
    pub(crate) cells: *mut u8,
    pub(crate) states: *mut RowState,
}

// SAFETY: tasks of the first phase write disjoint rows; those of the second only read.
unsafe impl Sync for Packed {}

/// Sizes that differ by kind and instruction set.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Shape {
    /// Most rows of a tile.
    pub(crate) rows: usize,
    /// Bytes of a cell.
    pub(crate) cell: usize,
    /// Values of k per line.
    pub(crate) k: usize,
}

panel_kernel! {
    /// The sizes of a kind of weights.
    pub(crate) fn run_shape = shape(format: Format, out: &mut Shape)
}
panel_kernel! {
    /// Packs some rows of a product.
    pub(crate) fn run_pack = pack_rows(job: &Job<'_>, rows: Range<usize>, packed: Packed, room: *mut f32)
}
panel_kernel! {
    /// Computes a part of a product from packed rows.
    pub(crate) fn run_part = compute_part(job: &Job<'_>, part: &Part, packed: Packed)
}

/// # Safety
/// None beyond the instruction set.
#[inline(always)]
unsafe fn shape<L: Level>(format: Format, out: &mut Shape) {
    *out = match format {
        Format::Int8(_) => shape_of::<L::Int8>(),
        Format::Bf16 => shape_of::<L::Bf16>(),
        Format::Plain(_) => shape_of::<L::F32>(),
    };
}

#[inline(always)]
fn shape_of<D: Dot>() -> Shape {
    Shape {
        rows: D::ROWS.min(MAX_ROWS),
        cell: size_of::<D::Cell>(),
        k: D::K,
    }
}

/// Rows of a tile when a product's rows are dealt out evenly.
#[inline(always)]
pub(crate) fn tile_rows(rows: usize, tiles: usize, tile: usize) -> Range<usize> {
    rows * tile / tiles..rows * (tile + 1) / tiles
}

/// # Safety
/// The job's pointers are valid for its shape, `packed` has room for its rows, these are those of whole tiles, and no other
/// thread packs them. For a gated product `room` has k values for each row of a tile.
#[inline(always)]
unsafe fn pack_rows<L: Level>(job: &Job<'_>, rows: Range<usize>, packed: Packed, room: *mut f32) {
    // SAFETY: the caller's duty.
    unsafe {
        match job.w.format() {
            Format::Int8(activation) => pack_of::<L::Int8>(job, activation, rows, packed, room),
            _ => pack_of::<L::Bf16>(job, Activation::PerToken, rows, packed, room),
        }
    }
}

#[inline(always)]
unsafe fn pack_of<D: Dot>(
    job: &Job<'_>,
    activation: Activation,
    rows: Range<usize>,
    packed: Packed,
    room: *mut f32,
) where
    D::Value: Value,
{
    let k = job.w.cols();
    let lines = k.div_ceil(D::K);
    let count = job.tiles;
    let mut start = rows.start;
    while start < rows.end {
        // The tile whose rows, by `tile_rows`, begin with this one.
        let tile = tile_rows(job.rows, count, ((start + 1) * count - 1) / job.rows);
        let (mut x, mut states) = (
            [std::ptr::null(); MAX_ROWS],
            [RowState::default(); MAX_ROWS],
        );
        // SAFETY: the caller's duty; a tile's cells lie behind those of all rows before it.
        unsafe {
            for (place, row) in tile.clone().enumerate() {
                let source = match job.source {
                    Some(source) => source[row] as usize,
                    None => row,
                };
                x[place] = job.x.add(source * job.x_stride);
                if job.gated {
                    let room = room.add(place * k);
                    silu_mul_kernel::<D::S>(x[place], x[place].add(k), room, k);
                    x[place] = room;
                }
            }
            let cells = packed.cells.cast::<D::Cell>();
            let cells = cells.add((job.first + tile.start) * lines);
            pack_tile::<D>(activation, &x[..tile.len()], k, cells, &mut states);
            for (row, state) in tile.clone().zip(states) {
                packed.states.add(job.first + row).write(state);
            }
        }
        start = tile.end;
    }
}

/// # Safety
/// As for [`pack_rows`], with all rows of the job packed, and no other thread writes the part's results.
#[inline(always)]
unsafe fn compute_part<L: Level>(job: &Job<'_>, part: &Part, packed: Packed) {
    // SAFETY: the caller's duty.
    unsafe {
        match job.w.format() {
            Format::Int8(_) => part_of::<L::Int8, true>(job, part, packed),
            _ => part_of::<L::Bf16, false>(job, part, packed),
        }
    }
}

#[inline(always)]
unsafe fn part_of<D: Dot, const INTEGER: bool>(job: &Job<'_>, part: &Part, packed: Packed) {
    let Form::Panels(panels) = job.w.form() else {
        return;
    };
    let lines = job.w.cols().div_ceil(D::K);
    let count = job.tiles;
    let bytes = panels.bytes().as_ptr();
    let finish = Finish::new(job, bytes, lines);
    let mut sums = [[0u32; PANEL]; MAX_ROWS];
    // Some panels stay in the second-level cache while all tiles go by; a tile goes along them, so that its rows of y are
    // written front to back. Tiles of few rows together take each panel while it is in the first-level cache.
    let block = if count > 1 && job.rows <= D::ROWS {
        1
    } else {
        (BLOCK_BYTES / (lines * LINE)).max(1)
    };
    for start in (part.panels.0..part.panels.1).step_by(block) {
        for tile in part.tiles.0..part.tiles.1 {
            let rows = tile_rows(job.rows, count, tile);
            for panel in start..part.panels.1.min(start + block) {
                // SAFETY: the caller's duty; a panel has `lines` lines.
                unsafe {
                    let cells = packed
                        .cells
                        .cast::<D::Cell>()
                        .add((job.first + rows.start) * lines);
                    let line = bytes.add(panel * lines * LINE);
                    any_rows::<D>(rows.len(), cells, line, lines, sums.as_mut_ptr());
                    let states = packed.states.add(job.first + rows.start);
                    finish.put_rows::<INTEGER>(rows.clone(), panel, states, &sums);
                }
            }
        }
    }
}

/// [`Dot::tile`] for 1 ..= ROWS rows.
///
/// # Safety
/// As for [`Dot::tile`].
#[inline(always)]
pub(crate) unsafe fn any_rows<D: Dot>(
    rows: usize,
    cells: *const D::Cell,
    lines: *const u8,
    count: usize,
    sums: *mut [u32; PANEL],
) {
    // A tile never has more than ROWS rows; the comparison keeps larger ones from being compiled.
    macro_rules! tile_of {
        ($($rows:literal)*) => {
            match rows {
                $($rows if $rows <= D::ROWS => {
                    // SAFETY: the caller's duty.
                    unsafe { D::tile::<$rows>(cells, lines, count, sums) }
                })*
                _ => {}
            }
        };
    }
    tile_of!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
}

/// Most rows for which four panels are taken together: more keep the multiplier busy by themselves.
pub(crate) const TOGETHER_ROWS: usize = 4;

/// [`Dot::tile_by_four`] for 1 ..= [`TOGETHER_ROWS`] rows.
///
/// # Safety
/// As for [`Dot::tile_by_four`].
#[inline(always)]
pub(crate) unsafe fn rows_by_four<D: Dot>(
    rows: usize,
    cells: *const D::Cell,
    lines: *const u8,
    panel_bytes: usize,
    count: usize,
    sums: *mut [[u32; PANEL]; MAX_ROWS],
) {
    // SAFETY: the caller's duty.
    unsafe {
        match rows {
            1 => D::tile_by_four::<1>(cells, lines, panel_bytes, count, sums),
            2 => D::tile_by_four::<2>(cells, lines, panel_bytes, count, sums),
            3 => D::tile_by_four::<3>(cells, lines, panel_bytes, count, sums),
            TOGETHER_ROWS => D::tile_by_four::<4>(cells, lines, panel_bytes, count, sums),
            _ => {}
        }
    }
}

/// What happens to sums on their way to y.
struct Finish<'a> {
    y: Output,
    y_stride: usize,
    n: usize,
    scales: *const u8,
    addends: *const u8,
    bias: Option<&'a [f32]>,
}

impl<'a> Finish<'a> {
    #[inline(always)]
    fn new(job: &Job<'a>, bytes: *const u8, lines: usize) -> Self {
        let columns = job.w.rows().next_multiple_of(PANEL);
        let scales = bytes.wrapping_add(columns / PANEL * lines * LINE);
        Self {
            y: job.y,
            y_stride: job.y_stride,
            n: job.w.rows(),
            scales,
            addends: scales.wrapping_add(columns * 4),
            bias: job.w.bias(),
        }
    }

    /// # Safety
    /// Rows, at most sixteen, their states and the panel exist, and y has the rows.
    #[inline(always)]
    unsafe fn put_rows<const INTEGER: bool>(
        &self,
        rows: Range<usize>,
        panel: usize,
        states: *const RowState,
        sums: &[[u32; PANEL]; MAX_ROWS],
    ) {
        let column = panel * PANEL;
        let (Output::Values(y), None, true) = (self.y, self.bias, column + PANEL <= self.n) else {
            for (place, row) in rows.enumerate() {
                // SAFETY: the caller's duty.
                unsafe {
                    let state = states.add(place).read();
                    self.put::<INTEGER>(row, panel, state, &sums[place]);
                }
            }
            return;
        };
        // The usual case without what differs by row: a panel's factors stay in registers.
        // SAFETY: the caller's duty; int8 bytes have scales and addends for whole panels.
        unsafe {
            let (mut scales, mut addends) = ([0.0; PANEL], [0; PANEL]);
            if INTEGER {
                scales = self
                    .scales
                    .cast::<[f32; PANEL]>()
                    .add(panel)
                    .read_unaligned();
                addends = self
                    .addends
                    .cast::<[i32; PANEL]>()
                    .add(panel)
                    .read_unaligned();
            }
            let mut to = y.add(rows.start * self.y_stride + column);
            for (place, sums) in sums.iter().enumerate().take(rows.len()) {
                let mut values = [0.0; PANEL];
                if INTEGER {
                    let state = states.add(place).read();
                    for i in 0..PANEL {
                        let sum = (sums[i] as i32).wrapping_sub(state.excess);
                        let factor = state.scale * scales[i];
                        values[i] = sum.wrapping_add(addends[i]) as f32 * factor;
                    }
                } else {
                    for i in 0..PANEL {
                        values[i] = f32::from_bits(sums[i]);
                    }
                }
                to.cast::<[f32; PANEL]>().write_unaligned(values);
                to = to.wrapping_add(self.y_stride);
            }
        }
    }

    /// # Safety
    /// Row and panel exist, and y has the row.
    #[inline(always)]
    unsafe fn put<const INTEGER: bool>(
        &self,
        row: usize,
        panel: usize,
        state: RowState,
        sums: &[u32; PANEL],
    ) {
        let column = panel * PANEL;
        let count = PANEL.min(self.n - column);
        // SAFETY: the caller's duty; int8 bytes have scales and addends for whole panels.
        unsafe {
            let exact = sums.map(|sum| (sum as i32).wrapping_sub(state.excess));
            let y = match self.y {
                Output::Values(y) => y.add(row * self.y_stride + column),
                Output::Sums(y) => {
                    let y = y.add(row * self.y_stride + column);
                    y.copy_from_nonoverlapping(exact.as_ptr(), count);
                    return;
                }
            };
            let mut values = if INTEGER {
                let scales = self
                    .scales
                    .cast::<[f32; PANEL]>()
                    .add(panel)
                    .read_unaligned();
                let addends = self
                    .addends
                    .cast::<[i32; PANEL]>()
                    .add(panel)
                    .read_unaligned();
                std::array::from_fn(|i| {
                    exact[i].wrapping_add(addends[i]) as f32 * (state.scale * scales[i])
                })
            } else {
                sums.map(f32::from_bits)
            };
            if let Some(bias) = self.bias {
                for (value, bias) in values.iter_mut().zip(&bias[column..]) {
                    *value += bias;
                }
            }
            if count == PANEL {
                y.cast::<[f32; PANEL]>().write_unaligned(values);
            } else {
                y.copy_from_nonoverlapping(values.as_ptr(), count);
            }
        }
    }
}
