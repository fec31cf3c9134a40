//! What this processor can do at best: read bandwidth and arithmetic peaks, for `twinfer machine`, roofline figures and
//! the shares that benchmarks report.
//!
//! Each function runs its loop on `threads` threads for about `budget`, in several turns, and returns a turn's count over
//! its time: the best turn's for arithmetic, the middle one's for reading, since what is read for milliseconds is read at
//! the rate that lasts. These are measurements: on a shared or throttled machine they come out lower.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Isa;

/// A measured rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// 10^9 per second: bytes for bandwidth, else operations (a multiply-add counts two).
    pub giga_per_second: f64,
    /// The instruction the loop is made of.
    pub instruction: &'static str,
    /// Threads that ran.
    pub threads: usize,
}

/// Length of a turn: short, so that some turn goes by without interruption.
const TURN: Duration = Duration::from_millis(2);

/// Bytes of one call of the reading loop.
const READ_CHUNK: usize = 1 << 19;

/// Counted work of one call of a loop, in operations.
type Loop = unsafe fn() -> usize;

/// Bandwidth of reading memory in large pages front to back, every thread its own part of a buffer four times as large as the node's
/// last-level caches (or of `bytes`, to measure a cache), rounded to half a MiB.
pub fn read_bandwidth(threads: usize, budget: Duration, bytes: Option<usize>) -> Peak {
    let threads = threads.max(1);
    let length = (bytes.unwrap_or_else(read_bytes) / threads / READ_CHUNK).max(1) * READ_CHUNK / 8;
    let instruction = if has_avx512() {
        "vpaddq zmm"
    } else {
        "64-bit add"
    };
    let turns = on_threads(threads, budget, || {
        let data = Numbers::new(length);
        let mut place = 0;
        move || {
            black_box(sum(black_box(
                &data.values()[place..place + READ_CHUNK / 8],
            )));
            place = (place + READ_CHUNK / 8) % length;
            READ_CHUNK
        }
    });
    let giga_per_second = turns[turns.len() / 2];
    Peak {
        giga_per_second,
        instruction,
        threads,
    }
}

/// Numbers in large pages, as weights lie; in small ones where there are none to be had.
enum Numbers {
    Large(twinfer_sys::LargePages),
    Small(Vec<u64>),
}

impl Numbers {
    fn new(length: usize) -> Self {
        let pages = twinfer_sys::LargePages::private(length * 8).map(|mut pages| {
            pages.as_mut_slice().fill(1);
            pages
        });
        pages.map_or_else(|_| Self::Small(vec![1; length]), Self::Large)
    }

    fn values(&self) -> &[u64] {
        match self {
            Self::Large(pages) => bytemuck::cast_slice(pages.as_slice()),
            Self::Small(values) => values,
        }
    }
}

/// At least 256 MiB, at most 4 GiB or a quarter of what can be had.
fn read_bytes() -> usize {
    let caches = twinfer_sys::last_level_cache_bytes().unwrap_or(0);
    let room = twinfer_sys::available_memory().map_or(u64::MAX, |bytes| bytes / 4);
    usize::try_from(caches.saturating_mul(4).clamp(1 << 28, 1 << 32).min(room)).unwrap_or(1 << 28)
}

/// f32 multiply-add peak of the widest vectors.
pub fn f32_fma(threads: usize, budget: Duration) -> Peak {
    arithmetic(threads, budget, loops::f32_fma())
}

/// bf16 dot-product peak (`vdpbf16ps`), or that of widening bf16 to f32 and multiply-add without it.
pub fn bf16_dot(threads: usize, budget: Duration) -> Peak {
    arithmetic(threads, budget, loops::bf16_dot())
}

/// int8 dot-product peak (VNNI `vpdpbusd`), or that of the multiply-add sequence without it.
pub fn int8_dot(threads: usize, budget: Duration) -> Peak {
    arithmetic(threads, budget, loops::int8_dot())
}

/// [`int8_dot`] within the instructions of `isa`, what a product on it can reach.
pub fn int8_dot_on(isa: Isa, threads: usize, budget: Duration) -> Peak {
    arithmetic(threads, budget, loops::int8_dot_on(isa))
}

