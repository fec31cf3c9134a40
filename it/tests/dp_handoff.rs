//! Prefill and decode instances of several ranks: each rank hands its own KV over, and answers are those of one rank alone.

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use twinfer_it::{
    Client, Cluster, ClusterOptions, Instance, children, completion_body, cpu_time, demo_model,
    free_ports,
};

const LIMIT: Duration = Duration::from_secs(20);
/// Longest lease of these tests, and what it takes to notice.
const IDLE: Duration = Duration::from_secs(6);

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

/// Ranks of one instance; sixteen experts are spread over three with two more seats.
fn ranks(count: u32) -> Vec<String> {
    let mut flags = vec!["--kv-port".to_owned(), "0".to_owned()];
    if count > 1 {
        flags.extend(["--dp".to_owned(), count.to_string()]);
    }
    if count == 3 {
        flags.extend(strings(&["--num-redundant-experts", "2"]));
    }
    flags
}

fn shape(prefill: u32, decode: u32) -> ClusterOptions {
    ClusterOptions {
        serve: strings(&["--kv-lease", "5", "--max-num-batched-tokens", "64"]),
        serve_prefill: ranks(prefill),
        serve_decode: ranks(decode),
        ..ClusterOptions::default()
    }
}

/// A prompt of its own for each number, over some blocks, and how it is sampled.
fn question(number: usize) -> Value {
    let prompt: Vec<usize> = (0..20 + 9 * number)
        .map(|at| 6 + (at * 31 + number * 97) % 200)
        .collect();
    let mut body = completion_body(prompt, 20);
    body["return_token_ids"] = json!(true);
    body["logprobs"] = json!(1);
    body["seed"] = json!(number);
    body["temperature"] = json!(if number.is_multiple_of(2) { 0.0 } else { 0.9 });
    body["n"] = json!(1 + number % 2);
    body["ignore_eos"] = json!(true);
    body
}

