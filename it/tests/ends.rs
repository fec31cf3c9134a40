//! Where an output ends: stop texts, stop tokens, end-of-sequence, lengths and the context, each at its
//! edges, whole and streamed, plain, with drafts, and over a pair. Real processes with the demo model.

use serde_json::{Value, json};
use twinfer_it::{
    Client, Cluster, ClusterOptions, Instance, chat_body, completion_body, demo_model,
};

/// End-of-sequence of the demo model.
const EOS: u32 = 1;
const CONTEXT: usize = 128;
const TOKENS: usize = 24;

/// One choice of an answer.
#[derive(Clone, Debug, PartialEq)]
struct Choice {
    ids: Vec<u32>,
    text: String,
    finish: String,
    stop_reason: Value,
}

/// The same model in three ways.
struct Ways {
    plain: Instance,
    drafting: Instance,
    pair: Cluster,
}

impl Ways {
    async fn start() -> Self {
        let context = CONTEXT.to_string();
        let limit = ["--max-model-len", context.as_str()];
        let serve = async |further: &[&str]| {
            let arguments = [limit.as_slice(), further].concat();
            let mut instance = Instance::serve(&demo_model(), &arguments, &[]);
            instance.ready().await;
            instance
        };
        let options = ClusterOptions {
            serve: [limit.as_slice(), &["--num-speculative-tokens", "2"]]
                .concat()
                .iter()
                .map(|&argument| argument.to_owned())
                .collect(),
            ..ClusterOptions::default()
        };
        Self {
            plain: serve(&[]).await,
            drafting: serve(&["--num-speculative-tokens", "3"]).await,
            pair: Cluster::start(&options).await,
        }
    }

    fn clients(&self) -> [(&'static str, Client); 3] {
        [
            ("plain", self.plain.client()),
            ("3 drafts", self.drafting.client()),
            ("1P1D, 2 drafts", self.pair.client()),
        ]
    }

    /// Every way gives the same choices, whole and streamed, and counts their tokens; returns them.
    async fn ask(&self, path: &str, body: &Value) -> Vec<Choice> {
        let mut first: Option<Vec<Choice>> = None;
        for (way, client) in self.clients() {
            let answer = whole(&client, path, body).await;
            let streamed = stream(&client, path, body).await;
            assert_eq!(streamed, answer, "{way}, streamed: {body}");
            let first = first.get_or_insert_with(|| answer.clone());
            assert_eq!(answer, *first, "{way}: {body}");
        }
        first.expect("an answer")
    }

    async fn one(&self, body: &Value) -> Choice {
        let mut choices = self.ask("/v1/completions", body).await;
        assert_eq!(choices.len(), 1);
        choices.remove(0)
    }

    async fn idle(&self) {
        let limit = std::time::Duration::from_secs(10);
        self.plain.kv_idle(limit).await;
        self.drafting.kv_idle(limit).await;
        self.pair.kv_idle(limit).await;
        for instance in [&self.drafting, &self.pair.decode[0]] {
            let metrics = instance.metrics().await;
            let accepted = metrics.sum("vllm:spec_decode_num_accepted_tokens_total", &[]);
            assert!(accepted > 0.0, "no draft stood: nothing was tested");
        }
    }
}

fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().into_iter().flatten();
    list.map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn count(usage: &Value) -> usize {
    usage["completion_tokens"].as_u64().expect("a count") as usize
}

async fn whole(client: &Client, path: &str, body: &Value) -> Vec<Choice> {
    let answer = client.post(path, body).await.expect("an answer");
    assert_eq!(answer.status, 200, "{body}: {}", answer.text());
    let answer = answer.json();
    let choices = answer["choices"].as_array().expect("choices").iter();
    let choices: Vec<Choice> = choices
        .map(|choice| Choice {
            ids: ids(&choice["token_ids"]),
            text: choice["text"]
                .as_str()
                .or(choice["message"]["content"].as_str())
                .expect("a text")
                .to_owned(),
            finish: choice["finish_reason"]
                .as_str()
                .expect("a reason")
                .to_owned(),
            stop_reason: choice["stop_reason"].clone(),
        })
        .collect();
    let tokens: usize = choices.iter().map(|choice| choice.ids.len()).sum();
    assert_eq!(count(&answer["usage"]), tokens, "{answer}");
    choices
}

async fn stream(client: &Client, path: &str, body: &Value) -> Vec<Choice> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let answer = client.post(path, &body).await.expect("an answer");
    assert_eq!(answer.status, 200, "{body}: {}", answer.text());
    let (events, done) = answer.events();
    assert!(done, "{}", answer.text());
    let n = body["n"].as_u64().unwrap_or(1) as usize;
    let empty = Choice {
        ids: Vec::new(),
        text: String::new(),
        finish: String::new(),
        stop_reason: Value::Null,
    };
    let mut choices = vec![empty; n];
    for event in &events {
        for part in event["choices"].as_array().expect("choices") {
            let choice = &mut choices[part["index"].as_u64().expect("an index") as usize];
            assert_eq!(choice.finish, "", "something behind the end: {part}");
            choice.ids.extend(ids(&part["token_ids"]));
            let text = part["text"].as_str().or(part["delta"]["content"].as_str());
            choice.text += text.unwrap_or_default();
            if let Some(finish) = part["finish_reason"].as_str() {
                choice.finish = finish.to_owned();
                choice.stop_reason = part["stop_reason"].clone();
            }
        }
    }
    let usage = &events.last().expect("events")["usage"];
    let tokens: usize = choices.iter().map(|choice| choice.ids.len()).sum();
    assert_eq!(count(usage), tokens, "{usage}");
    choices
}

