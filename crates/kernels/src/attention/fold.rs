//! Probabilities of a tile of positions, and how tiles are joined.

use super::TILE;
use super::task::{KEY_PANELS, ROWS};
use super::value::KvValue;
use crate::panels::Dot;
use crate::simd::Simd;
use crate::weight::PANEL;

/// A tile's scores and probabilities.
pub(super) struct Room<D: Dot> {
    /// By panel of positions and row.
    pub(super) scores: [[[u32; PANEL]; ROWS]; KEY_PANELS],
    pub(super) p: [[D::Value; TILE]; ROWS],
}

impl<D: Dot> Room<D> {
    pub(super) fn new() -> Self {
        Self {
            scores: [[[0; PANEL]; ROWS]; KEY_PANELS],
            p: [[D::Value::default(); TILE]; ROWS],
        }
    }
}

/// Scales the first `used` scores of some rows, whole panels, and turns them into probabilities relative to the largest
/// so far, 0 behind what a row sees. Folds m and l of these rows and returns factors on what was summed before.
///
/// # Safety
/// `folds` holds m and l of sixteen rows, and there are at most as many; no row sees more than `used` positions.
#[inline(always)]
pub(super) unsafe fn fold<D: Dot>(
    rows: usize,
    visible: &[usize; ROWS],
    used: usize,
    scale: f32,
    folds: *mut f32,
    room: &mut Room<D>,
) -> [f32; ROWS]
where
    D::Value: KvValue,
{
    // Rows beyond the last and rows that see nothing change nothing.
    let (mut tile_m, mut tile_l) = ([f32::NEG_INFINITY; ROWS], [0.0; ROWS]);
    let mut keeps = [0.0; ROWS];
    // SAFETY: whole vectors of a tile's scores and of sixteen rows.
    unsafe {
        let scale = D::S::splat(scale * D::Value::FACTOR);
        for row in 0..rows {
            if visible[row] == 0 {
                continue;
            }
            let mut scores = [D::S::splat(f32::NEG_INFINITY); TILE / 4];
            let vectors = used / D::S::LANES;
            let mut most = scores[0];
            for (i, score) in scores.iter_mut().enumerate().take(vectors) {
                let place = i * D::S::LANES;
                let sums = &raw const room.scores[place / PANEL][row][place % PANEL];
                let mut v = D::S::mul(D::S::load(sums.cast()), scale);
                let seen = visible[row].saturating_sub(place);
                if seen < D::S::LANES {
                    let mut lanes = [0.0; PANEL];
                    D::S::store(lanes.as_mut_ptr(), v);
                    lanes[seen..].fill(f32::NEG_INFINITY);
                    v = D::S::load(lanes.as_ptr());
                }
                most = D::S::larger(v, most);
                *score = v;
            }
            tile_m[row] = D::S::largest_lane(most);
            let before = folds.add(row).read();
            let m = if tile_m[row] > before {
                tile_m[row]
            } else {
                before
            };
            let m = D::S::splat(m);
            let mut parts = [D::S::splat(0.0); 4];
            let p = room.p[row].as_mut_ptr();
            for (i, score) in scores.iter().enumerate().take(vectors) {
                let v = D::Value::power::<D::S>(D::S::sub(*score, m));
                D::Value::put::<D::S>(v, p.add(i * D::S::LANES));
                let part = &mut parts[i % D::S::PARTS];
                *part = D::S::add(*part, v);
            }
            tile_l[row] = D::S::add_lanes(D::S::fold_parts(parts));
        }
        for place in (0..ROWS).step_by(D::S::LANES) {
            let (m, l) = (folds.add(place), folds.add(ROWS + place));
            let tile_m = D::S::load(tile_m.as_ptr().add(place));
            let next = D::S::larger(tile_m, D::S::load(m));
            let keep = D::Value::exact_power::<D::S>(D::S::sub(D::S::load(m), next));
            let tile_l = D::S::load(tile_l.as_ptr().add(place));
            D::S::store(l, D::S::fma(D::S::load(l), keep, tile_l));
            D::S::store(m, next);
            D::S::store(keeps.as_mut_ptr().add(place), keep);
        }
    }
    keeps
}
