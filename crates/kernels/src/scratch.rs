//! Working memory of kernels, kept per thread between calls.

use std::cell::RefCell;

/// Sixteen values on a cache line of their own.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; 16]);

thread_local! {
    static LINES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Calls `body` with `length` values (or a few more) aligned to 64 bytes, of unspecified content. A call inside `body`
/// gets other memory.
pub(crate) fn with_scratch<R>(length: usize, body: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut lines = LINES.with(RefCell::take);
    let needed = length.div_ceil(16);
    if lines.len() < needed {
        lines.resize(needed, Line([0.0; 16]));
    }
    // SAFETY: a Line is sixteen f32 without padding, so the vector's lines are that many values in a row.
    let values = unsafe {
        std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast::<f32>(), lines.len() * 16)
    };
    let result = body(values);
    LINES.with(|kept| {
        let mut kept = kept.borrow_mut();
        if kept.len() < lines.len() {
            *kept = lines;
        }
    });
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_aligned_and_nested_calls_do_not_share() {
        with_scratch(33, |outer| {
            assert!(outer.len() >= 33 && (outer.as_ptr() as usize).is_multiple_of(64));
            outer.fill(1.0);
            with_scratch(100, |inner| inner.fill(2.0));
            assert!(outer.iter().all(|&value| value == 1.0));
        });
    }
}
