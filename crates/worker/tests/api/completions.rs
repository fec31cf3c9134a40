use crate::support::{Server, Stream, expected};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

const PATH: &str = "/v1/completions";

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

/// Text and finish reason by choice, after checking every chunk.
async fn checked(stream: Stream) -> (BTreeMap<u64, (String, String)>, Vec<Value>) {
    let events = stream.events().await;
    let mut texts: BTreeMap<u64, (String, String)> = BTreeMap::new();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    for event in &events {
        assert_eq!(
            keys(event),
            ["id", "object", "created", "model", "choices", "usage"]
        );
        assert_eq!(event["id"], events[0]["id"]);
        assert_eq!(event["created"], events[0]["created"]);
        assert_eq!(event["object"], "text_completion");
        assert!(event["created"].as_u64().unwrap().abs_diff(now) <= 5);
        for choice in event["choices"].as_array().unwrap() {
            assert_eq!(
                keys(choice),
                ["index", "text", "logprobs", "finish_reason", "stop_reason"]
            );
            let entry = texts.entry(choice["index"].as_u64().unwrap()).or_default();
            assert!(entry.1.is_empty(), "text after the end of a choice");
            entry.0.push_str(choice["text"].as_str().unwrap());
            entry
                .1
                .push_str(choice["finish_reason"].as_str().unwrap_or_default());
        }
    }
    (texts, events)
}

/// C5.1.
#[tokio::test]
async fn a_whole_answer_has_all_fields_of_vllm() {
    let server = Server::start(Default::default()).await;
    let body = json!({"model": "scripted", "prompt": "Who are you?", "max_tokens": 5});
    let answer = server
        .client
        .clone()
        .header("x-request-id", "abc")
        .post(PATH, &body)
        .await;
    let json = answer.json();
    assert_eq!(
        keys(&json),
        [
            "id",
            "object",
            "created",
            "model",
            "choices",
            "service_tier",
            "system_fingerprint",
            "usage",
            "kv_transfer_params"
        ]
    );
    assert_eq!(json["id"], "cmpl-abc");
    assert_eq!(
        json["choices"],
        json!([{"index": 0, "text": expected("Who are you?", 5), "logprobs": null, "finish_reason": "length",
            "stop_reason": null, "token_ids": null, "prompt_logprobs": null, "prompt_token_ids": null}])
    );
    assert_eq!(
        json["usage"],
        json!({"prompt_tokens": 12, "total_tokens": 17, "completion_tokens": 5, "prompt_tokens_details": null})
    );
    assert_eq!(json["kv_transfer_params"], Value::Null);
}

/// C5.1.
#[tokio::test]
async fn streams_say_the_same_as_whole_answers() {
    let server = Server::start(Default::default()).await;
    for n in [1, 2] {
        for max_tokens in [1, 40] {
            let mut body =
                json!({"prompt": ["ab", "say:hello|"], "max_tokens": max_tokens, "n": n});
            let whole = server.client.complete(&body).await;
            body["stream"] = json!(true);
            let (texts, _) = checked(server.client.open(PATH, &body).await).await;
            assert_eq!(texts.len(), 2 * n);
            for choice in whole["choices"].as_array().unwrap() {
                let (text, reason) = &texts[&choice["index"].as_u64().unwrap()];
                assert_eq!(text, choice["text"].as_str().unwrap());
                assert_eq!(reason, choice["finish_reason"].as_str().unwrap());
            }
        }
    }
}

/// C5.2.
#[tokio::test]
async fn usage_comes_once_and_only_when_asked_for() {
    let server = Server::start(Default::default()).await;
    for n in [1, 2] {
        let mut body = json!({"prompt": "abc", "max_tokens": 4, "n": n});
        let whole = server.client.complete(&body).await["usage"].clone();
        body["stream"] = json!(true);
        for (options, asked) in [
            (json!({"include_usage": true}), true),
            (
                json!({"include_usage": true, "continuous_usage_stats": true}),
                true,
            ),
            (json!({"include_usage": false}), false),
            (json!({"include_usage": null}), false),
            (json!({}), false),
            (Value::Null, false),
        ] {
            body["stream_options"] = options.clone();
            let (_, events) = checked(server.client.open(PATH, &body).await).await;
            let last = events.last().unwrap();
            assert_eq!(last["choices"].as_array().unwrap().is_empty(), asked);
            if asked {
                assert_eq!(last["usage"], whole);
            }
            let chunks = if asked {
                &events[..events.len() - 1]
            } else {
                &events[..]
            };
            let continuous = options["continuous_usage_stats"] == true;
            for chunk in chunks {
                assert_eq!(chunk["usage"].is_object(), continuous);
                assert!(!chunk["choices"].as_array().unwrap().is_empty());
            }
        }
    }
}

