//! One task of attention: some query rows of one sequence by some heads that share a key and a value, on one thread.
//!
//! For each tile of positions keys are turned into panels (a column per position) and values into panels (a column per
//! value, a line per position or pair of positions). Scores and sums of values are then products of packed rows, a row
//! per query row and head, with these panels.

use std::ops::Range;

use super::fold::{Room, fold};
use super::value::KvValue;
use super::{KvSeq, TILE};
use crate::panels::{
    Dot, Level, MAX_ROWS, TOGETHER_ROWS, any_rows, pack_row, panel_kernel, rows_by_four, tile_rows,
};
use crate::simd::Simd;
use crate::weight::{LINE, PANEL};
use crate::{Activation, DType, HeadRows};

mod across;

use across::{AcrossRoom, FEWEST_ROWS};

/// The most rows of a register tile.
pub(super) const ROWS: usize = MAX_ROWS;
/// Longest key and value together, in bytes, that are asked for a tile ahead; longer ones the processor foresees, and a
/// tile of them would not stay in the first-level cache.
const PREFETCHED_BYTES: usize = 512;
/// Parts in which a tile ahead is asked for, so that memory is busy while others are computed with: some beside each panel
/// of keys that is packed, then of values, then beside the products of the first rows.
const PARTS: usize = 16;
const VALUE_PART: usize = KEY_PANELS;
const SCORE_PART: usize = 12;
const SUM_PART: usize = 14;
/// Panels of a tile's keys.
pub(super) const KEY_PANELS: usize = TILE / PANEL;

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

/// Rows (of the query buffer) and heads of one sequence; the heads are some of those that share a KV head, or all of several
/// KV heads.
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
    /// Sums of values, if packed rows are lanes.
    sums: usize,
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
            sums: if rows < FEWEST_ROWS {
                0
            } else {
                rows.div_ceil(ROWS) * geometry.value.next_multiple_of(PANEL) * ROWS
            },
            joined: geometry.key.next_multiple_of(ROWS),
        }
    }
}

impl Task {
    /// Groups of heads, heads of each and the first KV head.
    fn groups(&self, geometry: &Geometry) -> (usize, usize, usize) {
        let sharing = geometry.heads / geometry.kv_heads;
        let heads = (self.heads.1 - self.heads.0).min(sharing);
        let groups = (self.heads.1 - self.heads.0) / heads;
        (groups, heads, self.heads.0 / sharing)
    }
}

/// Values of scratch that [`run_task`] needs.
pub(super) fn scratch_length(geometry: &Geometry, task: &Task) -> usize {
    let (groups, heads, _) = task.groups(geometry);
    let layout = Layout::new(geometry, (task.rows.1 - task.rows.0) * heads);
    let of_group = layout.queries + layout.folds + layout.sums;
    of_group * groups + layout.keys + layout.values + layout.joined
}