fn arithmetic(threads: usize, budget: Duration, (instruction, body): (&'static str, Loop)) -> Peak {
    let threads = threads.max(1);
    // SAFETY: `loops` picks a loop whose instructions this processor has.
    let turns = on_threads(threads, budget, || move || unsafe { body() });
    let giga_per_second = turns[turns.len() - 1];
    Peak {
        giga_per_second,
        instruction,
        threads,
    }
}

/// Runs what `prepare` makes on all threads at the same time, turn by turn; 10^9 counts per second of each turn, ascending,
/// at least one.
fn on_threads<F: FnMut() -> usize>(
    threads: usize,
    budget: Duration,
    prepare: impl Fn() -> F + Sync,
) -> Vec<f64> {
    let barrier = Barrier::new(threads);
    let turns = (budget.as_nanos() / TURN.as_nanos()).clamp(1, 10_000);
    let turns: Vec<AtomicU64> = (0..turns).map(|_| AtomicU64::new(0)).collect();
    let member = || {
        let mut body = prepare();
        body();
        for turn in &turns {
            barrier.wait();
            let begin = Instant::now();
            let mut count = 0;
            while begin.elapsed() < TURN {
                count += body();
            }
            let rate = (count as f64 / begin.elapsed().as_secs_f64()) as u64;
            turn.fetch_add(rate, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(member);
        }
        member();
    });
    let mut rates: Vec<f64> = turns
        .into_iter()
        .map(|turn| turn.into_inner() as f64 / 1e9)
        .collect();
    rates.sort_by(f64::total_cmp);
    rates
}

fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("avx512f")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

fn sum(data: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        unsafe fn wide(data: &[u64]) -> u64 {
            plain(data)
        }
        if has_avx512() {
            // SAFETY: the feature was found.
            return unsafe { wide(data) };
        }
    }
    plain(data)
}

#[inline(always)]
fn plain(data: &[u64]) -> u64 {
    let mut sums = [0u64; 64];
    for chunk in data.as_chunks::<64>().0 {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*value);
        }
    }
    sums.iter().fold(0, |sum, value| sum.wrapping_add(*value))
}

#[cfg(target_arch = "x86_64")]
mod loops {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::Loop;
    use crate::isa::{Isa, Kind};

    const ROUNDS: usize = 20_000;
    /// Independent chains: more than latency times throughput of any processor so far.
    const CHAINS: usize = 12;

    pub(super) fn f32_fma() -> (&'static str, Loop) {
        if is_x86_feature_detected!("avx512f") {
            ("vfmadd231ps zmm", fma512)
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            ("vfmadd231ps ymm", fma256)
        } else {
            ("mulps, addps xmm", multiply_add)
        }
    }

