//! Products on the slower instruction sets: AVX2 beside its own peak, portable code beside AVX2.

use super::THREADS;
use super::ours::cores;
use anyhow::{Context, Result};
use std::time::{Duration, Instant};
use twinfer_kernels::{Compute, Isa, Matrix, ThreadTeam, Weight, bf16, peaks, product};

/// Rows of x, and `[n, k]` of the weights: projections of a layer 1024 wide.
const ROWS: usize = 512;
const SHAPES: [(usize, usize); 3] = [(3072, 1024), (1024, 2048), (1024, 4096)];
const SPIN: Duration = Duration::from_micros(20);

/// What AVX2 can do at best, 10^9 operations per second.
pub(super) fn avx2_peak(budget: Duration) -> Result<f64> {
    Ok(peaks::int8_dot_on(isa("avx2")?, THREADS, budget).giga_per_second)
}

/// Products on AVX2 and in portable code, 10^9 operations per second. Pins the thread.
pub(super) fn measure(at_least: Duration) -> Result<(f64, f64)> {
    Ok((
        gemm(isa("avx2")?, at_least)?,
        gemm(isa("portable")?, at_least)?,
    ))
}

fn isa(name: &str) -> Result<Isa> {
    Isa::detect(Some(name))
        .map_err(anyhow::Error::msg)
        .with_context(|| format!("instruction set {name}"))
}

/// All shapes in turn, int8 by int8, quantisation of x included; the median of the turns.
fn gemm(isa: Isa, at_least: Duration) -> Result<f64> {
    let cpus = cores()?;
    let team = ThreadTeam::with_spin(THREADS, Some(cpus), isa, SPIN)?;
    twinfer_sys::pin_thread(cpus.get(..1).context("no core")?)?;
    let mut works = Vec::new();
    for (n, k) in SHAPES {
        let values = (0..n * k).map(|i| bf16::from_f32((i % 251) as f32 - 125.0));
        let matrix = Matrix::from_bf16(n, k, values.collect())?;
        let weight = Weight::pack(Compute::W8A8, &[&matrix])?;
        let x: Vec<f32> = (0..ROWS * k).map(|i| (i % 127) as f32 - 63.0).collect();
        works.push((weight, x, vec![0.0; ROWS * n]));
    }
    let operations: usize = SHAPES.iter().map(|(n, k)| 2 * ROWS * n * k).sum();
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 3 || begin.elapsed() < at_least {
        let start = Instant::now();
        for (weight, x, y) in &mut works {
            product(&team, x, weight, y)?;
        }
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(operations as f64 / crate::bench::median(times.into_iter()) / 1e9)
}
