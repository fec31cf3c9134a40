//! Tiles of packed rows as lanes of vectors: keys, then values, are the rows of the products, queries and probabilities
//! their lines. Nothing is added up or compared across lanes, and no probability has to change its place. Each lane sees
//! the operations of a row alone in the same order as elsewhere.

use std::ops::Range;

use super::{KEY_PANELS, ROWS, SCORE_PART, SUM_PART, TILE, Work, tile_rows};
use crate::attention::value::KvValue;
use crate::panels::Dot;
use crate::simd::Simd;
use crate::weight::PANEL;

/// With fewer rows too many lanes would be idle.
pub(super) const FEWEST_ROWS: usize = 9;

/// A tile's scores and probabilities by position.
#[repr(align(64))]
pub(super) struct AcrossRoom {
    scores: [[u32; PANEL]; TILE],
    /// A line per K positions.
    p: [[u32; PANEL]; TILE],
    /// Sums of probabilities by the place of positions among sixteen.
    sums: [[f32; PANEL]; PANEL],
    products: [[u32; PANEL]; ROWS],
}

impl AcrossRoom {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self {
            scores: [[0; PANEL]; TILE],
            p: [[0; PANEL]; TILE],
            sums: [[0.0; PANEL]; PANEL],
            products: [[0; PANEL]; ROWS],
        }
    }
}

