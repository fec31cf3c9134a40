//! Matrix products y = x · wᵀ.

use std::ops::Range;

use crate::error::ensure_shape;
use crate::{HeadRows, KernelError, Matrix, ThreadTeam, reference};

/// Length of the blocks of k that are summed apart.
pub const K_BLOCK: usize = 512;

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
    let _ = team;
    reference::linear(x, w, y);
    Ok(())
}

/// One product per group of rows, as experts of a layer need it: for each `(w, rows)`, y[rows] = x[rows] · wᵀ. All
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
    let _ = team;
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
    for (w, rows) in groups {
        reference::linear(
            &x[rows.start * k..rows.end * k],
            w,
            &mut y[rows.start * n..rows.end * n],
        );
    }
    Ok(())
}

/// One small product per head: y[row, h] = w[h] · x[row, h], x `[rows, H, k]` (any strides), w H matrices `[n, k]`,
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
    let _ = team;
    ensure_shape!(
        w.len() == x.heads(),
        "{} matrices for {} heads",
        w.len(),
        x.heads()
    );
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
        y.len() == x.rows() * x.heads() * n,
        "y of {} values for {} rows of {} heads of {n}",
        y.len(),
        x.rows(),
        x.heads()
    );
    for row in 0..x.rows() {
        for (head, w) in w.iter().enumerate() {
            let start = (row * x.heads() + head) * n;
            reference::linear(x.head(row, head), w, &mut y[start..start + n]);
        }
    }
    Ok(())
}