/// A body whose output has many different tokens.
fn body(max_tokens: usize) -> Value {
    let mut body = completion_body("Once upon a time there was", max_tokens as u32);
    body["temperature"] = json!(0.9);
    body["seed"] = json!(4);
    body["ignore_eos"] = json!(true);
    body["return_token_ids"] = json!(true);
    body
}

/// An output without any end but its length: ids and the text of each token.
struct Base {
    ids: Vec<u32>,
    tokens: Vec<String>,
}

impl Base {
    async fn of(client: &Client, mut body: Value) -> Self {
        body["logprobs"] = json!(0);
        let answer = client.post("/v1/completions", &body).await;
        let answer = answer.expect("an answer").json();
        let choice = &answer["choices"][0];
        let tokens: Vec<String> = choice["logprobs"]["tokens"]
            .as_array()
            .expect("tokens")
            .iter()
            .map(|token| token.as_str().expect("a text").to_owned())
            .collect();
        assert_eq!(
            choice["text"],
            tokens.concat(),
            "characters over several tokens"
        );
        Self {
            ids: ids(&choice["token_ids"]),
            tokens,
        }
    }

    /// What must come, by the plainest search: the first token with which a stop token or a stop text
    /// that begins behind the first `min_tokens - 1` tokens is complete.
    fn expected(&self, body: &Value) -> Choice {
        let max_tokens = body["max_tokens"].as_u64().expect("a limit") as usize;
        let free = (body["min_tokens"].as_u64().unwrap_or(0) as usize).saturating_sub(1);
        let stop_ids = ids(&body["stop_token_ids"]);
        let stops: Vec<&str> = body["stop"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|stop| stop.as_str().expect("a text"))
            .collect();
        let choice = |tokens: usize, text: String, finish: &str, stop_reason: Value| Choice {
            ids: self.ids[..tokens].to_vec(),
            text,
            finish: finish.to_owned(),
            stop_reason,
        };
        let begin: usize = self.tokens[..free].iter().map(String::len).sum();
        for tokens in 1..=max_tokens {
            let id = self.ids[tokens - 1];
            if stop_ids.contains(&id) {
                let shown = match body["include_stop_str_in_output"] {
                    Value::Bool(true) => tokens,
                    _ => tokens - 1,
                };
                let text = self.tokens[..shown].concat();
                return choice(tokens, text, "stop", json!(id));
            }
            let text = self.tokens[..tokens].concat();
            let found = (begin..=text.len())
                .filter(|&end| text.is_char_boundary(end) && text.is_char_boundary(begin))
                .find_map(|end| {
                    let stop = stops
                        .iter()
                        .find(|stop| text[begin..end].ends_with(**stop))?;
                    Some((end, *stop))
                });
            if let Some((end, stop)) = found {
                let keep = match body["include_stop_str_in_output"] {
                    Value::Bool(true) => end,
                    _ => end - stop.len(),
                };
                return choice(tokens, text[..keep].to_owned(), "stop", json!(stop));
            }
        }
        let text = self.tokens[..max_tokens].concat();
        choice(max_tokens, text, "length", Value::Null)
    }
}

