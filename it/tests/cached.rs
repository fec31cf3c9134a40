//! What the prefix cache finds and tells: real processes with the demo model, block size 16.

use serde_json::{Value, json};
use std::time::Duration;
use tokio::task::JoinSet;
use twinfer_it::{Client, Cluster, ClusterOptions, Instance, completion_body, demo_model};

const BLOCK: usize = 16;
const OUTPUT: usize = 6;
const IDLE: Duration = Duration::from_secs(10);
/// Prompt lengths around the edges of blocks.
const LENGTHS: [usize; 13] = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65];

/// Of `len` tokens; differs from its first token on for each number.
fn prompt(number: usize, len: usize) -> Vec<u32> {
    (0..len)
        .map(|i| 6 + ((i * i * 7 + i * 37 + number * 101) % 1500) as u32)
        .collect()
}

fn body(prompt: &[u32]) -> Value {
    let mut body = completion_body(prompt.to_vec(), OUTPUT as u32);
    body["ignore_eos"] = json!(true);
    body["return_token_ids"] = json!(true);
    body["logprobs"] = json!(2);
    body
}

/// Whole blocks that a prompt may take from the cache: its last token is always computed.
fn whole_blocks(len: usize) -> usize {
    (len - 1) / BLOCK * BLOCK
}

async fn serve(arguments: &[&str]) -> Instance {
    let mut instance = Instance::serve(&demo_model(), arguments, &[]);
    instance.ready().await;
    instance
}

fn cached(usage: &Value) -> usize {
    let details = &usage["prompt_tokens_details"];
    details["cached_tokens"].as_u64().unwrap_or(0) as usize
}

/// The choices, and the cached tokens that usage tells, whole and streamed alike only in form.
async fn ask(client: &Client, body: &Value) -> (Value, usize) {
    let answer = client.post("/v1/completions", body).await;
    let answer = answer.expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let prompt = body["prompt"].as_array().expect("ids").len();
    assert_eq!(answer["usage"]["prompt_tokens"], json!(prompt), "{answer}");
    (answer["choices"].clone(), cached(&answer["usage"]))
}

async fn streamed(client: &Client, body: &Value) -> usize {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let answer = client.post("/v1/completions", &body).await;
    let (events, done) = answer.expect("an answer").events();
    assert!(done);
    cached(&events.last().expect("events")["usage"])
}

async fn hits(instance: &Instance) -> (usize, usize) {
    let metrics = instance.metrics().await;
    let sum = |name: &str| metrics.sum(name, &[]) as usize;
    (
        sum("vllm:prefix_cache_hits_total"),
        sum("vllm:prefix_cache_queries_total"),
    )
}

/// C4.8: the same prompt again, at every edge of a block, with and without drafts: all whole blocks but
/// the last token's are found, told and counted, and no answer changes.
#[tokio::test]
async fn cached_tokens_are_the_whole_blocks_before_the_last_token() {
    let without = serve(&["--no-enable-prefix-caching"]).await;
    for drafts in ["0", "3"] {
        let arguments = ["--num-speculative-tokens", drafts];
        let instance = serve(&arguments).await;
        let client = instance.client();
        let (mut found, mut looked) = (0, 0);
        for (number, len) in LENGTHS.into_iter().enumerate() {
            let body = body(&prompt(number, len));
            let (expected, none) = ask(&without.client(), &body).await;
            assert_eq!(none, 0);
            let what = format!("{drafts} drafts, prompt of {len}");
            assert_eq!(ask(&client, &body).await, (expected.clone(), 0), "{what}");
            let whole = whole_blocks(len);
            assert_eq!(ask(&client, &body).await, (expected, whole), "{what}");
            assert_eq!(streamed(&client, &body).await, whole, "{what}");
            // Choices share the prompt: told once, of the first.
            let mut several = body.clone();
            several["n"] = json!(3);
            assert_eq!(ask(&client, &several).await.1, whole, "{what}");
            // Scores of the prompt need all of it computed.
            let mut scored = body.clone();
            scored["prompt_logprobs"] = json!(0);
            assert_eq!(ask(&client, &scored).await.1, 0, "{what}");
            for salt in ["a", "b"] {
                let mut salted = body.clone();
                salted["cache_salt"] = json!(salt);
                assert_eq!(ask(&client, &salted).await.1, 0, "{what}");
                assert_eq!(ask(&client, &salted).await.1, whole, "{what}");
            }
            found += 2 * whole + 2 * whole;
            looked += 3 * len + 4 * len;
        }
        let (hits, queries) = hits(&instance).await;
        // Choices and scored prompts count as well.
        assert!(
            hits >= found && queries >= looked && hits < queries,
            "{hits} {queries}"
        );
        let metrics = instance.metrics().await;
        let sources = |source: &str| {
            let label = format!("source=\"{source}\"");
            metrics.sum("vllm:prompt_tokens_by_source_total", &[&label]) as usize
        };
        assert_eq!(sources("local_cache_hit"), hits);
        let all: f64 = metrics.sum("vllm:prompt_tokens_total", &[]);
        assert_eq!(sources("local_compute") + hits, all as usize);
        instance.kv_idle(IDLE).await;
    }
    assert_eq!(hits(&without).await.0, 0);
}

