use crate::support::{CONTEXT, Server};
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// C4.4.
#[tokio::test]
async fn prompts_around_the_context_length() {
    let server = Server::start(Default::default()).await;
    let ask = async |length: usize, max_tokens: Option<Value>| {
        let mut body = json!({"prompt": vec![97; length]});
        if let Some(max_tokens) = max_tokens {
            body["max_tokens"] = max_tokens;
        }
        server.client.post(PATH, &body).await
    };
    for max_tokens in [None, Some(Value::Null), Some(json!(1))] {
        let answer = ask(CONTEXT - 1, max_tokens).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let answer = answer.json();
        assert_eq!(answer["usage"]["completion_tokens"], 1);
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
    }
    for length in [CONTEXT, CONTEXT + 1, 10 * CONTEXT] {
        for max_tokens in [None, Some(Value::Null), Some(json!(1)), Some(json!(5))] {
            let (status, code, _, message) = ask(length, max_tokens).await.error();
            assert_eq!((status, code.as_str()), (400, "context_length_exceeded"));
            assert!(
                message.contains(&CONTEXT.to_string()) && message.contains(&length.to_string()),
                "{message}"
            );
        }
        assert_eq!(server.client.text("say:ok|", 5).await, "ok");
    }
    // What is asked for must fit, as with OpenAI.
    let (status, code, _, message) = ask(CONTEXT - 1, Some(json!(5))).await.error();
    assert_eq!((status, code.as_str()), (400, "context_length_exceeded"));
    assert!(message.contains(&(CONTEXT + 4).to_string()), "{message}");
}

/// C5.3.
#[tokio::test]
async fn errors_name_the_field() {
    let server = Server::start(Default::default()).await;
    let with = |field: &str, value: Value| {
        let mut body = json!({"prompt": "x", "max_tokens": 2});
        body[field] = value;
        body
    };
    for (body, status, param) in [
        (with("model", json!("nope")), 404, "model"),
        (with("temperature", json!(-0.5)), 400, "temperature"),
        (with("temperature", json!("hot")), 400, "temperature"),
        (with("top_p", json!(0)), 400, "top_p"),
        (with("top_p", json!(1.5)), 400, "top_p"),
        (with("min_p", json!(2)), 400, "min_p"),
        (with("presence_penalty", json!(3)), 400, "presence_penalty"),
        (with("n", json!(0)), 400, "n"),
        (with("suffix", json!("x")), 400, "suffix"),
        (with("best_of", json!(3)), 400, "best_of"),
        (
            with("response_format", json!({"type": "json_object"})),
            400,
            "response_format",
        ),
        (with("guided_json", json!({})), 400, "guided_json"),
        (with("prompt", Value::Null), 400, "prompt"),
        (with("prompt", json!("")), 400, "prompt"),
        (with("min_tokens", json!(3)), 400, "min_tokens"),
    ] {
        let answer = server.client.post(PATH, &body).await.error();
        assert_eq!(
            (answer.0, answer.2.as_deref()),
            (status, Some(param)),
            "{body}"
        );
    }
    for (messages, param) in [
        (Value::Null, "messages"),
        (json!([]), "messages"),
        (
            json!([{"role": "king", "content": "x"}]),
            "messages[0].role",
        ),
    ] {
        let answer = server
            .client
            .post(CHAT, &json!({"messages": messages}))
            .await
            .error();
        assert_eq!((answer.0, answer.2.as_deref()), (400, Some(param)));
    }
    assert_eq!(
        server
            .metric("twinfer_request_errors_total{code=\"model_not_found\",fault=\"client\"}")
            .await,
        1.0
    );
}

/// C3.17.
#[tokio::test]
async fn bodies_and_methods_that_are_none() {
    let server = Server::start(Default::default()).await;
    for path in [PATH, CHAT, "/tokenize", "/detokenize"] {
        for body in ["", "[]", "\"a\"", "{\"prompt\":\"x", "nul", "{} {}"] {
            assert_eq!(
                server.client.raw(path, body).await.error().0,
                400,
                "{path} {body}"
            );
        }
        assert_eq!(
            server
                .client
                .raw(path, &b"{\"prompt\":\"\xff\"}"[..])
                .await
                .error()
                .0,
            400
        );
        let text = server.client.clone().header("content-type", "text/plain");
        assert_eq!(text.raw(path, "{}").await.error().0, 415);
        let zipped = server.client.clone().header("content-encoding", "gzip");
        let (status, _, _, message) = zipped.raw(path, &b"\x1f\x8b"[..]).await.error();
        assert_eq!(status, 415);
        assert!(message.contains("content-encoding"), "{message}");
        assert_eq!(server.client.get(path).await.error().0, 405);
    }
    assert_eq!(server.client.get("/v1/nothing").await.error().0, 404);
    assert_eq!(server.client.raw("/v1/models", "{}").await.error().0, 405);
    let endless = format!("{{\"prompt\":\"{}\"}}", "x".repeat(9 << 20));
    assert_eq!(server.client.raw(PATH, endless).await.error().0, 413);
}

