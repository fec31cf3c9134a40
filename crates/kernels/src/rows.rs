//! Operations on rows: norms, activations, sums, rotary embedding.

use crate::error::ensure_shape;
use crate::reference::LANES as STEP;
use crate::simd::{Simd, exp, simd_kernel};
use crate::{Isa, K_BLOCK, KernelError, ThreadTeam};

/// Values of a task, about four microseconds.
const TASK_VALUES: usize = 1 << 14;

/// A buffer that tasks write disjoint parts of.
#[derive(Clone, Copy)]
struct Parts(*mut f32);

// SAFETY: only tasks of one call use it, on disjoint parts, while the call holds the borrow.
unsafe impl Sync for Parts {}

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
    let width = weight.len();
    ensure_shape!(
        width > 0 && x.len().is_multiple_of(width) && out.len() == x.len(),
        "norm of {} into {} values in rows of {width}",
        x.len(),
        out.len()
    );
    let rows = x.len() / width;
    let task_rows = TASK_VALUES.div_ceil(width);
    let out = Parts(out.as_mut_ptr());
    team.run_worth(x.len() / 4, rows.div_ceil(task_rows), |task, _| {
        let out = &out;
        for row in task * task_rows..rows.min((task + 1) * task_rows) {
            let x = &x[row * width..(row + 1) * width];
            // SAFETY: rows are inside the buffers and disjoint between tasks.
            unsafe {
                run_norm(
                    team.isa(),
                    x.as_ptr(),
                    weight.as_ptr(),
                    epsilon,
                    out.0.add(row * width),
                    width,
                )
            };
        }
    })
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
    ensure_shape!(
        !x.is_empty() && x.len() == weight.len() && x.len() == out.len(),
        "norm of a row of {} into {} values with {} weights",
        x.len(),
        out.len(),
        weight.len()
    );
    // SAFETY: all three have the same length.
    unsafe {
        run_norm(
            isa,
            x.as_ptr(),
            weight.as_ptr(),
            epsilon,
            out.as_mut_ptr(),
            x.len(),
        )
    };
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
    ensure_shape!(
        !x.is_empty() && x.len() == weight.len(),
        "norm of a row of {} values with {} weights",
        x.len(),
        weight.len()
    );
    let (row, length) = (x.as_mut_ptr(), x.len());
    // SAFETY: both have the same length; reads and writes of x go through the one pointer, and the kernel reads x whole
    // before it writes, and then value by value.
    unsafe { run_norm(isa, row, weight.as_ptr(), epsilon, row, length) };
    Ok(())
}

