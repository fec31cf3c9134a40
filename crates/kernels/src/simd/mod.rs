//! The vector operations kernels are written in, once for all instruction sets.
//!
//! A kernel is a generic function over [`Simd`], `#[inline(always)]` down to the intrinsics, and is entered through
//! [`simd_kernel!`], which makes one copy per instruction set with the right target features. Each operation has the
//! same result in every implementation, so kernels have equal bits by construction.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Avx512, Avx512Bf16, Avx512Level, without_small_bf16};
pub(crate) use portable::Portable;

use crate::reference::LANES as STEP;

/// Vectors of [`Simd::LANES`] f32 values, a divisor of the sixteen lanes of the definitions.
///
/// # Safety
/// All functions: the processor has the instruction set; pointers are valid for the number of values named (they need
/// not be aligned).
pub(crate) trait Simd: Copy + 'static {
    /// A vector.
    type V: Copy;
    /// Values of a vector.
    const LANES: usize;
    /// Vectors that hold sixteen lanes.
    const PARTS: usize = STEP / Self::LANES;
    /// Rows of x of a register tile; with four accumulators each, and operands, they fit the registers.
    const TILE_ROWS: usize;
    /// Whether a widened copy of bf16 values pays when more than one tile uses it: with few rows in a tile, widening
    /// in registers weighs on every product.
    const COPIES_BF16: bool;

    unsafe fn splat(value: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    /// `count` < LANES values, zeros behind.
    unsafe fn load_part(from: *const f32, count: usize) -> Self::V;
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    /// `count` < LANES values, zeros behind.
    unsafe fn load_bf16_part(from: *const u16, count: usize) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    /// The first `count` < LANES values.
    unsafe fn store_part(to: *mut f32, v: Self::V, count: usize);

    /// Zero where |v| < limit.
    unsafe fn without_small(v: Self::V, limit: f32) -> Self::V;
    /// LANES integers in −128 ..= 127.
    unsafe fn store_i8(to: *mut i8, v: Self::V);
    /// The nearest bf16 (ties to even) of LANES values, as bits; NaN stays NaN.
    unsafe fn store_bf16(to: *mut u16, v: Self::V);

    /// Stores the nearest bf16 (ties to even) of LANES values that are zero, no number, or no smaller than the smallest
    /// normal number.
    #[inline(always)]
    unsafe fn put_bf16(to: *mut u16, v: Self::V) {
        // SAFETY: the caller's duty.
        unsafe { Self::store_bf16(to, v) }
    }
    /// Sixteen cells of one bf16 of `lower` below one of `upper`, magnitudes below that of `smallest`, a power of two, as
    /// zero.
    unsafe fn pair_bf16(lower: *const u16, upper: *const u16, smallest: u16, to: *mut u32);

    /// [`Simd::pair_bf16`] of thirty-two of each; the first sixteen cells go to the first place.
    #[inline(always)]
    unsafe fn pair_bf16_twice(
        lower: *const u16,
        upper: *const u16,
        smallest: u16,
        to: [*mut u32; 2],
    ) {
        // SAFETY: the caller's duty.
        unsafe {
            Self::pair_bf16(lower, upper, smallest, to[0]);
            Self::pair_bf16(lower.add(16), upper.add(16), smallest, to[1]);
        }
    }

    /// Asks for the cache line at an address, which need not be mapped.
    unsafe fn prefetch(address: *const u8);
    /// [`Simd::prefetch`] into the second-level cache.
    unsafe fn prefetch_far(address: *const u8);

    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// a · b + c, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// a where a > b, else b (so b where either is NaN).
    unsafe fn larger(a: Self::V, b: Self::V) -> Self::V;
    /// a where a < b, else b.
    unsafe fn smaller(a: Self::V, b: Self::V) -> Self::V;
    /// 2^n for integers n in −126..=127; anything for NaN.
    unsafe fn power_of_two(n: Self::V) -> Self::V;
    /// p · 2^n for |p| in 0.5 ..= 2 and integers n in −151 ..= 129, rounded once.
    #[inline(always)]
    unsafe fn times_power_of_two(p: Self::V, n: Self::V) -> Self::V {
        use crate::math::ROUND_MAGIC;
        // SAFETY: the caller's duty. Two factors reach the subnormals and infinity, where 2^n alone is no normal number.
        unsafe {
            let magic = Self::splat(ROUND_MAGIC);
            let half = Self::mul(n, Self::splat(0.5));
            let half = Self::sub(Self::add(half, magic), magic);
            Self::mul(
                Self::mul(p, Self::power_of_two(half)),
                Self::power_of_two(Self::sub(n, half)),
            )
        }
    }

    /// x where a > b, else y.
    unsafe fn choose(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;

    /// [`crate::math::exp2_short`].
    #[inline(always)]
    unsafe fn exp2_short(x: Self::V) -> Self::V {
        use crate::math::{EXP2_MIN, EXP2_POLYNOMIAL, EXP2_ZERO, ROUND_MAGIC};
        // SAFETY: the caller's duty. The order of the operands of `larger` keeps NaN.
        unsafe {
            let clamped = Self::larger(Self::splat(EXP2_MIN), x);
            let magic = Self::splat(ROUND_MAGIC);
            let n = Self::sub(Self::add(clamped, magic), magic);
            let r = Self::sub(clamped, n);
            let mut p = Self::splat(EXP2_POLYNOMIAL[0]);
            p = Self::fma(p, r, Self::splat(EXP2_POLYNOMIAL[1]));
            p = Self::fma(p, r, Self::splat(EXP2_POLYNOMIAL[2]));
            p = Self::fma(p, r, Self::splat(1.0));
            let p = Self::mul(p, Self::power_of_two(n));
            Self::choose(Self::splat(EXP2_ZERO), x, Self::splat(0.0), p)
        }
    }

    /// Cells of the nearest bf16 of `first` below that of `second`, which are as for [`Simd::put_bf16`].
    #[inline(always)]
    unsafe fn put_bf16_pairs(to: *mut u32, first: Self::V, second: Self::V) {
        let (mut lower, mut upper) = ([0u16; STEP], [0u16; STEP]);
        // SAFETY: the caller's duty; a vector has at most sixteen lanes.
        unsafe {
            Self::put_bf16(lower.as_mut_ptr(), first);
            Self::put_bf16(upper.as_mut_ptr(), second);
            for lane in 0..Self::LANES {
                let cell = u32::from(lower[lane]) | (u32::from(upper[lane]) << 16);
                to.add(lane).write_unaligned(cell);
            }
        }
    }

    /// The largest of the lanes, none of which is NaN.
    #[inline(always)]
    unsafe fn largest_lane(v: Self::V) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; STEP];
        // SAFETY: a vector has at most sixteen lanes.
        unsafe { Self::store(lanes.as_mut_ptr(), v) };
        lanes.into_iter().fold(
            f32::NEG_INFINITY,
            |most, lane| if lane > most { lane } else { most },
        )
    }

    /// Brings sixteen lanes, held in PARTS vectors from the first lane on, down to one vector by the first levels of
    /// the tree; unused entries are ignored.
    unsafe fn fold_parts(parts: [Self::V; 4]) -> Self::V;
    /// The rest of the tree, for four folded vectors at once.
    unsafe fn add_lanes4(folded: [Self::V; 4]) -> [f32; 4];
    /// The rest of the tree for one folded vector.
    unsafe fn add_lanes(folded: Self::V) -> f32;
}

