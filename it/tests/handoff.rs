//! A prefill and a decode instance behind the router, as real processes.

use serde_json::{Value, json};
use std::time::{Duration, Instant};
use twinfer_it::{
    Client, Cluster, ClusterOptions, Instance, chat_body, completion_body, repository,
};

/// Seconds of the KV lease in these tests.
const LEASE: &str = "5";
const IDLE: Duration = Duration::from_secs(6);

struct Reference {
    prompt: Vec<u32>,
    output: Vec<u32>,
    gaps: Vec<f64>,
}

/// Greedy tokens by an independent implementation (`models/demo/training/reference.py`).
fn reference() -> Vec<Reference> {
    let text = std::fs::read_to_string(repository().join("testdata/demo/reference.json"))
        .expect("the reference");
    let all: Value = serde_json::from_str(&text).expect("JSON");
    let numbers = |value: &Value| -> Vec<u32> {
        value
            .as_array()
            .expect("a list")
            .iter()
            .map(|n| n.as_u64().expect("an id") as u32)
            .collect()
    };
    all["cases"]
        .as_array()
        .expect("cases")
        .iter()
        .map(|case| Reference {
            prompt: numbers(&case["prompt"]),
            output: numbers(&case["output"]),
            gaps: case["gaps"]
                .as_array()
                .expect("gaps")
                .iter()
                .map(|g| g.as_f64().expect("a gap"))
                .collect(),
        })
        .collect()
}

fn options() -> ClusterOptions {
    ClusterOptions {
        serve: [
            "--dtype",
            "f32",
            "--kv-lease",
            LEASE,
            "--max-num-batched-tokens",
            "64",
        ]
        .map(String::from)
        .to_vec(),
        ..ClusterOptions::default()
    }
}

fn ids_body(prompt: &[u32], max_tokens: u32) -> Value {
    let mut body = completion_body(prompt.to_vec(), max_tokens);
    body["return_token_ids"] = json!(true);
    body["ignore_eos"] = json!(true);
    body
}

fn token_ids(answer: &Value) -> Vec<u32> {
    answer["choices"][0]["token_ids"]
        .as_array()
        .unwrap_or_else(|| panic!("no token_ids in {answer}"))
        .iter()
        .map(|n| n.as_u64().expect("an id") as u32)
        .collect()
}

async fn complete(client: &Client, body: &Value) -> Value {
    let answer = client
        .post("/v1/completions", body)
        .await
        .expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// C2.1: prompts around the edges of blocks and chunks.
#[tokio::test]
async fn tokens_equal_the_reference_at_every_block_and_chunk_edge() {
    let mut options = options();
    // All of a prompt travels, however often it comes.
    options.serve.push("--no-enable-prefix-caching".into());
    let cluster = Cluster::start(&options).await;
    let mut colocated = Instance::serve(
        &twinfer_it::demo_model(),
        &["--dtype", "f32", "--max-num-batched-tokens", "64"],
        &[],
    );
    colocated.ready().await;
    for case in reference() {
        let length = case.prompt.len();
        for max_tokens in [1u32, 2, 40] {
            let body = ids_body(&case.prompt, max_tokens);
            let apart = complete(&cluster.client(), &body).await;
            let got = token_ids(&apart);
            // A near tie may fall either way in two implementations; beyond it texts differ.
            let certain = case
                .gaps
                .iter()
                .position(|&gap| gap < 1e-4)
                .unwrap_or(case.output.len());
            let compared = certain.min(max_tokens as usize);
            assert_eq!(got.len(), max_tokens as usize, "prompt of {length}");
            assert_eq!(
                got[..compared],
                case.output[..compared],
                "prompt of {length}, {max_tokens} tokens"
            );
            let together = complete(&colocated.client(), &body).await;
            assert_eq!(token_ids(&together), got, "prompt of {length}");
            // Where the prompt's KV came from may differ.
            for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
                let (together, apart) = (&together["usage"][count], &apart["usage"][count]);
                assert_eq!(together, apart, "{count}, prompt of {length}");
            }
            cluster.kv_idle(IDLE).await;
        }
    }
    let metrics = cluster.decode[0].metrics().await;
    let external = metrics.sum(
        "vllm:prompt_tokens_by_source_total",
        &["source=\"external_kv_transfer\""],
    );
    let expected: usize = reference()
        .iter()
        .map(|case| 3 * (case.prompt.len() - 1))
        .sum();
    assert_eq!(
        external as usize, expected,
        "all but the last prompt token come by handoff"
    );
}