panel_kernel! {
    /// `next` is a task that this thread is likely to run next.
    pub(super) fn run_task = any_type(call: &Call<'_>, task: &Task, next: Option<&Task>, scratch: *mut f32)
}

/// # Safety
/// The call's lengths were checked, the task lies inside it and no other task shares its rows and heads; scratch has
/// [`scratch_length`] values, aligned to 64 bytes.
#[inline(always)]
unsafe fn any_type<L: Level>(call: &Call<'_>, task: &Task, next: Option<&Task>, scratch: *mut f32) {
    // SAFETY: the caller's duty.
    unsafe {
        match call.geometry.kv_type {
            DType::F32 => typed_task::<L::F32>(call, task, next, scratch),
            DType::Bf16 => typed_task::<L::Bf16>(call, task, next, scratch),
        }
    }
}

#[inline(always)]
unsafe fn typed_task<D: Dot>(call: &Call<'_>, task: &Task, next: Option<&Task>, scratch: *mut f32)
where
    D::Value: KvValue,
{
    let geometry = &call.geometry;
    let (groups, heads, kv_head) = task.groups(geometry);
    let rows = (task.rows.1 - task.rows.0) * heads;
    let layout = Layout::new(geometry, rows);
    let seq = &call.seqs[task.seq];
    let first = seq.first_position + (task.rows.0 - seq.rows.start);
    let last = seq.first_position + (task.rows.1 - 1 - seq.rows.start);
    // SAFETY: scratch is cut as `scratch_length` counts it; the rest is the caller's duty.
    unsafe {
        let keys = scratch.add(layout.queries * groups);
        let values = keys.add(layout.keys);
        let folds = values.add(layout.values);
        let sums = folds.add(layout.folds * groups);
        let joined = sums.add(layout.sums * groups);
        let places = Places {
            queries: scratch,
            folds,
            sums,
        };
        let mut work = Work::<D> {
            call,
            kv_head,
            row_from: task.rows.0,
            head_from: task.heads.0,
            heads,
            rows,
            first,
            queries: scratch.cast(),
            keys: keys.cast(),
            values: values.cast(),
            folds,
            sums,
            rows_at: [[std::ptr::null(); TILE]; 2],
            now: 0,
            ahead: Ahead {
                rows: 0,
                count: TILE.min(last + 1),
                kv_head,
                turn: 0,
                turns: 0,
            },
        };
        work.find_rows(0, seq, 0, last);
        for part in 0..PARTS {
            work.prefetch(part);
        }
        for group in 0..groups {
            work.turn_to(task, &layout, &places, group);
            work.prepare(joined);
        }
        let mut room = Room::<D>::new();
        let mut across_room = AcrossRoom::new();
        for base in (0..=last).step_by(TILE) {
            let count = TILE.min(last + 1 - base);
            let mut next_tile = if base + TILE <= last {
                work.find_rows(1 - work.now, seq, base + TILE, last);
                Ahead {
                    rows: 1 - work.now,
                    count: TILE.min(last + 1 - (base + TILE)),
                    kv_head,
                    turn: 0,
                    turns: 0,
                }
            } else {
                work.find_task(next.unwrap_or(task))
            };
            if groups > 1 {
                next_tile.turns = groups;
            }
            for group in 0..groups {
                work.turn_to(task, &layout, &places, group);
                work.ahead = Ahead {
                    turn: group,
                    ..next_tile
                };
                work.pack_keys(count);
                work.pack_values(count);
                // A row's products reach over positions it does not see, with factors of 0: harmless if all are finite.
                let together = first + 1 >= base + count || work.all_finite(count);
                let tiles = rows.div_ceil(D::ROWS);
                for tile in 0..tiles {
                    let range = tile_rows(rows, tiles, tile);
                    if work.across() {
                        work.tile_across(tile, range, base, count, together, &mut across_room);
                    } else {
                        work.tile(tile, range, base, count, together, &mut room);
                    }
                }
            }
            work.now = 1 - work.now;
        }
        for group in 0..groups {
            work.turn_to(task, &layout, &places, group);
            if work.across() {
                work.finish_across();
            } else {
                work.finish();
            }
        }
    }
}

/// Keys and values that are needed next: those of a KV head at some positions.
#[derive(Clone, Copy)]
struct Ahead {
    /// Which of [`Work::rows_at`] holds where the positions' rows begin.
    rows: usize,
    count: usize,
    kv_head: usize,
    /// Whole rows are asked for, in so many turns of [`PARTS`], of which this is one; else the head's keys and values.
    turn: usize,
    turns: usize,
}

/// Where scratch of the first group lies.
struct Places {
    queries: *mut f32,
    folds: *mut f32,
    sums: *mut f32,
}

/// A task at one of its groups, with scratch. Packed row i is row i / heads by head i % heads of the group.
struct Work<'a, D: Dot> {
    call: &'a Call<'a>,
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
    /// Sums of values if packed rows are lanes: per tile of rows, value a line.
    sums: *mut f32,
    /// Where the KV rows of a tile of positions begin: of the present one, and of the next.
    rows_at: [[*const D::Value; TILE]; 2],
    /// Which is the present one.
    now: usize,
    ahead: Ahead,
}

/// # Safety
/// All functions: as for [`any_type`], and the pointers lead to scratch as [`Layout`] cuts it.
impl<D: Dot> Work<'_, D>
where
    D::Value: KvValue,
{
    /// Turns to a group of heads: each has queries and folds of its own.
    #[inline(always)]
    fn turn_to(&mut self, task: &Task, layout: &Layout, places: &Places, group: usize) {
        let geometry = &self.call.geometry;
        self.kv_head = task.heads.0 / (geometry.heads / geometry.kv_heads) + group;
        self.head_from = task.heads.0 + group * self.heads;
        let queries = places.queries.wrapping_add(group * layout.queries);
        self.queries = queries.cast();
        self.folds = places.folds.wrapping_add(group * layout.folds);
        self.sums = places.sums.wrapping_add(group * layout.sums);
    }

    #[inline(always)]
    fn key_lines(&self) -> usize {
        self.call.geometry.key.div_ceil(D::K)
    }

    /// Whether packed rows are lanes.
    #[inline(always)]
    fn across(&self) -> bool {
        // The largest of the products is scaled, not that of scaled ones.
        D::PANELS_ARE_CELLS && self.rows >= FEWEST_ROWS && self.call.geometry.scale > 0.0
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

    /// The KV row of a position of the present tile.
    #[inline(always)]
    fn kv_row(&self, place: usize) -> *const D::Value {
        self.rows_at[self.now][place]
    }

    /// Finds the KV rows of the tile at `base` of a sequence, up to its last position.
    #[inline(always)]
    fn find_rows(&mut self, which: usize, seq: &KvSeq<'_>, base: usize, last: usize) {
        let geometry = &self.call.geometry;
        let count = TILE.min(last + 1 - base);
        let (mut block, mut place) = (base / geometry.block_size, base % geometry.block_size);
        let mut row = seq.units[block].as_ptr().cast::<D::Value>();
        row = row.wrapping_add(place * geometry.row);
        for at in &mut self.rows_at[which][..count] {
            if place == geometry.block_size {
                (block, place) = (block + 1, 0);
                row = seq.units[block].as_ptr().cast();
            }
            *at = row;
            row = row.wrapping_add(geometry.row);
            place += 1;
        }
    }

    /// What a task needs first.
    #[inline(always)]
    fn find_task(&mut self, task: &Task) -> Ahead {
        let call = self.call;
        let seq = &call.seqs[task.seq];
        let last = seq.first_position + (task.rows.1 - 1 - seq.rows.start);
        let rows = 1 - self.now;
        self.find_rows(rows, seq, 0, last);
        Ahead {
            rows,
            count: TILE.min(last + 1),
            kv_head: task.heads.0 / (call.geometry.heads / call.geometry.kv_heads),
            turn: 0,
            turns: 0,
        }
    }

    /// Asks for a part of the keys and values that are needed next: a head's part of a row is too short for the processor to
    /// foresee.
    #[inline(always)]
    unsafe fn prefetch(&self, part: usize) {
        let geometry = &self.call.geometry;
        let size = size_of::<D::Value>();
        if self.ahead.turns > 0 {
            // SAFETY: the caller's duty.
            unsafe { self.prefetch_rows(part) };
            return;
        }
        if (geometry.key + geometry.value) * size > PREFETCHED_BYTES {
            return;
        }
        let ahead = &self.ahead;
        let key = ahead.kv_head * geometry.key;
        let value = geometry.values_from + ahead.kv_head * geometry.value;
        let first = (TILE / PARTS * part).min(ahead.count);
        let end = (first + TILE / PARTS).min(ahead.count);
        for &row in &self.rows_at[ahead.rows][first..end] {
            for (from, length) in [(key, geometry.key), (value, geometry.value)] {
                let start = row.wrapping_add(from).cast::<u8>();
                for byte in (0..length * size).step_by(64) {
                    // SAFETY: a prefetch of any address is harmless.
                    unsafe { D::S::prefetch(start.wrapping_add(byte)) };
                }
            }
        }
    }

    /// Asks for a part of whole rows, line after line, so that the processor sees a stream and goes ahead of it.
    #[inline(always)]
    unsafe fn prefetch_rows(&self, part: usize) {
        let Ahead {
            rows,
            count,
            turn,
            turns,
            ..
        } = self.ahead;
        let row_lines = (self.call.geometry.row * size_of::<D::Value>()).div_ceil(LINE);
        let cut = |part: usize| count * row_lines * part / (turns * PARTS);
        let (from, to) = (cut(turn * PARTS + part), cut(turn * PARTS + part + 1));
        let (mut place, mut line) = (from / row_lines, from % row_lines);
        let mut left = to - from;
        while left > 0 {
            let count = left.min(row_lines - line);
            let row = self.rows_at[rows][place].cast::<u8>();
            let mut at = row.wrapping_add(line * LINE);
            // Four at a time: with a test for each line, asking cost as much as computing scores.
            for _ in 0..count / 4 {
                for next in 0..4 {
                    // SAFETY: a prefetch of any address is harmless.
                    unsafe { D::S::prefetch_far(at.wrapping_add(next * LINE)) };
                }
                at = at.wrapping_add(4 * LINE);
            }
            for next in 0..count % 4 {
                // SAFETY: as above.
                unsafe { D::S::prefetch_far(at.wrapping_add(next * LINE)) };
            }
            left -= count;
            (place, line) = (place + 1, 0);
        }
    }

    /// Packs queries and empties folds.
    #[inline(always)]
    unsafe fn prepare(&self, joined: *mut f32) {
        let geometry = &self.call.geometry;
        let lines = self.key_lines();
        let tiles = self.rows.div_ceil(D::ROWS);
        for tile in 0..tiles {
            let range = tile_rows(self.rows, tiles, tile);
            let (mut from, mut all) = (range.start * lines, range.len());
            if self.across() {
                (from, all) = (tile * ROWS * lines, ROWS);
                // SAFETY: every tile has its lines. Lanes without a row are computed with, too.
                unsafe { self.queries.add(from).write_bytes(0, lines * ROWS) };
            }
            for (place, packed) in range.clone().enumerate() {
                let row = self.row_from + packed / self.heads;
                let head = self.head_from + packed % self.heads;
                let mut q = self.call.q.head(row, head);
                // SAFETY: the scratch has room for a joined query and for the cells of all rows.
                unsafe {
                    let mut to = self.queries.add(from + place);
                    if let Some(rope) = self.call.q_rope {
                        let rope = rope.head(row, head);
                        if q.len().is_multiple_of(D::K) {
                            let own = q.len();
                            pack_row::<D>(Activation::PerToken, q.as_ptr(), own, to, all);
                            to = to.add(own / D::K * all);
                            q = rope;
                        } else {
                            joined.copy_from_nonoverlapping(q.as_ptr(), q.len());
                            joined
                                .add(q.len())
                                .copy_from_nonoverlapping(rope.as_ptr(), rope.len());
                            q = std::slice::from_raw_parts(joined, geometry.key);
                        }
                    }
                    pack_row::<D>(Activation::PerToken, q.as_ptr(), q.len(), to, all);
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
    unsafe fn pack_keys(&self, count: usize) {
        let geometry = &self.call.geometry;
        let lines = self.key_lines();
        for panel in 0..count.div_ceil(PANEL) {
            let rows: [*const D::Value; PANEL] = std::array::from_fn(|i| {
                self.kv_row((panel * PANEL + i).min(count - 1))
                    .wrapping_add(self.kv_head * geometry.key)
            });
            // SAFETY: every row has a key; the panel has room for its lines.
            unsafe {
                let to = self.keys.add(panel * lines);
                let whole = geometry.key / D::K;
                D::key_columns(rows.map(|row| row.cast()), whole, to);
                if whole < lines {
                    // Only pairs leave a rest, of one value.
                    let mut rest = rows.map(|row| row.add(whole * D::K).read_unaligned().bits());
                    D::Value::clean(&mut rest);
                    to.add(whole).write(rest);
                }
                self.prefetch(panel);
            }
        }
    }

    /// Whether all packed values of some positions are finite.
    #[inline(always)]
    unsafe fn all_finite(&self, count: usize) -> bool {
        let (lines, used) = (TILE / D::K, count.div_ceil(D::K));
        let mut all = true;
        for panel in 0..self.call.geometry.value.div_ceil(PANEL) {
            // SAFETY: values are packed for `used` lines of each panel.
            all &= D::Value::all_finite(unsafe {
                std::slice::from_raw_parts(
                    self.values.add(panel * lines).cast(),
                    used * PANEL * D::K,
                )
            });
        }
        all
    }

    /// Panels of sixteen values by a line per K positions, zeros behind `count`.
    #[inline(always)]
    unsafe fn pack_values(&self, count: usize) {
        let geometry = &self.call.geometry;
        let lines = TILE / D::K;
        let part_lines = lines / (SCORE_PART - VALUE_PART);
        let from = geometry.values_from + self.kv_head * geometry.value;
        let whole = geometry.value / PANEL;
        let panels = geometry.value.div_ceil(PANEL);
        for line in 0..count.div_ceil(D::K) {
            let place = line * D::K;
            let paired = D::K == 1 || line * D::K + 1 < count;
            let first = self.kv_row(place).wrapping_add(from);
            let second = if D::K == 2 && paired {
                self.kv_row(place + 1).wrapping_add(from)
            } else {
                first
            };
            // SAFETY: both rows have all values; the panels have room for their lines.
            unsafe {
                if line % part_lines == 0 {
                    self.prefetch(VALUE_PART + line / part_lines);
                }
                let to = self.values.add(line);
                for panel in (0..whole - whole % 2).step_by(2) {
                    let column = panel * PANEL;
                    let to = [to.add(panel * lines), to.add((panel + 1) * lines)];
                    D::Value::two_lines::<D::S>(first.add(column), second.add(column), to);
                }
                if whole % 2 == 1 {
                    let column = (whole - 1) * PANEL;
                    let to = to.add((whole - 1) * lines);
                    D::Value::line::<D::S>(first.add(column), second.add(column), to);
                }
                if whole < panels {
                    let mut cells = [0; PANEL];
                    for (cell, column) in cells.iter_mut().zip(whole * PANEL..geometry.value) {
                        let lower = first.add(column).read_unaligned();
                        let upper = second.add(column).read_unaligned();
                        *cell = D::Value::pair(lower, upper, u32::MAX);
                    }
                    D::Value::clean(&mut cells);
                    to.add(whole * lines).write(cells);
                }
                if !paired {
                    for panel in 0..panels {
                        let line = &mut *to.add(panel * lines);
                        line.iter_mut().for_each(|cell| *cell &= 0xffff);
                    }
                }
            }
        }
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
        room: &mut Room<D>,
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
            self.scores(range.clone(), most, room);
            let folds = self.folds.add(tile * 2 * ROWS);
            let scale = self.call.geometry.scale;
            let keep = if most > TILE - PANEL {
                fold::<D>(range.len(), &visible, TILE, scale, folds, room)
            } else {
                let used = most.next_multiple_of(PANEL);
                fold::<D>(range.len(), &visible, used, scale, folds, room)
            };
            if together {
                self.add_values(range, base, &visible, most, &room.p, &keep);
                return;
            }
            for (place, packed) in range.enumerate() {
                if visible[place] > 0 {
                    self.pack_values(visible[place]);
                    let keep = [keep[place]; ROWS];
                    let visible = [visible[place]; ROWS];
                    let p = &room.p[place..=place];
                    self.add_values(packed..packed + 1, base, &visible, visible[0], p, &keep);
                }
            }
            // Others may come after this tile of rows.
            self.pack_values(count);
        }
    }

    /// Products of a tile of rows with the panels of keys before `most`.
    #[inline(always)]
    unsafe fn scores(&self, range: Range<usize>, most: usize, room: &mut Room<D>) {
        let lines = self.key_lines();
        let first_rows = range.start == 0;
        // SAFETY: queries and as many panels of keys as `most` needs are packed.
        unsafe {
            let cells = self.queries.add(range.start * lines);
            const { assert!(KEY_PANELS == 4, "a tile's panels are taken together") };
            if range.len() <= TOGETHER_ROWS && most > TILE - PANEL {
                let keys = self.keys.cast();
                let sums = room.scores.as_mut_ptr();
                rows_by_four::<D>(range.len(), cells, keys, lines * LINE, lines, sums);
                self.prefetch(SCORE_PART);
                self.prefetch(SCORE_PART + 1);
                return;
            }
            for (panel, sums) in room.scores.iter_mut().enumerate() {
                if panel * PANEL < most {
                    let keys = self.keys.add(panel * lines).cast();
                    any_rows::<D>(range.len(), cells, keys, lines, sums.as_mut_ptr());
                    if first_rows && panel < 2 {
                        self.prefetch(SCORE_PART + panel);
                    }
                }
            }
        }
    }

    /// out ← out · keep + Σ_j p_j v_j for rows that see something. In the first tile, which all rows see, out counts as 0.
    #[inline(always)]
    unsafe fn add_values(
        &self,
        range: Range<usize>,
        base: usize,
        visible: &[usize; ROWS],
        most: usize,
        p: &[[D::Value; TILE]],
        keep: &[f32; ROWS],
    ) {
        let geometry = &self.call.geometry;
        let (lines, used) = (TILE / D::K, most.div_ceil(D::K));
        let rows = range.len();
        let first_rows = range.start == 0;
        let mut outs = [std::ptr::null_mut(); ROWS];
        for (out, packed) in outs.iter_mut().zip(range) {
            *out = self.out(packed);
        }
        let mut cells = Cells([std::mem::MaybeUninit::uninit(); ROWS * TILE]);
        let cells = cells.0.as_mut_ptr().cast::<D::Cell>();
        let mut four = [[[0u32; PANEL]; ROWS]; 4];
        let panels = geometry.value.div_ceil(PANEL);
        // SAFETY: there are rows · used cells, of at most eight bytes per position pair or four per position; values are
        // packed for `used` lines; every row of out has `value` values.
        unsafe {
            D::cells(p.as_ptr().cast(), TILE, rows, used, cells);
            for panel in 0..panels {
                let sums = &mut four[panel % 4];
                let values = self.values.add(panel * lines).cast();
                if rows > TOGETHER_ROWS || panel / 4 * 4 + 4 > panels {
                    any_rows::<D>(rows, cells, values, used, sums.as_mut_ptr());
                } else if panel.is_multiple_of(4) {
                    let sums = four.as_mut_ptr();
                    rows_by_four::<D>(rows, cells, values, lines * LINE, used, sums);
                }
                let sums = &four[panel % 4];
                if first_rows && panel < 2 {
                    self.prefetch(SUM_PART + panel);
                }
                let column = panel * PANEL;
                let width = PANEL.min(geometry.value - column);
                for row in 0..rows {
                    if visible[row] == 0 {
                        continue;
                    }
                    let out = outs[row].add(column);
                    let keep = keep[row];
                    if width == PANEL {
                        let out = out.cast::<[f32; PANEL]>();
                        let mut sum = if base == 0 {
                            [0.0; PANEL]
                        } else {
                            out.read_unaligned()
                        };
                        for (out, add) in sum.iter_mut().zip(&sums[row]) {
                            *out = out.mul_add(keep, f32::from_bits(*add));
                        }
                        out.write_unaligned(sum);
                    } else {
                        for (i, add) in sums[row].iter().enumerate().take(width) {
                            let out = out.add(i);
                            let before = if base == 0 { 0.0 } else { out.read() };
                            out.write(before.mul_add(keep, f32::from_bits(*add)));
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
