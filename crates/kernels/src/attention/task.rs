//! One task of attention: some query rows of one sequence by some heads, on one thread.
//!
//! Keys are read where they lie in their blocks. For each tile of positions and each group of heads the scores are a
//! small product of packed queries with keys, and the values' sum an outer product of probabilities with the same rows.

use std::ops::Range;

use super::{MlaParams, MlaSeq, TILE};
use crate::gemm::{MAX_TILE_ROWS, TILE_COLS, group_tile, pack_rows};
use crate::math::exp;
use crate::reference::LANES as STEP;
use crate::rows::{exp_and_sum, largest};
use crate::simd::{Element, Simd, simd_kernel, widen};
use crate::{DType, HeadRows};

/// Vectors of a value row that are summed at a time.
const VALUE_VECTORS: usize = 4;

/// The arguments of a call, lengths checked.
pub(super) struct Call<'a> {
    pub(super) params: &'a MlaParams,
    pub(super) q_latent: HeadRows<'a>,
    pub(super) q_rope: HeadRows<'a>,
    pub(super) seqs: &'a [MlaSeq<'a>],
    pub(super) out: *mut f32,
}

// SAFETY: `out` is written by tasks only, each its own rows and heads, while the call holds the borrow.
unsafe impl Sync for Call<'_> {}

/// Rows (of the query buffer) and heads of one sequence.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) seq: usize,
    pub(super) rows: Range<usize>,
    pub(super) heads: Range<usize>,
}

/// The running softmax of one row and head.
#[derive(Clone, Copy)]
struct Fold {
    m: f32,
    l: f32,
    /// Factor on what was summed before this tile.
    keep: f32,
    /// Factor on this tile's sums.
    take: f32,
}

/// How the scratch of a task is cut: folds, the scores of a group of heads, its queries joined, all queries packed, a
/// widened copy of a tile's keys.
struct Layout {
    width: usize,
    heads: usize,
    rows: usize,
}

simd_kernel! {
    pub(super) fn run_task = any_type(call: &Call<'_>, task: &Task, scratch: *mut f32)
}

/// Values of scratch that [`run_task`] needs.
pub(super) fn scratch_length(params: &MlaParams, task: &Task) -> usize {
    let layout = Layout::new(params, task);
    layout.copy_values()
        + layout.fold_values()
        + layout.score_values()
        + layout.joined_values()
        + layout.packed_values()
}

impl Layout {
    fn new(params: &MlaParams, task: &Task) -> Self {
        Self {
            width: params.latent + params.rope,
            heads: task.heads.len(),
            rows: task.rows.len(),
        }
    }

    /// A packed query head, in whole steps.
    fn head_values(&self) -> usize {
        self.width.next_multiple_of(STEP)
    }

    fn packed_values(&self) -> usize {
        self.rows * self.heads * self.head_values()
    }

    fn joined_values(&self) -> usize {
        MAX_TILE_ROWS * self.head_values()
    }

    fn score_values(&self) -> usize {
        MAX_TILE_ROWS * TILE
    }

    /// A widened copy of a tile's keys.
    fn copy_values(&self) -> usize {
        TILE * self.width
    }

    fn fold_values(&self) -> usize {
        (self.rows * self.heads * size_of::<Fold>() / size_of::<f32>()).next_multiple_of(STEP)
    }
}

/// # Safety
/// The call's lengths were checked, the task lies inside it and no other task shares its rows and heads; scratch has
/// [`scratch_length`] values, aligned to 64 bytes.
#[inline(always)]
unsafe fn any_type<S: Simd>(call: &Call<'_>, task: &Task, scratch: *mut f32) {
    // SAFETY: the caller's duty.
    unsafe {
        match call.params.kv_type {
            DType::F32 => typed_task::<S, f32>(call, task, scratch),
            DType::Bf16 => typed_task::<S, u16>(call, task, scratch),
        }
    }
}

#[inline(always)]
unsafe fn typed_task<S: Simd, E: Element>(call: &Call<'_>, task: &Task, scratch: *mut f32) {
    let layout = Layout::new(call.params, task);
    let seq = &call.seqs[task.seq];
    let last = seq.first_position + (task.rows.end - 1 - seq.rows.start);
    let copies = E::NARROW && S::COPIES_BF16 && layout.rows * layout.heads > S::TILE_ROWS;
    // SAFETY: scratch is cut as `scratch_length` counts it, and Fold is four f32; the rest is the caller's duty.
    unsafe {
        let folds = scratch.cast::<Fold>();
        let scores = scratch.add(layout.fold_values());
        let joined = scores.add(layout.score_values());
        let packed = joined.add(layout.joined_values());
        let copy = packed.add(layout.packed_values());
        let work = Work {
            call,
            task,
            width: layout.width,
            heads: layout.heads,
            folds,
            scores,
            packed,
        };
        work.prepare::<S>(joined, layout.head_values());
        for base in (0..=last).step_by(TILE) {
            let count = TILE.min(last + 1 - base);
            let keys = key_rows::<E>(call.params, seq, base, count);
            if copies {
                let mut wide = [copy.cast_const(); TILE];
                for (i, key) in keys.iter().enumerate().take(count) {
                    wide[i] = copy.add(i * layout.width);
                    widen::<S, E>(*key, layout.width, copy.add(i * layout.width));
                }
                work.tile::<S, f32>(base, count, &wide, layout.head_values());
            } else {
                work.tile::<S, E>(base, count, &keys, layout.head_values());
            }
        }
        work.finish::<S>();
    }
}

/// A task with its scratch.
struct Work<'a> {
    call: &'a Call<'a>,
    task: &'a Task,
    width: usize,
    heads: usize,
    folds: *mut Fold,
    scores: *mut f32,
    packed: *mut f32,
}

