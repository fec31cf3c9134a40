//! What a serving process takes, from its start until its KV is full.

use super::{THREADS, prompt};
use crate::bench::Sample;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};
use twinfer_config::Dtype;
use twinfer_engine::{KvMemory, LoadOptions, check};
use twinfer_it::{Instance, completion_body};

const EVERY: Duration = Duration::from_millis(10);
/// So much longer may half of the intervals be: reading walks the pages of the process.
const LATE: Duration = Duration::from_millis(2);
/// A choice of this benchmark: room for 5800 tokens of SmolLM2, or for 5 sequences of the greatest length. The more KV, the less the rest
/// counts.
const KV: u64 = 128 << 20;
const LENGTH: u32 = 1024;

/// Most anonymous and shared memory of `twinfer serve` in MiB beside packed weights and KV, and when it
/// was how much.
pub(super) fn measure(model: &Path) -> Result<(Sample, String)> {
    // What `serve` takes if it is told nothing, but for its KV and its length.
    let options = LoadOptions {
        kv: KvMemory::Bytes(KV),
        max_model_len: Some(LENGTH as usize),
        dtype: Dtype::Bf16,
        quantize: true,
        threads: THREADS,
        ..LoadOptions::default()
    };
    let planned = check(model, &options)?;
    let tokens = planned.num_blocks as usize * options.block_size;
    let needed = planned.weight_bytes + planned.kv_bytes;
    let mut instance = Instance::serve(
        model,
        &[
            "--quantization",
            "w8a8",
            "--dtype",
            "bf16",
            "--threads",
            &THREADS.to_string(),
            "--max-model-len",
            &LENGTH.to_string(),
            "--kv-cache-memory",
            &KV.to_string(),
            "--max-num-batched-tokens",
            &options.max_num_batched_tokens.to_string(),
            "--max-num-seqs",
            &options.max_num_seqs.to_string(),
            "--block-size",
            &options.block_size.to_string(),
        ],
        &[],
    );
    let pid = instance.process.id();
    let ready = AtomicBool::new(false);
    let peaks = std::thread::scope(|scope| -> Result<Peaks> {
        let (stop, stopped) = sync_channel(1);
        let ready = &ready;
        let sampler = scope.spawn(move || sample(pid, ready, &stopped));
        let filled = fill(&mut instance, tokens, ready);
        drop(stop);
        let peak = sampler.join();
        filled?;
        peak.unwrap_or_else(|_| bail!("the sampling thread panicked"))
    })?;
    let Intervals { median, most } = intervals(&peaks.times)?;
    if median > EVERY + LATE {
        bail!(
            "memory was read every {median:?} by the median, where {EVERY:?} and {LATE:?} more are allowed"
        );
    }
    let (loading, serving) = (peaks.loading, peaks.serving);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let sample = Sample {
        ours: mib(loading.max(serving)),
        floor: mib(needed),
        peer: None,
    };
    let note = format!(
        "most memory while loading {:.0} MiB, afterwards {:.0} MiB; weights {:.0} MiB, KV {:.0} MiB, planned workspace {:.0} MiB for steps of {} tokens; read {} times, every {:.1} ms by the median, {:.0} ms at most",
        mib(loading),
        mib(serving),
        mib(planned.weight_bytes),
        mib(planned.kv_bytes),
        mib(planned.workspace_bytes),
        options.max_num_batched_tokens,
        peaks.times.len(),
        median.as_secs_f64() * 1e3,
        most.as_secs_f64() * 1e3,
    );
    Ok((sample, note))
}

/// Waits until it is ready, then computes prompts until each block has been written.
fn fill(instance: &mut Instance, tokens: usize, ready: &AtomicBool) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        instance.ready().await;
        ready.store(true, Ordering::Relaxed);
        let each = LENGTH as usize - 16;
        for sequence in 0..tokens.div_ceil(each) {
            let body = completion_body(prompt(each, sequence), 1);
            let answer = instance.client().post("/v1/completions", &body).await;
            let answer = answer.map_err(anyhow::Error::msg)?;
            if answer.status != 200 {
                bail!("{}: {}", answer.status, answer.text());
            }
        }
        Ok(())
    })
}

/// Most bytes until it was ready and from then on, and when they were read.
struct Peaks {
    loading: u64,
    serving: u64,
    times: Vec<Instant>,
}

/// Reads at every tick until `stopped` is closed; ticks that pass while it reads are left out.
fn sample(pid: u32, ready: &AtomicBool, stopped: &Receiver<()>) -> Result<Peaks> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let (mut most, mut times) = ([0, 0], Vec::new());
    let mut next = Instant::now() + EVERY;
    loop {
        let wait = next.saturating_duration_since(Instant::now());
        if stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
            break;
        }
        times.push(Instant::now());
        let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        let field = |name: &str| -> Result<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
            kib.with_context(|| format!("{path} has no {name}"))
        };
        // Private memory, and memory that other processes can map: KV, and weights that are shared.
        let taken = (field("Anonymous:")? + field("Pss_Shmem:")?) << 10;
        let most = &mut most[usize::from(ready.load(Ordering::Relaxed))];
        *most = taken.max(*most);
        next = (next + EVERY).max(Instant::now());
    }
    Ok(Peaks {
        loading: most[0],
        serving: most[1],
        times,
    })
}

/// What lies between one reading and the next.
#[derive(Debug, PartialEq)]
struct Intervals {
    median: Duration,
    most: Duration,
}

fn intervals(times: &[Instant]) -> Result<Intervals> {
    let pairs = times.iter().zip(times.iter().skip(1));
    let mut between: Vec<Duration> = pairs.map(|(a, b)| b.duration_since(*a)).collect();
    between.sort();
    let (Some(&median), Some(&most)) = (between.get(between.len() / 2), between.last()) else {
        bail!("memory was read {} times only", times.len());
    };
    Ok(Intervals { median, most })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_those_between_readings() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let found = intervals(&[at(0), at(10), at(21), at(61)]).unwrap();
        assert_eq!(found.median, Duration::from_millis(11));
        assert_eq!(found.most, Duration::from_millis(40));
        assert!(intervals(&[start]).is_err());
    }
}
