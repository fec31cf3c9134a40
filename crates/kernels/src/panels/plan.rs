//! How products are cut into tasks. Where they are cut changes no bits.

use std::cell::RefCell;

use super::tile::{Job, Part, Shape};
use crate::weight::{Format, LINE, PANEL};
use crate::{Isa, ThreadTeam};

/// Tasks per thread of long products, so that threads end together.
const TASKS_PER_THREAD: usize = 8;
/// A task is worth at least this much, so that claiming it costs little.
const TASK_NANOSECONDS: usize = 8_000;
/// Packed bytes of a task's rows: they stay in the second-level cache while panels go by.
const TASK_BYTES: usize = 384 << 10;
/// Values of x that are packed in one task.
const PACK_VALUES: usize = 1 << 12;
/// Rows of the smallest tiles that a single product of few rows is cut into, so that all threads pack.
const SMALL_TILE_ROWS: usize = 8;
/// With fewer values the calling thread packs them before the section begins: that is sooner done than a phase.
pub(super) const SOLO_VALUES: usize = 1 << 12;

/// Some rows of a product to pack.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pack {
    pub(super) job: usize,
    pub(super) rows: (usize, usize),
}

/// Tasks of a call; the memory is kept for the thread's next call.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) parts: Vec<Part>,
    pub(super) packs: Vec<Pack>,
    /// Threads that each get one stream of weights; 1 where weights are read more than once.
    streams: usize,
    /// A rough time of all on one core.
    pub(super) nanoseconds: usize,
}

thread_local! {
    static KEPT: RefCell<Plan> = RefCell::new(Plan::default());
}

/// Calls `body` with a plan of all jobs.
pub(super) fn with_plan<'a, R>(
    team: &ThreadTeam,
    shape: Shape,
    count: usize,
    job: impl Fn(usize) -> Job<'a>,
    body: impl FnOnce(&Plan) -> R,
) -> R {
    let mut plan = KEPT.take();
    plan.parts.clear();
    plan.packs.clear();
    plan.nanoseconds = (0..count)
        .map(|index| nanoseconds(team.isa(), &job(index)))
        .sum();
    let share = share(team, plan.nanoseconds);
    plan.streams = if team.is_worth(plan.nanoseconds) {
        team.threads()
    } else {
        1
    };
    for index in 0..count {
        let job = job(index);
        plan.add(team, shape, index, &job, share);
        if job.rows > shape.rows {
            plan.streams = 1;
        }
    }
    let result = body(&plan);
    KEPT.set(plan);
    result
}

/// Tiles that the rows of one of `count` products are dealt out to.
pub(super) fn tiles(team: &ThreadTeam, shape: Shape, count: usize, rows: usize) -> usize {
    let least = rows.div_ceil(shape.rows);
    if count > 1 {
        return least;
    }
    least.max((rows / SMALL_TILE_ROWS).min(team.threads()))
}

/// The time a task should take.
fn share(team: &ThreadTeam, total: usize) -> usize {
    if team.threads() == 1 || !team.is_worth(total) {
        return total.max(1);
    }
    let tasks = (total / TASK_NANOSECONDS).clamp(team.threads(), team.threads() * TASKS_PER_THREAD);
    total / tasks + 1
}

impl Plan {
    /// The part that is claimed as the `index`-th. Threads that claim in turn each read weights front to back.
    pub(super) fn claimed(&self, index: usize) -> &Part {
        let (stream, place) = (index % self.streams, index / self.streams);
        let (each, more) = (
            self.parts.len() / self.streams,
            self.parts.len() % self.streams,
        );
        &self.parts[stream * each + stream.min(more) + place]
    }

    fn add(&mut self, team: &ThreadTeam, shape: Shape, index: usize, job: &Job<'_>, share: usize) {
        if job.rows == 0 {
            return;
        }
        let isa = team.isa();
        let k = job.w.cols();
        let panels = job.w.rows().div_ceil(PANEL);
        let tiles = job.tiles;
        let tile_rows = job.rows.div_ceil(tiles);
        let tile_bytes = tile_rows * k.div_ceil(shape.k) * shape.cell;
        let blocks = (tiles * tile_bytes).div_ceil(TASK_BYTES).min(tiles);
        for block in 0..blocks {
            let range = (tiles * block / blocks, tiles * (block + 1) / blocks);
            let time = nanoseconds(isa, job) * (range.1 - range.0) / tiles;
            let cuts = time.div_ceil(share).clamp(1, panels);
            for cut in 0..cuts {
                self.parts.push(Part {
                    job: index,
                    tiles: range,
                    panels: (panels * cut / cuts, panels * (cut + 1) / cuts),
                });
            }
        }
        // Rows of a tile share cache lines of cells, so whole tiles go to a thread.
        let pieces = tiles.div_ceil((PACK_VALUES / (tile_rows * k)).max(1));
        let start =
            |piece: usize| super::tile::tile_rows(job.rows, tiles, tiles * piece / pieces).start;
        for piece in 0..pieces {
            self.packs.push(Pack {
                job: index,
                rows: (start(piece), start(piece + 1)),
            });
        }
    }
}

/// A rough time on one core: arithmetic or ten bytes of weights per nanosecond, the slower counts.
fn nanoseconds(isa: Isa, job: &Job<'_>) -> usize {
    let format = job.w.format();
    let per_line = if format == Format::Bf16 { 2 } else { 4 };
    let lines = job.w.rows().div_ceil(PANEL) * job.w.cols().div_ceil(per_line);
    let arithmetic = lines * job.rows / isa.lines_per_microsecond(format == Format::Bf16) * 1000
        + lines * job.rows % isa.lines_per_microsecond(format == Format::Bf16);
    arithmetic.max(lines * LINE / 10)
}