/// C4.8: beginnings: shared, then other; the output as part of the next prompt; one token less or more.
#[tokio::test]
async fn a_shared_beginning_is_found_up_to_where_it_differs() {
    let without = serve(&["--no-enable-prefix-caching"]).await;
    for drafts in ["0", "3"] {
        let instance = serve(&["--num-speculative-tokens", drafts]).await;
        let client = instance.client();
        for (number, len) in LENGTHS.into_iter().enumerate() {
            let first = prompt(number, len);
            let (choices, _) = ask(&client, &body(&first)).await;
            let same = async |prompt: &[u32], expected: usize, what: &str| {
                let body = body(prompt);
                let (choices, _) = ask(&without.client(), &body).await;
                let what = format!("{what}, {drafts} drafts, after a prompt of {len}");
                assert_eq!(ask(&client, &body).await, (choices, expected), "{what}");
            };
            // The KV of the last output token was never computed.
            let computed = len + OUTPUT - 1;
            let output = choices[0]["token_ids"].as_array().expect("ids").iter();
            let output = output.map(|id| id.as_u64().expect("an id") as u32);
            let longer: Vec<u32> = first.iter().copied().chain(output).chain([9]).collect();
            same(&longer, computed / BLOCK * BLOCK, "its output as prompt").await;
            if len > 1 {
                let shorter = &first[..len - 1];
                same(shorter, whole_blocks(len - 1), "one token less").await;
                let mut other = first.clone();
                other[len - 1] = 3;
                other.extend([4, 5]);
                // The shared beginning ends before the last token; the MTP layer's row of a position is
                // made of the token behind it as well.
                let shared = if drafts == "0" { len - 1 } else { len - 2 };
                same(&other, shared / BLOCK * BLOCK, "another last token").await;
                let mut foreign = first.clone();
                foreign[0] = 3;
                same(&foreign, 0, "another first token").await;
            }
        }
        instance.kv_idle(IDLE).await;
    }
}

/// C4.8: the cache gives way to running requests, and what is gone is computed again.
#[tokio::test]
async fn what_was_evicted_is_computed_again() {
    let without = serve(&["--no-enable-prefix-caching"]).await;
    let instance = serve(&["--kv-cache-memory", "224KiB"]).await;
    let client = instance.client();
    let total = instance
        .metrics()
        .await
        .sum("twinfer_kv_blocks", &["state=\"total\""]) as usize;
    let half = total / 2 * BLOCK;
    let kept = body(&prompt(0, half - OUTPUT));
    let (expected, _) = ask(&without.client(), &kept).await;
    let whole = whole_blocks(half - OUTPUT);
    assert_eq!(ask(&client, &kept).await, (expected.clone(), 0));
    assert_eq!(ask(&client, &kept).await, (expected.clone(), whole));
    for number in 1..4 {
        let _ = ask(&client, &body(&prompt(number, half - OUTPUT))).await;
    }
    assert_eq!(ask(&client, &kept).await, (expected.clone(), 0), "evicted");
    assert_eq!(ask(&client, &kept).await, (expected, whole));
    // Alone it may take the whole pool.
    let all = body(&prompt(9, total * BLOCK - OUTPUT));
    let (expected, _) = ask(&without.client(), &all).await;
    assert_eq!(ask(&client, &all).await, (expected, 0));
    instance.kv_idle(IDLE).await;
}

/// C4.8: sixteen at once with one prompt.
#[tokio::test]
async fn sixteen_equal_prompts_at_once_get_the_answer_of_one() {
    let without = serve(&["--no-enable-prefix-caching"]).await;
    for drafts in ["0", "2"] {
        let instance = serve(&["--num-speculative-tokens", drafts]).await;
        for (number, len) in [(0, 16), (1, 33), (2, 100), (3, 1)] {
            let body = body(&prompt(number, len));
            let (expected, _) = ask(&without.client(), &body).await;
            let mut tasks = JoinSet::new();
            for _ in 0..16 {
                let (client, body) = (instance.client(), body.clone());
                tasks.spawn(async move { ask(&client, &body).await });
            }
            for (choices, cached) in tasks.join_all().await {
                assert_eq!(choices, expected, "{drafts} drafts, prompt of {len}");
                assert!(
                    cached % BLOCK == 0 && cached <= whole_blocks(len),
                    "{cached}"
                );
            }
        }
        let (hits, queries) = hits(&instance).await;
        assert!(
            hits <= queries && queries == 16 * (16 + 33 + 100 + 1),
            "{queries}"
        );
        instance.kv_idle(IDLE).await;
    }
}

