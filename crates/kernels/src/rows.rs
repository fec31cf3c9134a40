//! Operations on rows: norms, activations, sums, rotary embedding.

use crate::error::ensure_shape;
use crate::math::sigmoid;
use crate::{Isa, KernelError, ThreadTeam, reference};

/// x / sqrt(mean(x²) + ε) · weight for every row of x; the row width is that of `weight`.
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::Panicked`].
pub fn rms_norm(
    team: &ThreadTeam,
    x: &[f32],
    weight: &[f32],
    epsilon: f32,
    out: &mut [f32],
) -> Result<(), KernelError> {
    let _ = team;
    let width = weight.len();
    ensure_shape!(
        width > 0 && x.len().is_multiple_of(width) && out.len() == x.len(),
        "norm of {} into {} values in rows of {width}",
        x.len(),
        out.len()
    );
    for (x, out) in x.chunks(width).zip(out.chunks_mut(width)) {
        reference::rms_norm_row(x, weight, epsilon, out);
    }
    Ok(())
}

/// [`rms_norm`] of one row.
///
/// # Errors
/// [`KernelError::Shape`] unless all three lengths are equal and above 0.
pub fn rms_norm_row(
    isa: Isa,
    x: &[f32],
    weight: &[f32],
    epsilon: f32,
    out: &mut [f32],
) -> Result<(), KernelError> {
    let _ = isa;
    ensure_shape!(
        !x.is_empty() && x.len() == weight.len() && x.len() == out.len(),
        "norm of a row of {} into {} values with {} weights",
        x.len(),
        out.len(),
        weight.len()
    );
    reference::rms_norm_row(x, weight, epsilon, out);
    Ok(())
}

/// [`rms_norm`] of one row in place.
///
/// # Errors
/// As [`rms_norm_row`].
pub fn rms_norm_row_in_place(
    isa: Isa,
    x: &mut [f32],
    weight: &[f32],
    epsilon: f32,
) -> Result<(), KernelError> {
    let copy = x.to_vec();
    rms_norm_row(isa, &copy, weight, epsilon, x)
}

/// gate ← silu(gate) · up.
///
/// # Errors
/// [`KernelError::Shape`] unless both have the same length; [`KernelError::Panicked`].
pub fn silu_mul(team: &ThreadTeam, gate: &mut [f32], up: &[f32]) -> Result<(), KernelError> {
    let _ = team;
    ensure_shape!(
        gate.len() == up.len(),
        "{} gates for {} values",
        gate.len(),
        up.len()
    );
    reference::silu_mul(gate, up);
    Ok(())
}

/// y ← y + x.
///
/// # Errors
/// [`KernelError::Shape`] unless both have the same length.
pub fn add(y: &mut [f32], x: &[f32]) -> Result<(), KernelError> {
    ensure_shape!(
        y.len() == x.len(),
        "{} values added to {}",
        x.len(),
        y.len()
    );
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
    Ok(())
}

/// y ← y + scale · x, the product rounded before the sum.
///
/// # Errors
/// [`KernelError::Shape`] unless both have the same length.
pub fn add_scaled(y: &mut [f32], x: &[f32], scale: f32) -> Result<(), KernelError> {
    ensure_shape!(
        y.len() == x.len(),
        "{} values added to {}",
        x.len(),
        y.len()
    );
    y.iter_mut().zip(x).for_each(|(y, x)| *y += scale * x);
    Ok(())
}

/// Rotates the pairs (2i, 2i+1) of a row: (a, b) → (a·cos_i − b·sin_i, b·cos_i + a·sin_i), every operation rounded.
/// DeepSeek's layout.
///
/// # Errors
/// [`KernelError::Shape`] unless the row has two values per cos and per sin.
pub fn rope_interleaved(row: &mut [f32], cos: &[f32], sin: &[f32]) -> Result<(), KernelError> {
    ensure_shape!(
        row.len() == 2 * cos.len() && cos.len() == sin.len(),
        "rotation of {} values by {} cos and {} sin",
        row.len(),
        cos.len(),
        sin.len()
    );
    for ((pair, cos), sin) in row.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        let [a, b] = *pair;
        *pair = [a * cos - b * sin, b * cos + a * sin];
    }
    Ok(())
}

/// x ← 1 / (1 + e^−x).
pub fn sigmoid_in_place(isa: Isa, values: &mut [f32]) {
    let _ = isa;
    values.iter_mut().for_each(|value| *value = sigmoid(*value));
}

/// Softmax of one row; an empty row stays empty.
pub fn softmax_in_place(isa: Isa, row: &mut [f32]) {
    let _ = isa;
    reference::softmax_in_place(row);
}
