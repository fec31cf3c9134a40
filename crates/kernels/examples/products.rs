//! Speed of products with packed weights beside the processor's peaks, for the shapes of a small dense model and of two
//! mixture-of-experts models: `cargo run --release -p twinfer-kernels --example products [FILTER [THREADS [ROWS,..]]]`.
//!
//! Weights are taken in turn from copies that together exceed the caches, as in decode.

use std::sync::Arc;
use std::time::{Duration, Instant};

use twinfer_kernels::{
    Compute, DType, Format, Isa, Matrix, ThreadTeam, Weight, bf16, grouped_product, peaks, product,
};
use twinfer_sys::LargePages;

const SHAPES: [(&str, usize, usize, usize); 9] = [
    ("smol-gate-up", 3072, 576, 1),
    ("smol-qkv", 960, 576, 1),
    ("smol-down", 576, 1536, 1),
    ("smol-head", 49152, 576, 1),
    ("moe-qkv", 3072, 1024, 1),
    ("moe-o", 1024, 2048, 1),
    ("moe-head", 49152, 1024, 1),
    ("moe-experts-up", 1024, 1024, 32),
    ("moe-experts-down", 1024, 512, 32),
];
const BUDGET: Duration = Duration::from_millis(150);
const COPIES_BYTES: usize = 160 << 20;
const TOP_K: usize = 4;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cpus = twinfer_sys::available_cpus()?;
    let mut arguments = std::env::args().skip(1);
    let filter = arguments.next().unwrap_or_default();
    let threads = match arguments.next() {
        Some(text) => text.parse()?,
        None => cpus.len(),
    };
    let rows = arguments.next().unwrap_or_else(|| "1,16,32,512".to_owned());
    let rows = rows
        .split(',')
        .map(str::parse)
        .collect::<Result<Vec<usize>, _>>()?;
    let isa = Isa::detect(std::env::var("TWINFER_ISA").ok().as_deref())?;
    let team = ThreadTeam::with_spin(threads, Some(&cpus), isa, Duration::from_micros(20))?;
    let int8 = peaks::int8_dot(threads, BUDGET).giga_per_second;
    let half = peaks::bf16_dot(threads, BUDGET).giga_per_second;
    let read = peaks::read_bandwidth(threads, BUDGET, None).giga_per_second;
    println!("{isa}, {threads} threads: int8 {int8:.0}, bf16 {half:.0} GOP/s, read {read:.1} GB/s");
    println!(
        "{:>18} {:>5} {:>4} {:>9} {:>8} {:>7} {:>7} {:>7} {:>9}",
        "shape", "type", "m", "us", "GOP/s", "of peak", "GB/s", "of read", "of limit"
    );
    for (compute, peak, name) in [(Compute::W8A8, int8, "w8a8"), (Compute::Bf16, half, "bf16")] {
        for (shape, n, k, experts) in SHAPES {
            if !format!("{name}-{shape}").contains(&filter) {
                continue;
            }
            let values = (0..n * k).map(|i| bf16::from_f32((i % 251) as f32 - 125.0));
            let matrix = Matrix::from_bf16(n, k, values.collect())?;
            let first = Weight::pack(compute, &[&matrix])?;
            let copies = (COPIES_BYTES / first.size_bytes()).max(experts).max(1);
            let each = first.size_bytes();
            let mut memory = LargePages::private(each * copies)?;
            for place in memory.as_mut_slice().chunks_mut(each) {
                Weight::pack_into(compute, &[&matrix], place)?;
            }
            let memory = Arc::new(memory);
            let format = Format::of(compute, DType::Bf16);
            let weights = (0..copies)
                .map(|copy| Weight::from_packed(format, n, k, memory.clone(), copy * each))
                .collect::<Result<Vec<_>, _>>()?;
            for &m in &rows {
                // Other guests of the machine change it from second to second.
                let read = peaks::read_bandwidth(threads, BUDGET / 5, None).giga_per_second;
                let (touched, seconds) = if experts == 1 {
                    let (x, mut y) = (vec![0.5; m * k], vec![0.0; m * n]);
                    let mut turn = 0;
                    let seconds = typical(|| {
                        turn = (turn + 1) % copies;
                        product(&team, &x, &weights[turn], &mut y)
                    })?;
                    (first.size_bytes(), seconds)
                } else {
                    let total = m * TOP_K;
                    let active = total.min(experts);
                    let (x, mut y) = (vec![0.5; total * k], vec![0.0; total * n]);
                    let mut turn = 0;
                    let seconds = typical(|| {
                        turn = (turn + active) % (copies - active + 1);
                        let groups: Vec<_> = (0..active)
                            .map(|e| {
                                let rows = total * e / active..total * (e + 1) / active;
                                (&weights[turn + e], rows)
                            })
                            .collect();
                        grouped_product(&team, &x, &groups, &mut y)
                    })?;
                    (first.size_bytes() * active, seconds)
                };
                let rows = if experts == 1 { m } else { m * TOP_K };
                let operations = 2.0 * (rows * n * k) as f64 / seconds / 1e9;
                let bytes = touched as f64 / seconds / 1e9;
                let least = (2.0 * (rows * n * k) as f64 / peak).max(touched as f64 / read) / 1e9;
                println!(
                    "{shape:>18} {name:>5} {m:>4} {:>9.1} {operations:>8.0} {:>6.0}% {bytes:>7.1} {:>6.0}% {:>8.0}%",
                    seconds * 1e6,
                    operations / peak * 100.0,
                    bytes / read * 100.0,
                    least / seconds * 100.0
                );
            }
        }
    }
    Ok(())
}

/// The lower quartile of the time of a call.
fn typical<E>(mut body: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let begin = Instant::now();
    let mut times = Vec::new();
    while begin.elapsed() < BUDGET || times.len() < 5 {
        let begin = Instant::now();
        body()?;
        times.push(begin.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 4])
}
