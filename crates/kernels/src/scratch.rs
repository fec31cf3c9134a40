//! Working memory of kernels, kept per thread between calls.

use std::cell::RefCell;

/// Sixteen values on a cache line of their own.
#[repr(C, align(64))]
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
struct Line([f32; 16]);

/// Memory for calls inside calls: slot i serves the i-th.
const SLOTS: usize = 4;

struct Kept {
    slots: [Vec<Line>; SLOTS],
    depth: usize,
}

thread_local! {
    static KEPT: RefCell<Kept> = const {
        RefCell::new(Kept {
            slots: [const { Vec::new() }; SLOTS],
            depth: 0,
        })
    };
}

/// Gives the slot back also when the body panics.
struct Slot {
    lines: Vec<Line>,
    depth: usize,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        KEPT.with_borrow_mut(|kept| {
            kept.depth = self.depth;
            if let Some(slot) = kept.slots.get_mut(self.depth) {
                *slot = lines;
            }
        });
    }
}

/// Calls `body` with `length` values (or a few more) aligned to 64 bytes, of unspecified content. A call inside `body`
/// gets other memory. Memory is kept for later calls of the thread, so steady work allocates nothing.
pub(crate) fn with_scratch<R>(length: usize, body: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut slot = KEPT.with_borrow_mut(|kept| {
        let depth = kept.depth;
        kept.depth += 1;
        let lines = kept.slots.get_mut(depth).map(std::mem::take);
        Slot {
            lines: lines.unwrap_or_default(),
            depth,
        }
    });
    let needed = length.div_ceil(16);
    if slot.lines.len() < needed {
        // Not grown in place: the old content need not be copied.
        slot.lines = Vec::new();
        slot.lines = vec![Line([0.0; 16]); needed];
    }
    body(bytemuck::cast_slice_mut(&mut slot.lines))
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

    #[test]
    fn memory_is_kept_at_every_depth() {
        let addresses = || {
            with_scratch(1000, |outer| {
                (
                    outer.as_ptr() as usize,
                    with_scratch(500, |inner| inner.as_ptr() as usize),
                )
            })
        };
        let first = addresses();
        assert_eq!(addresses(), first);
        let panicked = std::panic::catch_unwind(|| with_scratch(10, |_| panic!("on purpose")));
        assert!(panicked.is_err());
        assert_eq!(addresses(), first);
    }
}
