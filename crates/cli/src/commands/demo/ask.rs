//! One streamed chat question through the router, with what the decode instance counts for it.

use super::metrics;
use crate::commands::environment_keys;
use crate::exit::{Code, Failure};
use crate::output;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde_json::{Value, json};
use std::fmt;
use std::time::{Duration, Instant};
use twinfer_deploy::{Plan, reachable_router_url};
use twinfer_http::sse::SseParser;
use twinfer_http::{ClientOptions, Endpoint, PeerClient, Secret, next_chunk};
use twinfer_protocol::{DECODE_HEADER, ErrorBody, PREFILL_HEADER, Role};

/// For an answer to begin, and between two of its pieces.
const LIMIT: Duration = Duration::from_secs(60);
const MAX_EVENT: usize = 1 << 20;
const MAX_METRICS: usize = 4 << 20;
/// More than the longest right answer has.
const MAX_TOKENS: u32 = 96;

/// An answer and how it came about.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) text: String,
    /// Instances, as the router names them.
    pub(super) prefill: Option<String>,
    pub(super) decode: Option<String>,
    /// As the answer's usage says.
    pub(super) prompt_tokens: u64,
    pub(super) output_tokens: u64,
    /// From sending the question to the first text.
    pub(super) first_token: Duration,
    /// Prompt tokens whose KV the decode instance read from the prefill instance.
    pub(super) handed_tokens: u64,
    /// Prompt tokens that the decode instance computed.
    pub(super) computed_tokens: u64,
    pub(super) handed_bytes: u64,
}

/// Asks questions one after the other, so that counters can be told apart.
pub(super) struct Asker {
    client: PeerClient,
    router: Endpoint,
    decode: Endpoint,
    model: String,
    /// For the router.
    client_headers: HeaderMap,
    /// For the decode instance.
    peer_headers: HeaderMap,
}

/// Counters of the decode instance.
#[derive(Clone, Copy, Default)]
struct Counters {
    handed_tokens: f64,
    computed_tokens: f64,
    handed_bytes: f64,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "?".to_owned());
        write!(
            f,
            "{} -> {}: {} prompt tokens ({} by handoff, {} computed), {} output tokens, first token after {:.1} ms, {} bytes of KV \
             handed over",
            name(&self.prefill),
            name(&self.decode),
            self.prompt_tokens,
            self.handed_tokens,
            self.computed_tokens,
            self.output_tokens,
            self.first_token.as_secs_f64() * 1e3,
            self.handed_bytes,
        )
    }
}

