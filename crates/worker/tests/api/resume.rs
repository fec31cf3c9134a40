//! Streams that have begun elsewhere, and the lines that make that possible.

use crate::support::{Options, Server, expected};
use http::{HeaderName, HeaderValue};
use serde_json::{Value, json};
use twinfer_protocol::{IDS_HEADER, IdsLine, TokenId};

const PATH: &str = "/v1/completions";
const PROMPT: &str = "resume me";

/// What lines and events of a stream say.
#[derive(Debug, Default)]
struct Told {
    prompt: Option<Vec<TokenId>>,
    ids: Vec<TokenId>,
    at: u64,
    events: Vec<Value>,
}

fn told(body: &str) -> Told {
    let mut told = Told::default();
    for event in body.split_inclusive("\n\n") {
        let mut rest = event;
        let mut lines = 0;
        while let Some((line, length)) = IdsLine::cut(rest.as_bytes()) {
            rest = &rest[length..];
            match line {
                IdsLine::Prompt(ids) => told.prompt = Some(ids),
                IdsLine::Output { choice, ids, at } => {
                    assert_eq!(choice, 0);
                    told.ids.extend(ids);
                    told.at = at;
                    lines += 1;
                }
            }
        }
        let data = rest.strip_prefix("data: ").expect(rest).trim_end();
        if data == "[DONE]" {
            continue;
        }
        let event: Value = serde_json::from_str(data).expect(data);
        let has_choice = event["choices"]
            .as_array()
            .is_some_and(|all| !all.is_empty());
        assert_eq!(
            lines,
            usize::from(has_choice),
            "a line for each event with output: {event}"
        );
        told.events.push(event);
    }
    told
}

fn text(events: &[Value]) -> String {
    let piece = |event: &Value| {
        let choice = &event["choices"][0];
        let text = choice["text"]
            .as_str()
            .or(choice["delta"]["content"].as_str());
        text.unwrap_or_default().to_owned()
    };
    events.iter().map(piece).collect()
}

fn ask() -> Value {
    json!({"prompt": PROMPT, "max_tokens": 24, "stream": true, "stream_options": {"include_usage": true}})
}

fn resume(ids: &[TokenId], bytes: u64) -> Value {
    let mut body = ask();
    body["twinfer_resume"] = json!({"output_token_ids": ids, "emitted_bytes": bytes, "id": "cmpl-of-another", "created": 77});
    body
}

async fn server() -> Server {
    let mut server = Server::start(Options::default()).await;
    let header = HeaderName::from_static(IDS_HEADER);
    server
        .client
        .headers
        .insert(header, HeaderValue::from_static("1"));
    server
}

#[tokio::test]
async fn each_event_is_preceded_by_its_tokens_for_peers_that_ask() {
    let mut server = server().await;
    let answer = server.client.post(PATH, &ask()).await;
    let all = told(&answer.text());
    let said = expected(PROMPT, 24);
    assert_eq!(text(&all.events), said);
    assert_eq!(all.ids, said.bytes().map(TokenId::from).collect::<Vec<_>>());
    assert_eq!(all.at, 24);
    assert_eq!(all.prompt, None, "a text is tokenised the same anywhere");
    let chat = json!({"messages": [{"role": "user", "content": "say:hello|"}], "stream": true});
    let answer = server.client.post("/v1/chat/completions", &chat).await;
    let all = told(&answer.text());
    assert!(all.prompt.is_some_and(|ids| ids.len() > "say:hello|".len()));
    assert_eq!((text(&all.events).as_str(), all.at), ("hello", 5));
    // Others get events only.
    server.client.headers.clear();
    let answer = server.client.post(PATH, &ask()).await;
    assert!(answer.text().starts_with("data: "));
    assert!(!answer.text().contains(": i="));
}

#[tokio::test]
async fn a_stream_goes_on_where_it_was() {
    let server = server().await;
    let said = expected(PROMPT, 24);
    let ids: Vec<TokenId> = said.bytes().map(TokenId::from).collect();
    for cut in 0..24 {
        let answer = server
            .client
            .post(PATH, &resume(&ids[..cut], cut as u64))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let rest = told(&answer.text());
        assert_eq!(text(&rest.events), said[cut..], "after {cut}");
        assert_eq!(rest.ids, ids[cut..]);
        for event in &rest.events {
            assert_eq!(
                (&event["id"], &event["created"]),
                (&json!("cmpl-of-another"), &json!(77))
            );
        }
        let usage = &rest.events.last().expect("usage")["usage"];
        assert_eq!(usage["completion_tokens"], 24, "{usage}");
        assert_eq!(usage["prompt_tokens"], PROMPT.len());
    }
    // The last event was given: only the usage and the end were lost.
    let answer = server.client.post(PATH, &resume(&ids, 24)).await;
    let rest = told(&answer.text());
    assert_eq!(rest.events.len(), 1);
    assert_eq!(rest.events[0]["usage"]["completion_tokens"], 24);
    assert!(answer.text().ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn what_cannot_go_on_is_refused_by_name() {
    let mut server = server().await;
    let ids: Vec<TokenId> = expected(PROMPT, 4).bytes().map(TokenId::from).collect();
    let refused = async |server: &Server, body: Value| {
        let answer = server.client.post(PATH, &body).await;
        let error = answer.json()["error"].clone();
        (
            answer.status,
            error["param"].as_str().unwrap_or_default().to_owned(),
        )
    };
    let field = "twinfer_resume".to_owned();
    let other_text = resume(&ids, 3);
    let mut two = resume(&ids, 4);
    two["n"] = json!(2);
    let mut whole = resume(&ids, 4);
    whole["stream"] = json!(false);
    whole
        .as_object_mut()
        .expect("an object")
        .remove("stream_options");
    let mut unknown = resume(&ids, 4);
    unknown["twinfer_resume"]["output_token_ids"] = json!([1_000_000]);
    for body in [other_text, two, whole, unknown] {
        assert_eq!(
            refused(&server, body.clone()).await,
            (400, field.clone()),
            "{body}"
        );
    }
    server.client.headers.clear();
    assert_eq!(
        server.client.post(PATH, &resume(&ids, 4)).await.status,
        200,
        "on loopback without a key"
    );
    let mut options = Options::default();
    let key = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(key.path(), "of-peers").expect("written");
    options.config.peer_key_file = Some(key.path().to_owned());
    let keyed = Server::start(options).await;
    assert_eq!(refused(&keyed, resume(&ids, 4)).await, (403, field));
}