/// Stored elements a kernel widens to f32 exactly.
pub(crate) trait Element: Copy + 'static {
    /// Whether loading widens.
    const NARROW: bool;
    unsafe fn load<S: Simd>(from: *const Self) -> S::V;
    unsafe fn load_part<S: Simd>(from: *const Self, count: usize) -> S::V;
}

impl Element for f32 {
    const NARROW: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's duty.
        unsafe { S::load(from) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(from: *const Self, count: usize) -> S::V {
        // SAFETY: the caller's duty.
        unsafe { S::load_part(from, count) }
    }
}

/// bf16 as its bits.
impl Element for u16 {
    const NARROW: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's duty.
        unsafe { S::load_bf16(from) }
    }

    #[inline(always)]
    unsafe fn load_part<S: Simd>(from: *const Self, count: usize) -> S::V {
        // SAFETY: the caller's duty.
        unsafe { S::load_bf16_part(from, count) }
    }
}

/// Defines `unsafe fn name(isa, args)`, which runs the generic kernel compiled for that instruction set.
macro_rules! simd_kernel {
    (
        $(#[$attribute:meta])*
        $vis:vis fn $name:ident = $kernel:ident ( $($arg:ident : $type:ty),* $(,)? ) $(-> $result:ty)?
    ) => {
        $(#[$attribute])*
        ///
        /// # Safety
        /// That of the kernel it enters.
        $vis unsafe fn $name(isa: $crate::Isa, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            unsafe fn avx512($($arg: $type),*) $(-> $result)? {
                // SAFETY: the caller's duty.
                unsafe { $kernel::<$crate::simd::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $type),*) $(-> $result)? {
                // SAFETY: the caller's duty.
                unsafe { $kernel::<$crate::simd::Avx2>($($arg),*) }
            }
            match isa.0 {
                // SAFETY: an Isa of this kind exists only where the processor has its features.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Kind::Avx512 | $crate::isa::Kind::Avx512Bf16 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Kind::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: the caller's duty.
                $crate::isa::Kind::Portable => unsafe { $kernel::<$crate::simd::Portable>($($arg),*) },
            }
        }
    };
}
pub(crate) use simd_kernel;

/// Copies `length` values as f32.
///
/// # Safety
/// The processor has the instruction set; both pointers are valid for `length` values.
#[inline(always)]
pub(crate) unsafe fn widen<S: Simd, E: Element>(from: *const E, length: usize, to: *mut f32) {
    let whole = length / S::LANES * S::LANES;
    // SAFETY: the caller's duty.
    unsafe {
        for place in (0..whole).step_by(S::LANES) {
            S::store(to.add(place), E::load::<S>(from.add(place)));
        }
        if whole < length {
            let tail = E::load_part::<S>(from.add(whole), length - whole);
            S::store_part(to.add(whole), tail, length - whole);
        }
    }
}

/// [`crate::math::exp`] on vectors, operation by operation.
///
/// # Safety
/// The processor has the instruction set.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    use crate::math::{EXP_MAX, EXP_MIN, EXP_POLYNOMIAL, LN2_HIGH, LN2_LOW, LOG2_E, ROUND_MAGIC};
    // SAFETY: the caller's duty.
    unsafe {
        let x = S::smaller(S::splat(EXP_MAX), S::larger(S::splat(EXP_MIN), x));
        let magic = S::splat(ROUND_MAGIC);
        let n = S::sub(S::add(S::mul(x, S::splat(LOG2_E)), magic), magic);
        let r = S::fma(n, S::splat(-LN2_HIGH), x);
        let r = S::fma(n, S::splat(-LN2_LOW), r);
        let mut p = S::splat(EXP_POLYNOMIAL[0]);
        p = S::fma(p, r, S::splat(EXP_POLYNOMIAL[1]));
        p = S::fma(p, r, S::splat(EXP_POLYNOMIAL[2]));
        p = S::fma(p, r, S::splat(EXP_POLYNOMIAL[3]));
        p = S::fma(p, r, S::splat(EXP_POLYNOMIAL[4]));
        p = S::fma(p, r, S::splat(EXP_POLYNOMIAL[5]));
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::times_power_of_two(p, n)
    }
}
