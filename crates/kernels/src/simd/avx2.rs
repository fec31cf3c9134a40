//! Sixteen lanes in two registers.

use std::arch::x86_64::*;

use super::Simd;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2;

/// All ones in the first `count` lanes.
#[inline(always)]
unsafe fn mask(count: usize) -> __m256i {
    // SAFETY: needs AVX2, as every caller does.
    unsafe {
        _mm256_cmpgt_epi32(
            _mm256_set1_epi32(count as i32),
            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
        )
    }
}

// SAFETY: every function body needs what the trait's contract already demands: the instruction set, and pointers valid
// for the values it names. Masked loads and stores do not touch what the mask excludes.
#[expect(
    unsafe_op_in_unsafe_fn,
    reason = "the one reason for all bodies stands above"
)]
impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const TILE_ROWS: usize = 3;
    const COPIES_BF16: bool = true;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        _mm256_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        _mm256_loadu_ps(from)
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> __m256 {
        _mm256_maskload_ps(from, mask(count))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m256 {
        let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
    }

    #[inline(always)]
    unsafe fn load_bf16_part(from: *const u16, count: usize) -> __m256 {
        let mut copy = [0u16; 8];
        std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), count.min(8));
        Self::load_bf16(copy.as_ptr())
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: __m256) {
        _mm256_storeu_ps(to, v)
    }

    #[inline(always)]
    unsafe fn store_part(to: *mut f32, v: __m256, count: usize) {
        _mm256_maskstore_ps(to, mask(count), v)
    }

    #[inline(always)]
    unsafe fn without_small(v: __m256, limit: f32) -> __m256 {
        let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), v);
        _mm256_and_ps(
            _mm256_cmp_ps::<_CMP_NLT_UQ>(magnitude, _mm256_set1_ps(limit)),
            v,
        )
    }

    #[inline(always)]
    unsafe fn store_i8(to: *mut i8, v: __m256) {
        let v = _mm256_cvtps_epi32(v);
        let halves = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        _mm_storel_epi64(to.cast(), _mm_packs_epi16(halves, halves))
    }

    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, v: __m256) {
        let bits = _mm256_castps_si256(v);
        let upper = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        let carry = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, carry));
        let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        let rounded = _mm256_blendv_epi8(rounded, quiet, nan);
        let packed = _mm_packus_epi32(
            _mm256_castsi256_si128(rounded),
            _mm256_extracti128_si256::<1>(rounded),
        );
        _mm_storeu_si128(to.cast(), packed)
    }

    #[inline(always)]
    unsafe fn pair_bf16(lower: *const u16, upper: *const u16, smallest: u16, to: *mut u32) {
        let limit = _mm256_set1_epi16(smallest.cast_signed());
        let magnitude = _mm256_set1_epi16(0x7fff);
        for half in 0..2 {
            let lower = _mm_loadu_si128(lower.add(half * 8).cast());
            let upper = _mm_loadu_si128(upper.add(half * 8).cast());
            let first = _mm256_castsi128_si256(_mm_unpacklo_epi16(lower, upper));
            let cells = _mm256_inserti128_si256::<1>(first, _mm_unpackhi_epi16(lower, upper));
            let small = _mm256_cmpgt_epi16(limit, _mm256_and_si256(cells, magnitude));
            let cells = _mm256_andnot_si256(small, cells);
            _mm256_storeu_si256(to.add(half * 8).cast(), cells);
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
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        _mm256_div_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn choose(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_GT_OQ>(a, b))
    }

    #[inline(always)]
    unsafe fn larger(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }

    #[inline(always)]
    unsafe fn smaller(a: __m256, b: __m256) -> __m256 {
        _mm256_min_ps(a, b)
    }

    #[inline(always)]
    unsafe fn power_of_two(n: __m256) -> __m256 {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }

    #[inline(always)]
    unsafe fn fold_parts(parts: [__m256; 4]) -> __m256 {
        _mm256_add_ps(parts[0], parts[1])
    }

    #[inline(always)]
    unsafe fn add_lanes4([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        // Level (i, i+4): the lower half of ab holds a's sums, the upper half b's.
        let ab = _mm256_add_ps(
            _mm256_permute2f128_ps::<0x20>(a, b),
            _mm256_permute2f128_ps::<0x31>(a, b),
        );
        let cd = _mm256_add_ps(
            _mm256_permute2f128_ps::<0x20>(c, d),
            _mm256_permute2f128_ps::<0x31>(c, d),
        );
        // Level (i, i+2): per half [a02, a13, c02, c13] and [b02, b13, d02, d13].
        let twos = _mm256_add_ps(
            _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd),
            _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd),
        );
        // Level (i, i+1): lanes 0 and 2 of each half.
        let ones = _mm256_add_ps(twos, _mm256_permute_ps::<0b10_11_00_01>(twos));
        let mut sums = [0.0; 8];
        _mm256_storeu_ps(sums.as_mut_ptr(), ones);
        [sums[0], sums[4], sums[2], sums[6]]
    }

    #[inline(always)]
    unsafe fn add_lanes(folded: __m256) -> f32 {
        let four = _mm_add_ps(
            _mm256_castps256_ps128(folded),
            _mm256_extractf128_ps::<1>(folded),
        );
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}
