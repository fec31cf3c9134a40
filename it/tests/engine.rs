//! One answer, whatever the engine does to be fast: real processes with the demo model, which has an MTP
//! layer.

use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use twinfer_it::{
    Client, Cluster, ClusterOptions, Instance, chat_body, completion_body, demo_model,
};

const IDLE: Duration = Duration::from_secs(10);

fn prompt(number: u32, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|i| 6 + (i * i * 7 + i * 37 + number * 101) % 1500)
        .collect()
}

/// Prompts of which some begin alike, greedy and sampled, with log-probabilities.
fn bodies() -> Vec<Value> {
    let lens = [1, 15, 16, 17, 33, 64, 100, 31, 48, 150];
    lens.iter()
        .enumerate()
        .map(|(i, &len)| {
            let mut body = completion_body(prompt(i as u32 / 4, len), 40);
            body["return_token_ids"] = json!(true);
            body["ignore_eos"] = json!(i % 3 != 0);
            body["logprobs"] = json!(2);
            body["temperature"] = json!(if i % 2 == 0 { 0.0 } else { 0.9 });
            body["seed"] = json!(i);
            body
        })
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

/// What must be the same: text, tokens, log-probabilities, reasons.
async fn answers(client: &Client) -> Vec<Value> {
    let mut all = Vec::new();
    for body in bodies() {
        let answer = complete(client, &body).await;
        assert_eq!(
            answer["usage"]["completion_tokens"]
                .as_u64()
                .map(|n| n as usize),
            answer["choices"][0]["token_ids"].as_array().map(Vec::len)
        );
        all.push(answer["choices"].clone());
    }
    all
}

/// Sends all at once; [`collect`] waits for the answers.
fn send(client: &Client, bodies: impl IntoIterator<Item = Value>) -> JoinSet<(usize, Value)> {
    let mut tasks = JoinSet::new();
    for (place, body) in bodies.into_iter().enumerate() {
        let client = client.clone();
        tasks.spawn(async move { (place, complete(&client, &body).await) });
    }
    tasks
}

async fn collect(tasks: JoinSet<(usize, Value)>) -> Vec<Value> {
    let mut answers = tasks.join_all().await;
    answers.sort_by_key(|(place, _)| *place);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// The same at once instead of one after the other.
async fn together(client: &Client) -> Vec<Value> {
    let answers = collect(send(client, bodies())).await;
    answers
        .iter()
        .map(|answer| answer["choices"].clone())
        .collect()
}

async fn serve(arguments: &[&str]) -> Instance {
    let mut instance = Instance::serve(&demo_model(), arguments, &[]);
    instance.ready().await;
    instance
}

/// C4.5, C4.8: cache cold and hot, drafts 0, 1, 3, 5, together and apart.
#[tokio::test]
async fn neither_cache_nor_drafts_nor_handoff_change_an_answer() {
    let plain = serve(&["--no-enable-prefix-caching"]).await;
    let reference = answers(&plain.client()).await;
    for drafts in ["0", "1", "3", "5"] {
        let arguments = [
            "--num-speculative-tokens",
            drafts,
            "--max-num-batched-tokens",
            "48",
        ];
        let instance = serve(&arguments).await;
        let client = instance.client();
        assert_eq!(answers(&client).await, reference, "{drafts} drafts, cold");
        assert_eq!(
            together(&client).await,
            reference,
            "{drafts} drafts, hot and together"
        );
        instance.kv_idle(IDLE).await;
        let metrics = instance.metrics().await;
        assert!(metrics.sum("vllm:prefix_cache_hits_total", &[]) > 0.0);
        let drafted = metrics.sum("vllm:spec_decode_num_draft_tokens_total", &[]);
        let accepted = metrics.sum("vllm:spec_decode_num_accepted_tokens_total", &[]);
        assert_eq!(drafted > 0.0, drafts != "0");
        assert!(accepted <= drafted);
    }
    for drafts in ["0", "3"] {
        let options = ClusterOptions {
            serve: ["--num-speculative-tokens", drafts]
                .map(String::from)
                .to_vec(),
            ..ClusterOptions::default()
        };
        let cluster = Cluster::start(&options).await;
        let client = cluster.client();
        assert_eq!(
            answers(&client).await,
            reference,
            "1P1D, {drafts} drafts, cold"
        );
        assert_eq!(
            together(&client).await,
            reference,
            "1P1D, {drafts} drafts, hot"
        );
        cluster.kv_idle(IDLE).await;
        let prefill = cluster.prefill[0].metrics().await;
        assert!(prefill.sum("vllm:prefix_cache_hits_total", &[]) > 0.0);
        let decode = cluster.decode[0].metrics().await;
        assert_eq!(
            decode.sum("vllm:spec_decode_num_drafts_total", &[]) > 0.0,
            drafts != "0"
        );
        assert_eq!(decode.sum("twinfer_kv_load_failures_total", &[]), 0.0);
    }
}

/// The MTP layer's KV is part of what is handed over: instances with and without it exchange none.
#[tokio::test]
async fn an_instance_that_drafts_takes_no_kv_from_one_that_does_not() {
    let prefill = serve(&["--role", "prefill", "--kv-lease", "2"]).await;
    let decode = serve(&["--role", "decode", "--num-speculative-tokens", "1"]).await;
    let mut body = completion_body(prompt(0, 40), 1);
    body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let handle = complete(&prefill.client(), &body).await["kv_transfer_params"].clone();
    assert_eq!(handle["do_remote_prefill"], json!(true), "{handle}");
    let mut body = completion_body(prompt(0, 40), 4);
    body["kv_transfer_params"] = handle;
    let answer = decode
        .client()
        .post("/v1/completions", &body)
        .await
        .expect("an answer");
    assert!(answer.status >= 400, "{}", answer.text());
    assert!(answer.text().contains("fingerprint"), "{}", answer.text());
    prefill.kv_idle(IDLE).await;
    decode.kv_idle(IDLE).await;
}

/// C4.4: prompts around the context, alone and over a pair.
#[tokio::test]
async fn prompts_around_the_context_are_taken_or_refused_with_the_numbers() {
    const CONTEXT: usize = 64;
    let limit = ["--max-model-len", "64", "--num-speculative-tokens", "3"];
    let instance = serve(&limit).await;
    let options = ClusterOptions {
        serve: limit.map(String::from).to_vec(),
        ..ClusterOptions::default()
    };
    let cluster = Cluster::start(&options).await;
    for client in [instance.client(), cluster.client()] {
        let ask = async |len: usize, max_tokens: Option<Value>| {
            let mut body = completion_body(prompt(1, len), 1);
            match max_tokens {
                Some(max_tokens) => body["max_tokens"] = max_tokens,
                None => drop(body.as_object_mut().expect("a body").remove("max_tokens")),
            }
            body["ignore_eos"] = json!(true);
            client
                .post("/v1/completions", &body)
                .await
                .expect("an answer")
        };
        let all = || [None, Some(Value::Null), Some(json!(1)), Some(json!(5))];
        for max_tokens in all().into_iter().take(3) {
            let answer = ask(CONTEXT - 1, max_tokens).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            let answer = answer.json();
            assert_eq!(answer["usage"]["completion_tokens"], 1);
            assert_eq!(answer["choices"][0]["finish_reason"], "length");
        }
        let too_long = [CONTEXT, CONTEXT + 1, 10 * CONTEXT];
        let refused = too_long
            .into_iter()
            .flat_map(|len| all().map(|max_tokens| (len, max_tokens)));
        // A prompt that fits, with more output than there is room for, is none either.
        for (len, max_tokens) in refused.chain([(CONTEXT - 1, Some(json!(5)))]) {
            let answer = ask(len, max_tokens.clone()).await;
            let text = answer.text();
            assert_eq!(answer.status, 400, "{text}");
            assert_eq!(answer.error_code(), "context_length_exceeded", "{text}");
            assert!(
                text.contains("64") && text.contains(&len.to_string()),
                "{text}"
            );
            let fine = ask(8, Some(json!(5))).await;
            assert_eq!(fine.json()["usage"]["completion_tokens"], 5);
        }
        // The longest output that fits; chats that do not say take it.
        let answer = ask(1, Some(json!(CONTEXT - 1))).await.json();
        assert_eq!(answer["usage"]["completion_tokens"], CONTEXT - 1);
        for max_tokens in [None, Some(Value::Null)] {
            let mut chat = chat_body("Hello!");
            chat["ignore_eos"] = json!(true);
            if let Some(max_tokens) = max_tokens {
                chat["max_tokens"] = max_tokens;
            }
            let answer = client.post("/v1/chat/completions", &chat).await;
            let answer = answer.expect("an answer").json();
            assert_eq!(answer["usage"]["total_tokens"], CONTEXT, "{answer}");
            assert_eq!(answer["choices"][0]["finish_reason"], "length");
        }
    }
    instance.kv_idle(IDLE).await;
    cluster.kv_idle(IDLE).await;
}

/// C4.5: one to five drafts, prompts that end zero to k + 1 tokens before the context.
#[tokio::test]
async fn no_number_of_drafts_leads_beyond_max_tokens_or_the_context() {
    const CONTEXT: usize = 64;
    let plain = serve(&["--max-model-len", "64"]).await;
    for drafts in 1..=5u32 {
        let number = drafts.to_string();
        let arguments = ["--max-model-len", "64", "--num-speculative-tokens", &number];
        let together = serve(&arguments).await;
        let options = ClusterOptions {
            serve: arguments.map(String::from).to_vec(),
            ..ClusterOptions::default()
        };
        let apart = Cluster::start(&options).await;
        for before_end in 0..=drafts as usize + 1 {
            for max_tokens in [1, 2, drafts, drafts + 1, drafts + 2] {
                let len = CONTEXT - before_end;
                let mut body = completion_body(prompt(drafts, len), max_tokens);
                body["ignore_eos"] = json!(true);
                body["return_token_ids"] = json!(true);
                body["logprobs"] = json!(1);
                let expected = plain.client().post("/v1/completions", &body).await;
                let expected = expected.expect("an answer");
                let fits = len + max_tokens as usize <= CONTEXT;
                assert_eq!(expected.status == 200, fits, "{}", expected.text());
                for client in [together.client(), apart.client()] {
                    let answer = client.post("/v1/completions", &body).await;
                    let answer = answer.expect("an answer");
                    assert_eq!(answer.status, expected.status, "{}", answer.text());
                    if fits {
                        let answer = answer.json();
                        assert_eq!(answer["choices"], expected.json()["choices"]);
                        assert_eq!(answer["usage"]["completion_tokens"], max_tokens);
                        assert_eq!(answer["choices"][0]["finish_reason"], "length");
                    }
                }
            }
        }
        together.kv_idle(IDLE).await;
        apart.kv_idle(IDLE).await;
    }
}

/// C4.13: many at once with a small budget, alone, and after a restart.
#[tokio::test]
async fn sixty_four_requests_at_once_get_their_own_answers_and_the_same_after_a_restart() {
    let arguments = ["--max-num-batched-tokens", "16", "--max-num-seqs", "16"];
    let ask = |i: u32, seed: Option<u32>| {
        let mut body = completion_body(prompt(i, 9), i);
        body["return_token_ids"] = json!(true);
        body["ignore_eos"] = json!(true);
        body["temperature"] = json!(if seed.is_some() { 1.0 } else { 0.0 });
        body["seed"] = json!(seed);
        body
    };
    let run = async |client: &Client, seed: Option<u32>| {
        let bodies = (1..=64).map(|i| ask(i, seed.map(|seed| seed + i)));
        let mut all = Vec::new();
        for (answer, i) in collect(send(client, bodies)).await.iter().zip(1..) {
            assert_eq!(answer["usage"]["completion_tokens"], i);
            all.push(answer["choices"][0]["token_ids"].clone());
        }
        all
    };
    let mut instance = serve(&arguments).await;
    let client = instance.client();
    let (greedy, seeded) = (run(&client, None).await, run(&client, Some(0)).await);
    assert_ne!(
        run(&client, Some(500)).await,
        seeded,
        "other seeds, other texts"
    );
    instance.restart();
    instance.ready().await;
    let client = instance.client();
    assert_eq!(run(&client, Some(0)).await, seeded);
    for i in (1..=64u32).step_by(9) {
        let alone = complete(&client, &ask(i, None)).await;
        assert_eq!(alone["choices"][0]["token_ids"], greedy[i as usize - 1]);
    }
    instance.kv_idle(IDLE).await;
}

/// What a stream says, put together, and when it ended.
struct Streamed {
    ids: Vec<Value>,
    text: String,
    logprobs: Vec<Value>,
    finish: Value,
    ended: Instant,
}

async fn stream(client: Client, mut body: Value) -> Streamed {
    body["stream"] = json!(true);
    let answer = client.post("/v1/completions", &body).await;
    let answer = answer.expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    let (events, done) = answer.events();
    assert!(done, "{}", answer.text());
    let mut all = Streamed {
        ids: Vec::new(),
        text: String::new(),
        logprobs: Vec::new(),
        finish: Value::Null,
        ended: Instant::now(),
    };
    for event in &events {
        let choice = &event["choices"][0];
        assert!(all.finish.is_null(), "something behind the end: {event}");
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        // Where a piece begins is where the one before ended: nothing twice, nothing left out.
        let offsets = list(&choice["logprobs"]["text_offset"]);
        if let (Some(first), true) = (offsets.first(), all.logprobs.is_empty()) {
            assert_eq!(*first, json!(0));
        }
        all.ids.extend(list(&choice["token_ids"]));
        all.logprobs
            .extend(list(&choice["logprobs"]["token_logprobs"]));
        all.text += choice["text"].as_str().unwrap_or_default();
        all.finish = choice["finish_reason"].clone();
    }
    all
}

/// Blocks of an instance's pool.
async fn pool(instance: &Instance) -> usize {
    let metrics = instance.metrics().await;
    metrics.sum("twinfer_kv_blocks", &["state=\"total\""]) as usize
}

/// C4.10, C4.11: a pool of one and a half requests, and requests that can never fit.
#[tokio::test]
async fn requests_that_take_turns_for_the_pool_end_as_if_they_had_it_alone() {
    let roomy = serve(&[]).await;
    let tight = serve(&[
        "--kv-cache-memory",
        "224KiB",
        "--num-speculative-tokens",
        "2",
    ])
    .await;
    let blocks = pool(&tight).await;
    let output = blocks * 16 * 2 / 3 - 40;
    let body = |i: u32| {
        let mut body = completion_body(prompt(i, 40), output as u32);
        body["return_token_ids"] = json!(true);
        body["ignore_eos"] = json!(true);
        body["logprobs"] = json!(1);
        body
    };
    let impossible = completion_body(prompt(9, blocks * 16 + 1), 1);
    let mut tasks = JoinSet::new();
    for i in 0..8 {
        let (client, body) = (tight.client(), body(i));
        tasks.spawn(async move { (i, stream(client, body).await) });
        if i == 0 {
            // The first is the first.
            while tight.kv_busy().await == 0.0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
    for _ in 0..100 {
        let refused = tight
            .client()
            .post("/v1/completions", &impossible)
            .await
            .expect("an answer");
        assert_eq!(refused.status, 400);
        assert!(
            refused.text().contains(&(blocks * 16 + 1).to_string()),
            "{}",
            refused.text()
        );
    }
    let mut streams = tasks.join_all().await;
    streams.sort_by_key(|(i, _)| *i);
    for (i, streamed) in &streams {
        let alone = complete(&roomy.client(), &body(*i)).await["choices"][0].clone();
        assert_eq!(json!(streamed.ids), alone["token_ids"], "request {i}");
        assert_eq!(json!(streamed.text), alone["text"], "request {i}");
        assert_eq!(
            json!(streamed.logprobs),
            alone["logprobs"]["token_logprobs"],
            "request {i}"
        );
        assert_eq!(streamed.finish, "length");
    }
    let last = streams.iter().max_by_key(|(_, streamed)| streamed.ended);
    assert_ne!(last.map(|(i, _)| *i), Some(0), "the first came last");
    let preemptions = tight.metrics().await.sum("vllm:num_preemptions_total", &[]);
    assert!(
        preemptions > 0.0,
        "the pool was meant to run dry: {blocks} blocks"
    );
    assert!(preemptions <= 8.0 * 10.0, "{preemptions}");
    tight.kv_idle(IDLE).await;
}

/// C4.11: a pool of exactly the context, and one with a single block to spare for the cache.
#[tokio::test]
async fn a_pool_of_exactly_the_context_serves_all_of_it() {
    let roomy = serve(&[]).await;
    let blocks = pool(&serve(&["--kv-cache-memory", "224KiB"]).await).await;
    for spare in [0, 1] {
        let context = (blocks - spare) * 16;
        let limit = context.to_string();
        let arguments = ["--kv-cache-memory", "224KiB", "--max-model-len", &limit];
        let tight = serve(&arguments).await;
        for round in 0..4u32 {
            for len in [1, context / 2, context - 16, context - 1] {
                let mut body = completion_body(prompt(round / 2, len), (context - len) as u32);
                body["return_token_ids"] = json!(true);
                body["ignore_eos"] = json!(true);
                let expected = complete(&roomy.client(), &body).await;
                let answer = complete(&tight.client(), &body).await;
                assert_eq!(
                    answer["choices"], expected["choices"],
                    "{spare} blocks to spare, prompt of {len}"
                );
            }
            let refused = completion_body(prompt(round, context), 1);
            let refused = tight.client().post("/v1/completions", &refused).await;
            assert_eq!(refused.expect("an answer").status, 400);
        }
        tight.kv_idle(IDLE).await;
    }
}

/// Most memory that the process has had, in MiB.
fn peak_mib(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.trim().strip_suffix("kB"));
    number
        .expect("VmHWM")
        .trim()
        .parse::<f64>()
        .expect("a number")
        / 1024.0
}

/// C9.8: absurd numbers and sizes are refused; memory does not follow them, and others are served.
#[tokio::test]
async fn absurd_requests_are_refused_without_memory_and_others_do_not_notice() {
    let instance = serve(&["--num-speculative-tokens", "1"]).await;
    let client = instance.client();
    let ordinary = bodies().remove(4);
    let expected = complete(&client, &ordinary).await["choices"].clone();
    let before = peak_mib(instance.process.id());
    let biases: serde_json::Map<String, Value> =
        (0..1_000_000).map(|i| (i.to_string(), json!(1))).collect();
    let absurd = [
        ("n", json!(1_000_000)),
        ("best_of", json!(1_000_000)),
        ("max_tokens", json!(1_000_000_000_000u64)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(1.5)),
        ("max_tokens", json!("5")),
        ("logprobs", json!(1_000_000)),
        ("logprobs", json!(-1)),
        ("prompt_logprobs", json!(1_000_000)),
        ("prompt", json!(vec!["x"; 100_000])),
        ("prompt", json!(vec![7; 1_000_000])),
        ("stop", json!(vec!["x"; 100_000])),
        ("stop", json!("x".repeat(1 << 20))),
        ("logit_bias", Value::Object(biases)),
        ("allowed_token_ids", json!(vec![7; 1_000_000])),
        ("top_k", json!(-2)),
        ("min_tokens", json!(1_000_000)),
        ("cache_salt", json!("x".repeat(1 << 20))),
    ];
    for (field, value) in absurd {
        let mut body = completion_body("x", 2);
        body[field] = value;
        let refused = client.post("/v1/completions", &body);
        let (refused, beside) = tokio::join!(refused, complete(&client, &ordinary));
        let refused = refused.expect("an answer");
        assert_eq!(refused.status, 400, "{field}: {}", refused.text());
        assert!(refused.text().contains(field), "{}", refused.text());
        assert_eq!(beside["choices"], expected);
    }
    for (field, value) in [
        ("n", json!(1_000_000)),
        ("top_logprobs", json!(1_000_000)),
        ("top_logprobs", json!(-1)),
        ("max_tokens", json!(1_000_000_000_000u64)),
        ("max_completion_tokens", json!(-1)),
        ("messages", json!(vec![json!({}); 100_000])),
        ("stop", json!(vec!["x"; 100_000])),
    ] {
        let mut body = chat_body("Hello!");
        body["logprobs"] = json!(true);
        body[field] = value;
        let refused = client.post("/v1/chat/completions", &body).await;
        let refused = refused.expect("an answer");
        assert_eq!(refused.status, 400, "{field}: {}", refused.text());
        assert!(refused.text().contains(field), "{}", refused.text());
    }
    for number in ["NaN", "Infinity", "1e400", "-1e400", "00", "1.", "0x1"] {
        let body = format!("{{\"prompt\":\"x\",\"temperature\":{number}}}");
        let refused = client
            .post_bytes("/v1/completions", body, "application/json")
            .await;
        assert_eq!(refused.expect("an answer").status, 400, "{number}");
    }
    // Where the head or body is cut off, the answer may come too late for a client that still writes.
    let long = client.clone().with_header("x-long", &"x".repeat(1 << 20));
    let many = (0..10_000).fold(client.clone(), |client, i| {
        client.with_header(&format!("x-{i}"), "x")
    });
    for client in [long, many] {
        if let Ok(answer) = client.post("/v1/completions", &ordinary).await {
            assert_eq!(answer.status, 431);
        }
    }
    let endless = vec![b' '; 100 << 20];
    let endless = client
        .post_bytes("/v1/completions", endless, "application/json")
        .await;
    if let Ok(answer) = endless {
        assert_eq!(answer.status, 413);
    }
    assert_eq!(complete(&client, &ordinary).await["choices"], expected);
    let grown = peak_mib(instance.process.id()) - before;
    assert!(grown < 200.0, "{grown:.0} MiB more");
    instance.kv_idle(IDLE).await;
}