/// C9.8.
#[tokio::test]
async fn absurd_numbers_are_refused_and_nobody_suffers() {
    let server = Server::start(Default::default()).await;
    let many = |count: usize| {
        (0..count)
            .map(|i| (i.to_string(), json!(1)))
            .collect::<serde_json::Map<_, _>>()
    };
    for (field, value) in [
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
        ("prompt_logprobs", json!(-1)),
        ("prompt_logprobs", json!(1.5)),
        ("cache_salt", json!("x".repeat(1 << 20))),
        ("prompt", json!(vec!["x"; 100_000])),
        ("stop", json!(vec!["x"; 100_000])),
        ("stop", json!("x".repeat(1 << 20))),
        ("logit_bias", Value::Object(many(200_000))),
        ("top_k", json!(-2)),
    ] {
        let mut body = json!({"prompt": "x", "max_tokens": 2});
        body[field] = value;
        let refused = server.client.post(PATH, &body);
        let (answer, beside) = tokio::join!(refused, server.client.text("say:fine|", 9));
        let (status, _, param, _) = answer.error();
        assert_eq!(status, 400);
        assert!(param.unwrap().starts_with(field));
        assert_eq!(beside, "fine");
    }
    assert_eq!(
        server
            .client
            .raw(PATH, "{\"prompt\":\"x\",\"temperature\":NaN}")
            .await
            .error()
            .0,
        400
    );
}

/// C9.9.
#[tokio::test]
async fn foreign_token_ids_are_refused_everywhere() {
    let server = Server::start(Default::default()).await;
    for id in [
        json!(-1),
        json!(258),
        json!(2_147_483_648u64),
        json!(9_223_372_036_854_775_808u64),
        json!(1.5),
    ] {
        for body in [
            json!({"prompt": [97, id]}),
            json!({"prompt": [[97], [id]]}),
            json!({"prompt": "x", "stop_token_ids": [id]}),
            json!({"prompt": "x", "allowed_token_ids": [id]}),
            json!({"prompt": "x", "logit_bias": {id.to_string(): 1}}),
        ] {
            assert_eq!(
                server.client.post(PATH, &body).await.error().0,
                400,
                "{body}"
            );
        }
        assert_eq!(
            server
                .client
                .post("/detokenize", &json!({"tokens": [97, id]}))
                .await
                .error()
                .0,
            400
        );
    }
    assert_eq!(server.client.text("say:alive|", 9).await, "alive");
}

#[tokio::test]
async fn tokens_to_text_and_back() {
    let server = Server::start(Default::default()).await;
    let text = "h\u{e9}llo";
    let answer = server
        .client
        .post(
            "/tokenize",
            &json!({"prompt": text, "return_token_strs": true}),
        )
        .await
        .json();
    assert_eq!(
        (&answer["count"], &answer["max_model_len"]),
        (&json!(6), &json!(CONTEXT))
    );
    assert_eq!(answer["token_strs"].as_array().unwrap().len(), 6);
    let back = server
        .client
        .post("/detokenize", &json!({"tokens": answer["tokens"]}))
        .await
        .json();
    assert_eq!(back, json!({"prompt": text}));
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let answer = server.client.post("/tokenize", &chat).await.json();
    assert_eq!(
        answer["tokens"],
        json!("user:hi\n".bytes().collect::<Vec<_>>())
    );
}

#[tokio::test]
async fn the_model_is_listed_with_its_limit() {
    let server = Server::start(Default::default()).await;
    let list = server.client.get("/v1/models").await.json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "scripted");
    assert_eq!(list["data"][0]["max_model_len"], CONTEXT);
    assert_eq!(list["data"][0]["owned_by"], "twinfer");
}
