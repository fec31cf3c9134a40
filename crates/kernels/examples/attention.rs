//! Speed of MLA attention beside the processor's peaks:
//! `cargo run --release -p twinfer-kernels --example attention [THREADS]`.

use std::time::{Duration, Instant};

use twinfer_kernels::{DType, HeadRows, Isa, MlaParams, MlaSeq, ThreadTeam, mla_attention, peaks};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => twinfer_sys::available_cpus()?.len(),
    };
    let budget = Duration::from_millis(300);
    let isa = Isa::detect(std::env::var("TWINFER_ISA").ok().as_deref())?;
    let team = ThreadTeam::new(threads, None, isa)?;
    let fma = peaks::f32_fma(threads, budget);
    println!(
        "{isa}, {threads} threads: f32 peak {:.1} GFLOP/s",
        fma.giga_per_second
    );
    println!(
        "{:>6} {:>5} {:>5} {:>9} {:>5} {:>10} {:>9} {:>7} {:>9}",
        "heads", "seqs", "rows", "context", "type", "us", "GFLOP/s", "of peak", "KV GB/s"
    );
    for (heads, latent, rope) in [(16, 512, 64), (128, 512, 64), (4, 64, 16)] {
        for (kv_type, name) in [(DType::Bf16, "bf16"), (DType::F32, "f32")] {
            for (seqs, rows, context) in [
                (1, 1, 1024),
                (1, 1, 4096),
                (8, 1, 1024),
                (1, 64, 1024),
                (1, 256, 256),
            ] {
                let params = MlaParams {
                    heads,
                    latent,
                    rope,
                    block_size: 16,
                    kv_type,
                    scale: 0.1,
                };
                let unit = vec![0u8; 16 * (latent + rope) * kv_type.size()];
                let blocks: Vec<Vec<u8>> = (0..seqs * context / 16).map(|_| unit.clone()).collect();
                let units: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
                let tables: Vec<MlaSeq<'_>> = (0..seqs)
                    .map(|seq| MlaSeq {
                        rows: seq * rows..(seq + 1) * rows,
                        first_position: context - rows,
                        units: &units[seq * context / 16..(seq + 1) * context / 16],
                    })
                    .collect();
                let q_latent = vec![0.1; seqs * rows * heads * latent];
                let q_rope = vec![0.1; seqs * rows * heads * rope];
                let mut out = vec![0.0; q_latent.len()];
                let q_latent = HeadRows::dense(&q_latent, heads, latent)?;
                let q_rope = HeadRows::dense(&q_rope, heads, rope)?;
                let seconds = least(budget, || {
                    mla_attention(&team, &params, q_latent, q_rope, &tables, &mut out)
                })?;
                let keys = seqs * (0..rows).map(|row| context - row).sum::<usize>();
                let flops = 2.0 * (keys * heads * (2 * latent + rope)) as f64 / seconds / 1e9;
                let bytes =
                    (seqs * context * (latent + rope) * kv_type.size()) as f64 / seconds / 1e9;
                println!(
                    "{heads:>6} {seqs:>5} {rows:>5} {context:>9} {name:>5} {:>10.1} {flops:>9.1} {:>6.1}% {bytes:>9.1}",
                    seconds * 1e6,
                    100.0 * flops / fma.giga_per_second,
                );
            }
        }
    }
    Ok(())
}

/// Least time of a call over `budget`: others on the machine can only add to it.
fn least<E>(budget: Duration, mut body: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
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
