//! Soak of one prefill and one decode instance behind a router: after the load, what was taken must
//! be back (contract 3 of the architecture page).

use anyhow::{Result, bail};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use twinfer_it::{Client, Cluster, ClusterOptions, Instance};

/// Seconds of the KV lease in the soak.
const LEASE: u64 = 5;
/// Idle connections that a process may keep pooled to its peers.
const POOLED_CONNECTIONS: usize = 96;

/// How hard and how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Streams at the same time.
    #[arg(long, default_value_t = 64)]
    pub(crate) streams: u32,
    /// Share of requests whose client leaves midway, 0 to 1.
    #[arg(long, default_value_t = 0.2)]
    pub(crate) disconnect: f64,
    /// Seconds of load, after a warm-up of a tenth of it.
    #[arg(long, default_value_t = 60)]
    pub(crate) seconds: u64,
    /// Soak of so many ranks over executors that compute nothing, in place of all that.
    #[arg(long)]
    pub(crate) ranks: Option<u32>,
    /// With --ranks: an instance of so many ranks, served over HTTP for --seconds.
    #[arg(long, requires = "ranks")]
    pub(crate) http: bool,
    /// Steps of `--ranks`.
    #[arg(long, default_value_t = 1_000_000)]
    pub(crate) steps: u32,
}

#[derive(Default)]
struct Counts {
    finished: AtomicU64,
    left: AtomicU64,
    failed: AtomicU64,
    next: AtomicU64,
}

