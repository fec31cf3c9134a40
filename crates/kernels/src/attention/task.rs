//! One task of attention: some query rows of one sequence by some heads that share a key and a value, on one thread.
//!
//! For each tile of positions keys are turned into panels (a column per position) and values into panels (a column per
//! value, a line per position or pair of positions). Scores and sums of values are then products of packed rows, a row
//! per query row and head, with these panels.

use std::ops::Range;

use super::value::KvValue;
use super::{KvSeq, TILE};
use crate::panels::{Dot, Level, any_rows, pack_row, panel_kernel, tile_rows};
use crate::rows::largest;
use crate::simd::{Simd, exp};
use crate::weight::PANEL;
use crate::{Activation, DType, HeadRows};

/// The most rows of a register tile.
const ROWS: usize = 16;
/// Longest key and value together, in bytes, that are asked for a tile ahead; longer ones the processor foresees, and a
/// tile of them would not stay in the first-level cache.
const PREFETCHED_BYTES: usize = 512;
/// Panels of a tile's keys.
const KEY_PANELS: usize = TILE / PANEL;

/// What scores and sums are made of, for MLA and grouped queries alike.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry {
    /// Heads of q and out.
    pub(super) heads: usize,
    /// Groups of heads that share a key and a value.
    pub(super) kv_heads: usize,
    /// Values of a key.
    pub(super) key: usize,
    /// Values of a value.
    pub(super) value: usize,
    /// Elements of a KV row.
    pub(super) row: usize,
    /// Elements from the row's begin to the first value; a KV head's key begins at head · key, its value here + head ·
    /// value.
    pub(super) values_from: usize,
    pub(super) block_size: usize,
    pub(super) kv_type: DType,
    pub(super) scale: f32,
}

/// The arguments of a call, lengths checked.
pub(super) struct Call<'a> {
    pub(super) geometry: Geometry,
    pub(super) q: HeadRows<'a>,
    /// Values of q behind those of `q`, as MLA has them.
    pub(super) q_rope: Option<HeadRows<'a>>,
    pub(super) seqs: &'a [KvSeq<'a>],
    pub(super) out: *mut f32,
}

// SAFETY: `out` is written by tasks only, each its own rows and heads, while the call holds the borrow.
unsafe impl Sync for Call<'_> {}

/// Rows (of the query buffer) and heads of one sequence; the heads share a KV head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task {
    pub(super) seq: usize,
    pub(super) rows: (usize, usize),
    pub(super) heads: (usize, usize),
}

/// Scratch of a task, in f32.
struct Layout {
    queries: usize,
    keys: usize,
    values: usize,
    folds: usize,
    joined: usize,
}

impl Layout {
    fn new(geometry: &Geometry, rows: usize) -> Self {
        // A cell is at most two f32, whatever meets a line.
        Self {
            queries: (rows * geometry.key * 2).next_multiple_of(ROWS),
            keys: KEY_PANELS * geometry.key * PANEL,
            values: geometry.value.div_ceil(PANEL) * TILE * PANEL,
            // As many tiles as rows at worst, each with m and l of sixteen rows.
            folds: rows * 2 * ROWS,
            joined: geometry.key.next_multiple_of(ROWS),
        }
    }
}

/// Values of scratch that [`run_task`] needs.
pub(super) fn scratch_length(geometry: &Geometry, task: &Task) -> usize {
    let rows = (task.rows.1 - task.rows.0) * (task.heads.1 - task.heads.0);
    let layout = Layout::new(geometry, rows);
    layout.queries + layout.keys + layout.values + layout.folds + layout.joined
}

