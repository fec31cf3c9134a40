//! The products others call.

use std::ops::Range;

use super::pack::RowState;
use super::plan::{SOLO_VALUES, tiles, with_plan};
use super::tile::{Job, MAX_ROWS, Output, Packed, Shape, run_pack, run_part, run_shape};
use crate::error::ensure_shape;
use crate::scratch::with_scratch;
use crate::weight::{Form, Weight};
use crate::{Compute, HeadRows, KernelError, ThreadTeam, grouped_linear, linear, silu_mul_halves};

/// y = x · wᵀ (+ bias) for x `[m, k]`, w `[n, k]`, y `[m, n]`; m follows from the lengths and may be 0.
///
/// * f32: the sums of [`linear`].
/// * bf16: x and w rounded to the nearest bf16, ties to even, magnitudes below 2^-56 taken for zero. The sum starts at
///   +0; for each pair of k in ascending order first the product of the second, then that of the first is added by
///   fused multiply-add. An odd last k is paired with zeros.
/// * W8A8: x quantised by [`crate::quantize_rows`]; the integer sum, plus the column's addend, becomes the nearest f32
///   and is multiplied by (row scale · column scale), each operation rounded.
///
/// A bias is added last.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::Panicked`].
pub fn product(team: &ThreadTeam, x: &[f32], w: &Weight, y: &mut [f32]) -> Result<(), KernelError> {
    let (n, k) = (w.rows(), w.cols());
    let m = rows_of(w, x.len(), y.len())?;
    match w.form() {
        Form::Plain(matrix) => {
            linear(team, x, matrix, y)?;
            add_bias(w, y);
            Ok(())
        }
        Form::Panels(_) => {
            let job = Job {
                x: x.as_ptr(),
                x_stride: k,
                source: None,
                rows: m,
                tiles: 0,
                gated: false,
                w,
                y: Output::Values(y.as_mut_ptr()),
                y_stride: n,
                first: 0,
            };
            // SAFETY: the lengths were checked, and one product is disjoint.
            unsafe { run(team, w, m, 1, |_| job) }
        }
    }
}

/// The integer sums Σ q·Q of a W8A8 product, before addends and scales, for tests.
///
/// # Errors
/// [`KernelError::Shape`], also for weights of another kind; [`KernelError::Panicked`].
pub fn product_accumulators(
    team: &ThreadTeam,
    x: &[f32],
    w: &Weight,
    sums: &mut [i32],
) -> Result<(), KernelError> {
    ensure_shape!(
        w.compute() == Compute::W8A8,
        "integer sums of a product with {w:?}"
    );
    let m = rows_of(w, x.len(), sums.len())?;
    let job = Job {
        x: x.as_ptr(),
        x_stride: w.cols(),
        source: None,
        rows: m,
        tiles: 0,
        gated: false,
        w,
        y: Output::Sums(sums.as_mut_ptr()),
        y_stride: w.rows(),
        first: 0,
    };
    // SAFETY: the lengths were checked, and one product is disjoint.
    unsafe { run(team, w, m, 1, |_| job) }
}

/// One product per group of rows, as experts of a layer need it: for each `(w, rows)`, `y[rows] = x[rows] · wᵀ`. All
/// weights have the same shape `[n, k]` and format; x is `[m, k]`, y `[m, n]`. Rows of no group keep their content in
/// y.
///
/// # Errors
/// [`KernelError::Shape`], also when ranges overlap, are out of order or exceed m; [`KernelError::Panicked`].
pub fn grouped_product(
    team: &ThreadTeam,
    x: &[f32],
    groups: &[(&Weight, Range<usize>)],
    y: &mut [f32],
) -> Result<(), KernelError> {
    let Some((first, _)) = groups.first() else {
        return Ok(());
    };
    let m = rows_of(first, x.len(), y.len())?;
    grouped(team, x, None, false, m, groups, y)
}

