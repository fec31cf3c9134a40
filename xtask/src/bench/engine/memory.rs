//! What a serving process takes, from its start until its KV is full.

use super::ours::options;
use super::{THREADS, prompt};
use crate::bench::Sample;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;
use twinfer_engine::{KvMemory, LoadOptions, check};
use twinfer_it::{Instance, completion_body};

const EVERY: Duration = Duration::from_millis(10);
const KV: u64 = 128 << 20;
const LENGTH: u32 = 1024;

/// Most anonymous and shared memory of `twinfer serve` in MiB beside packed weights and KV, and when it
/// was how much.
pub(super) fn measure(model: &Path) -> Result<(Sample, String)> {
    let planned = check(
        model,
        &LoadOptions {
            kv: KvMemory::Bytes(KV),
            max_model_len: Some(LENGTH as usize),
            ..options(true, 1)?
        },
    )?;
    let tokens = planned.num_blocks as usize * LoadOptions::default().block_size;
    let needed = planned.weight_bytes + planned.kv_bytes;
    let mut instance = Instance::serve(
        model,
        &[
            "--quantization",
            "w8a8",
            "--threads",
            &THREADS.to_string(),
            "--max-model-len",
            &LENGTH.to_string(),
            "--kv-cache-memory",
            &KV.to_string(),
        ],
        &[],
    );
    let pid = instance.process.id();
    let ready = AtomicBool::new(false);
    let (loading, serving) = std::thread::scope(|scope| -> Result<(u64, u64)> {
        let (stop, stopped) = sync_channel(1);
        let ready = &ready;
        let sampler = scope.spawn(move || peaks(pid, ready, &stopped));
        let filled = fill(&mut instance, tokens, ready);
        drop(stop);
        let peak = sampler.join();
        filled?;
        peak.unwrap_or_else(|_| bail!("the sampling thread panicked"))
    })?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let sample = Sample {
        ours: mib(loading.max(serving)),
        floor: mib(needed),
        peer: None,
    };
    let note = format!(
        "most memory while loading {:.0} MiB, afterwards {:.0} MiB; weights {:.0} MiB, KV {:.0} MiB, planned workspace {:.0} MiB",
        mib(loading),
        mib(serving),
        mib(planned.weight_bytes),
        mib(planned.kv_bytes),
        mib(planned.workspace_bytes),
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

/// The most that was seen until it was ready, and from then on until `stopped` is closed, in bytes.
fn peaks(pid: u32, ready: &AtomicBool, stopped: &Receiver<()>) -> Result<(u64, u64)> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let (mut most, mut samples) = ([0, 0], 0);
    while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
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
        samples += 1;
    }
    if samples < 10 {
        bail!("{path} was read {samples} times only");
    }
    Ok((most[0], most[1]))
}
