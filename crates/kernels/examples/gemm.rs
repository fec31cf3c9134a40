//! Speed of matrix products beside the processor's peaks:
//! `cargo run --release -p twinfer-kernels --example gemm [THREADS]`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use twinfer_kernels::{Isa, Matrix, ThreadTeam, bf16, linear, peaks};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cpus = twinfer_sys::available_cpus()?;
    let threads = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => cpus.len(),
    };
    let budget = Duration::from_millis(300);
    let isa = Isa::detect(std::env::var("TWINFER_ISA").ok().as_deref())?;
    let team = ThreadTeam::new(threads, Some(&cpus), isa)?;
    let fma = peaks::f32_fma(threads, budget);
    let read = peaks::read_bandwidth(threads, budget, None);
    // Left to itself the system often puts both threads on one core for a while.
    twinfer_sys::pin_thread(&cpus[..1])?;
    println!(
        "{isa}, {threads} threads: f32 peak {:.1} GFLOP/s, read {:.1} GB/s",
        fma.giga_per_second, read.giga_per_second
    );
    println!(
        "{:>5} {:>6} {:>6} {:>5} {:>10} {:>9} {:>7} {:>9} {:>7}",
        "m", "n", "k", "type", "us", "GFLOP/s", "of peak", "GB/s", "of read"
    );
    for (n, k) in [(2048, 2048), (7168, 2048), (2048, 7168), (256, 256)] {
        for wide in [false, true] {
            let w = if wide {
                Matrix::from_f32(n, k, (0..n * k).map(|i| (i % 17) as f32 - 8.0).collect())?
            } else {
                Matrix::from_bf16(
                    n,
                    k,
                    (0..n * k)
                        .map(|i| bf16::from_f32((i % 17) as f32 - 8.0))
                        .collect(),
                )?
            };
            for m in [1, 2, 4, 8, 16, 32, 64, 256] {
                let x: Vec<f32> = (0..m * k).map(|i| (i % 13) as f32 * 0.1).collect();
                let mut y = vec![0.0; m * n];
                // Small matrices stay in cache between rounds; larger copies than the cache would hide the kernel.
                let seconds = best(budget, || linear(&team, &x, black_box(&w), &mut y))?;
                let flops = 2.0 * (m * n * k) as f64 / seconds / 1e9;
                let bytes = w.size_bytes() as f64 / seconds / 1e9;
                println!(
                    "{m:>5} {n:>6} {k:>6} {:>5} {:>10.1} {flops:>9.1} {:>6.1}% {bytes:>9.1} {:>6.1}%",
                    if wide { "f32" } else { "bf16" },
                    seconds * 1e6,
                    100.0 * flops / fma.giga_per_second,
                    100.0 * bytes / read.giga_per_second,
                );
            }
        }
    }
    Ok(())
}

/// Least time of a call over `budget`: others on the machine can only add to it.
fn best<E>(budget: Duration, mut body: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let (mut least, mut calls) = (f64::INFINITY, 0);
    let begin = Instant::now();
    while calls < 5 || begin.elapsed() < budget {
        let start = Instant::now();
        body()?;
        least = least.min(start.elapsed().as_secs_f64());
        calls += 1;
    }
    Ok(least)
}
