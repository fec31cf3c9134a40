//! What the engine can do, as clients see it: prompts that are scored, shared and cached, and drafts.

use crate::support::{CONTEXT, Server, expected};
use serde_json::{Value, json};
use twinfer_config::MoeComm;
use twinfer_protocol::Role;

const PATH: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn close(value: &Value, expected: f64) -> bool {
    (value.as_f64().unwrap() - expected).abs() < 1e-4
}

/// Log-probabilities of the scripted model: of the token that the script names, and of any other.
fn logprob(named: bool) -> f64 {
    let sum = (10f64.exp() + 257.0).ln();
    if named { 10.0 - sum } else { -sum }
}

#[tokio::test]
async fn an_echoed_prompt_has_log_probabilities_like_the_output() {
    let server = Server::start(Default::default()).await;
    // In `say:ab|ab` the last two letters are those that the script names.
    let prompt = "say:ab|ab";
    for k in [0, 1, 3] {
        let mut body =
            json!({"prompt": prompt, "echo": true, "logprobs": k, "max_tokens": 1, "n": 2});
        let whole = server.client.complete(&body).await;
        assert_eq!(whole["usage"]["prompt_tokens"], 9);
        for choice in whole["choices"].as_array().unwrap() {
            let logprobs = &choice["logprobs"];
            assert_eq!(choice["text"], prompt);
            assert_eq!(choice["finish_reason"], "stop");
            let tokens = logprobs["tokens"].as_array().unwrap();
            assert_eq!(tokens.len(), 10, "the prompt and the end");
            let texts: String = tokens.iter().take(9).map(|t| t.as_str().unwrap()).collect();
            assert_eq!(texts, prompt);
            let values = logprobs["token_logprobs"].as_array().unwrap();
            let tops = logprobs["top_logprobs"].as_array().unwrap();
            assert!(values[0].is_null() && tops[0].is_null());
            for at in 7..10 {
                assert!(close(&values[at], logprob(true)), "{values:?}");
                let own = tokens[at].as_str().unwrap();
                assert!(close(&tops[at][own], logprob(true)));
            }
            assert!(
                tops[1..]
                    .iter()
                    .all(|top| top.as_object().unwrap().len() <= k + 1)
            );
            assert_eq!(
                logprobs["text_offset"],
                json!([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
            );
        }
        body["stream"] = json!(true);
        let events = server.client.open(PATH, &body).await.events().await;
        for index in 0..2 {
            let of_choice = || {
                let choices = events.iter().filter_map(|event| event["choices"].get(0));
                choices.filter(move |choice| choice["index"] == index)
            };
            let text: String = of_choice().map(|c| c["text"].as_str().unwrap()).collect();
            assert_eq!(text, prompt);
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let parts = of_choice().filter_map(|c| c["logprobs"][list].as_array());
                let all: Vec<Value> = parts.flatten().cloned().collect();
                assert_eq!(
                    json!(all),
                    whole["choices"][index]["logprobs"][list],
                    "{list}"
                );
            }
        }
    }
}

#[tokio::test]
async fn a_prompt_is_scored_without_output() {
    let server = Server::start(Default::default()).await;
    for logprobs in [Value::Null, json!(2)] {
        for stream in [false, true] {
            let body = json!({"prompt": "hello", "echo": true, "max_tokens": 0, "logprobs": logprobs,
                "stream": stream, "stream_options": if stream { json!({"include_usage": true}) } else { Value::Null }});
            let (text, values, usage) = if stream {
                let events = server.client.open(PATH, &body).await.events().await;
                let choice = events[0]["choices"][0].clone();
                (
                    choice["text"].clone(),
                    choice["logprobs"].clone(),
                    events[events.len() - 1]["usage"].clone(),
                )
            } else {
                let answer = server.client.complete(&body).await;
                let choice = answer["choices"][0].clone();
                assert_eq!(choice["finish_reason"], "length");
                (
                    choice["text"].clone(),
                    choice["logprobs"].clone(),
                    answer["usage"].clone(),
                )
            };
            assert_eq!(text, "hello");
            assert_eq!(usage["completion_tokens"], 0);
            match logprobs.is_null() {
                true => assert!(values.is_null()),
                false => assert_eq!(values["tokens"], json!(["h", "e", "l", "l", "o"])),
            }
        }
    }
    let (status, _, param, _) = server
        .client
        .post(PATH, &json!({"prompt": "x", "max_tokens": 0}))
        .await
        .error();
    assert_eq!((status, param.as_deref()), (400, Some("max_tokens")));
}

#[tokio::test]
async fn a_prompt_is_scored_once_for_all_choices() {
    let server = Server::start(Default::default()).await;
    let labels = "engine=\"0\",model_name=\"scripted\"";
    let computed = async || {
        let series =
            format!("vllm:prompt_tokens_by_source_total{{{labels},source=\"local_compute\"}}");
        server.metric(&series).await
    };
    let prompt = "say:a prompt of some length|";
    for (extra, stream) in [
        (json!({"echo": true, "logprobs": 1}), false),
        (json!({"echo": true, "logprobs": 1}), true),
        (json!({"echo": true, "logprobs": 1, "max_tokens": 0}), true),
        (json!({"prompt_logprobs": 1}), false),
    ] {
        let before = computed().await;
        let mut body = json!({"prompt": prompt, "max_tokens": 2, "n": 6, "stream": stream});
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        if stream {
            let events = server.client.open(PATH, &body).await.events().await;
            let mut lengths = vec![0; 6];
            for event in &events {
                let Some(choice) = event["choices"].get(0) else {
                    continue;
                };
                let index = choice["index"].as_u64().unwrap() as usize;
                lengths[index] += choice["logprobs"]["tokens"].as_array().map_or(0, Vec::len);
            }
            let output = body["max_tokens"].as_u64().unwrap() as usize;
            assert_eq!(lengths, vec![prompt.len() + output; 6], "{body}");
        } else {
            let answer = server.client.complete(&body).await;
            let first = &answer["choices"][0];
            for choice in answer["choices"].as_array().unwrap() {
                assert_eq!(choice["prompt_logprobs"], first["prompt_logprobs"]);
                assert_eq!(
                    choice["logprobs"]["tokens"][3],
                    first["logprobs"]["tokens"][3]
                );
            }
        }
        // The first choice computes all of the prompt, the others what is left of its last block.
        let new = computed().await - before;
        let most = (prompt.len() + 5 * 16) as f64;
        assert!(
            new >= prompt.len() as f64 && new <= most,
            "{new} for {body}"
        );
    }
}

#[tokio::test]
async fn a_prompt_without_output_may_fill_the_context() {
    let server = Server::start(Default::default()).await;
    let mut body =
        json!({"prompt": vec![97; CONTEXT], "echo": true, "max_tokens": 0, "logprobs": 0});
    let answer = server.client.complete(&body).await;
    let tokens = answer["choices"][0]["logprobs"]["tokens"].as_array();
    assert_eq!(tokens.unwrap().len(), CONTEXT);
    for (tokens, prompt) in [(1, CONTEXT), (0, CONTEXT + 1)] {
        body["max_tokens"] = json!(tokens);
        body["prompt"] = json!(vec![97; prompt]);
        let (status, _, param, _) = server.client.post(PATH, &body).await.error();
        assert_eq!((status, param.as_deref()), (400, Some("prompt")));
    }
}

/// What an answer shows of prompts is bounded: choices repeat it, and small requests ask for much.
#[tokio::test]
async fn too_many_log_probabilities_of_prompts_are_refused_by_name() {
    let server = Server::with(|config| config.max_waiting = 1000).await;
    let prompts: Vec<_> = (0..8).map(|_| vec![97; CONTEXT - 1]).collect();
    let mut body = json!({"prompt": prompts, "prompt_logprobs": 20, "max_tokens": 1, "n": 64});
    let asked = 8 * 64 * (CONTEXT - 1) * 21;
    let (status, _, param, message) = server.client.post(PATH, &body).await.error();
    assert_eq!((status, param.as_deref()), (400, Some("prompt_logprobs")));
    let most: usize = message
        .split_whitespace()
        .rev()
        .find_map(|word| word.parse().ok())
        .unwrap();
    assert!(asked > most && (1..=3 << 18).contains(&most), "{message}");
    body["prompt_logprobs"] = Value::Null;
    body["echo"] = json!(true);
    body["logprobs"] = json!(19);
    let (status, _, param, _) = server.client.post(PATH, &body).await.error();
    assert_eq!((status, param.as_deref()), (400, Some("logprobs")));
    server.kv_idle(crate::support::LIMIT).await;
}

/// Requests that ask for much and take nothing of it do not pile up answers.
#[tokio::test]
async fn log_probabilities_that_nobody_takes_are_bounded_over_all_requests() {
    let server = Server::with(|config| config.max_waiting = 1000).await;
    let body =
        json!({"prompt": vec![97; CONTEXT - 1], "prompt_logprobs": 20, "max_tokens": 1, "n": 64});
    let mut unread = Vec::new();
    let refused = loop {
        let answer = server.client.open(PATH, &body).await;
        if answer.status != 200 {
            break answer.status;
        }
        unread.push(answer);
        assert!(unread.len() < 2000, "never refused");
    };
    assert_eq!(refused, 429);
    assert!(!unread.is_empty());
    drop(unread);
    server.kv_idle(crate::support::LIMIT).await;
    let answer = server.client.post(PATH, &body).await;
    assert_eq!(answer.status, 200);
}

/// One answer shows one number for one log-probability, whatever the place.
#[tokio::test]
async fn log_probabilities_are_written_alike_everywhere() {
    let server = Server::start(Default::default()).await;
    let body = json!({"prompt": "say:ab|a", "logprobs": 1, "prompt_logprobs": 1, "echo": true, "max_tokens": 2});
    let answer = server.client.complete(&body).await;
    let choice = &answer["choices"][0];
    let (own, top) = (
        &choice["logprobs"]["token_logprobs"],
        &choice["logprobs"]["top_logprobs"],
    );
    for (place, text) in choice["logprobs"]["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .enumerate()
    {
        if place > 0 {
            assert_eq!(own[place], top[place][text.as_str().unwrap()], "{choice}");
        }
    }
    assert_eq!(own[7], choice["prompt_logprobs"][7]["97"]["logprob"]);
}

/// As vLLM: completions have sixteen tokens where nothing is said, and all that fit where null is.
#[tokio::test]
async fn null_leaves_the_length_of_a_completion_open() {
    let server = Server::start(Default::default()).await;
    for (body, tokens) in [
        (json!({"prompt": "x", "ignore_eos": true}), 16),
        (
            json!({"prompt": "x", "ignore_eos": true, "max_tokens": null}),
            CONTEXT - 1,
        ),
    ] {
        let answer = server.client.complete(&body).await;
        assert_eq!(answer["usage"]["completion_tokens"], tokens, "{body}");
    }
}

#[tokio::test]
async fn prompt_logprobs_have_the_form_of_vllm() {
    let server = Server::start(Default::default()).await;
    let body = json!({"prompt": "say:ab|a", "prompt_logprobs": 2, "max_tokens": 2, "n": 2});
    let answer = server.client.complete(&body).await;
    for choice in answer["choices"].as_array().unwrap() {
        let list = choice["prompt_logprobs"].as_array().unwrap();
        assert_eq!(list.len(), 8);
        assert!(list[0].is_null());
        let last = &list[7]["97"];
        assert!(close(&last["logprob"], logprob(true)));
        assert_eq!(
            (&last["rank"], &last["decoded_token"]),
            (&json!(1), &json!("a"))
        );
        for entry in &list[1..] {
            assert!(
                (2..=3).contains(&entry.as_object().unwrap().len()),
                "{entry}"
            );
        }
        // The bar is one of 257 equals behind the best.
        assert!(close(&list[6]["124"]["logprob"], logprob(false)));
        assert_eq!(list[6]["124"]["rank"], 2);
        assert!(choice["logprobs"].is_null());
        assert_eq!(choice["text"], "b");
    }
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "max_tokens": 2});
    let answer = server.client.post(CHAT, &body).await.json();
    let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), tokens);
    assert!(answer["choices"][0]["logprobs"].is_null());
    for (field, value) in [
        ("prompt_logprobs", json!(21)),
        ("prompt_logprobs", json!(-1)),
    ] {
        let mut body = json!({"prompt": "x"});
        body[field] = value;
        assert_eq!(
            server.client.post(PATH, &body).await.error().2.as_deref(),
            Some(field)
        );
    }
}