/// C4.6: a stop text that ends at each place, over several tokens, inside of one and at the first
/// character, around the last permitted token, kept and cut.
#[tokio::test]
async fn a_stop_text_ends_the_output_wherever_it_lies() {
    let ways = Ways::start().await;
    let base = Base::of(&ways.plain.client(), body(TOKENS)).await;
    let first: String = base.tokens[0].chars().take(1).collect();
    let mut stops = vec![vec![first], vec![base.tokens[0].clone()]];
    for place in 0..10 {
        let over = |tokens: usize| -> String {
            let last = base.tokens[place].chars().last().expect("a character");
            let whole = base.tokens[place + 1..place + tokens - 1].concat();
            let next: String = base.tokens[place + tokens - 1].chars().take(1).collect();
            format!("{last}{whole}{next}")
        };
        stops.push(vec![over(2 + place % 2)]);
        // Two at once, one of which never completes, and one that is longer and begins earlier.
        stops.push(vec![
            base.tokens[place..place + 2].concat() + "\u{1F680}",
            base.tokens[place].clone(),
            base.tokens[..place + 1].concat(),
        ]);
    }
    for (number, stop) in stops.into_iter().enumerate() {
        let mut body = body(TOKENS);
        body["stop"] = json!(stop);
        body["include_stop_str_in_output"] = json!(number % 2 == 0);
        let expected = base.expected(&body);
        assert_eq!(expected.finish, "stop");
        let complete = expected.ids.len();
        for max_tokens in [complete.saturating_sub(1).max(1), complete, TOKENS] {
            body["max_tokens"] = json!(max_tokens);
            assert_eq!(ways.one(&body).await, base.expected(&body), "{body}");
        }
        // Before `min_tokens` it does not end anything, not even in part.
        for min_tokens in [complete, complete + 1] {
            body["min_tokens"] = json!(min_tokens);
            assert_eq!(ways.one(&body).await, base.expected(&body), "{body}");
        }
    }
    // One that never comes is no reason to keep the tail back.
    let mut never = body(TOKENS);
    let tail = base.tokens[TOKENS - 1].clone();
    never["stop"] = json!([format!("{tail}\u{1F680}")]);
    assert_eq!(ways.one(&never).await, base.expected(&never));
    ways.idle().await;
}

/// C4.6: a stop token at each place of an accepted block.
#[tokio::test]
async fn a_stop_token_ends_the_output_wherever_it_lies() {
    let ways = Ways::start().await;
    let base = Base::of(&ways.plain.client(), body(TOKENS)).await;
    for place in 0..12 {
        let mut body = body(TOKENS);
        body["stop_token_ids"] = json!([base.ids[place], 1500]);
        let expected = base.expected(&body);
        let complete = expected.ids.len();
        assert!(complete <= place + 1);
        assert_eq!(ways.one(&body).await, expected);
        // It is text only where stops are kept.
        body["include_stop_str_in_output"] = json!(true);
        assert_eq!(ways.one(&body).await, base.expected(&body));
        body["include_stop_str_in_output"] = json!(false);
        for max_tokens in [complete.saturating_sub(1).max(1), complete] {
            body["max_tokens"] = json!(max_tokens);
            assert_eq!(ways.one(&body).await, base.expected(&body), "{body}");
        }
        // Before `min_tokens` it is not drawn at all, nor counted.
        body["max_tokens"] = json!(TOKENS);
        body["min_tokens"] = json!(complete);
        let later = ways.one(&body).await;
        assert!(
            !later.ids[..complete].contains(&base.ids[place]),
            "{later:?}"
        );
        assert!(later.ids.len() > complete);
    }
    ways.idle().await;
}