panel_kernel! {
    pub(super) fn run_task = any_type(call: &Call<'_>, task: &Task, scratch: *mut f32)
}

/// # Safety
/// The call's lengths were checked, the task lies inside it and no other task shares its rows and heads; scratch has
/// [`scratch_length`] values, aligned to 64 bytes.
#[inline(always)]
unsafe fn any_type<L: Level>(call: &Call<'_>, task: &Task, scratch: *mut f32) {
    // SAFETY: the caller's duty.
    unsafe {
        match call.geometry.kv_type {
            DType::F32 => typed_task::<L::F32>(call, task, scratch),
            DType::Bf16 => typed_task::<L::Bf16>(call, task, scratch),
        }
    }
}

#[inline(always)]
unsafe fn typed_task<D: Dot>(call: &Call<'_>, task: &Task, scratch: *mut f32)
where
    D::Value: KvValue,
{
    let heads = task.heads.1 - task.heads.0;
    let rows = (task.rows.1 - task.rows.0) * heads;
    let layout = Layout::new(&call.geometry, rows);
    let seq = &call.seqs[task.seq];
    let first = seq.first_position + (task.rows.0 - seq.rows.start);
    let last = seq.first_position + (task.rows.1 - 1 - seq.rows.start);
    // SAFETY: scratch is cut as `scratch_length` counts it; the rest is the caller's duty.
    unsafe {
        let keys = scratch.add(layout.queries);
        let values = keys.add(layout.keys);
        let folds = values.add(layout.values);
        let work = Work::<D> {
            call,
            seq,
            kv_head: task.heads.0 / (call.geometry.heads / call.geometry.kv_heads),
            row_from: task.rows.0,
            head_from: task.heads.0,
            heads,
            rows,
            first,
            queries: scratch.cast(),
            keys: keys.cast(),
            values: values.cast(),
            folds,
        };
        work.prefetch(0, TILE.min(last + 1));
        work.prepare(folds.add(layout.folds));
        for base in (0..=last).step_by(TILE) {
            let count = TILE.min(last + 1 - base);
            work.pack_keys(base, count);
            let finite = work.pack_values(base, count);
            let next = base + TILE;
            if next <= last {
                work.prefetch(next, TILE.min(last + 1 - next));
            }
            // A row's products reach over positions it does not see, with factors of 0: harmless if all are finite.
            let together = finite || first + 1 >= base + count;
            let tiles = rows.div_ceil(D::ROWS);
            for tile in 0..tiles {
                let range = tile_rows(rows, tiles, tile);
                work.tile(tile, range, base, count, together);
            }
        }
        work.finish();
    }
}

/// A task with its scratch. Packed row i is row i / heads by head i % heads of the task.
struct Work<'a, D: Dot> {
    call: &'a Call<'a>,
    seq: &'a KvSeq<'a>,
    kv_head: usize,
    row_from: usize,
    head_from: usize,
    heads: usize,
    rows: usize,
    /// Absolute position of the task's first row.
    first: usize,
    queries: *mut D::Cell,
    keys: *mut [u32; PANEL],
    values: *mut [u32; PANEL],
    /// Per tile of rows m of sixteen rows, then l.
    folds: *mut f32,
}

/// # Safety
/// All functions: as for [`any_type`], and the pointers lead to scratch as [`Layout`] cuts it.
impl<D: Dot> Work<'_, D>
where
    D::Value: KvValue,
{
    #[inline(always)]
    fn key_lines(&self) -> usize {
        self.call.geometry.key.div_ceil(D::K)
    }

    /// Where the output of a packed row begins.
    #[inline(always)]
    fn out(&self, packed: usize) -> *mut f32 {
        let geometry = &self.call.geometry;
        let row = self.row_from + packed / self.heads;
        let head = self.head_from + packed % self.heads;
        self.call
            .out
            .wrapping_add((row * geometry.heads + head) * geometry.value)
    }

    /// How many of the positions from `base` on a packed row sees.
    #[inline(always)]
    fn visible(&self, packed: usize, base: usize, count: usize) -> usize {
        (self.first + packed / self.heads + 1)
            .saturating_sub(base)
            .min(count)
    }

    /// The KV row of a position.
    #[inline(always)]
    fn kv_row(&self, position: usize) -> *const D::Value {
        let geometry = &self.call.geometry;
        let unit = self.seq.units[position / geometry.block_size].as_ptr();
        unit.cast::<D::Value>()
            .wrapping_add(position % geometry.block_size * geometry.row)
    }

    /// Asks for keys and values of some positions: a head's part of a row is too short for the processor to foresee.
    #[inline(always)]
    unsafe fn prefetch(&self, base: usize, count: usize) {
        let geometry = &self.call.geometry;
        let size = size_of::<D::Value>();
        if (geometry.key + geometry.value) * size > PREFETCHED_BYTES {
            return;
        }
        let key = self.kv_head * geometry.key;
        let value = geometry.values_from + self.kv_head * geometry.value;
        for position in base..base + count {
            let row = self.kv_row(position);
            for (from, length) in [(key, geometry.key), (value, geometry.value)] {
                let start = row.wrapping_add(from).cast::<u8>();
                for byte in (0..length * size).step_by(64) {
                    // SAFETY: a prefetch of any address is harmless.
                    unsafe { D::S::prefetch(start.wrapping_add(byte)) };
                }
            }
        }
    }

    /// Packs queries, empties folds and output.
    #[inline(always)]
    unsafe fn prepare(&self, joined: *mut f32) {
        let geometry = &self.call.geometry;
        let lines = self.key_lines();
        let tiles = self.rows.div_ceil(D::ROWS);
        for tile in 0..tiles {
            let range = tile_rows(self.rows, tiles, tile);
            for (place, packed) in range.clone().enumerate() {
                let row = self.row_from + packed / self.heads;
                let head = self.head_from + packed % self.heads;
                let mut q = self.call.q.head(row, head).as_ptr();
                // SAFETY: the scratch has room for a joined query and for the cells of all rows.
                unsafe {
                    if let Some(rope) = self.call.q_rope {
                        let (latent, rope) = (self.call.q.head(row, head), rope.head(row, head));
                        joined.copy_from_nonoverlapping(latent.as_ptr(), latent.len());
                        joined
                            .add(latent.len())
                            .copy_from_nonoverlapping(rope.as_ptr(), rope.len());
                        q = joined;
                    }
                    let to = self.queries.add(range.start * lines + place);
                    pack_row::<D>(Activation::PerToken, q, geometry.key, to, range.len());
                    self.out(packed).write_bytes(0, geometry.value);
                }
            }
            for row in 0..ROWS {
                // SAFETY: every tile has its folds.
                unsafe {
                    let folds = self.folds.add(tile * 2 * ROWS);
                    folds.add(row).write(f32::NEG_INFINITY);
                    folds.add(ROWS + row).write(0.0);
                }
            }
        }
    }

    /// Panels of sixteen positions; columns behind `count` repeat the last one.
    #[inline(always)]
    unsafe fn pack_keys(&self, base: usize, count: usize) {
        let geometry = &self.call.geometry;
        let lines = self.key_lines();
        for panel in 0..count.div_ceil(PANEL) {
            let rows: [*const D::Value; PANEL] = std::array::from_fn(|i| {
                let position = base + (panel * PANEL + i).min(count - 1);
                self.kv_row(position)
                    .wrapping_add(self.kv_head * geometry.key)
            });
            // SAFETY: every row has a key; the panel has room for its lines.
            unsafe {
                let to = self.keys.add(panel * lines);
                let whole = geometry.key / D::K;
                D::columns(rows.map(|row| row.cast()), whole, to);
                if whole < lines {
                    // Only pairs leave a rest, of one value.
                    let rest = rows.map(|row| row.add(whole * D::K).read_unaligned().bits());
                    to.add(whole).write(rest);
                }
                let mut most = [0; PANEL];
                for line in std::slice::from_raw_parts_mut(to, lines) {
                    *line = D::Value::clean(*line, &mut most);
                }
            }
        }
    }

    /// Panels of sixteen values by a line per K positions, zeros behind `count`; whether all values are finite.
    #[inline(always)]
    unsafe fn pack_values(&self, base: usize, count: usize) -> bool {
        let geometry = &self.call.geometry;
        let lines = TILE / D::K;
        let used = count.div_ceil(D::K);
        let from = geometry.values_from + self.kv_head * geometry.value;
        let mut most = [0; PANEL];
        let whole = geometry.value / PANEL;
        for line in 0..used {
            let position = base + line * D::K;
            let first = self.kv_row(position).wrapping_add(from);
            let paired = D::K == 2 && line * D::K + 1 < count;
            let second = if paired {
                self.kv_row(position + 1).wrapping_add(from)
            } else {
                first
            };
            // SAFETY: both rows have all values; the panels have room for their lines.
            unsafe {
                for panel in 0..whole {
                    let column = panel * PANEL;
                    let lower = first
                        .add(column)
                        .cast::<[D::Value; PANEL]>()
                        .read_unaligned();
                    let upper = second
                        .add(column)
                        .cast::<[D::Value; PANEL]>()
                        .read_unaligned();
                    let to = self.values.add(panel * lines + line);
                    to.write(D::Value::clean(cells(&lower, &upper, paired), &mut most));
                }
                if whole * PANEL < geometry.value {
                    let (mut lower, mut upper) =
                        ([D::Value::default(); PANEL], [D::Value::default(); PANEL]);
                    for (i, column) in (whole * PANEL..geometry.value).enumerate() {
                        lower[i] = first.add(column).read_unaligned();
                        upper[i] = second.add(column).read_unaligned();
                    }
                    let to = self.values.add(whole * lines + line);
                    to.write(D::Value::clean(cells(&lower, &upper, paired), &mut most));
                }
            }
        }
        D::Value::all_finite(&most)
    }

    /// Folds the tile of positions `base .. base + count` into a tile of packed rows.
    #[inline(always)]
    unsafe fn tile(
        &self,
        tile: usize,
        range: Range<usize>,
        base: usize,
        count: usize,
        together: bool,
    ) {
        let mut visible = [0; ROWS];
        for (visible, packed) in visible.iter_mut().zip(range.clone()) {
            *visible = self.visible(packed, base, count);
        }
        let most = visible.iter().fold(0, |most, &visible| most.max(visible));
        if most == 0 {
            return;
        }
        // SAFETY: the caller's duty.
        unsafe {
            let mut scores = [[0.0f32; TILE]; ROWS];
            self.scores(range.clone(), &visible, most, &mut scores);
            let folds = self.folds.add(tile * 2 * ROWS);
            let mut p = [[D::Value::default(); TILE]; ROWS];
            let fold = fold::<D>(&scores[..range.len()], &visible, folds, &mut p);
            if together {
                self.add_values(range, &visible, most, &p, &fold);
                return;
            }
            for (place, packed) in range.enumerate() {
                if visible[place] > 0 {
                    self.pack_values(base, visible[place]);
                    let alone = Fold {
                        keep: [fold.keep[place]; ROWS],
                        take: [fold.take[place]; ROWS],
                    };
                    let visible = [visible[place]; ROWS];
                    let p = &p[place..=place];
                    self.add_values(packed..packed + 1, &visible, visible[0], p, &alone);
                }
            }
            // Others may come after this tile of rows.
            self.pack_values(base, count);
        }
    }

    /// Scaled scores of visible positions, −∞ behind them.
    #[inline(always)]
    unsafe fn scores(
        &self,
        range: Range<usize>,
        visible: &[usize; ROWS],
        most: usize,
        scores: &mut [[f32; TILE]; ROWS],
    ) {
        let lines = self.key_lines();
        let scale = self.call.geometry.scale;
        let mut sums = [[0u32; PANEL]; ROWS];
        for panel in 0..KEY_PANELS {
            let column = panel * PANEL;
            if column < most {
                // SAFETY: queries and this panel of keys are packed.
                unsafe {
                    let cells = self.queries.add(range.start * lines);
                    let keys = self.keys.add(panel * lines).cast();
                    any_rows::<D>(range.len(), cells, keys, lines, sums.as_mut_ptr());
                }
            }
            for row in 0..range.len() {
                let scores = &mut scores[row][column..column + PANEL];
                for place in (0..PANEL).step_by(D::S::LANES) {
                    // SAFETY: whole vectors of a panel.
                    unsafe {
                        let sums = D::S::load(sums[row].as_ptr().cast::<f32>().add(place));
                        let scaled = D::S::mul(sums, D::S::splat(scale));
                        D::S::store(scores.as_mut_ptr().add(place), scaled);
                    }
                }
                let seen = visible[row].saturating_sub(column);
                if seen < PANEL {
                    scores[seen..].fill(f32::NEG_INFINITY);
                }
            }
        }
    }

    /// out ← out · keep + (Σ_j p_j v_j) · take for rows that see something.
    #[inline(always)]
    unsafe fn add_values(
        &self,
        range: Range<usize>,
        visible: &[usize; ROWS],
        most: usize,
        p: &[[D::Value; TILE]],
        fold: &Fold,
    ) {
        let geometry = &self.call.geometry;
        let (lines, used) = (TILE / D::K, most.div_ceil(D::K));
        let rows = range.len();
        let mut outs = [std::ptr::null_mut(); ROWS];
        for (out, packed) in outs.iter_mut().zip(range) {
            *out = self.out(packed);
        }
        let mut cells = Cells([std::mem::MaybeUninit::uninit(); ROWS * TILE]);
        let cells = cells.0.as_mut_ptr().cast::<D::Cell>();
        let mut sums = [[0u32; PANEL]; ROWS];
        // SAFETY: there are rows · used cells, of at most eight bytes per position pair or four per position; values are
        // packed for `used` lines; every row of out has `value` values.
        unsafe {
            D::cells(p.as_ptr().cast(), TILE, rows, used, cells);
            for panel in 0..geometry.value.div_ceil(PANEL) {
                let values = self.values.add(panel * lines).cast();
                any_rows::<D>(rows, cells, values, used, sums.as_mut_ptr());
                let column = panel * PANEL;
                let width = PANEL.min(geometry.value - column);
                for row in 0..rows {
                    if visible[row] == 0 {
                        continue;
                    }
                    let out = outs[row].add(column);
                    let (keep, take) = (fold.keep[row], fold.take[row]);
                    if width == PANEL {
                        let out = out.cast::<[f32; PANEL]>();
                        let mut sum = out.read_unaligned();
                        for (out, add) in sum.iter_mut().zip(&sums[row]) {
                            *out = *out * keep + f32::from_bits(*add) * take;
                        }
                        out.write_unaligned(sum);
                    } else {
                        for (i, add) in sums[row].iter().enumerate().take(width) {
                            let out = out.add(i);
                            out.write(out.read() * keep + f32::from_bits(*add) * take);
                        }
                    }
                }
            }
        }
    }

    /// Divides the sums by l.
    #[inline(always)]
    unsafe fn finish(&self) {
        let tiles = self.rows.div_ceil(D::ROWS);
        for tile in 0..tiles {
            for (place, packed) in tile_rows(self.rows, tiles, tile).enumerate() {
                // SAFETY: the row is the task's.
                unsafe {
                    let l = self.folds.add(tile * 2 * ROWS + ROWS + place).read();
                    let length = self.call.geometry.value;
                    let out = std::slice::from_raw_parts_mut(self.out(packed), length);
                    out.iter_mut().for_each(|out| *out /= l);
                }
            }
        }
    }
}

/// Room for a tile's probabilities as cells.
#[repr(align(64))]
struct Cells([std::mem::MaybeUninit<u32>; ROWS * TILE]);

/// Factors on what was summed before a tile, and on the tile's sums, for sixteen rows.
struct Fold {
    keep: [f32; ROWS],
    take: [f32; ROWS],
}

/// A line of the values of one position, or of two.
#[inline(always)]
fn cells<V: KvValue>(lower: &[V; PANEL], upper: &[V; PANEL], paired: bool) -> [u32; PANEL] {
    let mask = if paired { u32::MAX } else { 0 };
    let mut cells = [0; PANEL];
    for i in 0..PANEL {
        cells[i] = V::pair(lower[i], upper[i], mask);
    }
    cells
}

/// Turns rows of scores into probabilities relative to the largest of the tile, and folds m and l of all rows.
///
/// # Safety
/// `folds` holds m and l of sixteen rows, and there are at most as many.
#[inline(always)]
unsafe fn fold<D: Dot>(
    scores: &[[f32; TILE]],
    visible: &[usize; ROWS],
    folds: *mut f32,
    p: &mut [[D::Value; TILE]; ROWS],
) -> Fold
where
    D::Value: KvValue,
{
    // Rows beyond the last and rows that see nothing change nothing.
    let (mut tile_m, mut tile_l) = ([f32::NEG_INFINITY; ROWS], [0.0; ROWS]);
    let mut fold = Fold {
        keep: [0.0; ROWS],
        take: [0.0; ROWS],
    };
    // SAFETY: whole vectors of a tile's scores and of sixteen rows.
    unsafe {
        for (row, scores) in scores.iter().enumerate() {
            if visible[row] == 0 {
                continue;
            }
            tile_m[row] = largest::<D::S>(scores.as_ptr(), TILE);
            let m = D::S::splat(tile_m[row]);
            let mut parts = [D::S::splat(0.0); 4];
            for place in (0..TILE).step_by(D::S::LANES) {
                let v = exp::<D::S>(D::S::sub(D::S::load(scores.as_ptr().add(place)), m));
                let v = D::Value::put::<D::S>(v, p[row].as_mut_ptr().add(place));
                let part = &mut parts[place / D::S::LANES % D::S::PARTS];
                *part = D::S::add(*part, v);
            }
            tile_l[row] = D::S::add_lanes(D::S::fold_parts(parts));
        }
        for place in (0..ROWS).step_by(D::S::LANES) {
            let (m, l) = (folds.add(place), folds.add(ROWS + place));
            let tile_m = D::S::load(tile_m.as_ptr().add(place));
            let next = D::S::larger(tile_m, D::S::load(m));
            let keep = exp::<D::S>(D::S::sub(D::S::load(m), next));
            let take = exp::<D::S>(D::S::sub(tile_m, next));
            let tile_l = D::S::load(tile_l.as_ptr().add(place));
            let sum = D::S::add(D::S::mul(D::S::load(l), keep), D::S::mul(tile_l, take));
            D::S::store(l, sum);
            D::S::store(m, next);
            D::S::store(fold.keep.as_mut_ptr().add(place), keep);
            D::S::store(fold.take.as_mut_ptr().add(place), take);
        }
    }
    fold
}
