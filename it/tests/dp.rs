//! Ranks as processes behind one front: same answers as one rank, sleeping when idle, and one failure for all.

use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use twinfer_it::{Client, Instance, completion_body, demo_model};

const LIMIT: Duration = Duration::from_secs(20);

async fn instance(dp: &str, further: &[&str]) -> Instance {
    let arguments = [&["--dp", dp], further].concat();
    let mut instance = Instance::serve(&demo_model(), &arguments, &[]);
    instance.ready().await;
    instance
}

/// Process ids of the ranks that a front has started.
fn ranks_of(front: u32) -> Vec<u32> {
    let children = format!("/proc/{front}/task");
    let mut found = Vec::new();
    for task in std::fs::read_dir(children)
        .expect("the front runs")
        .flatten()
    {
        let children = std::fs::read_to_string(task.path().join("children"));
        let children = children.unwrap_or_default();
        found.extend(
            children
                .split_whitespace()
                .filter_map(|pid| pid.parse::<u32>().ok()),
        );
    }
    found.sort_unstable();
    found
}

fn runs(process: u32) -> bool {
    Path::new(&format!("/proc/{process}")).exists()
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn signal(process: u32, signal: Signal) {
    let pid = rustix::process::Pid::from_raw(process.try_into().expect("a process id"));
    rustix::process::kill_process(pid.expect("a process id"), signal).expect("it runs");
}

fn question(number: usize) -> Value {
    let prompts = [
        "Once upon a time",
        "宫保鸡丁怎么做",
        "The",
        "1 2 3 4 5 6 7 8 9",
    ];
    let mut body = completion_body(prompts[number % prompts.len()], 24);
    body["return_token_ids"] = json!(true);
    body["logprobs"] = json!(1);
    body["seed"] = json!(number);
    body["temperature"] = json!(if number.is_multiple_of(2) { 0.0 } else { 0.9 });
    body["n"] = json!(1 + number % 3);
    body
}

async fn ask(client: &Client, body: &Value) -> Value {
    let answer = client
        .post("/v1/completions", body)
        .await
        .expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["choices"].clone()
}

async fn ask_all(client: &Client, count: usize) -> Vec<Value> {
    let mut asked = JoinSet::new();
    for number in 0..count {
        let client = client.clone();
        asked.spawn(async move { (number, ask(&client, &question(number)).await) });
    }
    let mut answers = asked.join_all().await;
    answers.sort_by_key(|(number, _)| *number);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn any_number_of_requests_gets_the_answers_of_one_rank() {
    let alone = instance("1", &[]).await;
    let expected = ask_all(&alone.client(), 9).await;
    for dp in [2, 4] {
        let ranks = instance(&dp.to_string(), &["--max-num-batched-tokens", "16"]).await;
        let client = ranks.client();
        assert_eq!(ranks_of(ranks.process.id()).len(), dp);
        for count in 1..=2 * dp + 1 {
            assert_eq!(
                ask_all(&client, count).await,
                expected[..count],
                "{dp}: {count}"
            );
        }
        // One request alone on each rank in turn.
        for rank in 0..dp {
            let pinned = ranks
                .client()
                .with_header("x-data-parallel-rank", &rank.to_string());
            assert_eq!(
                ask(&pinned, &question(1)).await,
                expected[1],
                "{dp}: rank {rank}"
            );
        }
        let card = client
            .get("/twinfer/instance")
            .await
            .expect("a card")
            .json();
        assert_eq!(card["ranks"], json!(dp));
        let load = client.get("/twinfer/load").await.expect("a report").json();
        assert_eq!(load["ranks"].as_array().map(Vec::len), Some(dp));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_request_runs_where_it_must_and_a_rank_that_is_none_is_refused() {
    let ranks = instance("2", &["--no-enable-prefix-caching"]).await;
    let pinned = ranks.client().with_header("x-data-parallel-rank", "1");
    for _ in 0..3 {
        ask(&pinned, &question(0)).await;
    }
    let metrics = ranks.metrics().await;
    let steps = |labels: &[&str]| metrics.sum("twinfer_rank_steps_total", labels);
    let worked = |rank: &str| {
        ["prefill", "decode", "mixed"]
            .iter()
            .map(|phase| steps(&[&format!("rank=\"{rank}\""), &format!("phase=\"{phase}\"")]))
            .sum::<f64>()
    };
    assert!(worked("1") > 60.0, "{}", worked("1"));
    assert_eq!(worked("0"), 0.0);
    assert!(steps(&["rank=\"0\"", "phase=\"dummy\""]) > 60.0);
    for wrong in ["2", "-1", "x"] {
        let client = ranks.client().with_header("x-data-parallel-rank", wrong);
        let answer = client
            .post("/v1/completions", &question(0))
            .await
            .expect("an answer");
        assert_eq!(answer.status, 400);
        assert!(
            answer.text().contains("x-data-parallel-rank"),
            "{}",
            answer.text()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_leaves_frees_its_blocks_and_an_idle_group_takes_no_turns() {
    let ranks = instance("2", &["--max-model-len", "4096"]).await;
    let client = ranks.client();
    let mut body: Value = completion_body("Once upon a time", 3000);
    body["ignore_eos"] = json!(true);
    body["stream"] = json!(true);
    for _ in 0..4 {
        let mut stream = client
            .stream("/v1/completions", &body)
            .await
            .expect("a stream");
        stream.piece().await.expect("a first piece");
    }
    let end = Instant::now() + LIMIT;
    loop {
        let load = client.get("/twinfer/load").await.expect("a report").json();
        if load["running"] == 0 && load["waiting"] == 0 && load["kv_blocks"]["used"] == 0 {
            break;
        }
        assert!(Instant::now() < end, "{load}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The same place in the ranks' processes afterwards: they wait and do not run.
    let busy = |process: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("it runs");
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split(' ')
            .collect();
        fields[12].parse::<u64>().expect("user time")
            + fields[13].parse::<u64>().expect("system time")
    };
    let processes = ranks_of(ranks.process.id());
    assert_eq!(processes.len(), 2);
    let steps = |metrics: &twinfer_it::Metrics| metrics.sum("twinfer_rank_steps_total", &[]);
    let before: (f64, Vec<u64>) = (
        steps(&ranks.metrics().await),
        processes.iter().map(busy).collect(),
    );
    tokio::time::sleep(Duration::from_secs(1)).await;
    let after: (f64, Vec<u64>) = (
        steps(&ranks.metrics().await),
        processes.iter().map(busy).collect(),
    );
    assert_eq!(before.0, after.0);
    for (before, after) in before.1.iter().zip(&after.1) {
        // In hundredths of a second.
        assert!(after - before < 30, "{before} to {after}");
    }
    // And wake again.
    assert_eq!(
        ask(&client, &question(0)).await.as_array().map(Vec::len),
        Some(1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_dies_or_stops_ends_the_instance_and_nothing_is_left() {
    for (what, idle) in [
        (Signal::KILL, false),
        (Signal::KILL, true),
        (Signal::STOP, false),
    ] {
        let mut ranks = instance("2", &["--max-model-len", "4096"]).await;
        let processes = ranks_of(ranks.process.id());
        assert_eq!(processes.len(), 2);
        let client = ranks.client();
        let mut body: Value = completion_body("Once upon a time", 4000);
        body["ignore_eos"] = json!(true);
        body["stream"] = json!(true);
        let mut stream = None;
        if !idle {
            let mut running = client
                .stream("/v1/completions", &body)
                .await
                .expect("a stream");
            running.piece().await.expect("a first piece");
            stream = Some(running);
        }
        let begin = Instant::now();
        signal(processes[1], what);
        if let Some(mut stream) = stream {
            let mut text = String::new();
            while let Ok(Some(piece)) = stream.piece().await {
                text.push_str(&String::from_utf8_lossy(&piece));
            }
            assert!(
                text.contains("\"error\"") && text.contains("rank 1"),
                "{text}"
            );
        }
        let status = ranks.process.wait(Duration::from_secs(10)).await;
        assert!(begin.elapsed() < Duration::from_secs(10));
        assert_eq!(status.code(), Some(1), "{}", ranks.process.output());
        assert!(
            ranks.process.output().contains("rank 1"),
            "{}",
            ranks.process.output()
        );
        until("ranks are left", || {
            !processes.iter().any(|process| runs(*process))
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_end_with_their_front_drained_or_killed() {
    for what in [Signal::TERM, Signal::KILL] {
        let mut ranks = instance("2", &["--drain-settle", "0"]).await;
        let processes: BTreeSet<u32> = ranks_of(ranks.process.id()).into_iter().collect();
        assert_eq!(processes.len(), 2);
        ask(&ranks.client(), &question(0)).await;
        ranks.process.signal(what).expect("it runs");
        let status = ranks.process.wait(LIMIT).await;
        if what == Signal::TERM {
            assert!(status.success(), "{}", ranks.process.output());
        }
        until("ranks are left", || {
            !processes.iter().any(|process| runs(*process))
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_disagrees_with_the_ranks_is_refused_before_any_starts() {
    for (variable, value, meaning) in [
        ("WORLD_SIZE", "8", "number of all ranks"),
        ("RANK", "3", "RANK is inherited"),
    ] {
        let model = demo_model();
        let mut ranks = Instance::serve(&model, &["--dp", "2"], &[(variable, value)]);
        let status = ranks.process.wait(LIMIT).await;
        assert_eq!(status.code(), Some(64), "{}", ranks.process.output());
        let output = ranks.process.output();
        assert!(
            output.contains(variable) && output.contains(meaning),
            "{output}"
        );
    }
    let arguments = ["--dp", "2", "--role", "decode"];
    let mut ranks = Instance::serve(&demo_model(), &arguments, &[]);
    assert_eq!(ranks.process.wait(LIMIT).await.code(), Some(64));
    assert!(
        ranks.process.output().contains("dp is 2"),
        "{}",
        ranks.process.output()
    );
}
