//! Speed of attention beside the processor's peaks:
//! `cargo run --release -p twinfer-kernels --example attention [FILTER [THREADS [ROWS [cold]]]]`. With `cold` KV comes from
//! memory, as each layer of a model finds it.

use std::time::{Duration, Instant};

use twinfer_kernels::{
    Compute, DType, GqaParams, HeadRows, Isa, KernelError, KvSeq, Matrix, MlaParams, ThreadTeam,
    Weight, bf16, gqa_attention, mla_attention, peaks, per_head_product,
};
use twinfer_sys::LargePages;

const BUDGET: Duration = Duration::from_millis(150);
const BLOCK: usize = 16;
const COPIES_BYTES: usize = 256 << 20;

/// Name, heads, KV heads (0: MLA), key, value.
const SHAPES: [(&str, usize, usize, usize, usize); 4] = [
    ("smol-gqa", 9, 3, 64, 64),
    ("moe-gqa", 16, 4, 128, 128),
    ("moe-mla", 16, 0, 576, 512),
    ("v3-mla", 128, 0, 576, 512),
];
/// Sequences, rows of each, positions.
const CALLS: [(usize, usize, usize); 6] = [
    (1, 1, 512),
    (16, 1, 512),
    (32, 1, 160),
    (1, 1, 4096),
    (1, 512, 512),
    (1, 512, 2048),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cpus = twinfer_sys::available_cpus()?;
    let mut arguments = std::env::args().skip(1);
    let filter = arguments.next().unwrap_or_default();
    let threads = match arguments.next() {
        Some(text) => text.parse()?,
        None => cpus.len(),
    };
    let only = arguments
        .next()
        .map(|text| text.parse::<usize>())
        .transpose()?;
    let cold = arguments.next().is_some_and(|word| word == "cold");
    let isa = Isa::detect(std::env::var("TWINFER_ISA").ok().as_deref())?;
    let team = ThreadTeam::with_spin(threads, Some(&cpus), isa, Duration::from_micros(20))?;
    let peak = peaks::bf16_dot(threads, BUDGET).giga_per_second;
    // Left to itself the system often puts both threads on one core for a while.
    twinfer_sys::pin_thread(&cpus[..1])?;
    println!("{isa}, {threads} threads: bf16 peak {peak:.0} GFLOP/s");
    println!(
        "{:>10} {:>5} {:>5} {:>9} {:>10} {:>9} {:>7} {:>9}",
        "shape", "seqs", "rows", "positions", "us", "GFLOP/s", "of peak", "KV GB/s"
    );
    for (name, heads, kv_heads, key, value) in SHAPES {
        if !name.contains(&filter) {
            continue;
        }
        for (seqs, rows, positions) in CALLS {
            if only.is_some_and(|only| only != rows) {
                continue;
            }
            let row = if kv_heads == 0 {
                key
            } else {
                2 * kv_heads * key
            };
            let unit = BLOCK * row * 2;
            let each = seqs * positions / BLOCK;
            let copies = if cold {
                COPIES_BYTES.div_ceil(each * unit)
            } else {
                1
            };
            let mut pages = LargePages::private(copies * each * unit)?;
            pages.as_mut_slice().fill(0x3c);
            let units: Vec<&[u8]> = pages.as_slice().chunks_exact(unit).collect();
            let table = |units| -> Vec<KvSeq<'_>> {
                let of_seq = |(seq, units)| KvSeq {
                    rows: seq * rows..(seq + 1) * rows,
                    first_position: positions - rows,
                    units,
                };
                <[&[u8]]>::chunks(units, positions / BLOCK)
                    .enumerate()
                    .map(of_seq)
                    .collect()
            };
            let tables: Vec<Vec<KvSeq<'_>>> = units.chunks(each).map(table).collect();
            let mut turns = tables.iter().cycle();
            let mut next = move || turns.next().map_or(&[][..], Vec::as_slice);
            let q = vec![0.1; seqs * rows * heads * key];
            let mut out = vec![0.0; seqs * rows * heads * value];
            let seconds = if kv_heads == 0 {
                let params = MlaParams {
                    heads,
                    latent: value,
                    rope: key - value,
                    block_size: BLOCK,
                    kv_type: DType::Bf16,
                    scale: 0.1,
                };
                let latent = HeadRows::part(&q, heads, key, 0..value)?;
                let rope = HeadRows::part(&q, heads, key, value..key)?;
                typical(|| mla_attention(&team, &params, latent, rope, next(), &mut out))?
            } else {
                let params = GqaParams {
                    heads,
                    kv_heads,
                    head_dim: key,
                    block_size: BLOCK,
                    kv_type: DType::Bf16,
                    scale: 0.1,
                };
                let q = HeadRows::dense(&q, heads, key)?;
                typical(|| gqa_attention(&team, &params, q, next(), &mut out))?
            };
            let pairs = seqs * (0..rows).map(|row| positions - row).sum::<usize>();
            let flops = 2.0 * (pairs * heads * (key + value)) as f64 / seconds / 1e9;
            println!(
                "{name:>10} {seqs:>5} {rows:>5} {positions:>9} {:>10.1} {flops:>9.1} {:>6.0}% {:>9.1}",
                seconds * 1e6,
                flops / peak * 100.0,
                (seqs * positions * row * 2) as f64 / seconds / 1e9
            );
        }
    }
    for (name, n, k) in [("heads-up", 512, 128), ("heads-down", 128, 512)] {
        if !name.contains(&filter) {
            continue;
        }
        let heads = 16;
        let matrix = Matrix::from_bf16(n, k, vec![bf16::from_f32(0.5); n * k])?;
        let weights = (0..heads)
            .map(|_| Weight::pack(Compute::Bf16, &[&matrix]))
            .collect::<Result<Vec<_>, _>>()?;
        for rows in [1, 16, 512] {
            if only.is_some_and(|only| only != rows) {
                continue;
            }
            let (x, mut y) = (vec![0.5; rows * heads * k], vec![0.0; rows * heads * n]);
            let x = HeadRows::dense(&x, heads, k)?;
            let seconds = typical(|| per_head_product(&team, x, &weights, &mut y))?;
            let flops = 2.0 * (rows * heads * n * k) as f64 / seconds / 1e9;
            println!(
                "{name:>10} {:>5} {rows:>5} {:>9} {:>10.1} {flops:>9.1} {:>6.0}%",
                "",
                "",
                seconds * 1e6,
                flops / peak * 100.0
            );
        }
    }
    Ok(())
}

/// The lower quartile of the time of a call.
fn typical(mut body: impl FnMut() -> Result<(), KernelError>) -> Result<f64, KernelError> {
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