/// C2.2: the client goes while prefill computes and while decode generates.
#[tokio::test]
async fn a_client_that_leaves_stops_both_legs_and_frees_their_kv() {
    let mut options = options();
    options.serve = ["--kv-lease", LEASE, "--max-num-batched-tokens", "16"]
        .map(String::from)
        .to_vec();
    let cluster = Cluster::start(&options).await;
    let client = cluster.client();
    let long: Vec<u32> = (0..1024).map(|i| 6 + (i * 37) % 1500).collect();
    for round in 0..100u32 {
        let stream = round % 2 == 0;
        let mut body = if round % 4 < 2 {
            // No prefix of it is cached.
            let mut fresh = long.clone();
            fresh[0] = 6 + round;
            ids_body(&fresh, 64)
        } else {
            ids_body(&long[..8], 512)
        };
        body["stream"] = json!(stream);
        if stream && round % 4 >= 2 {
            let mut stream = client
                .stream("/v1/completions", &body)
                .await
                .expect("a stream");
            assert_eq!(stream.status, 200);
            stream.piece().await.expect("a piece");
        } else {
            let gone = tokio::time::timeout(
                Duration::from_millis(5 + u64::from(round % 30)),
                client.post("/v1/completions", &body),
            )
            .await;
            assert!(
                gone.is_err() || round % 4 >= 2,
                "a 64-chunk prompt is not answered in that time"
            );
        }
    }
    cluster.kv_idle(IDLE).await;
    for instance in cluster.prefill.iter().chain(&cluster.decode) {
        let metrics = instance.metrics().await;
        assert_eq!(metrics.sum("vllm:num_requests_running", &[]), 0.0);
        assert_eq!(metrics.sum("vllm:num_requests_waiting", &[]), 0.0);
        let log = instance.process.output();
        assert!(
            !log.contains("ERROR"),
            "a client that leaves is no error:\n{log}"
        );
    }
    let answer = complete(&client, &ids_body(&long[..8], 4)).await;
    assert_eq!(token_ids(&answer).len(), 4);
}

/// C2.4: decode refuses after prefill has finished.
#[tokio::test]
async fn a_request_that_decode_refuses_frees_prefill_at_once() {
    let mut options = options();
    options.serve_prefill = ["--max-model-len", "1024"].map(String::from).to_vec();
    options.serve_decode = ["--max-model-len", "256"].map(String::from).to_vec();
    options.serve = ["--kv-lease", "60"].map(String::from).to_vec();
    let cluster = Cluster::start(&options).await;
    // Sent past the router, which would refuse at once: prefill first, then decode, as public proxies do.
    let prompt: Vec<u32> = (0..400).map(|i| 6 + (i * 37) % 1500).collect();
    let key = |client: Client| client.with_header("authorization", "Bearer key-of-this-test");
    let (prefill, decode) = (
        key(cluster.prefill[0].client()),
        key(cluster.decode[0].client()),
    );
    for round in 0..50 {
        let mut body = ids_body(&prompt, 1);
        body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null});
        let handle = complete(&prefill, &body).await["kv_transfer_params"].clone();
        assert_eq!(handle["do_remote_prefill"], json!(true), "{handle}");
        let mut body = ids_body(&prompt, 8);
        body["kv_transfer_params"] = handle;
        match round % 3 {
            0 => body["model"] = json!("no such model"),
            1 => body["temperature"] = json!(-1),
            _ => {}
        }
        let refused = decode
            .post("/v1/completions", &body)
            .await
            .expect("an answer");
        let expected = if round % 3 == 0 { 404 } else { 400 };
        assert_eq!(refused.status, expected, "{}", refused.text());
        cluster.prefill[0].kv_idle(Duration::from_secs(1)).await;
    }
    // Through the router: the client gets decode's status and body. The length of a text is known only
    // to who tokenises it.
    let text = "Once upon a time ".repeat(100);
    let refused = cluster
        .client()
        .post("/v1/completions", &completion_body(text, 8))
        .await
        .expect("an answer");
    let code = refused.error_code();
    assert_eq!(
        (refused.status, code.as_str()),
        (400, "context_length_exceeded")
    );
    let message = refused.json()["error"]["message"].to_string();
    assert!(message.contains("length is 256 tokens"), "{message}");
    cluster.prefill[0].kv_idle(Duration::from_secs(1)).await;
    let long: Vec<u32> = (0..1000).map(|i| 6 + (i * 37) % 1500).collect();
    complete(
        &cluster.prefill[0]
            .client()
            .with_header("authorization", "Bearer key-of-this-test"),
        &{
            let mut body = ids_body(&long, 1);
            body["kv_transfer_params"] = json!({"do_remote_decode": true});
            body
        },
    )
    .await;
}

