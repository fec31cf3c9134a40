//! Sixteen lanes in one register.

use std::arch::x86_64::*;

use super::Simd;

/// With or without bf16 dot products; the operations of [`Simd`] are the same.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Level<const BF16: bool>;

pub(crate) type Avx512 = Avx512Level<false>;
pub(crate) type Avx512Bf16 = Avx512Level<true>;

#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    // Counts are below 16 by contract; the shift stays defined for any.
    (1u16 << (count & 15)) - 1
}

/// 0, 32, 1, 33, ...: the first sixteen of one vector in pairs with those of another.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn pairs() -> __m512i {
    // SAFETY: the caller's duty.
    unsafe {
        let lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        let second = _mm512_slli_epi32::<16>(_mm512_add_epi32(lanes, _mm512_set1_epi32(32)));
        _mm512_or_si512(lanes, second)
    }
}

/// Zero where a bf16 has a magnitude below that of `smallest`, a power of two.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
pub(crate) unsafe fn without_small_bf16(v: __m512i, smallest: u16) -> __m512i {
    // SAFETY: the caller's duty. Doubling shifts the sign out.
    unsafe {
        let limit = _mm512_set1_epi16((smallest << 1).cast_signed());
        let large = _mm512_cmpge_epu16_mask(_mm512_add_epi16(v, v), limit);
        _mm512_maskz_mov_epi16(large, v)
    }
}

// SAFETY: every function body needs what the trait's contract already demands: the instruction set, and pointers valid
// for the values it names. Masked loads and stores do not touch what the mask excludes.
#[expect(
    unsafe_op_in_unsafe_fn,
    reason = "the one reason for all bodies stands above"
)]
impl<const BF16: bool> Simd for Avx512Level<BF16> {
    type V = __m512;
    const LANES: usize = 16;
    const TILE_ROWS: usize = 6;
    const COPIES_BF16: bool = false;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        _mm512_loadu_ps(from)
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> __m512 {
        _mm512_maskz_loadu_ps(mask(count), from)
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
    }

    #[inline(always)]
    unsafe fn load_bf16_part(from: *const u16, count: usize) -> __m512 {
        let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask(count), from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m512) {
        _mm512_storeu_ps(to, v)
    }

    #[inline(always)]
    unsafe fn store_part(to: *mut f32, v: __m512, count: usize) {
        _mm512_mask_storeu_ps(to, mask(count), v)
    }

