//! Soak of the ranks of one instance over HTTP: arrivals, lengths, clients that leave, idle gaps. All answers must be those of
//! one rank, all ranks must have taken the same steps, and what was taken must be back.

use crate::soak::mix;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use twinfer_it::{Client, Instance, Metrics, completion_body, demo_model};

/// Load and gap that take turns.
const BUSY: Duration = Duration::from_secs(20);
const IDLE: Duration = Duration::from_secs(4);
/// Between two requests, on average.
const APART: Duration = Duration::from_millis(60);
/// Work stands still for no longer.
const PROGRESS: Duration = Duration::from_secs(5);
/// One of so many clients leaves.
const LEAVES: u64 = 10;
/// One of so many answers is compared with that of one rank.
const COMPARED: u64 = 7;
/// Longest prompt and answer, in tokens.
const PROMPT: u64 = 300;
const OUTPUT: u64 = 200;

#[derive(Default)]
struct Counts {
    finished: AtomicU64,
    left: AtomicU64,
    tokens: AtomicU64,
}

pub(crate) fn run(ranks: u32, seconds: u64) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(soak(ranks, Duration::from_secs(seconds)))
}

async fn soak(ranks: u32, time: Duration) -> Result<()> {
    let count = ranks.to_string();
    let mut served = Instance::serve(
        &demo_model(),
        &[
            "--dp",
            &count,
            "--max-num-seqs",
            "8",
            "--kv-cache-memory",
            "32MiB",
        ],
        &[],
    );
    served.ready().await;
    let counts = Arc::new(Counts::default());
    // What the first requests take stays: connections, buffers, sizes of tables.
    let mut answers = busy(&served, 0, BUSY / 4, &counts).await?;
    idle(&served).await?;
    let before = descriptors(&served)?;
    let end = Instant::now() + time;
    let mut first = 1_000_000;
    let mut gaps = 0;
    while Instant::now() < end {
        answers.extend(busy(&served, first, BUSY, &counts).await?);
        first += 1_000_000;
        idle(&served).await?;
        gaps += 1;
    }
    let metrics = served.metrics().await;
    let steps: Vec<f64> = (0..ranks).map(|rank| steps(&metrics, Some(rank))).collect();
    ensure!(
        steps.iter().all(|own| *own == steps[0]),
        "ranks took different numbers of steps: {steps:?}"
    );
    let after = descriptors(&served)?;
    ensure!(
        after == before,
        "descriptors: {before:?} before, {after:?} after"
    );
    println!(
        "{ranks} ranks for {} s: {} finished, {} left midway, {} tokens; {gaps} gaps, in which no step was taken; {} steps of each \
         rank; KV and descriptors {after:?} as after warm-up",
        time.as_secs(),
        counts.finished.load(Ordering::Relaxed),
        counts.left.load(Ordering::Relaxed),
        counts.tokens.load(Ordering::Relaxed),
        steps[0],
    );
    drop(served);
    let mut alone = Instance::serve(&demo_model(), &["--kv-cache-memory", "32MiB"], &[]);
    alone.ready().await;
    let client = alone.client();
    for (number, got) in &answers {
        let expected = ask(&client, &request(*number)).await?;
        ensure!(
            *got == expected,
            "request {number}: {got}, one rank: {expected}"
        );
    }
    println!(
        "{} answers compared: equal to those of one rank",
        answers.len()
    );
    Ok(())
}