impl Asker {
    pub(super) fn new(plan: &Plan, peer_key: &str) -> Result<Self, Failure> {
        let internal = |error: &dyn fmt::Display| Failure::new(Code::Internal, error);
        let endpoint = |url: &str| url.parse::<Endpoint>().map_err(|error| internal(&error));
        let decode = plan
            .instances
            .iter()
            .find(|instance| instance.role == Role::Decode)
            .ok_or_else(|| internal(&"the demo's plan has no decode instance"))?;
        let bearer = |secret: &Secret| {
            HeaderMap::from_iter([(http::header::AUTHORIZATION, secret.bearer())])
        };
        let peer = Secret::new(peer_key, "the demo").map_err(|error| internal(&error))?;
        let api = Secret::load("api-key-file", None, environment_keys().api.as_ref())
            .map_err(|error| Failure::new(Code::Config, error))?;
        let mut client_headers = api.as_ref().map(bearer).unwrap_or_default();
        client_headers.insert(
            http::header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        Ok(Self {
            client: PeerClient::new(ClientOptions::default()),
            router: endpoint(&reachable_router_url(plan))?,
            decode: endpoint(&decode.url())?,
            model: plan.served_model_name.clone(),
            client_headers,
            peer_headers: bearer(&peer),
        })
    }

    /// Asks, and prints the text as it comes.
    pub(super) async fn ask(&mut self, question: &str) -> Result<Answer, String> {
        let before = self.counters().await?;
        let body = json!({
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let start = Instant::now();
        let response = self
            .client
            .send(
                Method::POST,
                &self.router,
                "/v1/chat/completions",
                self.client_headers.clone(),
                body.to_string().into(),
                LIMIT,
            )
            .await
            .map_err(|error| error.to_string())?;
        let header = |name: &str| {
            response
                .headers()
                .get(name)
                .and_then(|value| value.to_str().ok())
                .map(str::to_owned)
        };
        let (prefill, decode, status) = (
            header(PREFILL_HEADER),
            header(DECODE_HEADER),
            response.status(),
        );
        let mut body = response.into_body();
        if status != StatusCode::OK {
            let bytes = twinfer_http::collect_body(body, "router", MAX_EVENT, LIMIT)
                .await
                .map_err(|error| error.to_string())?;
            return Err(refusal(status, &bytes));
        }
        let mut parser = SseParser::new(MAX_EVENT);
        let mut stream = Stream::default();
        while let Some(chunk) = next_chunk(&mut body, "router", LIMIT)
            .await
            .map_err(|error| error.to_string())?
        {
            parser.push(chunk);
            while let Some(event) = parser.next_event().map_err(|error| error.to_string())? {
                if event.is_done() {
                    stream.done = true;
                } else if let Some(data) = event.data() {
                    stream.take(&data, start)?;
                }
            }
        }
        if !stream.done {
            return Err(format!(
                "the stream ended without [DONE] after {:?}",
                stream.text
            ));
        }
        let after = self.counters().await?;
        Ok(Answer {
            text: stream.text,
            prefill,
            decode,
            prompt_tokens: stream.prompt_tokens,
            output_tokens: stream.output_tokens,
            first_token: stream.first_token.unwrap_or_default(),
            handed_tokens: counted(before.handed_tokens, after.handed_tokens),
            computed_tokens: counted(before.computed_tokens, after.computed_tokens),
            handed_bytes: counted(before.handed_bytes, after.handed_bytes),
        })
    }

    async fn counters(&self) -> Result<Counters, String> {
        let (status, bytes) = self
            .client
            .get(
                &self.decode,
                "/metrics",
                self.peer_headers.clone(),
                MAX_METRICS,
                LIMIT,
            )
            .await
            .map_err(|error| error.to_string())?;
        if status != StatusCode::OK {
            return Err(format!(
                "/metrics of the decode instance: {}",
                refusal(status, &bytes)
            ));
        }
        let text = String::from_utf8_lossy(&bytes);
        // A counter with labels appears when it is first counted.
        let tokens = |source| {
            metrics::sum(
                &text,
                "vllm:prompt_tokens_by_source_total",
                &[("source", source)],
            )
            .unwrap_or_default()
        };
        Ok(Counters {
            handed_tokens: tokens("external_kv_transfer"),
            computed_tokens: tokens("local_compute"),
            handed_bytes: metrics::sum(&text, "twinfer_kv_handoff_bytes_total", &[])
                .unwrap_or_default(),
        })
    }
}

/// What a stream has said so far.
#[derive(Default)]
struct Stream {
    text: String,
    prompt_tokens: u64,
    output_tokens: u64,
    first_token: Option<Duration>,
    done: bool,
}

impl Stream {
    fn take(&mut self, data: &[u8], start: Instant) -> Result<(), String> {
        let event: Value = serde_json::from_slice(data)
            .map_err(|error| format!("an event is no JSON: {error}"))?;
        if let Some(message) = event["error"]["message"].as_str() {
            let code = event["error"]["code"].as_str().unwrap_or("error");
            return Err(format!("{code}: {message}"));
        }
        if let Some(text) = event["choices"][0]["delta"]["content"]
            .as_str()
            .filter(|text| !text.is_empty())
        {
            self.first_token.get_or_insert_with(|| start.elapsed());
            self.text.push_str(text);
            output::write(&text).map_err(|_| "standard output cannot be written".to_owned())?;
        }
        if let Some(usage) = event["usage"].as_object() {
            let count = |key: &str| usage.get(key).and_then(Value::as_u64).unwrap_or_default();
            (self.prompt_tokens, self.output_tokens) =
                (count("prompt_tokens"), count("completion_tokens"));
        }
        Ok(())
    }
}

fn refusal(status: StatusCode, body: &[u8]) -> String {
    match serde_json::from_slice::<ErrorBody>(body) {
        Ok(body) => format!(
            "{} ({status}): {}",
            body.error.code.unwrap_or_default(),
            body.error.message
        ),
        Err(_) => format!("status {status}"),
    }
}

/// Counters are whole numbers that only grow.
fn counted(before: f64, after: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "rounded and not negative"
    )]
    let count = (after - before).round().max(0.0) as u64;
    count
}
