use crate::support::{CONTEXT, Options, Server, expected};
use serde_json::{Value, json};

const PATH: &str = "/v1/chat/completions";

#[expect(clippy::needless_pass_by_value, reason = "callers pass json!(...)")]
fn body(content: Value, rest: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": content}]});
    body.as_object_mut()
        .unwrap()
        .extend(rest.as_object().unwrap().clone());
    body
}

/// C5.1.
#[tokio::test]
async fn a_chat_whole_and_streamed() {
    let server = Server::start(Default::default()).await;
    for n in [1usize, 2] {
        let mut request = body(json!("say:hello there|"), json!({"n": n}));
        let answer = server.client.post(PATH, &request).await.json();
        assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
        assert_eq!(answer["object"], "chat.completion");
        for (index, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
            assert_eq!(choice["index"], index);
            assert_eq!(choice["finish_reason"], "stop");
            assert_eq!(choice["message"]["role"], "assistant");
            assert_eq!(choice["message"]["content"], "hello there");
            assert_eq!(choice["message"]["tool_calls"], json!([]));
        }
        request["stream"] = json!(true);
        request["stream_options"] = json!({"include_usage": true});
        let events = server.client.open(PATH, &request).await.events().await;
        let (last, chunks) = events.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(last["usage"][count], answer["usage"][count]);
        }
        // The prompt of the first was cached; the last token is always computed.
        let cached = &last["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert_eq!(*cached, 20);
        for index in 0..n {
            let mut text = String::new();
            let mut ends = 0;
            let own: Vec<&Value> = chunks
                .iter()
                .map(|chunk| {
                    assert_eq!(chunk["object"], "chat.completion.chunk");
                    assert_eq!(chunk["id"], events[0]["id"]);
                    assert!(chunk.get("usage").is_none());
                    &chunk["choices"][0]
                })
                .filter(|choice| choice["index"] == index)
                .collect();
            assert_eq!(own[0]["delta"], json!({"role": "assistant", "content": ""}));
            for choice in &own {
                assert!(choice.as_object().unwrap().contains_key("finish_reason"));
                text.push_str(choice["delta"]["content"].as_str().unwrap());
                ends += usize::from(choice["finish_reason"].is_string());
            }
            assert_eq!(text, "hello there");
            assert_eq!(ends, 1);
            assert_eq!(own.last().unwrap()["finish_reason"], "stop");
        }
    }
}

/// C5.13.
#[tokio::test]
async fn null_is_absent_in_chats() {
    let server = Server::start(Default::default()).await;
    let plain = server
        .client
        .post(PATH, &body(json!("say:x|"), json!({})))
        .await
        .json();
    let nulls = json!({"stream": null, "logprobs": null, "stop": null, "max_tokens": null, "tools": null,
        "seed": null, "user": null, "x_unknown": [1], "min_tokens": 0, "tools": [], "n": 1.0});
    let answer = server
        .client
        .post(PATH, &body(json!("say:x|"), nulls))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["choices"], plain["choices"]);
    let parts = json!([{"type": "text", "text": "say:x|"}]);
    let answer = server
        .client
        .post(PATH, &body(parts, json!({})))
        .await
        .json();
    assert_eq!(answer["choices"], plain["choices"]);
}

/// As vLLM: a default, and no limit.
#[tokio::test]
async fn a_chat_without_max_tokens_has_the_models_max_new_tokens() {
    let options = |max_new_tokens| Options {
        max_new_tokens: Some(max_new_tokens),
        ..Options::default()
    };
    let server = Server::start(options(5)).await;
    let tokens = async |server: &Server, more: Value| {
        let answer = server.client.post(PATH, &body(json!("hi"), more)).await;
        answer.json()["usage"]["completion_tokens"].clone()
    };
    for nothing in [json!({}), json!({"max_tokens": null})] {
        assert_eq!(tokens(&server, nothing).await, 5);
    }
    for asked in [3, 9] {
        assert_eq!(tokens(&server, json!({"max_tokens": asked})).await, asked);
        let newer = json!({"max_completion_tokens": asked});
        assert_eq!(tokens(&server, newer).await, asked);
    }
    // A completion has sixteen.
    let body = json!({"prompt": "x", "ignore_eos": true});
    let answer = server.client.complete(&body).await;
    assert_eq!(answer["usage"]["completion_tokens"], 16);
    // What does not fit is filled up.
    let server = Server::start(options(100_000)).await;
    assert_eq!(tokens(&server, json!({})).await, CONTEXT - 8);
}

#[tokio::test]
async fn a_chat_without_max_tokens_fills_the_context() {
    let server = Server::with(|config| config.max_model_len = Some(64)).await;
    let answer = server
        .client
        .post(PATH, &body(json!("hi"), json!({})))
        .await
        .json();
    let usage = &answer["usage"];
    assert_eq!(usage["total_tokens"], 64);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        expected("user:hi\n", 64 - 8)
    );
}

/// C5.12.
#[tokio::test]
async fn chat_logprobs_carry_bytes_that_reproduce_the_text() {
    let server = Server::start(Default::default()).await;
    for top in [0, 1, 20] {
        let request = body(
            json!("say:\u{e9}\u{1f600}|"),
            json!({"logprobs": true, "top_logprobs": top}),
        );
        let answer = server.client.post(PATH, &request).await.json();
        let choice = &answer["choices"][0];
        let content = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], content.len());
        let bytes: Vec<u8> = content
            .iter()
            .take(content.len() - 1)
            .flat_map(|token| {
                token["bytes"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|b| b.as_u64().unwrap() as u8)
            })
            .collect();
        assert_eq!(
            String::from_utf8(bytes).unwrap(),
            choice["message"]["content"].as_str().unwrap()
        );
        for token in content {
            assert_eq!(token["top_logprobs"].as_array().unwrap().len(), top);
        }
    }
}

/// C9.5.
#[tokio::test]
async fn templates_and_their_variables_cannot_be_replaced() {
    let server = Server::start(Default::default()).await;
    for rest in [
        json!({"chat_template": "{{ 1 }}"}),
        json!({"chat_template_kwargs": {"chat_template": "x"}}),
        json!({"chat_template_kwargs": {"messages": []}}),
        json!({"chat_template_kwargs": {"tools": []}}),
        json!({"chat_template_kwargs": {"add_generation_prompt": false}}),
        json!({"chat_template_kwargs": {"tokenize": true}}),
    ] {
        let (status, _, param, _) = server
            .client
            .post(PATH, &body(json!("x"), rest))
            .await
            .error();
        assert_eq!(status, 400);
        assert!(param.unwrap().starts_with("chat_template"));
    }
    let harmless = json!({"chat_template_kwargs": {"thinking": true}, "max_tokens": 1});
    assert_eq!(
        server
            .client
            .post(PATH, &body(json!("x"), harmless))
            .await
            .status,
        200
    );
}
