//! A running server against answers of another implementation (`testdata/golden/serving`, made with
//! transformers): tokens however the work is cut, logits far out in a long context.

use serde_json::{Value, json};
use tokio::task::JoinSet;
use twinfer_it::{Checkpoint, Client, Cluster, ClusterOptions, completion_body, repository};

const MODELS: [&str; 2] = ["qwen3_moe", "deepseek_v3"];
/// Tokens of a long prompt that are sent at a time.
const PART: usize = 2000;

/// A prompt and its greedy tokens.
struct Case {
    prompt: Vec<u32>,
    ids: Vec<u32>,
}

fn file(name: &str) -> Value {
    let path = repository().join("testdata/golden/serving").join(name);
    let text = std::fs::read_to_string(path).expect("the reference");
    serde_json::from_str(&text).expect("JSON")
}

fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().expect("a list").iter();
    list.map(|number| number.as_f64().expect("a number"))
        .collect()
}

fn ids(value: &Value) -> Vec<u32> {
    numbers(value).into_iter().map(|id| id as u32).collect()
}

fn cases(model: &str) -> Vec<Case> {
    let file = file("greedy.json");
    let all = file[model].as_array().expect("answers").iter();
    all.map(|answer| {
        // Nearer ties could fall either way in two implementations.
        assert!(numbers(&answer["gaps"]).iter().all(|gap| *gap > 1e-4));
        Case {
            prompt: ids(&answer["prompt"]),
            ids: ids(&answer["ids"]),
        }
    })
    .collect()
}

async fn complete(client: &Client, body: &Value) -> Value {
    let answer = client.post("/v1/completions", body).await;
    let answer = answer.expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

async fn greedy(client: Client, prompt: Vec<u32>, tokens: usize) -> Vec<u32> {
    let mut body = completion_body(prompt, tokens as u32);
    body["ignore_eos"] = json!(true);
    body["return_token_ids"] = json!(true);
    ids(&complete(&client, &body).await["choices"][0]["token_ids"])
}

/// All cases, at most `together` at once.
async fn check(client: &Client, cases: &[Case], together: usize, what: &str) {
    let mut running = JoinSet::new();
    let compare = |(place, got): (usize, Vec<u32>)| {
        let case: &Case = &cases[place];
        assert_eq!(
            got,
            case.ids,
            "{what}, prompt {place} of {}",
            case.prompt.len()
        );
    };
    for (place, case) in cases.iter().enumerate() {
        if running.len() == together
            && let Some(done) = running.join_next().await
        {
            compare(done.expect("an answer"));
        }
        let (client, prompt, tokens) = (client.clone(), case.prompt.clone(), case.ids.len());
        running.spawn(async move { (place, greedy(client, prompt, tokens).await) });
    }
    running.join_all().await.into_iter().for_each(compare);
}

/// C6.12, C4.8, C4.13: alone and in a batch, chunked, cold and hot, on one thread and on eight.
#[tokio::test]
async fn greedy_tokens_equal_the_reference_however_the_work_is_cut() {
    for model in MODELS {
        let (checkpoint, cases) = (Checkpoint::golden(model), cases(model));
        assert_eq!(cases.len(), 50);
        for (threads, budget, cache) in [
            ("1", "512", "--no-enable-prefix-caching"),
            ("1", "8", "--no-enable-prefix-caching"),
            ("1", "8", "--enable-prefix-caching"),
            ("8", "512", "--enable-prefix-caching"),
            ("8", "8", "--no-enable-prefix-caching"),
        ] {
            let arguments = [
                "--dtype",
                "f32",
                "--threads",
                threads,
                "--max-num-batched-tokens",
                budget,
                cache,
            ];
            let instance = checkpoint.serve(&arguments).await;
            let client = instance.client();
            for together in [1, 16] {
                let what = format!("{model}, {arguments:?}, {together} at once");
                check(&client, &cases, together, &what).await;
            }
            let hits = instance.metrics().await;
            let hits = hits.sum("vllm:prefix_cache_hits_total", &[]);
            assert_eq!(hits > 0.0, cache == "--enable-prefix-caching", "{hits}");
        }
    }
}

/// C6.12 with drafts and over a pair: a sequence whose KV came from elsewhere is no other sequence.
#[tokio::test]
async fn greedy_tokens_equal_the_reference_with_drafts_and_after_a_handoff() {
    let (checkpoint, all) = (Checkpoint::golden("deepseek_v3"), cases("deepseek_v3"));
    for drafts in ["1", "3"] {
        let arguments = ["--dtype", "f32", "--num-speculative-tokens", drafts];
        let instance = checkpoint.serve(&arguments).await;
        for together in [1, 16] {
            check(
                &instance.client(),
                &all,
                together,
                &format!("{drafts} drafts"),
            )
            .await;
        }
    }
    for model in MODELS {
        let checkpoint = Checkpoint::golden(model);
        let options = ClusterOptions {
            serve: ["--dtype", "f32"].map(String::from).to_vec(),
            model: checkpoint.path().to_owned(),
            ..ClusterOptions::default()
        };
        let cluster = Cluster::start(&options).await;
        check(
            &cluster.client(),
            &cases(model),
            16,
            &format!("{model}, 1P1D"),
        )
        .await;
    }
}

/// Log-probabilities of a row of logits.
fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - most).exp()).sum();
    logits.iter().map(|x| x - most - sum.ln()).collect()
}