/// C5.16.
#[tokio::test]
async fn every_form_of_prompt_and_its_choice_indices() {
    let server = Server::start(Default::default()).await;
    let ids = |text: &str| text.bytes().collect::<Vec<u8>>();
    for (prompt, texts) in [
        (json!("ab"), vec!["ab"]),
        (json!(["ab", "cd", "say:x|"]), vec!["ab", "cd", "say:x|"]),
        (json!(ids("ab")), vec!["ab"]),
        (json!([ids("ab"), ids("cd")]), vec!["ab", "cd"]),
    ] {
        for n in [1usize, 3] {
            let body = json!({"prompt": prompt, "n": n, "max_tokens": 1});
            let answer = server.client.complete(&body).await;
            let choices = answer["choices"].as_array().unwrap();
            assert_eq!(choices.len(), texts.len() * n);
            for (index, choice) in choices.iter().enumerate() {
                assert_eq!(choice["index"], index);
                assert_eq!(choice["text"], expected(texts[index / n], 1));
            }
            assert_eq!(answer["usage"]["completion_tokens"], choices.len());
            assert_eq!(
                answer["usage"]["prompt_tokens"],
                texts.iter().map(|t| t.len()).sum::<usize>()
            );
        }
    }
    let sixteen = server.client.complete(&json!({"prompt": "ab"})).await;
    assert_eq!(sixteen["usage"]["completion_tokens"], 16);
    let newer = server
        .client
        .complete(&json!({"prompt": "ab", "max_completion_tokens": 3}))
        .await;
    assert_eq!(newer["usage"]["completion_tokens"], 3);
}

/// C5.16.
#[tokio::test]
async fn echo_is_exact() {
    let server = Server::start(Default::default()).await;
    let prompt = "h\u{e9}ll\u{f6} ";
    let body = json!({"prompt": prompt, "echo": true, "max_tokens": 2, "n": 2});
    let answer = server.client.complete(&body).await;
    let plain = server
        .client
        .complete(&json!({"prompt": prompt, "max_tokens": 2}))
        .await;
    let text = plain["choices"][0]["text"].as_str().unwrap();
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], format!("{prompt}{text}"));
    }
    let mut body = body;
    body["stream"] = json!(true);
    let (texts, _) = checked(server.client.open(PATH, &body).await).await;
    for (text_of, _) in texts.values() {
        assert_eq!(*text_of, format!("{prompt}{text}"));
    }
}

/// C3.7.
#[tokio::test]
async fn one_token_is_one_token() {
    let server = Server::start(Default::default()).await;
    for field in ["max_tokens", "max_completion_tokens"] {
        let mut body = json!({"prompt": "ab", field: 1});
        let answer = server.client.complete(&body).await;
        assert_eq!(answer["usage"]["completion_tokens"], 1);
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(answer["choices"][0]["text"], expected("ab", 1));
        body["stream"] = json!(true);
        let (texts, _) = checked(server.client.open(PATH, &body).await).await;
        assert_eq!(texts[&0], (expected("ab", 1), "length".to_owned()));
    }
}

/// C5.6.
#[tokio::test]
async fn stop_texts_never_show_and_reasons_are_told() {
    let server = Server::start(Default::default()).await;
    for (say, stop, text, reason) in [
        ("one two three", json!("two"), "one ", Some("two")),
        ("one two three", json!([" t", "two"]), "one", Some(" t")),
        ("one two thr", json!("three"), "one two thr", None),
        ("abc", json!("a"), "", Some("a")),
        ("x\u{1f600}y", json!("\u{1f600}"), "x", Some("\u{1f600}")),
        ("plain", json!([]), "plain", None),
    ] {
        let mut body = json!({"prompt": format!("say:{say}|"), "max_tokens": 50, "stop": stop});
        let whole = server.client.complete(&body).await;
        let choice = &whole["choices"][0];
        assert_eq!(choice["text"], text, "{say} {stop}");
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(choice["stop_reason"], json!(reason));
        body["stream"] = json!(true);
        let (texts, events) = checked(server.client.open(PATH, &body).await).await;
        assert_eq!(
            texts[&0],
            (text.to_owned(), "stop".to_owned()),
            "{say} {stop}"
        );
        assert_eq!(
            events.last().unwrap()["choices"][0]["stop_reason"],
            json!(reason)
        );
    }
    let body = json!({"prompt": "say:abc|", "stop_token_ids": [98], "max_tokens": 9});
    let choice = &server.client.complete(&body).await["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["stop_reason"]),
        (&json!("a"), &json!(98))
    );
}