/// C4.6: end-of-sequence: the end of a chat, and forced to each place.
#[tokio::test]
async fn end_of_sequence_ends_the_output_unless_it_is_ignored_or_too_early() {
    const CHAT: &str = "/v1/chat/completions";
    let ways = Ways::start().await;
    for question in ["What is the capital of France?", "Hello!"] {
        let chat = |changes: Value| {
            let mut body = chat_body(question);
            body["return_token_ids"] = json!(true);
            body["max_tokens"] = json!(60);
            for (field, value) in changes.as_object().expect("changes") {
                body[field] = value.clone();
            }
            body
        };
        let ask = async |changes: Value| ways.ask(CHAT, &chat(changes)).await.remove(0);
        let natural = ask(json!({})).await;
        let len = natural.ids.len();
        assert!(len > 2 && natural.ids[len - 1] == EOS, "{natural:?}");
        assert_eq!(
            (natural.finish.as_str(), &natural.stop_reason),
            ("stop", &Value::Null)
        );
        // The last permitted token may be it; one fewer is the length, with all of the text.
        for max_tokens in [len, len + 1] {
            assert_eq!(ask(json!({"max_tokens": max_tokens})).await, natural);
        }
        let cut = ask(json!({"max_tokens": len - 1})).await;
        assert_eq!(cut.ids, natural.ids[..len - 1]);
        assert_eq!((cut.finish.as_str(), &cut.text), ("length", &natural.text));
        // As a stop token it is named.
        let named = ask(json!({"ignore_eos": true, "stop_token_ids": [EOS]})).await;
        assert_eq!((&named.ids, &named.text), (&natural.ids, &natural.text));
        assert_eq!(
            (named.finish.as_str(), named.stop_reason),
            ("stop", json!(EOS))
        );
        let ignored = ask(json!({"ignore_eos": true, "max_tokens": len + 5})).await;
        assert_eq!(ignored.ids[..len], natural.ids);
        assert_eq!(
            (ignored.ids.len(), ignored.finish.as_str()),
            (len + 5, "length")
        );
        assert!(ignored.text.starts_with(&natural.text));
        for min_tokens in [len - 2, len - 1] {
            assert_eq!(ask(json!({"min_tokens": min_tokens})).await, natural);
        }
        for min_tokens in [len, len + 3] {
            let later = ask(json!({"min_tokens": min_tokens})).await;
            assert!(!later.ids[..min_tokens].contains(&EOS), "{later:?}");
            assert!(later.ids.len() > min_tokens);
            assert_eq!(later.ids[..len - 1], natural.ids[..len - 1]);
        }
    }
    // Where nothing else can be drawn it comes as soon as it may.
    for min_tokens in 0..10usize {
        let mut body = body(TOKENS);
        body["ignore_eos"] = json!(false);
        body["min_tokens"] = json!(min_tokens);
        body["logit_bias"] = json!({EOS.to_string(): 100});
        body["temperature"] = json!(0);
        let got = ways.one(&body).await;
        assert_eq!(got.ids.len(), min_tokens + 1, "{got:?}");
        assert_eq!(got.ids.iter().position(|&id| id == EOS), Some(min_tokens));
        assert_eq!(got.finish, "stop");
        body["max_tokens"] = json!(min_tokens + 1);
        assert_eq!(ways.one(&body).await, got);
        if min_tokens > 0 {
            body["max_tokens"] = json!(min_tokens);
            let cut = ways.one(&body).await;
            assert_eq!((cut.ids.len(), cut.finish.as_str()), (min_tokens, "length"));
        }
    }
    ways.idle().await;
}

/// C4.5, C4.4: the length that was asked for, and the end of the context.
#[tokio::test]
async fn lengths_are_exact_up_to_the_end_of_the_context() {
    let ways = Ways::start().await;
    let base = Base::of(&ways.plain.client(), body(TOKENS)).await;
    for max_tokens in 1..=12 {
        let body = body(max_tokens);
        assert_eq!(ways.one(&body).await, base.expected(&body), "{body}");
    }
    for before_end in 1..=6usize {
        let prompt: Vec<u32> = (0..CONTEXT - before_end)
            .map(|i| 6 + (i as u32 * 31 + 7) % 1500)
            .collect();
        for max_tokens in [Some(1), Some(before_end), None] {
            let mut body = completion_body(prompt.clone(), 1);
            body["max_tokens"] = json!(max_tokens);
            body["ignore_eos"] = json!(true);
            body["return_token_ids"] = json!(true);
            let got = ways.one(&body).await;
            assert_eq!(got.ids.len(), max_tokens.unwrap_or(before_end), "{body}");
            assert_eq!(got.finish, "length");
        }
    }
    ways.idle().await;
}

/// Choices of one request end each for itself, and their tokens are counted together.
#[tokio::test]
async fn choices_end_each_for_itself() {
    let ways = Ways::start().await;
    let mut several = body(TOKENS);
    several["n"] = json!(3);
    let free = ways.ask("/v1/completions", &several).await;
    assert!(free.iter().all(|choice| choice.ids.len() == TOKENS));
    assert!(free[0].ids != free[1].ids && free[1].ids != free[2].ids);
    // Stop tokens that the choices meet at different places, some of them not at all.
    several["stop_token_ids"] = json!([free[0].ids[2], free[1].ids[9]]);
    let stop = ids(&several["stop_token_ids"]);
    let got = ways.ask("/v1/completions", &several).await;
    for (got, free) in got.iter().zip(&free) {
        let at = free.ids.iter().position(|id| stop.contains(id));
        let len = at.map_or(TOKENS, |at| at + 1);
        assert_eq!(got.ids, free.ids[..len]);
        assert_eq!(got.finish == "stop", at.is_some());
        assert!(free.text.starts_with(&got.text));
    }
    // Each alone at its length of one.
    let mut one = body(1);
    one["n"] = json!(3);
    for (got, free) in ways.ask("/v1/completions", &one).await.iter().zip(&free) {
        assert_eq!(got.ids, free.ids[..1]);
        assert_eq!(got.finish, "length");
    }
    ways.idle().await;
}
