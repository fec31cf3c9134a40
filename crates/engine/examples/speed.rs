//! Steps of a model without scheduler: prefill and decode rates, for profiling.
//!
//!     cargo run --profile dist -p twinfer-engine --example speed -- MODEL_DIR [THREADS]

use std::time::Instant;
use twinfer_engine::{CpuExecutor, Executor, KvMemory, LoadOptions, SeqWork, load};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: speed MODEL_DIR [THREADS]")?;
    let threads = args.next().map_or(Ok(2), |n| n.parse())?;
    let options = LoadOptions {
        threads,
        kv: KvMemory::Blocks(2048),
        ..LoadOptions::default()
    };
    let start = Instant::now();
    let mut loaded = load(dir.as_ref(), &options)?;
    println!(
        "loaded {} bytes in {:.3} s, {:?}",
        loaded.weight_bytes,
        start.elapsed().as_secs_f64(),
        loaded.executor
    );
    let executor = &mut loaded.executor;
    for (length, sequences) in [(64, 1), (512, 1), (64, 8)] {
        let rate = best(5, || prefill(executor, length, sequences))?;
        println!("prefill {sequences:2} x {length:4} tokens: {rate:9.0} tok/s");
    }
    for sequences in [1, 4, 8, 32] {
        let rate = best(3, || decode(executor, sequences, 128, 64))?;
        println!("decode {sequences:2} sequences behind 128 tokens: {rate:9.0} tok/s");
    }
    Ok(())
}

type Rate = Result<f64, Box<dyn std::error::Error>>;

fn best(rounds: usize, mut run: impl FnMut() -> Rate) -> Rate {
    (0..rounds).try_fold(0.0, |best: f64, _| Ok(best.max(run()?)))
}

fn tables(sequences: usize, tokens: usize) -> Vec<Vec<u32>> {
    let blocks = tokens.div_ceil(16);
    (0..sequences)
        .map(|s| (0..blocks).map(|b| (b * sequences + s) as u32).collect())
        .collect()
}

fn prefill(executor: &mut CpuExecutor, length: usize, sequences: usize) -> Rate {
    let vocab = executor.vocab_size() as u32;
    let tokens: Vec<u32> = (0..length as u32)
        .map(|i| 6 + i * 31 % (vocab - 6))
        .collect();
    let tables = tables(sequences, length);
    let batch: Vec<SeqWork<'_>> = tables
        .iter()
        .map(|blocks| SeqWork {
            tokens: &tokens,
            start: 0,
            blocks,
            logits: true,
        })
        .collect();
    let mut logits = Vec::new();
    let start = Instant::now();
    executor.execute(&batch, &mut logits)?;
    Ok((length * sequences) as f64 / start.elapsed().as_secs_f64())
}

fn decode(executor: &mut CpuExecutor, sequences: usize, prompt: usize, steps: usize) -> Rate {
    let tables = tables(sequences, prompt + steps);
    let mut logits = Vec::new();
    let tokens: Vec<u32> = (0..prompt as u32).map(|i| 6 + i).collect();
    for blocks in &tables {
        executor.execute(
            &[SeqWork {
                tokens: &tokens,
                start: 0,
                blocks,
                logits: false,
            }],
            &mut logits,
        )?;
    }
    let start = Instant::now();
    for step in 0..steps {
        let token = [6 + step as u32];
        let batch: Vec<SeqWork<'_>> = tables
            .iter()
            .map(|blocks| SeqWork {
                tokens: &token,
                start: prompt + step,
                blocks,
                logits: true,
            })
            .collect();
        executor.execute(&batch, &mut logits)?;
    }
    Ok((sequences * steps) as f64 / start.elapsed().as_secs_f64())
}