/// # Safety
/// All functions: as for [`any_type`], and the pointers lead to scratch as [`Layout`] cuts it.
impl Work<'_> {
    /// Rows of the task with their absolute positions.
    #[inline(always)]
    fn position(&self, row: usize) -> usize {
        let seq = &self.call.seqs[self.task.seq];
        seq.first_position + (self.task.rows.start + row - seq.rows.start)
    }

    /// Heads of group `group`, counted from the task's first, dealt out evenly.
    #[inline(always)]
    fn group(&self, groups: usize, group: usize) -> Range<usize> {
        self.heads * group / groups..self.heads * (group + 1) / groups
    }

    /// Where the output of a row and head of the task begins.
    #[inline(always)]
    unsafe fn out(&self, row: usize, head: usize) -> *mut f32 {
        let (row, head) = (self.task.rows.start + row, self.task.heads.start + head);
        // SAFETY: the caller names a row and head of the task.
        unsafe {
            self.call
                .out
                .add((row * self.call.params.heads + head) * self.call.params.latent)
        }
    }

    /// Empties the folds and the output and packs `[q_latent | q_rope]` of each row by groups of heads.
    #[inline(always)]
    unsafe fn prepare<S: Simd>(&self, joined: *mut f32, head_values: usize) {
        let groups = self.heads.div_ceil(S::TILE_ROWS);
        for row in 0..self.task.rows.len() {
            for head in 0..self.heads {
                // SAFETY: row and head are the task's.
                unsafe {
                    let empty = Fold {
                        m: f32::NEG_INFINITY,
                        l: 0.0,
                        keep: 0.0,
                        take: 0.0,
                    };
                    self.folds.add(row * self.heads + head).write(empty);
                    self.out(row, head).write_bytes(0, self.call.params.latent);
                }
            }
            for group in 0..groups {
                let group = self.group(groups, group);
                for (place, head) in group.clone().enumerate() {
                    let (row, head) = (self.task.rows.start + row, self.task.heads.start + head);
                    let latent = self.call.q_latent.head(row, head);
                    let rope = self.call.q_rope.head(row, head);
                    // SAFETY: `joined` has room for a group of heads of latent + rope values.
                    unsafe {
                        let to = joined.add(place * self.width);
                        to.copy_from_nonoverlapping(latent.as_ptr(), latent.len());
                        to.add(latent.len())
                            .copy_from_nonoverlapping(rope.as_ptr(), rope.len());
                    }
                }
                // SAFETY: `packed` has room for every row and head in whole steps.
                unsafe {
                    let to = self
                        .packed
                        .add((row * self.heads + group.start) * head_values);
                    pack_rows::<S>(joined, self.width, group.len(), self.width, to);
                }
            }
        }
    }

    /// Folds the tile of positions `base .. base + count` into every row that sees some of it.
    #[inline(always)]
    unsafe fn tile<S: Simd, E: Element>(
        &self,
        base: usize,
        count: usize,
        keys: &[*const E; TILE],
        head_values: usize,
    ) {
        let MlaParams { latent, scale, .. } = *self.call.params;
        let groups = self.heads.div_ceil(S::TILE_ROWS);
        for row in 0..self.task.rows.len() {
            let position = self.position(row);
            if position < base {
                continue;
            }
            let visible = count.min(position + 1 - base);
            for group in 0..groups {
                let group = self.group(groups, group);
                let place = row * self.heads + group.start;
                // SAFETY: the pointers lead to this row's and group's parts; the first `visible` keys are rows.
                unsafe {
                    let q = self.packed.add(place * head_values);
                    score::<S, E>(
                        q,
                        group.len(),
                        keys,
                        visible,
                        self.width,
                        scale,
                        self.scores,
                    );
                    for head in 0..group.len() {
                        let fold = &mut *self.folds.add(place + head);
                        fold_scores::<S>(self.scores.add(head * TILE), visible, fold);
                    }
                    let (folds, out) = (self.folds.add(place), self.out(row, group.start));
                    add_values::<S, E>(self.scores, folds, group.len(), keys, visible, latent, out);
                }
            }
        }
    }

    /// Divides the sums by l.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self) {
        for row in 0..self.task.rows.len() {
            for head in 0..self.heads {
                // SAFETY: row and head are the task's.
                unsafe {
                    let l = (*self.folds.add(row * self.heads + head)).l;
                    divide::<S>(self.out(row, head), self.call.params.latent, l);
                }
            }
        }
    }
}

