//! Cases of ranks behind one front: load in bursts with clients that leave, drafts with idle ranks, a rank that is lost
//! while it starts, a node that has not come yet.

use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use twinfer_it::{Client, Instance, Process, children, completion_body, demo_model, free_port};

const LIMIT: Duration = Duration::from_secs(30);
/// Work stands still for no longer.
const PROGRESS: Duration = Duration::from_secs(5);

async fn instance(arguments: &[&str]) -> Instance {
    let mut instance = Instance::serve(&demo_model(), arguments, &[]);
    instance.ready().await;
    instance
}

async fn ask(client: &Client, body: &Value) -> Value {
    let answer = client
        .post("/v1/completions", body)
        .await
        .expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["choices"][0].clone()
}

/// Spreads numbers evenly: splitmix64.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A greedy request with a prompt of 1 to 300 tokens and an answer of 1 to 200, both made by its number.
fn request(number: u64) -> Value {
    let length = 1 + mix(number) % 300;
    let prompt: Vec<u64> = (0..length)
        .map(|at| 6 + mix(number * 1000 + at) % 250)
        .collect();
    let mut body = completion_body(prompt, 1 + (mix(number ^ 3) % 200) as u32);
    body["return_token_ids"] = json!(true);
    body["temperature"] = json!(0.0);
    body
}

/// Sends a request, or begins one and leaves; the answer of one that stays.
async fn one(client: &Client, number: u64) -> Option<Value> {
    let mut body = request(number);
    if !mix(number ^ 7).is_multiple_of(20) {
        return Some(ask(client, &body).await);
    }
    body["stream"] = json!(true);
    let mut stream = client
        .stream("/v1/completions", &body)
        .await
        .expect("a stream");
    stream.piece().await.expect("a first piece");
    None
}

fn steps(metrics: &twinfer_it::Metrics, rank: Option<u32>) -> f64 {
    let label = rank.map(|rank| format!("rank=\"{rank}\""));
    let labels: Vec<&str> = label.iter().map(String::as_str).collect();
    metrics.sum("twinfer_rank_steps_total", &labels)
}

