//! Matrix products y = x · wᵀ.

mod tile;

use std::cell::RefCell;
use std::ops::Range;

use crate::error::ensure_shape;
use crate::scratch::with_scratch;
use crate::team::SOLO_NANOSECONDS;
use crate::{HeadRows, Isa, KernelError, Matrix, ThreadTeam};
use tile::{Product, TASK_ROWS, TILE_COLS, run_task, scratch_length};

/// Length of the blocks of k that are summed apart.
pub const K_BLOCK: usize = 512;

/// A task is worth at least this much, so that claiming it costs little.
const TASK_NANOSECONDS: usize = 8_000;
/// Tasks per thread, so that threads end together.
const TASKS_PER_THREAD: usize = 8;
/// Most columns of a task with many rows: its part of y stays in cache between blocks of k.
const TASK_COLS: usize = 256;

thread_local! {
    /// Memory for the tasks of the thread's next call.
    static KEPT: RefCell<Vec<Task>> = const { RefCell::new(Vec::new()) };
}

/// A part of one product.
struct Task {
    product: usize,
    rows: Range<usize>,
    cols: Range<usize>,
}

/// y = x · wᵀ for x `[m, k]`, w `[n, k]`, y `[m, n]`; m follows from the lengths and may be 0.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::Panicked`].
pub fn linear(team: &ThreadTeam, x: &[f32], w: &Matrix, y: &mut [f32]) -> Result<(), KernelError> {
    let (n, k) = (w.rows(), w.cols());
    let m = x.len() / k;
    ensure_shape!(
        x.len() == m * k && y.len() == m * n,
        "x of {} and y of {} values for {w:?}",
        x.len(),
        y.len()
    );
    let product = Product {
        x: x.as_ptr(),
        x_stride: k,
        rows: m,
        w,
        y: y.as_mut_ptr(),
        y_stride: n,
    };
    // SAFETY: the lengths were checked, and one product is disjoint.
    unsafe { run(team, &[product]) }
}

/// One product per group of rows, as experts of a layer need it: for each `(w, rows)`, `y[rows] = x[rows] · wᵀ`. All
/// matrices have the same shape `[n, k]`; x is `[m, k]`, y `[m, n]`. Rows of no group keep their content in y.
///
/// # Errors
/// [`KernelError::Shape`], also when ranges overlap, are out of order or exceed m; [`KernelError::Panicked`].
pub fn grouped_linear(
    team: &ThreadTeam,
    x: &[f32],
    groups: &[(&Matrix, Range<usize>)],
    y: &mut [f32],
) -> Result<(), KernelError> {
    let Some((first, _)) = groups.first() else {
        return Ok(());
    };
    let (n, k) = (first.rows(), first.cols());
    let m = x.len() / k;
    ensure_shape!(
        x.len() == m * k && y.len() == m * n,
        "x of {} and y of {} values for {first:?}",
        x.len(),
        y.len()
    );
    let mut end = 0;
    for (w, rows) in groups {
        ensure_shape!(
            (w.rows(), w.cols()) == (n, k),
            "{w:?} beside {first:?} in one grouped product"
        );
        ensure_shape!(
            end <= rows.start && rows.start <= rows.end && rows.end <= m,
            "rows {rows:?} after {end} of {m}"
        );
        end = rows.end;
    }
    let (x, y) = (x.as_ptr(), y.as_mut_ptr());
    let products: Vec<Product<'_>> = groups
        .iter()
        .filter(|(_, rows)| !rows.is_empty())
        .map(|(w, rows)| Product {
            // SAFETY: rows lie inside x and y, as checked above.
            x: unsafe { x.add(rows.start * k) },
            x_stride: k,
            rows: rows.len(),
            w,
            // SAFETY: as above.
            y: unsafe { y.add(rows.start * n) },
            y_stride: n,
        })
        .collect();
    // SAFETY: the lengths were checked, and ranges are disjoint.
    unsafe { run(team, &products) }
}