/// Addresses of the rows at positions `base .. base + count`; the entries behind repeat the last one.
#[inline(always)]
fn key_rows<E: Element>(
    params: &MlaParams,
    seq: &MlaSeq<'_>,
    base: usize,
    count: usize,
) -> [*const E; TILE] {
    let width = params.latent + params.rope;
    let mut keys = [std::ptr::null(); TILE];
    for (i, key) in keys.iter_mut().enumerate() {
        let position = base + i.min(count - 1);
        let unit = seq.units[position / params.block_size].as_ptr().cast::<E>();
        *key = unit.wrapping_add(position % params.block_size * width);
    }
    keys
}

/// `scores[head][key]` = scale · (q · key) for the first `visible` keys; up to three entries behind hold anything.
#[inline(always)]
unsafe fn score<S: Simd, E: Element>(
    q: *const f32,
    heads: usize,
    keys: &[*const E; TILE],
    visible: usize,
    width: usize,
    scale: f32,
    scores: *mut f32,
) {
    for key in (0..visible).step_by(TILE_COLS) {
        let mut columns = [keys[key]; TILE_COLS];
        for (i, column) in columns.iter_mut().enumerate() {
            *column = keys[(key + i).min(visible - 1)];
        }
        let mut sums = [[0.0; TILE_COLS]; MAX_TILE_ROWS];
        // SAFETY: q is packed for `heads` rows; keys have `width` values; a head's scores have room for a tile.
        unsafe {
            group_tile::<S, E>(q, heads, columns, width, &mut sums);
            for (head, sums) in sums.iter().enumerate().take(heads) {
                for (i, sum) in sums.iter().enumerate() {
                    scores.add(head * TILE + key + i).write(sum * scale);
                }
            }
        }
    }
}