#[tokio::test]
async fn a_cached_prompt_is_told_and_counted_and_salts_keep_prompts_apart() {
    let server = Server::start(Default::default()).await;
    let cached = async |body: Value| {
        let answer = server.client.complete(&body).await;
        assert_eq!(
            answer["choices"][0]["text"],
            expected("a prompt of some length", 3)
        );
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
    };
    let body = json!({"prompt": "a prompt of some length", "max_tokens": 3});
    assert_eq!(cached(body.clone()).await, None);
    assert_eq!(cached(body.clone()).await, Some(20));
    let mut salted = body.clone();
    salted["cache_salt"] = json!("mine");
    assert_eq!(cached(salted.clone()).await, None);
    assert_eq!(cached(salted).await, Some(20));
    let mut stream = body.clone();
    stream["stream"] = json!(true);
    stream["stream_options"] = json!({"include_usage": true});
    let events = server.client.open(PATH, &stream).await.events().await;
    let usage = &events[events.len() - 1]["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 20);
    // Choices share with each other; what counts is what the first found.
    let several = json!({"prompt": "another one", "max_tokens": 1, "n": 4});
    let answer = server.client.complete(&several).await;
    assert!(answer["usage"]["prompt_tokens_details"].is_null());
    let labels = "engine=\"0\",model_name=\"scripted\"";
    server.kv_idle(crate::support::LIMIT).await;
    let hits = server
        .metric(&format!("vllm:prefix_cache_hits_total{{{labels}}}"))
        .await;
    let queries = server
        .metric(&format!("vllm:prefix_cache_queries_total{{{labels}}}"))
        .await;
    assert_eq!(
        (hits, queries),
        (3.0 * 20.0 + 3.0 * 8.0, 5.0 * 23.0 + 4.0 * 11.0)
    );
    assert!(server.metric("twinfer_kv_blocks{state=\"cached\"}").await > 0.0);
    let found = server
        .metric(&format!(
            "vllm:prompt_tokens_by_source_total{{{labels},source=\"local_cache_hit\"}}"
        ))
        .await;
    assert_eq!(found, hits);
}

#[tokio::test]
async fn the_cache_can_be_switched_off() {
    let server = Server::with(|config| config.no_enable_prefix_caching = true).await;
    let body = json!({"prompt": "a prompt of some length", "max_tokens": 3, "n": 2});
    for _ in 0..2 {
        let answer = server.client.complete(&body).await;
        assert!(answer["usage"]["prompt_tokens_details"].is_null());
        assert_eq!(
            answer["choices"][1]["text"],
            expected("a prompt of some length", 3)
        );
    }
}

/// C4.5, C4.6 as clients see them: drafts change nothing but the number of steps.
#[tokio::test]
async fn drafts_change_no_answer_and_are_counted_by_place() {
    let plain = Server::start(Default::default()).await;
    let drafting = Server::with(|config| config.num_speculative_tokens = 3).await;
    let bodies = [
        json!({"prompt": "ab", "max_tokens": 40, "logprobs": 2}),
        json!({"prompt": "say:one END two|", "max_tokens": 30, "stop": "END"}),
        json!({"prompt": "say:one|", "max_tokens": 30}),
        json!({"prompt": "say:one|", "max_tokens": 2}),
        json!({"prompt": "ab", "max_tokens": 9, "temperature": 1.0, "seed": 3, "n": 3}),
        json!({"prompt": vec![97; CONTEXT - 3], "max_tokens": 3}),
        json!({"prompt": "say:one|", "max_tokens": 30, "stop_token_ids": [110]}),
    ];
    for body in &bodies {
        let (a, b) = (
            plain.client.complete(body).await,
            drafting.client.complete(body).await,
        );
        assert_eq!(a["choices"], b["choices"], "{body}");
        assert_eq!(
            a["usage"]["completion_tokens"],
            b["usage"]["completion_tokens"]
        );
        let mut stream = body.clone();
        stream["stream"] = json!(true);
        let events = drafting.client.open(PATH, &stream).await.events().await;
        for choice in a["choices"].as_array().unwrap() {
            let parts = events.iter().filter_map(|event| event["choices"].get(0));
            let parts = parts.filter(|part| part["index"] == choice["index"]);
            let text: String = parts.map(|part| part["text"].as_str().unwrap()).collect();
            assert_eq!(json!(text), choice["text"], "{body}");
        }
    }
    let labels = "engine=\"0\",model_name=\"scripted\"";
    let metric = async |name: &str| {
        drafting
            .metric(&format!("vllm:spec_decode_{name}_total{{{labels}}}"))
            .await
    };
    let (rounds, drafted, accepted) = (
        metric("num_drafts").await,
        metric("num_draft_tokens").await,
        metric("num_accepted_tokens").await,
    );
    assert!(rounds > 0.0 && accepted > rounds && accepted <= drafted);
    let mut places = Vec::new();
    for place in 0..5 {
        let series = format!(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position=\"{place}\"}}"
        );
        places.push(drafting.metric(&series).await);
    }
    assert_eq!(places.iter().sum::<f64>(), accepted);
    assert!(
        places[0] >= places[1] && places[2] > 0.0 && places[3] == 0.0,
        "{places:?}"
    );
}

/// C4.13.
#[tokio::test]
async fn each_of_64_requests_gets_its_own_text_and_count() {
    for drafts in [0, 2] {
        let server = Server::with(|config| {
            config.max_num_batched_tokens = 16;
            config.num_speculative_tokens = drafts;
        })
        .await;
        let mut tasks = tokio::task::JoinSet::new();
        for i in 1..=64u32 {
            let client = server.client.clone();
            tasks.spawn(async move {
                let prompt = format!("marker {i}");
                let greedy = json!({"prompt": prompt, "max_tokens": i, "ignore_eos": true});
                let answer = client.complete(&greedy).await;
                assert_eq!(answer["choices"][0]["text"], expected(&prompt, i as usize));
                assert_eq!(answer["usage"]["completion_tokens"], i);
                let seeded = json!({"prompt": prompt, "max_tokens": 12, "temperature": 5.0, "seed": i,
                    "ignore_eos": true, "return_token_ids": true});
                (seeded.clone(), client.complete(&seeded).await["choices"][0]["token_ids"].clone())
            });
        }
        let mut seen = Vec::new();
        while let Some(done) = tasks.join_next().await {
            seen.push(done.unwrap());
        }
        // Alone, at another instance.
        let other = Server::start(Default::default()).await;
        for (body, ids) in seen.iter().step_by(7) {
            let alone = other.client.complete(body).await;
            assert_eq!(alone["choices"][0]["token_ids"], *ids, "{body}");
            let mut reseeded = body.clone();
            reseeded["seed"] = json!(1000);
            let reseeded = other.client.complete(&reseeded).await;
            assert_ne!(reseeded["choices"][0]["token_ids"], *ids);
        }
        server.kv_idle(crate::support::LIMIT).await;
    }
}

#[tokio::test]
async fn flags_of_the_engine_are_checked_at_start() {
    type Change = fn(&mut twinfer_config::ServeConfig);
    let changes: [(Change, &str); 14] = [
        (|c| c.num_speculative_tokens = 6, "num-speculative-tokens"),
        (|c| c.dp = 0, "dp"),
        (|c| c.dp = 65, "dp"),
        (
            |c| {
                c.dp = 2;
                c.kv_port = u16::MAX;
            },
            "kv-port",
        ),
        (|c| c.moe_comm = Some(MoeComm::AllGather), "moe-comm"),
        (|c| c.eplb_interval = Some(8), "eplb-interval"),
        (|c| c.eplb_after_prefill = true, "eplb-after-prefill"),
        (
            |c| c.num_redundant_experts = Some(2),
            "num-redundant-experts",
        ),
        (
            |c| {
                c.dp = 2;
                c.eplb_interval = Some(0);
            },
            "eplb-interval",
        ),
        (|c| c.prefill_chunk = Some(8), "prefill-chunk"),
        (|c| c.prefill_longest_wait = Some(8), "prefill-longest-wait"),
        (
            |c| {
                c.dp = 2;
                c.prefill_run = Some(0);
            },
            "prefill-run",
        ),
        (|c| c.prefill_any_interval = 0, "prefill-any-interval"),
        (|c| c.prefill_any_interval = 1 << 20, "prefill-any-interval"),
    ];
    for (change, flag) in changes {
        let mut config = crate::support::config();
        config.role = Role::Both;
        change(&mut config);
        let error = twinfer_worker::validate(&config).unwrap_err().to_string();
        assert!(error.contains(flag), "{error}");
    }
}