/// C4.1.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_requests_at_random_times_get_the_answers_of_one_rank() {
    let ranks = instance(&["--dp", "4", "--max-num-seqs", "16"]).await;
    let client = ranks.client();
    let pinned = client.clone().with_header("x-data-parallel-rank", "2");
    let first = ask(&pinned, &request(0)).await;
    let mut asked = JoinSet::new();
    let mut answers = vec![(0, first)];
    let (mut number, mut seen) = (1, (Instant::now(), 0.0));
    while number <= 1000 || !asked.is_empty() {
        if number <= 1000 && asked.len() < 60 {
            let client = client.clone();
            asked.spawn(async move { (number, one(&client, number).await) });
            number += 1;
            // Some come together, some after a gap.
            tokio::time::sleep(Duration::from_millis(mix(number ^ 11) % 12)).await;
        } else {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        while let Some(ended) = asked.try_join_next() {
            let (number, answer) = ended.expect("answered");
            answers.extend(answer.map(|answer| (number, answer)));
        }
        if seen.0.elapsed() >= PROGRESS {
            let now = steps(&ranks.metrics().await, None);
            assert!(asked.is_empty() || now > seen.1, "no step for {PROGRESS:?}");
            seen = (Instant::now(), now);
        }
    }
    assert!(answers.len() > 900, "{}", answers.len());
    ranks.kv_idle(LIMIT).await;
    // Ranks count their last step when they have taken it.
    let end = Instant::now() + LIMIT;
    loop {
        let metrics = ranks.metrics().await;
        let steps: Vec<f64> = (0..4).map(|rank| steps(&metrics, Some(rank))).collect();
        if steps[0] > 0.0 && steps.iter().all(|own| *own == steps[0]) {
            break;
        }
        assert!(Instant::now() < end, "{steps:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    drop(ranks);
    let alone = instance(&["--max-num-seqs", "64"]).await;
    let mut asked = JoinSet::new();
    for (number, got) in answers {
        let client = alone.client();
        asked.spawn(
            async move { assert_eq!(got, ask(&client, &request(number)).await, "{number}") },
        );
        if asked.len() >= 60 {
            asked.join_next().await.expect("one").expect("equal");
        }
    }
    while let Some(ended) = asked.join_next().await {
        ended.expect("equal");
    }
}

/// C4.3.
#[tokio::test(flavor = "multi_thread")]
async fn lone_requests_with_drafts_end_though_the_other_rank_has_none() {
    for drafts in ["1", "3", "5"] {
        let flags = ["--num-speculative-tokens", drafts];
        let alone = instance(&flags).await;
        let ranks = instance(&[&flags[..], &["--dp", "2"]].concat()).await;
        let lone = |prompt: Vec<u32>| {
            let mut body = completion_body(prompt, 64);
            body["return_token_ids"] = json!(true);
            body["ignore_eos"] = json!(true);
            body
        };
        let short = lone(vec![40]);
        let long = lone((0..700).map(|at| 6 + at % 200).collect());
        for (body, gap) in [(&short, 0), (&long, 0), (&short, 1500)] {
            tokio::time::sleep(Duration::from_millis(gap)).await;
            let got = tokio::time::timeout(LIMIT, ask(&ranks.client(), body)).await;
            let expected = ask(&alone.client(), body).await;
            assert_eq!(got.expect("in time"), expected, "{drafts} drafts");
        }
    }
}

/// C8.3.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_is_killed_while_it_starts_ends_the_start() {
    let mut ranks = Instance::serve(&demo_model(), &["--dp", "4"], &[]);
    let front = ranks.process.id();
    let end = Instant::now() + LIMIT;
    let started = loop {
        let started = children(front);
        if started.len() == 4 {
            break started;
        }
        assert!(Instant::now() < end, "{}", ranks.process.output());
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    let pid = rustix::process::Pid::from_raw(started[2].try_into().expect("a process id"));
    rustix::process::kill_process(pid.expect("a process id"), Signal::KILL).expect("it runs");
    let status = ranks.process.wait(Duration::from_secs(10)).await;
    let output = ranks.process.output();
    assert!(status.code().is_some_and(|code| code != 0), "{output}");
    let last = output.lines().last().unwrap_or_default();
    assert!(
        last.contains("rank 2 ") && last.contains("signal 9"),
        "{output}"
    );
    let runs = |process: &u32| Path::new(&format!("/proc/{process}")).exists();
    while started.iter().any(runs) {
        assert!(Instant::now() < end, "ranks are left");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// C8.1.
#[tokio::test(flavor = "multi_thread")]
async fn an_instance_is_alive_and_not_ready_until_its_last_rank_is_up() {
    let rpc = free_port().to_string();
    let common = [
        "--dp",
        "4",
        "--data-parallel-address",
        "127.0.0.1",
        "--data-parallel-rpc-port",
        &rpc,
        "--data-parallel-size-local",
    ];
    let model = demo_model();
    let mut front = Instance::serve(&model, &[&common[..], &["3"]].concat(), &[]);
    let client = front.client();
    let end = Instant::now() + LIMIT;
    let status = async |path: &str| client.get(path).await.map(|answer| answer.status);
    while status("/health").await != Ok(200) {
        assert!(Instant::now() < end, "{}", front.process.output());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for _ in 0..5 {
        assert_eq!(status("/ready").await, Ok(503));
        assert_eq!(status("/health").await, Ok(200));
        let answer = client.post("/v1/completions", &request(1)).await;
        assert_eq!(answer.expect("an answer").status, 503);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let path = model.display().to_string();
    let node = [
        "serve",
        &path,
        "--threads",
        "1",
        "--headless",
        "--data-parallel-start-rank",
        "3",
    ];
    let mut node = Process::start(&[&node[..], &common, &["1"]].concat(), &[]);
    front.ready().await;
    for rank in 0..4 {
        let pinned = front
            .client()
            .with_header("x-data-parallel-rank", &rank.to_string());
        ask(&pinned, &request(1)).await;
    }
    front.process.signal(Signal::TERM).expect("it runs");
    assert!(
        front.process.wait(LIMIT).await.success(),
        "{}",
        front.process.output()
    );
    assert!(node.wait(LIMIT).await.success(), "{}", node.output());
}