/// Over a pair a prompt that prefill has cached is not computed again, and what decode has cached is not
/// fetched again.
#[tokio::test]
async fn a_pair_counts_what_prefill_found_and_what_decode_fetched() {
    let without = serve(&["--no-enable-prefix-caching"]).await;
    for drafts in ["0", "2"] {
        let options = ClusterOptions {
            serve: ["--num-speculative-tokens", drafts]
                .map(String::from)
                .to_vec(),
            ..ClusterOptions::default()
        };
        let cluster = Cluster::start(&options).await;
        let client = cluster.client();
        for (number, len) in LENGTHS.into_iter().enumerate() {
            let body = body(&prompt(number, len));
            let (expected, _) = ask(&without.client(), &body).await;
            let (what, whole) = (
                format!("{drafts} drafts, prompt of {len}"),
                whole_blocks(len),
            );
            assert_eq!(ask(&client, &body).await, (expected.clone(), 0), "{what}");
            assert_eq!(ask(&client, &body).await, (expected, whole), "{what}");
            assert_eq!(streamed(&client, &body).await, whole, "{what}");
            let mut several = body.clone();
            several["n"] = json!(2);
            assert_eq!(ask(&client, &several).await.1, whole, "{what}");
        }
        cluster.kv_idle(IDLE).await;
        let found: usize = LENGTHS.into_iter().map(whole_blocks).sum();
        let (hits, _) = hits(&cluster.prefill[0]).await;
        assert_eq!(hits, 3 * found, "the first of four found nothing");
        let decode = cluster.decode[0].metrics().await;
        let sources = |source: &str| {
            let label = format!("source=\"{source}\"");
            decode.sum("vllm:prompt_tokens_by_source_total", &[&label]) as usize
        };
        let fetched: usize = LENGTHS.iter().map(|len| 4 * (len - 1)).sum();
        let fetched = fetched - 3 * found;
        assert_eq!(sources("external_kv_transfer"), fetched);
        // The second choice shares the whole blocks of the first.
        assert_eq!(sources("local_cache_hit"), 4 * found);
        let all = decode.sum("vllm:prompt_tokens_total", &[]) as usize;
        assert_eq!(fetched + 4 * found + sources("local_compute"), all);
        assert_eq!(self::hits(&cluster.decode[0]).await, (4 * found, all));
        assert_eq!(all, LENGTHS.iter().map(|len| 5 * len).sum::<usize>());
        assert_eq!(decode.sum("twinfer_kv_load_failures_total", &[]), 0.0);
    }
}

/// What prefill found is told to the client also by a decode instance that has no cache: neither of them
/// computed it.
#[tokio::test]
async fn a_pair_tells_what_prefill_found() {
    let prefill = serve(&["--role", "prefill"]).await;
    let decode = serve(&["--role", "decode", "--no-enable-prefix-caching"]).await;
    let mut asked = body(&prompt(1, 50));
    for expected in [0, 48] {
        let mut first = asked.clone();
        first["max_tokens"] = json!(1);
        first["kv_transfer_params"] = json!({"do_remote_decode": true});
        let answer = prefill.client().post("/v1/completions", &first).await;
        let handle = answer.expect("an answer").json()["kv_transfer_params"].clone();
        assert_eq!(handle["remote_prefill_cached_tokens"], json!(expected));
        asked["kv_transfer_params"] = handle;
        assert_eq!(ask(&decode.client(), &asked).await.1, expected);
    }
    // A peer's number counts only as far as its KV goes.
    let mut first = body(&prompt(1, 50));
    first["kv_transfer_params"] = json!({"do_remote_decode": true});
    let answer = prefill.client().post("/v1/completions", &first).await;
    asked["kv_transfer_params"] = answer.expect("an answer").json()["kv_transfer_params"].clone();
    asked["kv_transfer_params"]["remote_prefill_cached_tokens"] = json!(u32::MAX);
    assert_eq!(streamed(&decode.client(), &asked).await, 49);
    prefill.kv_idle(IDLE).await;
    decode.kv_idle(IDLE).await;
}