/// [`grouped_product`] where row i of the groups is row `source[i]` of x `[tokens, k]`: tokens need not be copied
/// expert by expert. y is `[source.len(), n]`.
///
/// # Errors
/// As [`grouped_product`], and when a source is no row of x.
pub fn grouped_product_gathered(
    team: &ThreadTeam,
    x: &[f32],
    source: &[u32],
    groups: &[(&Weight, Range<usize>)],
    y: &mut [f32],
) -> Result<(), KernelError> {
    let Some((first, _)) = groups.first() else {
        return Ok(());
    };
    let (n, k) = (first.rows(), first.cols());
    let tokens = x.len() / k;
    ensure_shape!(
        x.len() == tokens * k && y.len() == source.len() * n,
        "x of {} and y of {} values for {} rows of {first:?}",
        x.len(),
        y.len(),
        source.len()
    );
    if let Some(row) = source.iter().find(|&&row| row as usize >= tokens) {
        return Err(KernelError::Shape(format!("row {row} of {tokens} tokens")));
    }
    if let Form::Plain(_) = first.form() {
        let gathered: Vec<f32> = source
            .iter()
            .flat_map(|&row| &x[row as usize * k..][..k])
            .copied()
            .collect();
        return grouped(team, &gathered, None, false, source.len(), groups, y);
    }
    grouped(team, x, Some(source), false, source.len(), groups, y)
}

/// [`product`] of silu(gate) · up for rows `[gate | up]` of x `[m, 2 k]`, with the bits of [`crate::silu_mul_halves`] and
/// [`product`] one after the other. `room` grows to hold the first's output for weights in f32 only.
///
/// # Errors
/// As [`product`].
pub fn product_gated(
    team: &ThreadTeam,
    x: &[f32],
    w: &Weight,
    room: &mut Vec<f32>,
    y: &mut [f32],
) -> Result<(), KernelError> {
    if let Form::Plain(_) = w.form() {
        return product(team, gate_rows(team, x, w, room, y)?, w, y);
    }
    let m = y.len() / w.rows();
    grouped_product_gated(team, x, &[(w, 0..m)], room, y)
}

/// Rows of x `[m, 2 k]` and y `[m, n]`.
fn rows_of_halves(w: &Weight, x: usize, y: usize) -> Result<usize, KernelError> {
    let m = x / (2 * w.cols());
    ensure_shape!(
        x == m * 2 * w.cols() && y == m * w.rows(),
        "x of {x} and y of {y} values for a gated product with {w:?}"
    );
    Ok(m)
}

/// silu(gate) · up of all rows into `room`, for weights in f32.
fn gate_rows<'a>(
    team: &ThreadTeam,
    x: &[f32],
    w: &Weight,
    room: &'a mut Vec<f32>,
    y: &[f32],
) -> Result<&'a [f32], KernelError> {
    let (k, m) = (w.cols(), rows_of_halves(w, x.len(), y.len())?);
    if room.len() < m * k {
        room.resize(m * k, 0.0);
    }
    let gated = &mut room[..m * k];
    silu_mul_halves(team, x, k, gated)?;
    Ok(gated)
}

/// [`grouped_product`] of silu(gate) · up for rows `[gate | up]` of x `[m, 2 k]`; `room` as in [`product_gated`].
///
/// # Errors
/// As [`grouped_product`].
pub fn grouped_product_gated(
    team: &ThreadTeam,
    x: &[f32],
    groups: &[(&Weight, Range<usize>)],
    room: &mut Vec<f32>,
    y: &mut [f32],
) -> Result<(), KernelError> {
    let Some((first, _)) = groups.first() else {
        return Ok(());
    };
    if let Form::Plain(_) = first.form() {
        let gated = gate_rows(team, x, first, room, y)?;
        return grouped(
            team,
            gated,
            None,
            false,
            gated.len() / first.cols(),
            groups,
            y,
        );
    }
    let m = rows_of_halves(first, x.len(), y.len())?;
    grouped(team, x, None, true, m, groups, y)
}