/// The long prompt of the reference.
fn long_prompt(len: usize) -> Vec<u32> {
    let mut state = 7u64;
    (0..len)
        .map(|_| {
            state = (state * 1_103_515_245 + 12_345) % (1 << 31);
            ((state >> 16) % 499) as u32
        })
        .collect()
}

/// C6.6: YaRN in all its spellings, at positions inside of the original context and beyond.
#[tokio::test]
async fn logits_under_yarn_equal_the_reference_at_every_position() {
    let file = file("yarn.json");
    let positions = ids(&file["positions"]);
    for variant in file["variants"].as_array().expect("variants") {
        let name = format!("{}, {}", variant["checkpoint"], variant["name"]);
        let checkpoint = Checkpoint::golden(variant["checkpoint"].as_str().expect("a name"));
        for (field, value) in variant["config"].as_object().expect("changes") {
            checkpoint.configure(field, value.clone());
        }
        let layers = ids(&json!([variant["config"]["num_hidden_layers"]]))[0];
        checkpoint.edit(|tensors| {
            tensors.retain(|name, _| {
                let layer = name.strip_prefix("model.layers.");
                let layer = layer.and_then(|rest| rest.split('.').next()?.parse().ok());
                layer.is_none_or(|layer: u32| layer < layers)
            });
        });
        let arguments = ["--dtype", "f32", "--threads", "2", "--max-num-seqs", "1"];
        let instance = checkpoint.serve(&arguments).await;
        let client = instance.client();
        let listed = client.get("/v1/models").await.expect("an answer").json();
        assert_eq!(
            listed["data"][0]["max_model_len"], variant["context"],
            "{name}"
        );
        let context = variant["context"].to_string();
        let log = instance.process.output();
        assert!(log.contains(&format!("max_model_len={context}")), "{log}");
        let rows = variant["logits"].as_array().expect("rows");
        let mut done = 0;
        for (&position, row) in positions.iter().zip(rows) {
            // In parts, each found in the cache by the next, so that no answer takes long.
            let prompt = long_prompt(position as usize + 1);
            while done + PART < prompt.len() {
                done += PART;
                let body = completion_body(prompt[..done].to_vec(), 1);
                let _ = complete(&client, &body).await;
            }
            let logits = numbers(row);
            let reference = log_softmax(&logits);
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
            let best = best.expect("logits");
            let scale = logits.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let mut worst = 0.0f64;
            // A token that alone may be drawn is told with its score among all.
            for id in [best, 1, 77, 203, 350, 498] {
                let mut body = completion_body(prompt.clone(), 1);
                body["logprobs"] = json!(0);
                body["return_token_ids"] = json!(true);
                if id != best {
                    body["allowed_token_ids"] = json!([id]);
                }
                let answer = complete(&client, &body).await;
                let choice = &answer["choices"][0];
                assert_eq!(choice["token_ids"], json!([id]), "{name}, {position}");
                let logprob = numbers(&choice["logprobs"]["token_logprobs"])[0];
                worst = worst.max((logprob - reference[id]).abs());
            }
            println!("{name}, position {position}: {worst:.1e} of {scale:.1}");
            assert!(
                worst <= 1e-2 * scale,
                "{name}, position {position}: {worst}"
            );
        }
    }
}

/// C6.6: settings that contradict each other are no model.
#[tokio::test]
async fn rope_settings_that_contradict_each_other_are_refused_by_name() {
    let yarn = |changes: Value| {
        let mut yarn =
            json!({"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32});
        for (field, value) in changes.as_object().expect("changes") {
            yarn[field] = value.clone();
        }
        yarn
    };
    for (changes, words) in [
        // The extended length, extended again.
        (
            json!({"max_position_embeddings": 32768, "rope_scaling": yarn(json!({}))}),
            ["max_position_embeddings is 32768", "1024"],
        ),
        (
            json!({"rope_scaling": yarn(json!({"rope_type": "linear"}))}),
            ["type", "rope_type"],
        ),
        (
            json!({"rope_scaling": yarn(json!({})), "original_max_position_embeddings": 64}),
            ["original_max_position_embeddings is 64", "32"],
        ),
        (
            json!({"rope_scaling": yarn(json!({})), "rope_parameters": yarn(json!({"factor": 16.0}))}),
            ["rope_scaling", "rope_parameters"],
        ),
        (
            json!({"rope_scaling": null, "rope_parameters": yarn(json!({"rope_theta": 50_000.0}))}),
            ["rope_theta is 10000", "50000"],
        ),
        (
            json!({"rope_scaling": yarn(json!({"beta_fast": 1, "beta_slow": 32}))}),
            ["beta_fast", "beta_slow"],
        ),
        (
            json!({"rope_scaling": yarn(json!({"original_max_position_embeddings": null}))}),
            ["original_max_position_embeddings", "config.json"],
        ),
        (
            json!({"rope_scaling": yarn(json!({"type": "dynamic"}))}),
            ["dynamic", "yarn"],
        ),
        (
            json!({"rope_scaling": yarn(json!({"factor": 0.5}))}),
            ["factor", "0.5"],
        ),
        (
            json!({"rope_scaling": yarn(json!({"mscale_of_all": 1.0}))}),
            ["mscale_of_all", "rope_scaling"],
        ),
    ] {
        let model = Checkpoint::golden("deepseek_v3");
        for (field, value) in changes.as_object().expect("changes") {
            model.configure(field, value.clone());
        }
        model.refused(&[], &words).await;
    }
}