/// # Safety
/// All functions: as for those of [`Work`], and [`Dot::PANELS_ARE_CELLS`].
impl<D: Dot> Work<'_, D>
where
    D::Value: KvValue,
{
    /// [`Work::tile`].
    #[inline(always)]
    pub(super) unsafe fn tile_across(
        &self,
        tile: usize,
        range: Range<usize>,
        base: usize,
        count: usize,
        together: bool,
        room: &mut AcrossRoom,
    ) {
        // Rows grow, and so does what they see.
        let least = self.visible(range.start, base, count);
        let most = self.visible(range.end - 1, base, count);
        if most == 0 {
            return;
        }
        let mut seen = [most as f32; ROWS];
        if least < most {
            for (seen, packed) in seen.iter_mut().zip(range.clone()) {
                *seen = self.visible(packed, base, count) as f32;
            }
        }
        // SAFETY: the caller's duty; folds hold m and l of sixteen rows.
        unsafe {
            let seen = D::S::load(seen.as_ptr());
            let first_rows = range.start == 0;
            let scale = D::S::splat(self.call.geometry.scale * D::Value::FACTOR);
            let largest = self.products_across(tile, first_rows, seen, least, most, room);
            let tile_m = D::S::mul(largest, scale);
            let m = self.folds.add(tile * 2 * ROWS);
            let l = m.add(ROWS);
            let before = D::S::load(m);
            let next = D::S::larger(tile_m, before);
            let keep = D::Value::exact_power::<D::S>(D::S::sub(before, next));
            let tile_l = match most.div_ceil(PANEL) {
                1 => Self::powers::<1>(scale, next, room),
                2 => Self::powers::<2>(scale, next, room),
                3 => Self::powers::<3>(scale, next, room),
                _ => Self::powers::<KEY_PANELS>(scale, next, room),
            };
            D::S::store(m, next);
            D::S::store(l, D::S::fma(D::S::load(l), keep, tile_l));
            let (zero, one) = (D::S::splat(0.0), D::S::splat(1.0));
            if together {
                let changed = if least == 0 {
                    Some(D::S::choose(seen, zero, one, zero))
                } else {
                    None
                };
                self.add_across(tile, first_rows, base, most, keep, changed, room);
                return;
            }
            for (lane, packed) in range.enumerate() {
                let visible = self.visible(packed, base, count);
                if visible > 0 {
                    self.pack_values(visible);
                    let mut alone = [0.0; ROWS];
                    alone[lane] = 1.0;
                    let alone = D::S::load(alone.as_ptr());
                    self.add_across(tile, false, base, visible, keep, Some(alone), room);
                }
            }
            // Others may come after this tile of rows.
            self.pack_values(count);
        }
    }

    /// Products with the keys before `most`, whole panels of them, −∞ where a row does not see one; returns the largest of
    /// each row. All rows see the positions before `least`.
    #[inline(always)]
    unsafe fn products_across(
        &self,
        tile: usize,
        first_rows: bool,
        seen: <D::S as Simd>::V,
        least: usize,
        most: usize,
        room: &mut AcrossRoom,
    ) -> <D::S as Simd>::V {
        let lines = self.key_lines();
        // SAFETY: queries of the tile and as many panels of keys as `most` needs are packed.
        unsafe {
            let queries = self.queries.add(tile * ROWS * lines).cast();
            let none = D::S::splat(f32::NEG_INFINITY);
            let mut largest = none;
            for panel in 0..most.div_ceil(PANEL) {
                let keys = self.keys.add(panel * lines).cast();
                let from = panel * PANEL;
                let scores = room.scores.as_mut_ptr().add(from);
                D::tile::<PANEL>(keys, queries, lines, scores);
                if first_rows && panel < 2 {
                    self.prefetch(SCORE_PART + panel);
                }
                for place in 0..PANEL {
                    let score = scores.add(place).cast::<f32>();
                    let mut v = D::S::load(score);
                    if from + PANEL > least {
                        let position = D::S::splat((from + place) as f32);
                        v = D::S::choose(seen, position, v, none);
                        D::S::store(score, v);
                    }
                    largest = D::S::larger(v, largest);
                }
            }
            largest
        }
    }

    /// Turns the products with some panels of keys into probabilities relative to `m`, and returns their sums.
    #[inline(always)]
    unsafe fn powers<const PANELS: usize>(
        scale: <D::S as Simd>::V,
        m: <D::S as Simd>::V,
        room: &mut AcrossRoom,
    ) -> <D::S as Simd>::V {
        // SAFETY: the room has vectors of sixteen lanes for all positions.
        unsafe {
            let scores = room.scores.as_ptr().cast::<f32>();
            let sums = room.sums.as_mut_ptr().cast::<f32>();
            for place in (0..PANEL).step_by(2) {
                let (mut first_sum, mut second_sum) = (D::S::splat(0.0), D::S::splat(0.0));
                for panel in 0..PANELS {
                    let position = panel * PANEL + place;
                    let first = D::S::load(scores.add(position * PANEL));
                    let second = D::S::load(scores.add((position + 1) * PANEL));
                    let first = D::S::sub(D::S::mul(first, scale), m);
                    let second = D::S::sub(D::S::mul(second, scale), m);
                    let first = D::Value::power::<D::S>(first);
                    let second = D::Value::power::<D::S>(second);
                    first_sum = D::S::add(first_sum, first);
                    second_sum = D::S::add(second_sum, second);
                    let to = room.p.as_mut_ptr().add(position / D::K);
                    D::Value::put_lines::<D::S>(first, second, to);
                }
                D::S::store(sums.add(place * PANEL), first_sum);
                D::S::store(sums.add((place + 1) * PANEL), second_sum);
            }
            let mut level = [D::S::splat(0.0); PANEL];
            for (place, sum) in level.iter_mut().enumerate() {
                *sum = D::S::load(sums.add(place * PANEL));
            }
            for width in [8, 4, 2, 1] {
                for place in 0..width {
                    level[place] = D::S::add(level[place], level[place + width]);
                }
            }
            level[0]
        }
    }

    /// sums ← sums · keep + Σ_j p_j v_j over the positions before `most`, for all rows or those whose lane of `changed` is
    /// above 0.
    #[expect(
        clippy::too_many_arguments,
        reason = "what a tile of rows has of its own"
    )]
    #[inline(always)]
    unsafe fn add_across(
        &self,
        tile: usize,
        first_rows: bool,
        base: usize,
        most: usize,
        keep: <D::S as Simd>::V,
        changed: Option<<D::S as Simd>::V>,
        room: &mut AcrossRoom,
    ) {
        let (lines, used) = (TILE / D::K, most.div_ceil(D::K));
        let panels = self.call.geometry.value.div_ceil(PANEL);
        // SAFETY: values are packed for `used` lines, and the tile has sums for whole panels.
        unsafe {
            let zero = D::S::splat(0.0);
            let sums = self.sums.add(tile * panels * PANEL * ROWS);
            for panel in 0..panels {
                let values = self.values.add(panel * lines).cast();
                if first_rows && panel < 2 {
                    self.prefetch(SUM_PART + panel);
                }
                let Some(changed) = changed else {
                    let sums = sums.add(panel * PANEL * ROWS).cast();
                    let p = room.p.as_ptr().cast();
                    D::tile_onto(values, p, used, base == 0, keep, sums);
                    continue;
                };
                let products = room.products.as_mut_ptr();
                D::tile::<PANEL>(values, room.p.as_ptr().cast(), used, products);
                for place in 0..PANEL {
                    let sum = sums.add((panel * PANEL + place) * ROWS);
                    let add = D::S::load(products.add(place).cast());
                    let before = if base == 0 { zero } else { D::S::load(sum) };
                    let next = D::S::fma(before, keep, add);
                    D::S::store(sum, D::S::choose(changed, zero, next, D::S::load(sum)));
                }
            }
        }
    }

    /// Divides the sums by l and writes them out.
    #[inline(always)]
    pub(super) unsafe fn finish_across(&self) {
        let value = self.call.geometry.value;
        let panels = value.div_ceil(PANEL);
        let tiles = self.rows.div_ceil(D::ROWS);
        let (mut quotients, mut rows) = ([[0u32; PANEL]; ROWS], [[0u32; PANEL]; ROWS]);
        for tile in 0..tiles {
            // SAFETY: the tile has folds and sums; rows of out are the task's.
            unsafe {
                let l = D::S::load(self.folds.add(tile * 2 * ROWS + ROWS));
                let sums = self.sums.add(tile * panels * PANEL * ROWS);
                for panel in 0..panels {
                    for (place, quotient) in quotients.iter_mut().enumerate() {
                        let sum = D::S::load(sums.add((panel * PANEL + place) * ROWS));
                        D::S::store(quotient.as_mut_ptr().cast(), D::S::div(sum, l));
                    }
                    let columns = quotients
                        .each_ref()
                        .map(|quotient| quotient.as_ptr().cast());
                    D::columns(columns, ROWS, rows.as_mut_ptr());
                    let column = panel * PANEL;
                    let width = PANEL.min(value - column);
                    for (row, packed) in rows.iter().zip(tile_rows(self.rows, tiles, tile)) {
                        let out = self.out(packed).add(column);
                        if width == PANEL {
                            out.cast::<[u32; PANEL]>().write_unaligned(*row);
                        } else {
                            out.copy_from_nonoverlapping(row.as_ptr().cast(), width);
                        }
                    }
                }
            }
        }
    }
}