/// x and y are of whole rows, sources in range.
fn grouped(
    team: &ThreadTeam,
    x: &[f32],
    source: Option<&[u32]>,
    gated: bool,
    m: usize,
    groups: &[(&Weight, Range<usize>)],
    y: &mut [f32],
) -> Result<(), KernelError> {
    let Some((first, _)) = groups.first() else {
        return Ok(());
    };
    let (n, k) = (first.rows(), first.cols());
    let mut end = 0;
    for (w, rows) in groups {
        ensure_shape!(
            (w.rows(), w.cols()) == (n, k) && same_kind(w, first),
            "{w:?} beside {first:?} in one grouped product"
        );
        ensure_shape!(
            end <= rows.start && rows.start <= rows.end && rows.end <= m,
            "rows {rows:?} after {end} of {m}"
        );
        end = rows.end;
    }
    if let Form::Plain(_) = first.form() {
        let matrices: Vec<_> = groups
            .iter()
            .filter_map(|(w, rows)| match w.form() {
                Form::Plain(matrix) => Some((matrix, rows.clone())),
                Form::Panels(_) => None,
            })
            .collect();
        grouped_linear(team, x, &matrices, y)?;
        for (w, rows) in groups {
            add_bias(w, &mut y[rows.start * n..rows.end * n]);
        }
        return Ok(());
    }
    let (x, y) = (Shared(x.as_ptr()), Shared(y.as_mut_ptr()));
    let stride = if gated { 2 * k } else { k };
    let job = |index: usize| {
        let (x, y) = (&x, &y);
        let (w, rows) = &groups[index];
        let skip = if source.is_some() {
            0
        } else {
            rows.start * stride
        };
        Job {
            x: x.0.wrapping_add(skip),
            x_stride: stride,
            source: source.map(|source| &source[rows.clone()]),
            rows: rows.len(),
            tiles: 0,
            gated,
            w,
            y: Output::Values(y.0.wrapping_add(rows.start * n)),
            y_stride: n,
            first: rows.start,
        }
    };
    // SAFETY: rows lie inside x (or its sources do) and y, and ranges are disjoint.
    unsafe { run(team, first, m, groups.len(), job) }
}

/// One small product per head: `y[row, h] = w[h] · x[row, h]`, x `[rows, H, k]` (any strides), w H weights `[n, k]` of
/// one format, y dense `[rows, H, n]`. MLA uses it for q̃ = Uᵀ q_nope (with U transposed at load) and o = P u.
///
/// # Errors
/// [`KernelError::Shape`], also for [`Compute::F32`], which [`crate::per_head_linear`] is for;
/// [`KernelError::Panicked`].
pub fn per_head_product(
    team: &ThreadTeam,
    x: HeadRows<'_>,
    w: &[Weight],
    y: &mut [f32],
) -> Result<(), KernelError> {
    let heads = x.heads();
    ensure_shape!(w.len() == heads, "{} weights for {heads} heads", w.len());
    let Some(first) = w.first() else {
        return Ok(());
    };
    let n = first.rows();
    for w in w {
        ensure_shape!(
            (w.rows(), w.cols()) == (n, x.width()) && same_kind(w, first),
            "{w:?} beside {first:?} for heads of width {}",
            x.width()
        );
        ensure_shape!(
            w.compute() != Compute::F32,
            "{w:?} is not packed for products by head"
        );
    }
    ensure_shape!(
        y.len() == x.rows() * heads * n,
        "y of {} values for {} rows of {heads} heads of {n}",
        y.len(),
        x.rows()
    );
    if x.rows() == 0 {
        return Ok(());
    }
    let y = Shared(y.as_mut_ptr());
    let job = |head: usize| {
        let y = &y;
        Job {
            x: x.starting_at(head).as_ptr(),
            x_stride: x.row_stride(),
            source: None,
            rows: x.rows(),
            tiles: 0,
            gated: false,
            w: &w[head],
            y: Output::Values(y.0.wrapping_add(head * n)),
            y_stride: heads * n,
            first: head * x.rows(),
        }
    };
    // SAFETY: the lengths were checked; heads write disjoint columns of y.
    unsafe { run(team, first, heads * x.rows(), heads, job) }
}