    pub(super) fn bf16_dot() -> (&'static str, Loop) {
        if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512f") {
            ("vdpbf16ps zmm", dpbf16)
        } else if is_x86_feature_detected!("avx512f") {
            ("vpmovzxwd, vpslld, vfmadd231ps zmm", widened512)
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            ("vpmovzxwd, vpslld, vfmadd231ps ymm", widened256)
        } else {
            ("mulps, addps xmm", multiply_add)
        }
    }

    pub(super) fn int8_dot() -> (&'static str, Loop) {
        if is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512f") {
            ("vpdpbusd zmm", vnni512)
        } else if is_x86_feature_detected!("avxvnni") {
            ("vpdpbusd ymm", vnni256)
        } else if is_x86_feature_detected!("avx2") {
            ("vpmaddubsw, vpmaddwd, vpaddd ymm", maddubs256)
        } else {
            ("scalar multiply, add", integer_multiply_add)
        }
    }

    pub(super) fn int8_dot_on(isa: Isa) -> (&'static str, Loop) {
        match isa.0 {
            Kind::Avx512Bf16 | Kind::Avx512 => ("vpdpbusd zmm", vnni512),
            Kind::Avx2 => ("vpmaddubsw, vpmaddwd, vpaddd ymm", maddubs256),
            Kind::Portable => ("scalar multiply, add", integer_multiply_add),
        }
    }

    /// Runs `step` on independent accumulators; the operands are opaque to the compiler, so nothing is folded away.
    macro_rules! chains {
        ($(#[$feature:meta])* $name:ident, $zero:expr, $operand:expr, $operations:expr, |$sum:ident, $a:ident, $b:ident| $step:expr) => {
            $(#[$feature])*
            unsafe fn $name() -> usize {
                let mut sums = [$zero; CHAINS];
                let ($a, $b) = (black_box($operand), black_box($operand));
                for _ in 0..ROUNDS {
                    for $sum in &mut sums {
                        *$sum = $step;
                    }
                }
                black_box(sums);
                ROUNDS * CHAINS * $operations
            }
        };
    }

    chains!(
        #[target_feature(enable = "avx512f")]
        fma512,
        _mm512_setzero_ps(),
        _mm512_set1_ps(0.5),
        32,
        |sum, a, b| _mm512_fmadd_ps(a, b, *sum)
    );
    chains!(
        #[target_feature(enable = "avx2,fma")]
        fma256,
        _mm256_setzero_ps(),
        _mm256_set1_ps(0.5),
        16,
        |sum, a, b| _mm256_fmadd_ps(a, b, *sum)
    );
    chains!(multiply_add, [0.0f32; 4], [0.5f32; 4], 8, |sum, a, b| {
        std::array::from_fn(|i| a[i] * sum[i] + b[i])
    });
    chains!(
        #[target_feature(enable = "avx512f,avx512bf16")]
        dpbf16,
        _mm512_setzero_ps(),
        _mm512_set1_epi16(0x3f00),
        64,
        |sum, a, b| _mm512_dpbf16_ps(*sum, bits512(a), bits512(b))
    );
    chains!(
        #[target_feature(enable = "avx512f")]
        widened512,
        _mm512_setzero_ps(),
        _mm256_set1_epi16(0x3f00),
        32,
        |sum, a, b| _mm512_fmadd_ps(widen512(black_box(a)), widen512(b), *sum)
    );
    chains!(
        #[target_feature(enable = "avx2,fma")]
        widened256,
        _mm256_setzero_ps(),
        _mm_set1_epi16(0x3f00),
        16,
        |sum, a, b| _mm256_fmadd_ps(widen256(black_box(a)), widen256(b), *sum)
    );
    chains!(
        #[target_feature(enable = "avx512f,avx512vnni")]
        vnni512,
        _mm512_setzero_si512(),
        _mm512_set1_epi8(1),
        128,
        |sum, a, b| _mm512_dpbusd_epi32(*sum, a, b)
    );
    chains!(
        #[target_feature(enable = "avx2,avxvnni")]
        vnni256,
        _mm256_setzero_si256(),
        _mm256_set1_epi8(1),
        64,
        |sum, a, b| _mm256_dpbusd_avx_epi32(*sum, a, b)
    );
    chains!(
        #[target_feature(enable = "avx2")]
        maddubs256,
        _mm256_setzero_si256(),
        _mm256_set1_epi8(1),
        64,
        |sum, a, b| _mm256_add_epi32(
            *sum,
            _mm256_madd_epi16(_mm256_maddubs_epi16(black_box(a), b), _mm256_set1_epi16(1))
        )
    );
    chains!(integer_multiply_add, 0i32, 1i32, 2, |sum, a, b| sum
        .wrapping_mul(a)
        .wrapping_add(b));

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn bits512(v: __m512i) -> __m512bh {
        // SAFETY: both are 64 bytes of plain bits.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(v) }
    }

    #[target_feature(enable = "avx512f")]
    fn widen512(v: __m256i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v)))
    }

    #[target_feature(enable = "avx2")]
    fn widen256(v: __m128i) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(v)))
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod loops {
    use std::hint::black_box;

    use super::Loop;
    use crate::Isa;

    const ROUNDS: usize = 20_000;

    pub(super) fn f32_fma() -> (&'static str, Loop) {
        ("f32 multiply-add", float)
    }

    pub(super) fn bf16_dot() -> (&'static str, Loop) {
        ("f32 multiply-add", float)
    }

    pub(super) fn int8_dot() -> (&'static str, Loop) {
        ("i32 multiply-add", integer)
    }

    pub(super) fn int8_dot_on(_isa: Isa) -> (&'static str, Loop) {
        int8_dot()
    }

    unsafe fn float() -> usize {
        let mut sums = [0.0f32; 64];
        let (a, b) = (black_box(0.5f32), black_box(0.5f32));
        for _ in 0..ROUNDS {
            sums.iter_mut().for_each(|sum| *sum = a.mul_add(*sum, b));
        }
        black_box(sums);
        ROUNDS * sums.len() * 2
    }

    unsafe fn integer() -> usize {
        let mut sums = [0i32; 64];
        let (a, b) = (black_box(3i32), black_box(5i32));
        for _ in 0..ROUNDS {
            sums.iter_mut()
                .for_each(|sum| *sum = sum.wrapping_mul(a).wrapping_add(b));
        }
        black_box(sums);
        ROUNDS * sums.len() * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_positive_and_name_their_instruction() {
        let budget = Duration::from_millis(5);
        for threads in [0, 1, 2] {
            for peak in [
                read_bandwidth(threads, budget, Some(1 << 20)),
                f32_fma(threads, budget),
                bf16_dot(threads, budget),
                int8_dot(threads, budget),
                int8_dot_on(Isa::best(), threads, budget),
            ] {
                assert!(
                    peak.giga_per_second > 0.0 && peak.giga_per_second.is_finite(),
                    "{peak:?}"
                );
                assert!(!peak.instruction.is_empty() && peak.threads == threads.max(1));
            }
        }
    }
}