/// What a process holds.
#[derive(Clone, Debug, PartialEq)]
struct Held {
    name: String,
    kv_used: f64,
    kv_held: f64,
    in_flight: f64,
    files: usize,
    sockets: usize,
    resident_mib: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let (Some(ranks), true) = (args.ranks, args.http) {
        return crate::soak_ranks::run(ranks, args.seconds);
    }
    if let Some(ranks) = args.ranks {
        return crate::bench::drift(ranks, args.steps);
    }
    if !(0.0..=1.0).contains(&args.disconnect) {
        bail!(
            "--disconnect is {}; it lies between 0 and 1",
            args.disconnect
        );
    }
    if args.streams == 0 || args.seconds == 0 {
        bail!("--streams and --seconds are at least 1");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(soak(args))
}

async fn soak(args: &Args) -> Result<()> {
    let options = ClusterOptions {
        serve: vec![
            "--kv-lease".into(),
            LEASE.to_string(),
            "--max-num-seqs".into(),
            "64".into(),
        ],
        ..ClusterOptions::default()
    };
    let cluster = Cluster::start(&options).await;
    let warm_up = Arc::new(Counts::default());
    load(
        &cluster,
        args,
        Duration::from_secs((args.seconds / 10).max(3)),
        &warm_up,
    )
    .await?;
    let before = settled(&cluster, None).await?;
    let counts = Arc::new(Counts::default());
    load(&cluster, args, Duration::from_secs(args.seconds), &counts).await?;
    let ended = Instant::now();
    let after = settled(&cluster, Some(&before)).await?;
    println!(
        "{} streams for {} s: {} finished, {} left midway, {} failed; gauges back after {:.1} s (lease {LEASE} s)",
        args.streams,
        args.seconds,
        counts.finished.load(Ordering::Relaxed),
        counts.left.load(Ordering::Relaxed),
        counts.failed.load(Ordering::Relaxed),
        ended.elapsed().as_secs_f64(),
    );
    println!(
        "{:<10} {:>8} {:>8} {:>10} {:>11} {:>13} {:>15}",
        "", "KV used", "KV held", "in flight", "files", "sockets", "resident MiB"
    );
    for (a, b) in before.iter().zip(&after) {
        println!(
            "{:<10} {:>3} {:>4} {:>3} {:>4} {:>4} {:>5} {:>5} {:>5} {:>6} {:>6} {:>7.0} {:>7.0}",
            a.name,
            a.kv_used,
            b.kv_used,
            a.kv_held,
            b.kv_held,
            a.in_flight,
            b.in_flight,
            a.files,
            b.files,
            a.sockets,
            b.sockets,
            a.resident_mib,
            b.resident_mib,
        );
    }
    if counts.failed.load(Ordering::Relaxed) > 0 {
        bail!("{} requests failed", counts.failed.load(Ordering::Relaxed));
    }
    if counts.finished.load(Ordering::Relaxed) == 0
        || (args.disconnect > 0.0 && counts.left.load(Ordering::Relaxed) == 0)
    {
        bail!("the load did nothing");
    }
    Ok(())
}

async fn load(
    cluster: &Cluster,
    args: &Args,
    duration: Duration,
    counts: &Arc<Counts>,
) -> Result<()> {
    let end = Instant::now() + duration;
    let mut streams = tokio::task::JoinSet::new();
    for _ in 0..args.streams {
        let (client, counts, share) = (cluster.client(), Arc::clone(counts), args.disconnect);
        streams.spawn(async move {
            while Instant::now() < end {
                one_request(&client, &counts, share).await;
            }
        });
    }
    while let Some(ended) = streams.join_next().await {
        ended?;
    }
    Ok(())
}

async fn one_request(client: &Client, counts: &Counts, share: f64) {
    let number = counts.next.fetch_add(1, Ordering::Relaxed);
    let draw = mix(number);
    let length = 1 + draw % 400;
    let prompt: Vec<u64> = (0..length).map(|i| 6 + mix(draw ^ i) % 1500).collect();
    let leaves = (mix(draw) % 1000) as f64 / 1000.0 < share;
    let body = json!({"model": "demo", "prompt": prompt, "max_tokens": 4 + draw % 60, "ignore_eos": true,
        "temperature": 1, "seed": number, "stream": true});
    let failed = |why: String| {
        if counts.failed.fetch_add(1, Ordering::Relaxed) < 5 {
            eprintln!("request {number}: {why}");
        }
    };
    let mut stream = match client.stream("/v1/completions", &body).await {
        Ok(stream) if stream.status == 200 => stream,
        Ok(stream) => {
            let status = stream.status;
            let text = stream
                .whole()
                .await
                .map(|answer| answer.text())
                .unwrap_or_default();
            return failed(format!("status {status}: {text}"));
        }
        Err(error) => return failed(error),
    };
    let mut pieces = 0;
    let mut tail = Vec::new();
    loop {
        match stream.piece().await {
            Ok(Some(piece)) => {
                tail.extend_from_slice(&piece);
                pieces += 1;
                if leaves && pieces > draw % 8 {
                    counts.left.fetch_add(1, Ordering::Relaxed);
                    return;
                }
            }
            Ok(None) => break,
            Err(error) => return failed(error),
        }
    }
    if !tail.ends_with(b"data: [DONE]\n\n") || tail.windows(8).any(|part| part == b"\"error\":") {
        return failed(format!(
            "stream ended badly: {}",
            String::from_utf8_lossy(&tail[tail.len().saturating_sub(300)..])
        ));
    }
    counts.finished.fetch_add(1, Ordering::Relaxed);
}

/// Waits until nothing is in flight and every process holds what it held before, at most lease + 1 s.
async fn settled(cluster: &Cluster, before: Option<&[Held]>) -> Result<Vec<Held>> {
    let end = Instant::now() + Duration::from_secs(LEASE + 1);
    loop {
        let mut now = Vec::new();
        for (name, instance) in named(cluster) {
            now.push(held(name, instance).await?);
        }
        let mut wrong = Vec::new();
        for (i, held) in now.iter().enumerate() {
            if held.kv_used != 0.0 || held.kv_held != 0.0 || held.in_flight != 0.0 {
                wrong.push(format!("{held:?}"));
            }
            if let Some(before) = before.and_then(|all| all.get(i))
                && (held.files != before.files
                    || held.sockets > before.sockets.max(POOLED_CONNECTIONS))
            {
                wrong.push(format!("{held:?}, before {before:?}"));
            }
        }
        if wrong.is_empty() {
            return Ok(now);
        }
        if Instant::now() > end {
            bail!("not back within lease + 1 s: {}", wrong.join("; "));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn named(cluster: &Cluster) -> impl Iterator<Item = (&'static str, &Instance)> {
    let prefill = cluster.prefill.iter().map(|instance| ("prefill", instance));
    let decode = cluster.decode.iter().map(|instance| ("decode", instance));
    prefill.chain(decode).chain([("router", &cluster.router)])
}

async fn held(name: &str, instance: &Instance) -> Result<Held> {
    let metrics = instance.metrics().await;
    let (mut files, mut sockets) = (0, 0);
    for entry in std::fs::read_dir(format!("/proc/{}/fd", instance.process.id()))? {
        // A descriptor that is closed meanwhile is none that is held.
        let Ok(target) = std::fs::read_link(entry?.path()) else {
            continue;
        };
        if target.to_string_lossy().starts_with("socket:") {
            sockets += 1
        } else {
            files += 1
        }
    }
    let pages: f64 = std::fs::read_to_string(format!("/proc/{}/statm", instance.process.id()))?
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .unwrap_or(0.0);
    Ok(Held {
        name: name.to_owned(),
        kv_used: metrics.sum("twinfer_kv_blocks", &["state=\"used\""]),
        kv_held: metrics.sum("twinfer_kv_blocks", &["state=\"held\""]),
        in_flight: metrics.sum("vllm:num_requests_running", &[])
            + metrics.sum("vllm:num_requests_waiting", &[])
            + metrics.sum("twinfer_router_in_flight", &[]),
        files,
        sockets,
        resident_mib: pages * rustix::param::page_size() as f64 / f64::from(1 << 20),
    })
}

/// A well-mixed function of a number (splitmix64's finaliser).
pub(crate) fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