struct Shared<T>(T);

// SAFETY: only addresses are taken from it; `run`'s contract covers what is done with them.
unsafe impl<T> Sync for Shared<T> {}

/// m of x `[m, k]` and y `[m, n]`.
fn rows_of(w: &Weight, x: usize, y: usize) -> Result<usize, KernelError> {
    let m = x / w.cols();
    ensure_shape!(
        x == m * w.cols() && y == m * w.rows(),
        "x of {x} and y of {y} values for {w:?}"
    );
    Ok(m)
}

/// Whether two weights can be in one call. Static activations may differ.
fn same_kind(a: &Weight, b: &Weight) -> bool {
    matches!(
        (a.form(), b.form()),
        (Form::Plain(_), Form::Plain(_)) | (Form::Panels(_), Form::Panels(_))
    ) && a.compute() == b.compute()
}

fn add_bias(w: &Weight, y: &mut [f32]) {
    if let Some(bias) = w.bias() {
        for row in y.chunks_mut(w.rows()) {
            row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    }
}

/// Packs the rows of all jobs, `rows` in all, and computes them. `w` is one of the weights.
///
/// # Safety
/// Every job's pointers are valid for its shape and strides, no two share an element of y, and all weights are panels
/// of the same k and kind.
unsafe fn run<'a>(
    team: &ThreadTeam,
    w: &Weight,
    rows: usize,
    count: usize,
    job: impl Fn(usize) -> Job<'a> + Sync,
) -> Result<(), KernelError> {
    let isa = team.isa();
    let mut shape = Shape::default();
    // SAFETY: any processor can name sizes.
    unsafe { run_shape(isa, w.format(), &mut shape) };
    let cell_values = rows * w.cols().div_ceil(shape.k) * shape.cell.div_ceil(4);
    let cell_values = cell_values.next_multiple_of(16);
    let state_values = rows * size_of::<RowState>() / 4;
    let job = |index: usize| {
        let mut job = job(index);
        job.tiles = tiles(team, shape, count, job.rows);
        job
    };
    with_plan(team, shape, count, job, |plan| {
        with_scratch(cell_values + state_values, |scratch| {
            let cells = scratch.as_mut_ptr();
            let packed = Packed {
                cells: cells.cast(),
                states: cells.wrapping_add(cell_values).cast(),
            };
            let pack = |index: usize| {
                let pack = &plan.packs[index];
                let (job, rows) = (job(pack.job), pack.rows.0..pack.rows.1);
                with_scratch(if job.gated { MAX_ROWS * w.cols() } else { 0 }, |room| {
                    // SAFETY: the scratch has room for all rows, tasks pack disjoint ones; the rest is the caller's duty.
                    unsafe { run_pack(isa, &job, rows, packed, room.as_mut_ptr()) };
                });
            };
            let compute = |index: usize| {
                let part = plan.claimed(index);
                // SAFETY: all rows are packed by now, and parts are disjoint; the rest is the caller's duty.
                unsafe { run_part(isa, &job(part.job), part, packed) };
            };
            if !team.is_worth(plan.nanoseconds) {
                return team.run_solo(plan.packs.len() + plan.parts.len(), |task| {
                    match task.checked_sub(plan.packs.len()) {
                        None => pack(task),
                        Some(task) => compute(task),
                    }
                });
            }
            if rows * w.cols() < SOLO_VALUES {
                team.run_solo(plan.packs.len(), pack)?;
                return team.run(plan.parts.len(), |task, _| compute(task));
            }
            team.run_two(plan.packs.len(), plan.parts.len(), pack, compute)
        })
    })
}