/// out = silu(gate) · up for rows `[gate | up]` of 2 · `width` values each, out `[rows, width]`.
///
/// # Errors
/// [`KernelError::Shape`] unless `width` is above 0 and lengths fit; [`KernelError::Panicked`].
pub fn silu_mul_halves(
    team: &ThreadTeam,
    gate_up: &[f32],
    width: usize,
    out: &mut [f32],
) -> Result<(), KernelError> {
    ensure_shape!(
        width > 0 && out.len().is_multiple_of(width) && gate_up.len() == out.len() * 2,
        "{} gates and values in rows of 2 · {width} for {}",
        gate_up.len(),
        out.len()
    );
    let rows = out.len() / width;
    let task_rows = TASK_VALUES.div_ceil(width);
    let length = out.len();
    let out = Parts(out.as_mut_ptr());
    team.run_worth(length / 2, rows.div_ceil(task_rows), |task, _| {
        let out = &out;
        for row in task * task_rows..rows.min((task + 1) * task_rows) {
            let halves = &gate_up[row * 2 * width..(row + 1) * 2 * width];
            let (gate, up) = halves.split_at(width);
            // SAFETY: the row is inside the buffer and disjoint from other tasks'.
            unsafe {
                let out = out.0.add(row * width);
                run_silu_mul(team.isa(), gate.as_ptr(), up.as_ptr(), out, width);
            }
        }
    })
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

/// Rotates the pairs (i, i + half) of a row: (a, b) → (a·cos_i − b·sin_i, b·cos_i + a·sin_i), every operation rounded.
/// The layout of Llama and Qwen in Hugging Face files.
///
/// # Errors
/// [`KernelError::Shape`] unless the row has two values per cos and per sin.
pub fn rope_half(row: &mut [f32], cos: &[f32], sin: &[f32]) -> Result<(), KernelError> {
    ensure_shape!(
        row.len() == 2 * cos.len() && cos.len() == sin.len(),
        "rotation of {} values by {} cos and {} sin",
        row.len(),
        cos.len(),
        sin.len()
    );
    let (lower, upper) = row.split_at_mut(cos.len());
    for (((a, b), cos), sin) in lower.iter_mut().zip(upper).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
    Ok(())
}

/// x ← 1 / (1 + e^−x).
pub fn sigmoid_in_place(isa: Isa, values: &mut [f32]) {
    // SAFETY: pointer and length are those of the slice.
    unsafe { run_sigmoid(isa, values.as_mut_ptr(), values.len()) }
}

/// Softmax of one row; an empty row stays empty.
pub fn softmax_in_place(isa: Isa, row: &mut [f32]) {
    // SAFETY: pointer and length are those of the slice.
    unsafe { run_softmax(isa, row.as_mut_ptr(), row.len()) }
}

simd_kernel! {
    fn run_norm = norm(x: *const f32, weight: *const f32, epsilon: f32, out: *mut f32, length: usize)
}
simd_kernel! {
    fn run_silu_mul = silu_mul_kernel(gate: *const f32, up: *const f32, out: *mut f32, length: usize)
}
simd_kernel! {
    fn run_sigmoid = sigmoid_kernel(values: *mut f32, length: usize)
}
simd_kernel! {
    fn run_softmax = softmax(row: *mut f32, length: usize)
}

/// # Safety
/// All three pointers are valid for `length` > 0 values; `out` may be `x`.
#[inline(always)]
unsafe fn norm<S: Simd>(
    x: *const f32,
    weight: *const f32,
    epsilon: f32,
    out: *mut f32,
    length: usize,
) {
    // SAFETY: the caller's duty.
    unsafe {
        let mut squares = 0.0;
        for start in (0..length).step_by(K_BLOCK) {
            let sum = sum_of_squares::<S>(x.add(start), K_BLOCK.min(length - start));
            squares = if start == 0 { sum } else { squares + sum };
        }
        let scale = 1.0 / (squares / length as f32 + epsilon).sqrt();
        let scales = S::splat(scale);
        let whole = length - length % S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            let v = S::mul(S::mul(S::load(x.add(i)), scales), S::load(weight.add(i)));
            S::store(out.add(i), v);
        }
        for i in whole..length {
            out.add(i)
                .write(x.add(i).read() * scale * weight.add(i).read());
        }
    }
}

/// One block's sum of squares by the definition of products.
#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and column"
)]
#[inline(always)]
unsafe fn sum_of_squares<S: Simd>(x: *const f32, length: usize) -> f32 {
    // SAFETY: the caller grants `length` values.
    unsafe {
        let mut parts = [S::splat(0.0); 4];
        for step in 0..length.div_ceil(STEP) {
            for part in 0..S::PARTS {
                let v = load_padded::<S>(x, step * STEP + part * S::LANES, length, 0.0);
                parts[part] = S::fma(v, v, parts[part]);
            }
        }
        S::add_lanes(S::fold_parts(parts))
    }
}

/// The vector at `place`; `pad` from `length` on.
#[inline(always)]
pub(crate) unsafe fn load_padded<S: Simd>(
    values: *const f32,
    place: usize,
    length: usize,
    pad: f32,
) -> S::V {
    // SAFETY: the caller grants `length` values; none behind is read.
    unsafe {
        if place + S::LANES <= length {
            return S::load(values.add(place));
        }
        let mut padded = [pad; STEP];
        for i in place..length {
            padded[i - place] = values.add(i).read();
        }
        S::load(padded.as_ptr())
    }
}