/// Turns a head's scores into probabilities relative to the tile's largest, and folds m and l.
#[inline(always)]
unsafe fn fold_scores<S: Simd>(scores: *mut f32, visible: usize, fold: &mut Fold) {
    // SAFETY: the caller grants `visible` scores.
    unsafe {
        let tile_m = largest::<S>(scores, visible);
        let tile_l = exp_and_sum::<S>(scores, visible, tile_m);
        let next = if tile_m > fold.m { tile_m } else { fold.m };
        fold.keep = exp(fold.m - next);
        fold.take = exp(tile_m - next);
        fold.m = next;
        fold.l = fold.l.mul_add(fold.keep, tile_l * fold.take);
    }
}

/// `out[head]` ← `out[head]` · keep + (Σ_j p_j c_j) · take for a group of heads.
#[inline(always)]
unsafe fn add_values<S: Simd, E: Element>(
    p: *const f32,
    folds: *const Fold,
    heads: usize,
    keys: &[*const E; TILE],
    visible: usize,
    latent: usize,
    out: *mut f32,
) {
    macro_rules! heads_of {
        ($($heads:literal)*) => {
            match heads {
                $($heads if $heads <= S::TILE_ROWS => {
                    let keys = &keys[..visible];
                    let wide = VALUE_VECTORS * S::LANES;
                    let whole = latent / wide * wide;
                    // SAFETY: the caller's duty; columns stay below `latent`.
                    unsafe {
                        for column in (0..whole).step_by(wide) {
                            value_tile::<S, E, $heads, VALUE_VECTORS>(p, folds, keys, column, S::LANES, latent, out);
                        }
                        for column in (whole..latent).step_by(S::LANES) {
                            let count = S::LANES.min(latent - column);
                            value_tile::<S, E, $heads, 1>(p, folds, keys, column, count, latent, out);
                        }
                    }
                })*
                _ => {}
            }
        };
    }
    heads_of!(1 2 3 4 5 6);
}

/// `VECTORS` vectors of the sum, from `column` on; the last one has `count` values.
#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and column"
)]
#[inline(always)]
unsafe fn value_tile<S: Simd, E: Element, const HEADS: usize, const VECTORS: usize>(
    p: *const f32,
    folds: *const Fold,
    keys: &[*const E],
    column: usize,
    count: usize,
    latent: usize,
    out: *mut f32,
) {
    // SAFETY: the caller grants `HEADS` rows of p, folds and out, and columns below `latent`.
    unsafe {
        let mut sums = [[S::splat(0.0); VECTORS]; HEADS];
        for (j, key) in keys.iter().enumerate() {
            let mut weights = [S::splat(0.0); HEADS];
            for head in 0..HEADS {
                weights[head] = S::splat(p.add(head * TILE + j).read());
            }
            for vector in 0..VECTORS {
                let from = key.add(column + vector * S::LANES);
                let c = if count == S::LANES {
                    E::load::<S>(from)
                } else {
                    E::load_part::<S>(from, count)
                };
                for head in 0..HEADS {
                    sums[head][vector] = S::fma(weights[head], c, sums[head][vector]);
                }
            }
        }
        for head in 0..HEADS {
            let fold = *folds.add(head);
            let (keep, take) = (S::splat(fold.keep), S::splat(fold.take));
            for vector in 0..VECTORS {
                let out = out.add(head * latent + column + vector * S::LANES);
                let sum = S::mul(sums[head][vector], take);
                if count == S::LANES {
                    S::store(out, S::fma(S::load(out), keep, sum));
                } else {
                    S::store_part(out, S::fma(S::load_part(out, count), keep, sum), count);
                }
            }
        }
    }
}

/// values ← values / l.
#[inline(always)]
unsafe fn divide<S: Simd>(values: *mut f32, length: usize, l: f32) {
    // SAFETY: the caller's duty.
    let divisor = unsafe { S::splat(l) };
    for place in (0..length).step_by(S::LANES) {
        // SAFETY: the caller grants `length` values.
        unsafe {
            let values = values.add(place);
            if place + S::LANES <= length {
                S::store(values, S::div(S::load(values), divisor));
            } else {
                let count = length - place;
                S::store_part(values, S::div(S::load_part(values, count), divisor), count);
            }
        }
    }
}