/// They were refused.
#[tokio::test]
async fn bad_words_are_not_in_the_answer() {
    let server = Server::start(Default::default()).await;
    let ask = async |words: &[&str]| {
        let body =
            json!({"prompt": "say:abcabd|", "max_tokens": 9, "temperature": 0, "bad_words": words});
        let whole = server.client.complete(&body).await;
        whole["choices"][0]["text"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    assert_eq!(ask(&[]).await, "abcabd");
    assert!(
        ask(&["abc"]).await.starts_with("ab"),
        "only its end is forbidden"
    );
    assert!(!ask(&["abc"]).await.contains("abc"));
    assert_eq!(ask(&["bd", "x"]).await.get(..5), Some("abcab"));
    let body = json!({"prompt": "x", "bad_words": ["x", "  "]});
    assert_eq!(server.client.post(PATH, &body).await.error().0, 400);
}

/// C5.5.
#[tokio::test]
async fn no_chunk_ends_inside_a_character() {
    let server = Server::start(Default::default()).await;
    let said = "\u{4f60}\u{597d} \u{d55c} \u{1f469}\u{200d}\u{1f680} e\u{301} \u{feff}\u{fffd}!";
    let mut body = json!({"prompt": format!("say:{said}|"), "max_tokens": 100});
    assert_eq!(
        server.client.complete(&body).await["choices"][0]["text"],
        said
    );
    body["stream"] = json!(true);
    let (texts, events) = checked(server.client.open(PATH, &body).await).await;
    assert_eq!(texts[&0].0, said);
    // Three bytes are one character here: more chunks than characters would be cut ones.
    assert!(
        events.len() <= said.chars().count() + 1,
        "{} chunks",
        events.len()
    );
}

/// C5.12.
#[tokio::test]
async fn logprobs_are_natural_finite_and_one_per_token() {
    let server = Server::start(Default::default()).await;
    // The scripted logits are 10 for one token and 0 for the 257 others.
    let best = 10.0 - (10f64.exp() + 257.0).ln();
    for k in [0usize, 1, 3, 20] {
        let mut body = json!({"prompt": "say:h\u{e9}y|", "max_tokens": 9, "logprobs": k, "n": 2});
        let whole = server.client.complete(&body).await;
        for choice in whole["choices"].as_array().unwrap() {
            let logprobs = &choice["logprobs"];
            // Four bytes and the end.
            assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 5);
            assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4]));
            for (value, top) in logprobs["token_logprobs"]
                .as_array()
                .unwrap()
                .iter()
                .zip(logprobs["top_logprobs"].as_array().unwrap())
            {
                assert!((value.as_f64().unwrap() - best).abs() < 1e-4);
                assert!(top.as_object().unwrap().len() <= k.max(1));
                assert!(
                    top.as_object()
                        .unwrap()
                        .values()
                        .all(|v| v.as_f64().unwrap() <= 0.0)
                );
            }
        }
        body["stream"] = json!(true);
        let (_, events) = checked(server.client.open(PATH, &body).await).await;
        let mut streamed = 0;
        for event in &events {
            streamed += event["choices"][0]["logprobs"]["tokens"]
                .as_array()
                .unwrap()
                .len();
        }
        assert_eq!(streamed, 10);
    }
    let masked = json!({"prompt": "ab", "max_tokens": 1, "logprobs": 2, "allowed_token_ids": [65]});
    let answer = server.client.complete(&masked).await;
    assert_eq!(answer["choices"][0]["text"], "A");
}

#[tokio::test]
async fn token_ids_are_returned_on_request() {
    let server = Server::start(Default::default()).await;
    let mut body = json!({"prompt": "say:hi|", "max_tokens": 9, "return_token_ids": true});
    let whole = server.client.complete(&body).await;
    assert_eq!(whole["choices"][0]["token_ids"], json!([104, 105, 257]));
    assert_eq!(
        whole["choices"][0]["prompt_token_ids"],
        json!("say:hi|".bytes().collect::<Vec<_>>())
    );
    assert_eq!(whole["usage"]["completion_tokens"], 3);
    body["stream"] = json!(true);
    let events = server.client.open(PATH, &body).await.events().await;
    let ids: Vec<Value> = events
        .iter()
        .flat_map(|event| event["choices"][0]["token_ids"].as_array().unwrap().clone())
        .collect();
    assert_eq!(json!(ids), json!([104, 105, 257]));
}

/// C2.10.
#[tokio::test]
async fn equal_request_ids_do_not_meet() {
    let server = Server::start(Default::default()).await;
    let client = server.client.clone().header("x-request-id", "same");
    let body = |text: &str| json!({"prompt": format!("say:{text}|"), "max_tokens": 99, "request_id": "same"});
    let (first, second) = (body("first marker"), body("second marker"));
    let (a, b) = tokio::join!(client.complete(&first), client.complete(&second));
    assert_eq!(
        (&a["id"], &b["id"]),
        (&json!("cmpl-same"), &json!("cmpl-same"))
    );
    assert_eq!(a["choices"][0]["text"], "first marker");
    assert_eq!(b["choices"][0]["text"], "second marker");
    for id in ["x".repeat(200), "../../x".into(), "a b;c\"d".into()] {
        let answer = server
            .client
            .clone()
            .header("x-request-id", &id)
            .complete(&body("odd"))
            .await;
        assert_eq!(answer["id"], format!("cmpl-{id}"));
        assert_eq!(answer["choices"][0]["text"], "odd");
    }
}