async fn ask(client: &Client, body: &Value) -> Value {
    let answer = client
        .post("/v1/completions", body)
        .await
        .expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

async fn ask_all(client: &Client, count: usize) -> Vec<Value> {
    let mut asked = JoinSet::new();
    for number in 0..count {
        let client = client.clone();
        asked.spawn(async move {
            let answer = ask(&client, &question(number)).await;
            (number, answer["choices"].clone())
        });
    }
    let mut answers = asked.join_all().await;
    answers.sort_by_key(|(number, _)| *number);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// The handle that a prefill instance answers with.
async fn handle(client: &Client, number: usize) -> Value {
    let mut body = question(number);
    body["max_tokens"] = json!(1);
    body["n"] = json!(1);
    body["kv_transfer_params"] = json!({"do_remote_decode": true});
    ask(client, &body).await["kv_transfer_params"].clone()
}

/// Waits until a metric has a value.
async fn metric(instance: &Instance, name: &str, labels: &[&str], value: f64) {
    let end = Instant::now() + LIMIT;
    loop {
        let now = instance.metrics().await.sum(name, labels);
        if now == value {
            return;
        }
        assert!(Instant::now() < end, "{name} is {now}, not {value}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_shape_of_ranks_gives_the_answers_of_one_and_kv_comes_by_handoff() {
    const COUNT: usize = 9;
    let mut alone = Instance::serve(&demo_model(), &[], &[]);
    alone.ready().await;
    let expected = ask_all(&alone.client(), COUNT).await;
    let mut tokens = 0;
    for number in 0..COUNT {
        tokens += question(number)["prompt"].as_array().map_or(0, Vec::len) - 1;
    }
    for (prefill, decode) in [(1, 1), (2, 1), (1, 4), (2, 3)] {
        let cluster = Cluster::start(&shape(prefill, decode)).await;
        let got = ask_all(&cluster.client(), COUNT).await;
        assert_eq!(got, expected, "{prefill}x{decode}");
        let metrics = cluster.decode[0].metrics().await;
        let source = "source=\"external_kv_transfer\"";
        let came = metrics.sum("vllm:prompt_tokens_by_source_total", &[source]);
        assert_eq!(came as usize, tokens, "{prefill}x{decode}");
        assert_eq!(metrics.sum("twinfer_kv_load_failures_total", &[]), 0.0);
        cluster.kv_idle(IDLE).await;
        // What the handoff counts, counted over all ranks.
        let sent = &cluster.prefill[0];
        metric(sent, "twinfer_kv_leases", &[], 0.0).await;
        let direction = "direction=\"sent\"";
        metric(
            sent,
            "twinfer_kv_handoffs_total",
            &[direction],
            COUNT as f64,
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_of_phases_change_no_answer_of_either_role() {
    let mut alone = Instance::serve(&demo_model(), &[], &[]);
    alone.ready().await;
    let expected = ask_all(&alone.client(), 8).await;
    let policies: [&[&str]; 3] = [
        &[],
        &["--prefill-chunk", "0", "--prefill-run", "2"],
        &[
            "--prefill-threshold-requests",
            "4",
            "--prefill-longest-wait",
            "40",
            "--prefill-any-interval",
            "3",
        ],
    ];
    for policy in policies {
        let mut options = shape(2, 2);
        options.serve.extend(strings(policy));
        let cluster = Cluster::start(&options).await;
        assert_eq!(ask_all(&cluster.client(), 8).await, expected, "{policy:?}");
        cluster.kv_idle(IDLE).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handle_names_the_rank_that_holds_the_kv_and_only_that_one_gives_it_out() {
    let base = free_ports(2);
    let port = base.to_string();
    let arguments = ["--role", "prefill", "--dp", "2", "--kv-port", port.as_str()];
    let mut prefill = Instance::serve(&demo_model(), &arguments, &[]);
    prefill.ready().await;
    let decode = ["--role", "decode", "--dp", "2"];
    let mut decode = Instance::serve(&demo_model(), &decode, &[]);
    decode.ready().await;
    let mut epochs = BTreeSet::new();
    for rank in 0..2_u16 {
        let pinned = prefill
            .client()
            .with_header("x-data-parallel-rank", &rank.to_string());
        let params = handle(&pinned, 3).await;
        assert_eq!(params["remote_port"], json!(base + rank), "{params}");
        let engine = params["remote_engine_id"].as_str().expect("an id");
        let (_, epoch) = engine.rsplit_once('-').expect("an epoch");
        epochs.insert(epoch.to_owned());
        // Shown to the other rank it is a handle of another incarnation: an error, never other text.
        let mut wrong = params.clone();
        wrong["remote_port"] = json!(base + 1 - rank);
        let mut body = question(3);
        body["kv_transfer_params"] = wrong;
        let answer = decode
            .client()
            .post("/v1/completions", &body)
            .await
            .expect("an answer");
        assert_eq!(
            answer.json()["error"]["code"],
            "kv_stale",
            "{}",
            answer.text()
        );
        // A release finds its rank, once.
        let release = json!({"remote_request_id": params["remote_request_id"], "epoch": epoch});
        for outcome in ["Freed", "AlreadyGone"] {
            let answer = prefill
                .client()
                .post("/twinfer/kv/release", &release)
                .await
                .expect("an answer");
            assert_eq!(answer.json()["outcome"], outcome, "{}", answer.text());
        }
    }
    assert_eq!(epochs.len(), 2);
    let unknown =
        json!({"remote_request_id": "0000000000000000-00000001", "epoch": "0123456789abcdef"});
    let answer = prefill
        .client()
        .post("/twinfer/kv/release", &unknown)
        .await
        .expect("an answer");
    assert_eq!(answer.json()["outcome"], "Unknown", "{}", answer.text());
    // A handle that nobody reads ends with its lease, and one that a request does not get to use is released.
    let params = handle(&prefill.client(), 4).await;
    let mut body = question(4);
    body["kv_transfer_params"] = params;
    body["max_tokens"] = json!(0);
    body["temperature"] = json!(-1);
    let refused = decode
        .client()
        .post("/v1/completions", &body)
        .await
        .expect("an answer");
    assert_eq!(refused.status, 400, "{}", refused.text());
    prefill.kv_idle(IDLE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_end_by_time_on_every_rank_and_are_renewed_while_a_request_waits() {
    let arguments = [
        "--role",
        "prefill",
        "--dp",
        "2",
        "--kv-port",
        "0",
        "--kv-lease",
        "1",
    ];
    let mut prefill = Instance::serve(&demo_model(), &arguments, &[]);
    prefill.ready().await;
    for rank in ["0", "1"] {
        let pinned = prefill.client().with_header("x-data-parallel-rank", rank);
        handle(&pinned, 2).await;
    }
    metric(&prefill, "twinfer_kv_leases_expired_total", &[], 2.0).await;
    prefill.kv_idle(IDLE).await;
    // One sequence at a time: the second waits for the first, longer than its lease lasts.
    let decode = [
        "--role",
        "decode",
        "--dp",
        "2",
        "--max-num-seqs",
        "1",
        "--max-model-len",
        "4096",
    ];
    let mut decode = Instance::serve(&demo_model(), &decode, &[]);
    decode.ready().await;
    let pinned = decode.client().with_header("x-data-parallel-rank", "1");
    let mut long = completion_body("Once upon a time", 4000);
    long["ignore_eos"] = json!(true);
    long["stream"] = json!(true);
    let mut stream = pinned
        .stream("/v1/completions", &long)
        .await
        .expect("a stream");
    stream.piece().await.expect("a first piece");
    let mut body = question(5);
    body["kv_transfer_params"] = handle(&prefill.client(), 5).await;
    let waits = pinned.clone();
    let mut answer = JoinSet::new();
    answer.spawn(async move { ask(&waits, &body).await });
    tokio::time::sleep(Duration::from_millis(2500)).await;
    drop(stream);
    let answer = answer.join_next().await.expect("one").expect("it ends");
    let source = "source=\"external_kv_transfer\"";
    let metrics = decode.metrics().await;
    let came = metrics.sum("vllm:prompt_tokens_by_source_total", &[source]);
    assert_eq!(came, 64.0, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_sleep_while_kv_is_on_its_way_and_wake_for_its_end() {
    let arguments = [
        "--role",
        "prefill",
        "--dp",
        "2",
        "--kv-port",
        "0",
        "--kv-lease",
        "20",
    ];
    let mut prefill = Instance::serve(&demo_model(), &arguments, &[]);
    prefill.ready().await;
    let decode = ["--role", "decode", "--dp", "2", "--kv-timeout", "4"];
    let mut decode = Instance::serve(&demo_model(), &decode, &[]);
    decode.ready().await;
    // Takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut params = handle(&prefill.client(), 6).await;
    params["remote_port"] = json!(silent.local_addr().expect("an address").port());
    let mut body = question(6);
    body["kv_transfer_params"] = params;
    let client = decode.client();
    let mut answer = JoinSet::new();
    answer.spawn(async move { client.post("/v1/completions", &body).await });
    let processes = children(decode.process.id());
    assert_eq!(processes.len(), 2);
    tokio::time::sleep(Duration::from_millis(1000)).await;
    let before: Vec<Duration> = processes.iter().map(|id| cpu_time(*id)).collect();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    for (process, before) in processes.iter().zip(before) {
        let busy = cpu_time(*process) - before;
        assert!(busy < Duration::from_millis(400), "{busy:?} of 1.5 s");
    }
    let answer = answer.join_next().await.expect("one").expect("it ends");
    let answer = answer.expect("an answer");
    assert_eq!(
        answer.json()["error"]["code"],
        "kv_transfer_failed",
        "{}",
        answer.text()
    );
    decode.kv_idle(IDLE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_span_of_ports_that_cannot_be_had_is_refused_with_rank_and_port() {
    let arguments = ["--role", "prefill", "--dp", "2", "--kv-port", "65535"];
    let mut instance = Instance::serve(&demo_model(), &arguments, &[]);
    assert_eq!(instance.process.wait(LIMIT).await.code(), Some(64));
    let output = instance.process.output();
    assert!(
        output.contains("kv-port is 65535") && output.contains("0 to 65534"),
        "{output}"
    );
    let base = free_ports(2);
    let _taken = TcpListener::bind(("127.0.0.1", base + 1)).expect("it is free");
    let port = base.to_string();
    let arguments = ["--role", "prefill", "--dp", "2", "--kv-port", port.as_str()];
    let mut instance = Instance::serve(&demo_model(), &arguments, &[]);
    let code = instance.process.wait(LIMIT).await.code();
    let output = instance.process.output();
    assert!(
        output.contains("rank 1") && output.contains(&(base + 1).to_string()),
        "{output}"
    );
    assert_eq!(code, Some(69), "{output}");
}