    #[inline(always)]
    unsafe fn without_small(v: __m512, limit: f32) -> __m512 {
        let large = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(_mm512_abs_ps(v), _mm512_set1_ps(limit));
        _mm512_maskz_mov_ps(large, v)
    }

    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, v: __m512) {
        _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)))
    }

    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, v: __m512) {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let carry = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, carry));
        let quiet = _mm512_or_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(0x40));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        let rounded = _mm512_mask_mov_epi32(rounded, nan, quiet);
        _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(rounded))
    }

    #[inline(always)]
    unsafe fn put_bf16(to: *mut u16, v: __m512) {
        if BF16 {
            let bits = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
            _mm256_storeu_si256(to.cast(), bits);
        } else {
            Self::store_bf16(to, v);
        }
    }

    #[inline(always)]
    unsafe fn put_bf16_pairs(to: *mut u32, first: __m512, second: __m512) {
        if BF16 {
            let both = _mm512_cvtne2ps_pbh(second, first);
            let both = std::mem::transmute::<__m512bh, __m512i>(both);
            // The second vector is the upper half: its values are 16 behind, not 32.
            let nearer = _mm512_set1_epi32(16 << 16);
            let from = _mm512_sub_epi32(pairs(), nearer);
            _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi16(from, both));
        } else {
            let (mut lower, mut upper) = ([0u16; 16], [0u16; 16]);
            Self::store_bf16(lower.as_mut_ptr(), first);
            Self::store_bf16(upper.as_mut_ptr(), second);
            let lower = _mm512_cvtepu16_epi32(_mm256_loadu_si256(lower.as_ptr().cast()));
            let upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256(upper.as_ptr().cast()));
            let cells = _mm512_or_si512(lower, _mm512_slli_epi32::<16>(upper));
            _mm512_storeu_si512(to.cast(), cells);
        }
    }

    #[inline(always)]
    unsafe fn choose(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), x)
    }

    #[inline(always)]
    unsafe fn exp2_short(x: __m512) -> __m512 {
        use crate::math::{EXP2_POLYNOMIAL, EXP2_ZERO, ROUND_MAGIC};
        // What is far below becomes anything, and then zero.
        let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(EXP2_ZERO));
        let magic = _mm512_set1_ps(ROUND_MAGIC);
        let n = _mm512_sub_ps(_mm512_add_ps(x, magic), magic);
        let r = _mm512_sub_ps(x, n);
        let mut p = _mm512_set1_ps(EXP2_POLYNOMIAL[0]);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2_POLYNOMIAL[1]));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2_POLYNOMIAL[2]));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
        _mm512_maskz_scalef_ps(kept, p, n)
    }

    #[inline(always)]
    unsafe fn pair_bf16(lower: *const u16, upper: *const u16, smallest: u16, to: *mut u32) {
        let lower = _mm512_cvtepu16_epi32(_mm256_loadu_si256(lower.cast()));
        let upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256(upper.cast()));
        let cells = _mm512_or_si512(lower, _mm512_slli_epi32::<16>(upper));
        _mm512_storeu_si512(to.cast(), without_small_bf16(cells, smallest))
    }

    #[inline(always)]
    unsafe fn pair_bf16_twice(
        lower: *const u16,
        upper: *const u16,
        smallest: u16,
        to: [*mut u32; 2],
    ) {
        let lower = _mm512_loadu_si512(lower.cast());
        let upper = _mm512_loadu_si512(upper.cast());
        for (half, to) in to.into_iter().enumerate() {
            // Value i of the one, then of the other.
            let from = _mm512_add_epi16(pairs(), _mm512_set1_epi16(16 * half as i16));
            let cells = _mm512_permutex2var_epi16(lower, from, upper);
            _mm512_storeu_si512(to.cast(), without_small_bf16(cells, smallest));
        }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(address.cast())
    }

    #[inline(always)]
    unsafe fn prefetch_far(address: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(address.cast())
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn larger(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }

    #[inline(always)]
    unsafe fn smaller(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }

    #[inline(always)]
    unsafe fn power_of_two(n: __m512) -> __m512 {
        let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
    }

    #[inline(always)]
    unsafe fn times_power_of_two(p: __m512, n: __m512) -> __m512 {
        _mm512_scalef_ps(p, n)
    }

    #[inline(always)]
    unsafe fn largest_lane(v: __m512) -> f32 {
        _mm512_reduce_max_ps(v)
    }

    #[inline(always)]
    unsafe fn fold_parts(parts: [__m512; 4]) -> __m512 {
        parts[0]
    }

    #[inline(always)]
    unsafe fn add_lanes4([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        // Level (i, i+8): the lower half of ab holds a's sums, the upper half b's.
        let ab = _mm512_add_ps(
            _mm512_shuffle_f32x4::<0x44>(a, b),
            _mm512_shuffle_f32x4::<0xee>(a, b),
        );
        let cd = _mm512_add_ps(
            _mm512_shuffle_f32x4::<0x44>(c, d),
            _mm512_shuffle_f32x4::<0xee>(c, d),
        );
        // Level (i, i+4): quarter q holds the four partial sums of input q.
        let quarters = _mm512_add_ps(
            _mm512_shuffle_f32x4::<0x88>(ab, cd),
            _mm512_shuffle_f32x4::<0xdd>(ab, cd),
        );
        // Levels (i, i+2) and (i, i+1) inside quarters.
        let twos = _mm512_add_ps(quarters, _mm512_permute_ps::<0b01_00_11_10>(quarters));
        let ones = _mm512_add_ps(twos, _mm512_permute_ps::<0b10_11_00_01>(twos));
        let firsts =
            _mm512_permutexvar_ps(_mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12)), ones);
        let mut sums = [0.0; 4];
        _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(firsts));
        sums
    }

    #[inline(always)]
    unsafe fn add_lanes(folded: __m512) -> f32 {
        let eight = _mm256_add_ps(
            _mm512_castps512_ps256(folded),
            _mm512_extractf32x8_ps::<1>(folded),
        );
        super::avx2::Avx2::add_lanes(eight)
    }
}