/// Sends requests for `time` and waits for all answers; some of them, by number.
async fn busy(
    served: &Instance,
    first: u64,
    time: Duration,
    counts: &Arc<Counts>,
) -> Result<Vec<(u64, Value)>> {
    let client = served.client();
    let end = Instant::now() + time;
    let mut asked = JoinSet::new();
    let mut answers = Vec::new();
    let mut seen = (Instant::now(), 0.0);
    let mut number = first;
    while Instant::now() < end || !asked.is_empty() {
        if Instant::now() < end && asked.len() < 64 {
            let (client, counts) = (client.clone(), Arc::clone(counts));
            asked.spawn(async move { (number, one(&client, number, &counts).await) });
            number += 1;
            // Exponential, so that some come together.
            let share = (mix(number) >> 11) as f64 / (1_u64 << 53) as f64;
            tokio::time::sleep(APART.mul_f64(-(1.0 - share).ln())).await;
        } else {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        while let Some(ended) = asked.try_join_next() {
            let (number, outcome) = ended?;
            let answer = outcome.with_context(|| format!("request {number}"))?;
            answers.extend(answer.map(|answer| (number, answer)));
        }
        if seen.0.elapsed() >= PROGRESS {
            let now = steps(&served.metrics().await, None);
            ensure!(asked.is_empty() || now > seen.1, "no step for {PROGRESS:?}");
            seen = (Instant::now(), now);
        }
    }
    Ok(answers)
}

async fn one(client: &Client, number: u64, counts: &Counts) -> Result<Option<Value>> {
    let mut body = request(number);
    if mix(number ^ 7).is_multiple_of(LEAVES) {
        body["stream"] = json!(true);
        let stream = client.stream("/v1/completions", &body).await;
        let mut stream = stream.map_err(|error| anyhow!(error))?;
        ensure!(stream.status == 200, "status {}", stream.status);
        for _ in 0..1 + mix(number) % 5 {
            if stream
                .piece()
                .await
                .map_err(|error| anyhow!(error))?
                .is_none()
            {
                break;
            }
        }
        counts.left.fetch_add(1, Ordering::Relaxed);
        return Ok(None);
    }
    let answer = ask(client, &body).await?;
    let tokens = answer["token_ids"].as_array().map_or(0, Vec::len);
    counts.finished.fetch_add(1, Ordering::Relaxed);
    counts.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
    Ok(number.is_multiple_of(COMPARED).then_some(answer))
}

async fn ask(client: &Client, body: &Value) -> Result<Value> {
    let answer = client.post("/v1/completions", body).await;
    let answer = answer.map_err(|error| anyhow!(error))?;
    ensure!(answer.status == 200, "{}", answer.text());
    Ok(answer.json()["choices"][0].clone())
}

/// A request that its number makes.
fn request(number: u64) -> Value {
    let length = 1 + mix(number) % PROMPT;
    let prompt: Vec<u64> = (0..length)
        .map(|i| 6 + mix(number * 1000 + i) % 250)
        .collect();
    let mut body = completion_body(prompt, 1 + (mix(number ^ 3) % OUTPUT) as u32);
    body["return_token_ids"] = json!(true);
    body["seed"] = json!(number);
    body["temperature"] = json!(if number.is_multiple_of(2) { 0.0 } else { 0.9 });
    body
}

/// Nothing runs, nothing is held, and then no step is taken.
async fn idle(served: &Instance) -> Result<()> {
    served.kv_idle(Duration::from_secs(10)).await;
    let end = Instant::now() + PROGRESS;
    let mut before = steps(&served.metrics().await, None);
    loop {
        tokio::time::sleep(IDLE / 4).await;
        let now = steps(&served.metrics().await, None);
        if now == before {
            break;
        }
        ensure!(
            Instant::now() < end,
            "an idle instance takes steps: {before}, {now}"
        );
        before = now;
    }
    tokio::time::sleep(IDLE / 2).await;
    let now = steps(&served.metrics().await, None);
    ensure!(
        now == before,
        "an idle instance takes steps: {before}, {now}"
    );
    Ok(())
}

fn steps(metrics: &Metrics, rank: Option<u32>) -> f64 {
    let label = rank.map(|rank| format!("rank=\"{rank}\""));
    let labels: Vec<&str> = label.iter().map(String::as_str).collect();
    metrics.sum("twinfer_rank_steps_total", &labels)
}

/// Open descriptors of the ranks, in the order of their process ids.
fn descriptors(served: &Instance) -> Result<Vec<usize>> {
    let front = served.process.id();
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{front}/task"))? {
        let children = std::fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        found.extend(
            children
                .split_whitespace()
                .filter_map(|id| id.parse::<u32>().ok()),
        );
    }
    found.sort_unstable();
    if found.is_empty() {
        bail!("no rank runs");
    }
    let count =
        |id: &u32| -> Result<usize> { Ok(std::fs::read_dir(format!("/proc/{id}/fd"))?.count()) };
    found.iter().map(count).collect()
}