/// Stores what of a vector lies before `length`.
#[inline(always)]
unsafe fn store_padded<S: Simd>(values: *mut f32, place: usize, length: usize, v: S::V) {
    // SAFETY: the caller grants `length` values; none behind is written.
    unsafe {
        if place + S::LANES <= length {
            S::store(values.add(place), v);
        } else if place < length {
            S::store_part(values.add(place), v, length - place);
        }
    }
}

/// 1 + e^−x.
#[inline(always)]
unsafe fn one_plus_exp_minus<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller's duty.
    unsafe { S::add(S::splat(1.0), exp::<S>(S::mul(x, S::splat(-1.0)))) }
}

/// # Safety
/// All three pointers are valid for `length` values.
#[inline(always)]
pub(crate) unsafe fn silu_mul_kernel<S: Simd>(
    gate: *const f32,
    up: *const f32,
    out: *mut f32,
    length: usize,
) {
    for place in (0..length).step_by(S::LANES) {
        // SAFETY: the caller's duty.
        unsafe {
            let g = load_padded::<S>(gate, place, length, 0.0);
            let u = load_padded::<S>(up, place, length, 0.0);
            let v = S::mul(S::div(g, one_plus_exp_minus::<S>(g)), u);
            store_padded::<S>(out, place, length, v);
        }
    }
}

/// # Safety
/// The pointer is valid for `length` values.
#[inline(always)]
unsafe fn sigmoid_kernel<S: Simd>(values: *mut f32, length: usize) {
    for place in (0..length).step_by(S::LANES) {
        // SAFETY: the caller's duty.
        unsafe {
            let x = load_padded::<S>(values, place, length, 0.0);
            store_padded::<S>(
                values,
                place,
                length,
                S::div(S::splat(1.0), one_plus_exp_minus::<S>(x)),
            );
        }
    }
}

/// # Safety
/// The pointer is valid for `length` values.
#[inline(always)]
unsafe fn softmax<S: Simd>(row: *mut f32, length: usize) {
    // SAFETY: the caller's duty.
    unsafe {
        let largest = largest::<S>(row, length);
        let sums = exp_and_sum::<S>(row, length, largest);
        let sums = S::splat(sums);
        for place in (0..length).step_by(S::LANES) {
            let v = load_padded::<S>(row, place, length, 0.0);
            store_padded::<S>(row, place, length, S::div(v, sums));
        }
    }
}

/// The largest of some values, NaN left out; −∞ for none.
///
/// # Safety
/// The pointer is valid for `length` values.
#[inline(always)]
pub(crate) unsafe fn largest<S: Simd>(values: *const f32, length: usize) -> f32 {
    // SAFETY: the caller's duty.
    unsafe {
        let mut largest = S::splat(f32::NEG_INFINITY);
        for place in (0..length).step_by(S::LANES) {
            largest = S::larger(
                load_padded::<S>(values, place, length, f32::NEG_INFINITY),
                largest,
            );
        }
        // None of the lanes is NaN, so the order of comparisons does not matter.
        S::largest_lane(largest)
    }
}

/// values ← e^(value − largest); their sum by sixteen lanes.
///
/// # Safety
/// The pointer is valid for `length` values.
#[expect(
    clippy::needless_range_loop,
    reason = "register tiles are addressed by row and column"
)]
#[inline(always)]
pub(crate) unsafe fn exp_and_sum<S: Simd>(values: *mut f32, length: usize, largest: f32) -> f32 {
    // SAFETY: the caller's duty.
    unsafe {
        let shift = S::splat(largest);
        let mut parts = [S::splat(0.0); 4];
        for step in 0..length.div_ceil(STEP) {
            for part in 0..S::PARTS {
                let place = step * STEP + part * S::LANES;
                // The exponential of −∞ is 0, which leaves sums of non-negative values as they are.
                let v = load_padded::<S>(values, place, length, f32::NEG_INFINITY);
                let v = exp::<S>(S::sub(v, shift));
                store_padded::<S>(values, place, length, v);
                parts[part] = S::add(parts[part], v);
            }
        }
        S::add_lanes(S::fold_parts(parts))
    }
}
