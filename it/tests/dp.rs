//! Ranks as processes behind one front: same answers as one rank, sleeping when idle, and one failure for all.

use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use twinfer_it::{Client, Instance, children, completion_body, cpu_time, demo_model};

const LIMIT: Duration = Duration::from_secs(20);

async fn instance(dp: &str, further: &[&str]) -> Instance {
    let arguments = [&["--dp", dp], further].concat();
    let mut instance = Instance::serve(&demo_model(), &arguments, &[]);
    instance.ready().await;
    instance
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

/// A greedy one with a long answer.
fn long_question(number: usize) -> Value {
    let prompts = [
        "宫保鸡丁怎么做",
        "Once upon a time",
        "The",
        "1 2 3 4 5 6 7 8 9",
        "a",
        "Why is the sky blue?",
        "宫保鸡丁怎么做？请一步一步地说。",
        "def main():",
        "In the beginning there was nothing, and then",
    ];
    let mut body = completion_body(prompts[number % prompts.len()], 256);
    body["return_token_ids"] = json!(true);
    body["temperature"] = json!(0.0);
    body
}

async fn ask_all(client: &Client, count: usize, question: fn(usize) -> Value) -> Vec<Value> {
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
    let expected = ask_all(&alone.client(), 9, long_question).await;
    for dp in [2, 4] {
        let ranks = instance(&dp.to_string(), &["--max-num-batched-tokens", "16"]).await;
        let client = ranks.client();
        assert_eq!(children(ranks.process.id()).len(), dp);
        for count in 1..=2 * dp + 1 {
            assert_eq!(
                ask_all(&client, count, long_question).await,
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
                ask(&pinned, &long_question(0)).await,
                expected[0],
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
    let busy = |process: &u32| cpu_time(*process);
    let processes = children(ranks.process.id());
    assert_eq!(processes.len(), 2);
    let steps = |metrics: &twinfer_it::Metrics| metrics.sum("twinfer_rank_steps_total", &[]);
    let before: (f64, Vec<Duration>) = (
        steps(&ranks.metrics().await),
        processes.iter().map(busy).collect(),
    );
    tokio::time::sleep(Duration::from_secs(1)).await;
    let after: (f64, Vec<Duration>) = (
        steps(&ranks.metrics().await),
        processes.iter().map(busy).collect(),
    );
    assert_eq!(before.0, after.0);
    for (before, after) in before.1.iter().zip(&after.1) {
        let busy = *after - *before;
        assert!(busy < Duration::from_millis(300), "{busy:?}");
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
        let processes = children(ranks.process.id());
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
        let processes: BTreeSet<u32> = children(ranks.process.id()).into_iter().collect();
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
    for (code, flags, named) in [
        (
            64,
            &["--moe-comm", "all-gather"][..],
            "moe-comm is all-gather",
        ),
        (64, &["--eplb-interval", "4"], "eplb-interval is 4"),
        (64, &["--eplb-after-prefill"], "eplb-after-prefill is true"),
        (
            64,
            &["--num-redundant-experts", "2"],
            "num-redundant-experts is 2",
        ),
        (
            64,
            &["--dp", "4", "--num-redundant-experts", "2"],
            "num-redundant-experts is 2",
        ),
        (64, &["--dp", "3"], "dp is 3"),
        (2, &["--dp", "2", "--moe-comm", "ring"], "all-gather"),
        (
            64,
            &["--dp", "2", "--eplb-interval", "0"],
            "eplb-interval is 0",
        ),
    ] {
        let mut ranks = Instance::serve(&demo_model(), flags, &[]);
        let status = ranks.process.wait(LIMIT).await;
        assert_eq!(status.code(), Some(code), "{}", ranks.process.output());
        let output = ranks.process.output();
        assert!(output.contains(named), "{flags:?}: {output}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn experts_that_move_and_gathered_rows_change_no_answer_and_are_counted() {
    let alone = instance("1", &[]).await;
    let expected = ask_all(&alone.client(), 9, question).await;
    let moving = [
        "--eplb-interval",
        "8",
        "--eplb-after-prefill",
        "--num-redundant-experts",
        "4",
    ];
    for (further, moves) in [
        (&["--moe-comm", "all-gather"][..], false),
        (&moving, true),
        (&[&moving[..], &["--moe-comm", "all-gather"]].concat(), true),
    ] {
        let ranks = instance("4", further).await;
        assert_eq!(
            ask_all(&ranks.client(), 9, question).await,
            expected,
            "{further:?}"
        );
        let metrics = ranks.metrics().await;
        let sent = |what: &str| {
            metrics.sum(
                "twinfer_rank_sent_bytes_total",
                &[&format!("what=\"{what}\"")],
            )
        };
        assert!(sent("rows") > 0.0 && sent("outputs") > 0.0);
        let seats = metrics.sum("twinfer_expert_moves_total", &[]);
        let plans = metrics.sum("twinfer_expert_plans_total", &[]);
        assert_eq!((seats > 0.0, plans > 0.0), (moves, moves), "{further:?}");
        assert_eq!(sent("weights") > 0.0, moves, "{further:?}");
        let balance = |placement: &str| {
            metrics.sum(
                "twinfer_expert_balance_permille",
                &[&format!("placement=\"{placement}\"")],
            )
        };
        if moves {
            // The fullest rank has at least what a mean one has; a plan never makes it worse.
            assert!(balance("after") >= 1000.0);
            assert!(balance("after") <= balance("before"));
        }
    }
}

#[test]
fn prompts_from_a_file_get_the_answers_of_one_rank() {
    let folder = tempfile::tempdir().expect("a folder");
    let prompts = folder.path().join("prompts.jsonl");
    let lines: Vec<String> = (0..9)
        .map(|number| {
            let mut body = question(number);
            body["model"] = json!("demo");
            body.to_string()
        })
        .collect();
    std::fs::write(&prompts, lines.join("\n")).expect("prompts");
    let run = |dp: &str| {
        let output = std::process::Command::new(twinfer_it::binary())
            .arg("generate")
            .arg(demo_model())
            .args(["--threads", "1", "--dp", dp, "--prompts"])
            .arg(&prompts)
            .output()
            .expect("it runs");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        String::from_utf8(output.stdout).expect("text")
    };
    let expected = run("1");
    assert_eq!(expected.lines().count(), 1 + 2 + 3 + 1 + 2 + 3 + 1 + 2 + 3);
    for dp in ["2", "4"] {
        assert_eq!(run(dp), expected, "{dp} ranks");
    }
}