/// One small product per head: `y[row, h] = w[h] · x[row, h]`, x `[rows, H, k]` (any strides), w H matrices `[n, k]`,
/// y dense `[rows, H, n]`. MLA uses it for q̃ = Uᵀ q_nope (with U transposed at load) and o = P u.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::Panicked`].
pub fn per_head_linear(
    team: &ThreadTeam,
    x: HeadRows<'_>,
    w: &[Matrix],
    y: &mut [f32],
) -> Result<(), KernelError> {
    let heads = x.heads();
    ensure_shape!(w.len() == heads, "{} matrices for {heads} heads", w.len());
    let Some(first) = w.first() else {
        return Ok(());
    };
    let n = first.rows();
    for w in w {
        ensure_shape!(
            (w.rows(), w.cols()) == (n, x.width()),
            "{w:?} for heads of width {} to {n}",
            x.width()
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
    let y = y.as_mut_ptr();
    let products: Vec<Product<'_>> = w
        .iter()
        .enumerate()
        .map(|(head, w)| Product {
            x: x.starting_at(head).as_ptr(),
            x_stride: x.row_stride(),
            rows: x.rows(),
            w,
            // SAFETY: y holds rows · heads · n values, as checked above.
            y: unsafe { y.add(head * n) },
            y_stride: heads * n,
        })
        .collect();
    // SAFETY: the lengths were checked; heads write disjoint columns of y.
    unsafe { run(team, &products) }
}

/// # Safety
/// Every product's pointers are valid for its shape and strides, and no two products share an element of y.
unsafe fn run(team: &ThreadTeam, products: &[Product<'_>]) -> Result<(), KernelError> {
    let isa = team.isa();
    let total = products
        .iter()
        .map(|product| nanoseconds(isa, product))
        .sum();
    let mut tasks = KEPT.take();
    tasks.clear();
    plan(isa, products, total, team.threads(), &mut tasks);
    let result = team.run_worth(total, tasks.len(), |index, _| {
        let task = &tasks[index];
        let product = &products[task.product];
        let (rows, cols) = (task.rows.clone(), task.cols.clone());
        with_scratch(scratch_length(rows.len(), product.w.cols()), |scratch| {
            // SAFETY: the caller's duty; tasks of a product cover disjoint parts of y.
            unsafe { run_task(isa, product, rows, cols, scratch) }
        });
    });
    KEPT.set(tasks);
    result
}

/// Cuts products into tasks. Where it cuts changes no bits.
fn plan(isa: Isa, products: &[Product<'_>], total: usize, threads: usize, tasks: &mut Vec<Task>) {
    let budget = if threads == 1 || total < SOLO_NANOSECONDS {
        1
    } else {
        (total / TASK_NANOSECONDS).clamp(threads, threads * TASKS_PER_THREAD)
    };
    for (index, product) in products.iter().enumerate() {
        let (m, n) = (product.rows, product.w.rows());
        let row_tasks = m.div_ceil(TASK_ROWS);
        let share = (nanoseconds(isa, product) * budget)
            .div_ceil(total.max(1))
            .div_ceil(row_tasks.max(1));
        let limit = if m > TILE_COLS * 2 { TASK_COLS } else { n };
        let cols = n
            .div_ceil(share.max(1))
            .next_multiple_of(TILE_COLS)
            .min(limit);
        for row_task in 0..row_tasks {
            for col in (0..n).step_by(cols) {
                let rows = m * row_task / row_tasks..m * (row_task + 1) / row_tasks;
                tasks.push(Task {
                    product: index,
                    rows,
                    cols: col..(col + cols).min(n),
                });
            }
        }
    }
}

/// A rough time of a product on one core: arithmetic or ten bytes of weights per nanosecond, the slower counts.
fn nanoseconds(isa: Isa, product: &Product<'_>) -> usize {
    let products = product
        .rows
        .saturating_mul(product.w.rows())
        .saturating_mul(product.w.cols());
    (products / isa.products_per_nanosecond()).max(product.w.size_bytes() / 10)
}