/// C2.7: prefill dies with handles out and comes back as another incarnation; decode likewise.
#[tokio::test]
async fn an_instance_that_dies_and_returns_is_used_again_and_its_old_handles_are_not() {
    let mut cluster = Cluster::start(&options()).await;
    let prompt: Vec<u32> = (0..200).map(|i| 6 + (i * 37) % 1500).collect();
    let key = |client: Client| client.with_header("authorization", "Bearer key-of-this-test");
    let expected = token_ids(&complete(&cluster.client(), &ids_body(&prompt, 8)).await);

    let mut body = ids_body(&prompt, 1);
    body["kv_transfer_params"] = json!({"do_remote_decode": true});
    let old =
        complete(&key(cluster.prefill[0].client()), &body).await["kv_transfer_params"].clone();

    cluster.prefill[0].process.kill();
    let start = Instant::now();
    let lost = cluster
        .client()
        .post("/v1/completions", &ids_body(&prompt, 8))
        .await
        .expect("an answer");
    assert!(lost.status >= 500, "{}", lost.text());
    assert!(!lost.error_code().is_empty(), "{}", lost.text());
    assert!(start.elapsed() < Duration::from_secs(15));
    cluster.prefill[0].restart();
    cluster.prefill[0].ready().await;

    let mut body = ids_body(&prompt, 8);
    body["kv_transfer_params"] = old;
    let stale = key(cluster.decode[0].client())
        .post("/v1/completions", &body)
        .await
        .expect("an answer");
    assert_eq!(stale.status, 502, "{}", stale.text());
    assert_eq!(stale.error_code(), "kv_stale");

    answers_again(&cluster, &prompt, &expected).await;
    cluster.decode[0].process.kill();
    let lost = cluster
        .client()
        .post("/v1/completions", &ids_body(&prompt, 8))
        .await
        .expect("an answer");
    assert!(lost.status >= 500, "{}", lost.text());
    cluster.prefill[0].kv_idle(IDLE).await;
    cluster.decode[0].restart();
    cluster.decode[0].ready().await;
    answers_again(&cluster, &prompt, &expected).await;
    cluster.kv_idle(IDLE).await;
}

