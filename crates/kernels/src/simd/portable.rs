//! Sixteen lanes in four arrays of four, for any processor; compilers turn these into 128-bit vectors (NEON).

use super::Simd;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

type V = [f32; 4];

#[inline(always)]
fn each(a: V, b: V, operation: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|lane| operation(a[lane], b[lane]))
}

#[inline(always)]
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

// SAFETY: only loads and stores have needs, and the trait's contract grants them.
#[expect(
    unsafe_op_in_unsafe_fn,
    reason = "the one reason for all bodies stands above"
)]
impl Simd for Portable {
    type V = V;
    const LANES: usize = 4;
    const TILE_ROWS: usize = 4;
    const COPIES_BF16: bool = true;

    #[inline(always)]
    unsafe fn splat(value: f32) -> V {
        [value; 4]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> V {
        from.cast::<V>().read_unaligned()
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> V {
        std::array::from_fn(|lane| {
            if lane < count {
                from.add(lane).read_unaligned()
            } else {
                0.0
            }
        })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> V {
        from.cast::<[u16; 4]>().read_unaligned().map(widen)
    }

    #[inline(always)]
    unsafe fn load_bf16_part(from: *const u16, count: usize) -> V {
        std::array::from_fn(|lane| {
            if lane < count {
                widen(unsafe { from.add(lane).read_unaligned() })
            } else {
                0.0
            }
        })
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: V) {
        to.cast::<V>().write_unaligned(v)
    }

    #[inline(always)]
    unsafe fn store_part(to: *mut f32, v: V, count: usize) {
        for (lane, value) in v.into_iter().enumerate().take(count) {
            to.add(lane).write_unaligned(value)
        }
    }

    #[inline(always)]
    unsafe fn without_small(v: V, limit: f32) -> V {
        v.map(|value| if value.abs() < limit { 0.0 } else { value })
    }

    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, v: V) {
        // Integers already: the conversion only has to keep them.
        to.cast::<[i8; 4]>()
            .write_unaligned(v.map(|value| value as i32 as i8))
    }

    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, v: V) {
        to.cast::<[u16; 4]>()
            .write_unaligned(v.map(crate::convert::round_bits))
    }

    #[inline(always)]
    unsafe fn pair_bf16(lower: *const u16, upper: *const u16, smallest: u16, to: *mut u32) {
        let lower = lower.cast::<[u16; 16]>().read_unaligned();
        let upper = upper.cast::<[u16; 16]>().read_unaligned();
        let large = |bits: u16| if bits & 0x7fff < smallest { 0 } else { bits };
        for (place, (lower, upper)) in lower.into_iter().zip(upper).enumerate() {
            let cell = u32::from(large(lower)) | (u32::from(large(upper)) << 16);
            to.add(place).write_unaligned(cell);
        }
    }

    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}

    #[inline(always)]
    unsafe fn prefetch_far(_address: *const u8) {}

    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        each(a, b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        each(a, b, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        each(a, b, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        each(a, b, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    unsafe fn choose(a: V, b: V, x: V, y: V) -> V {
        std::array::from_fn(|lane| if a[lane] > b[lane] { x[lane] } else { y[lane] })
    }

    #[inline(always)]
    unsafe fn larger(a: V, b: V) -> V {
        each(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn smaller(a: V, b: V) -> V {
        each(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn power_of_two(n: V) -> V {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    unsafe fn fold_parts([a, b, c, d]: [V; 4]) -> V {
        // Levels (i, i+8) and (i, i+4).
        let (low, high) = (each(a, c, |a, b| a + b), each(b, d, |a, b| a + b));
        each(low, high, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn add_lanes4(folded: [V; 4]) -> [f32; 4] {
        folded.map(|[a, b, c, d]| (a + c) + (b + d))
    }

    #[inline(always)]
    unsafe fn add_lanes([a, b, c, d]: V) -> f32 {
        (a + c) + (b + d)
    }
}