async fn answers_again(cluster: &Cluster, prompt: &[u32], expected: &[u32]) {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let answer = cluster
            .client()
            .post("/v1/completions", &ids_body(prompt, 8))
            .await
            .expect("an answer");
        if answer.status == 200 {
            assert_eq!(token_ids(&answer.json()), expected);
            return;
        }
        assert!(Instant::now() < end, "still refused: {}", answer.text());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// C2.7: a prefill that is killed in the middle of a stream of requests hurts only its own.
#[tokio::test]
async fn other_pairs_serve_on_when_one_prefill_is_killed() {
    let mut options = options();
    options.prefill = 2;
    let mut cluster = Cluster::start(&options).await;
    let prompt: Vec<u32> = (0..300).map(|i| 6 + (i * 37) % 1500).collect();
    let expected = token_ids(&complete(&cluster.client(), &ids_body(&prompt, 6)).await);
    let mut requests = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let (client, body) = (cluster.client(), ids_body(&prompt, 6));
        requests.spawn(async move {
            client
                .post("/v1/completions", &body)
                .await
                .expect("an answer")
        });
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    cluster.prefill[0].process.kill();
    while let Some(answer) = requests.join_next().await {
        let answer = answer.expect("a task");
        if answer.status == 200 {
            assert_eq!(token_ids(&answer.json()), expected);
        } else {
            assert!(
                answer.status >= 500 && !answer.error_code().is_empty(),
                "{}",
                answer.text()
            );
        }
    }
    for _ in 0..4 {
        assert_eq!(
            token_ids(&complete(&cluster.client(), &ids_body(&prompt, 6)).await),
            expected
        );
    }
    cluster.prefill[1].kv_idle(IDLE).await;
    cluster.decode[0].kv_idle(IDLE).await;
}

/// C2.10: ids that a client chooses link nothing.
#[tokio::test]
async fn equal_client_ids_do_not_mix_two_requests() {
    let cluster = Cluster::start(&options()).await;
    let countries = [
        ("France", "Paris"),
        ("Italy", "Rome"),
        ("Japan", "Tokyo"),
        ("Spain", "Madrid"),
    ];
    let long = "x".repeat(200);
    for id in ["same", long.as_str(), "../../etc, \"odd\" %00 ; é"] {
        let mut requests = tokio::task::JoinSet::new();
        for (country, city) in countries {
            let ascii: String = id.chars().filter(char::is_ascii).collect();
            let client = cluster.client().with_header("x-request-id", &ascii);
            let mut body = chat_body(&format!("What is the capital of {country}?"));
            body["request_id"] = json!(id);
            body["kv_transfer_params"] =
                json!({"do_remote_prefill": true, "transfer_id": id, "remote_request_id": id});
            requests.spawn(async move {
                (
                    city,
                    client
                        .post("/v1/chat/completions", &body)
                        .await
                        .expect("an answer"),
                )
            });
        }
        let mut seen = std::collections::BTreeSet::new();
        while let Some(answer) = requests.join_next().await {
            let (city, answer) = answer.expect("a task");
            assert_eq!(answer.status, 200, "{}", answer.text());
            let body = answer.json();
            let text = body["choices"][0]["message"]["content"]
                .as_str()
                .expect("text")
                .to_owned();
            assert!(text.contains(city), "{city} expected, got {text}");
            assert!(
                seen.insert(body["id"].to_string()),
                "two answers with one id"
            );
        }
    }
    cluster.kv_idle(IDLE).await;
}

/// C3.7: one token is one token.
#[tokio::test]
async fn max_tokens_one_gives_one_token_through_both_legs() {
    let cluster = Cluster::start(&options()).await;
    let mut colocated = Instance::serve(&twinfer_it::demo_model(), &["--dtype", "f32"], &[]);
    colocated.ready().await;
    for field in ["max_tokens", "max_completion_tokens"] {
        let mut body = chat_body("What is the capital of France?");
        body[field] = json!(1);
        let together = colocated
            .client()
            .post("/v1/chat/completions", &body)
            .await
            .expect("an answer")
            .json();
        let apart = cluster
            .client()
            .post("/v1/chat/completions", &body)
            .await
            .expect("an answer")
            .json();
        assert_eq!(
            apart["choices"][0]["message"]["content"],
            together["choices"][0]["message"]["content"]
        );
        assert_eq!(apart["choices"][0]["finish_reason"], json!("length"));
        assert_eq!(apart["usage"]["completion_tokens"], json!(1));

        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let answer = cluster
            .client()
            .post("/v1/chat/completions", &body)
            .await
            .expect("an answer");
        let (events, done) = answer.events();
        assert!(done, "{}", answer.text());
        let text: String = events
            .iter()
            .filter_map(|e| e["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(json!(text), together["choices"][0]["message"]["content"]);
        assert_eq!(
            events.last().expect("events")["usage"]["completion_tokens"],
            json!(1)
        );
    }
    cluster.kv_idle(IDLE).await;
}

/// C9.3: topology that a client sends is not believed.
#[tokio::test]
async fn kv_parameters_of_a_client_reach_nobody() {
    let cluster = Cluster::start(&options()).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a listener");
    let port = listener.local_addr().expect("an address").port();
    for (host, port) in [
        ("127.0.0.1", port),
        ("169.254.169.254", 80),
        ("127.0.0.1", 22),
    ] {
        let params = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_host": host, "remote_port": port,
            "remote_engine_id": "prefill-00000000deadbeef", "remote_request_id": "cmpl-other-0-1", "remote_block_ids": [1, 2, 3]});
        let mut body = chat_body("What is the capital of France?");
        body["kv_transfer_params"] = params;
        let routed = cluster
            .client()
            .post("/v1/chat/completions", &body)
            .await
            .expect("an answer");
        assert_eq!(routed.status, 200, "{}", routed.text());
        assert!(routed.text().contains("Paris"), "{}", routed.text());
        let direct = cluster.decode[0]
            .client()
            .post("/v1/chat/completions", &body)
            .await
            .expect("an answer");
        assert!([401, 403].contains(&direct.status), "{}", direct.text());
        let peer = cluster.decode[0]
            .client()
            .with_header("authorization", "Bearer wrong-key");
        let direct = peer
            .post("/v1/chat/completions", &body)
            .await
            .expect("an answer");
        assert!([401, 403].contains(&direct.status), "{}", direct.text());
    }
    let came = tokio::time::timeout(Duration::from_millis(300), listener.accept()).await;
    assert!(
        came.is_err(),
        "somebody connected to the address that a client named"
    );
    cluster.kv_idle(IDLE).await;
}
