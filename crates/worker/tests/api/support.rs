//! An instance in this process, with the scripted executor, and a client for it.

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use hyper::body::Incoming;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use twinfer_config::{Dtype, KvLoadFailurePolicy, LogFormat, ServeConfig};
use twinfer_engine::testing::{
    BYTE_EOS, BYTE_VOCAB, ScriptedExecutor, ScriptedShape, write_byte_tokenizer,
};
use twinfer_engine::{ExecError, Executor};
use twinfer_http::{ClientOptions, Drain, Endpoint, PeerClient, collect_body, next_chunk};
use twinfer_protocol::{Fingerprint, Role, TokenId};
use twinfer_text::{ChatTemplate, Tokenizer};
use twinfer_worker::{Hooks, LoadProgress, Model, Ready, SamplingDefaults, ServeError, serve_with};

/// Far beyond what any answer here takes.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const MODEL: &str = "scripted";
pub(crate) const CONTEXT: usize = 512;

/// Called before each step with the number of sequences in it.
pub(crate) type BeforeStep = Box<dyn FnMut(usize) -> Result<(), ExecError> + Send>;

/// What kind of instance to start.
pub(crate) struct Options {
    pub(crate) config: ServeConfig,
    pub(crate) num_blocks: u32,
    pub(crate) before_step: Option<BeforeStep>,
    /// Differs between instances that must not exchange KV.
    pub(crate) weights: &'static str,
    /// Of the model's generation_config.json.
    pub(crate) max_new_tokens: Option<u32>,
}

/// A running instance; ended when dropped.
pub(crate) struct Server {
    pub(crate) ready: Ready,
    pub(crate) drain: Drain,
    pub(crate) client: Client,
    /// What the executor counts layers with.
    pub(crate) layers: Arc<AtomicU64>,
    task: JoinSet<Result<(), ServeError>>,
    _dir: tempfile::TempDir,
}

#[derive(Clone)]
pub(crate) struct Client {
    http: PeerClient,
    endpoint: Endpoint,
    pub(crate) headers: HeaderMap,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// An answer that is still coming.
pub(crate) struct Stream {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    body: Incoming,
}

pub(crate) fn config() -> ServeConfig {
    ServeConfig {
        model: PathBuf::from("none"),
        role: Role::Both,
        model_revision: None,
        served_model_name: Some(MODEL.into()),
        name: None,
        host: "127.0.0.1".into(),
        port: 0,
        kv_host: None,
        kv_advertise_host: None,
        kv_port: 0,
        pd_peers: Vec::new(),
        kv_lease: 5,
        kv_load_failure_policy: KvLoadFailurePolicy::Fail,
        kv_timeout: 5,
        quantization: twinfer_config::Quantization::None,
        dtype: Dtype::F32,
        max_model_len: None,
        max_output_tokens: None,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_waiting: 64,
        block_size: 4,
        enable_prefix_caching: false,
        no_enable_prefix_caching: false,
        share_weights: false,
        num_speculative_tokens: 0,
        adaptive_draft_length: false,
        prefill_any_interval: 1,
        dp: 1,
        prefill_chunk: None,
        moe_comm: None,
        eplb_interval: None,
        eplb_after_prefill: false,
        num_redundant_experts: None,
        prefill_run: None,
        prefill_threshold_requests: None,
        prefill_threshold_tokens: None,
        prefill_longest_wait: None,
        data_parallel_size_local: None,
        data_parallel_start_rank: None,
        data_parallel_address: None,
        data_parallel_rpc_port: None,
        headless: false,
        receipts: None,
        rank_host: None,
        kv_cache_memory: None,
        threads: None,
        cpus: None,
        isa: None,
        seed: 0,
        max_body_bytes: 8 << 20,
        drain_settle: 0.0,
        drain_timeout: 5.0,
        api_key_file: None,
        peer_key_file: None,
        environment_keys: twinfer_config::EnvironmentKeys::default(),
        log_format: LogFormat::Text,
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            config: config(),
            num_blocks: 1024,
            before_step: None,
            weights: "w",
            max_new_tokens: None,
        }
    }
}

/// `say:TEXT|` makes the model say TEXT and end; anything else makes it say letters for ever.
pub(crate) fn script(tokens: &[TokenId]) -> TokenId {
    let at = |pattern: &[u8]| {
        let pattern: Vec<TokenId> = pattern.iter().map(|&b| b.into()).collect();
        tokens
            .windows(pattern.len())
            .position(|window| window == pattern)
    };
    if let (Some(begin), Some(end)) = (at(b"say:"), at(b"|")) {
        let text = &tokens[begin + 4..end];
        // A chat's template ends the message with a newline.
        let said = tokens.len() - end - 1;
        let said = if tokens.get(end + 1) == Some(&10) {
            said - 1
        } else {
            said
        };
        return text.get(said).copied().unwrap_or(BYTE_EOS);
    }
    let sum: u64 = tokens
        .iter()
        .enumerate()
        .map(|(i, &t)| (i as u64 + 7) * u64::from(t))
        .sum();
    97 + (sum % 26) as TokenId
}

/// What [`script`] says after a prompt of bytes.
pub(crate) fn expected(prompt: &str, tokens: usize) -> String {
    let mut all: Vec<TokenId> = prompt.bytes().map(TokenId::from).collect();
    for _ in 0..tokens {
        all.push(script(&all));
    }
    all[prompt.len()..]
        .iter()
        .map(|&t| char::from(u8::try_from(t).unwrap()))
        .collect()
}

/// The scripted model; `path` has its tokenizer.
pub(crate) fn model(
    path: &Path,
    config: &ServeConfig,
    num_blocks: u32,
    before_step: Option<BeforeStep>,
    weights: &str,
) -> Model {
    let tokenizer = Arc::new(Tokenizer::from_dir(path).unwrap());
    let template = ChatTemplate::from_dir(path, &tokenizer).unwrap();
    let shape = ScriptedShape {
        vocab_size: BYTE_VOCAB,
        block_size: config.block_size as usize,
        num_blocks,
        max_context: CONTEXT,
        draft_layer: config.num_speculative_tokens > 0,
    };
    let mut executor = ScriptedExecutor::new(shape)
        .unwrap()
        .with_script(script)
        .with_drafts(script);
    if let Some(mut before) = before_step {
        executor = executor.with_before_step(move |info| before(info.works.len()));
    }
    Model {
        executor: Box::new(executor) as Box<dyn Executor>,
        fingerprint: Fingerprint {
            id: weights.into(),
            weights: weights.into(),
            block_size: config.block_size,
            ..Fingerprint::default()
        },
        tokenizer,
        template,
        num_blocks,
        max_model_len: config.max_model_len.unwrap_or(CONTEXT as u32),
        defaults: SamplingDefaults {
            temperature: 0.0,
            ..SamplingDefaults::default()
        },
    }
}

impl Server {
    pub(crate) async fn start(options: Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_byte_tokenizer(dir.path()).unwrap();
        let path = dir.path().to_owned();
        let drain = Drain::new();
        let (sender, receiver) = oneshot::channel();
        let hooks = Hooks {
            on_ready: Box::new(move |ready| {
                let _ = sender.send(ready.clone());
            }),
            signals: false,
            ..Hooks::default()
        };
        let Options {
            config,
            num_blocks,
            before_step,
            weights,
            max_new_tokens,
        } = options;
        let layers: Arc<OnceLock<Arc<AtomicU64>>> = Arc::default();
        let counted = Arc::clone(&layers);
        let load = move |config: &ServeConfig, _: &(dyn Fn(LoadProgress) + Sync)| {
            let mut model = model(&path, config, num_blocks, before_step, weights);
            model.defaults.max_tokens = max_new_tokens;
            let _ = counted.set(model.executor.progress().unwrap());
            Ok(model)
        };
        let mut task = JoinSet::new();
        task.spawn(serve_with(config, drain.clone(), hooks, load));
        let ready = tokio::select! {
            ready = receiver => ready.unwrap(),
            ended = task.join_next() => panic!("did not start: {ended:?}"),
        };
        Self {
            client: Client::new(ready.addr),
            ready,
            layers: Arc::clone(layers.get().unwrap()),
            drain,
            task,
            _dir: dir,
        }
    }

    pub(crate) async fn with(change: impl FnOnce(&mut ServeConfig)) -> Self {
        let mut options = Options::default();
        change(&mut options.config);
        Self::start(options).await
    }

    /// Waits until it has ended by itself.
    pub(crate) async fn ended(&mut self) -> Result<(), ServeError> {
        tokio::time::timeout(LIMIT, self.task.join_next())
            .await
            .unwrap()
            .unwrap()
            .unwrap()
    }

    /// Ends it and waits.
    pub(crate) async fn stop(mut self) -> Result<(), ServeError> {
        self.drain.end_now();
        self.ended().await
    }

    /// Waits until no KV block is used or held.
    pub(crate) async fn kv_idle(&self, limit: Duration) {
        let start = Instant::now();
        loop {
            let load = self.client.get("/twinfer/load").await.json();
            let count = |name: &str| load["kv_blocks"][name].as_u64().unwrap();
            if count("used") == 0
                && count("held") == 0
                && load["running"] == 0
                && load["waiting"] == 0
            {
                return;
            }
            assert!(start.elapsed() < limit, "KV still in use: {load}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) async fn metric(&self, series: &str) -> f64 {
        let text = String::from_utf8(self.client.get("/metrics").await.body.to_vec()).unwrap();
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_else(|| panic!("no {series} in {text}"))
    }
}

impl Client {
    pub(crate) fn new(addr: SocketAddr) -> Self {
        let options = ClientOptions {
            connect_timeout: LIMIT,
            idle_timeout: Duration::from_secs(5),
            max_idle_per_peer: 64,
        };
        Self {
            http: PeerClient::new(options),
            endpoint: format!("http://{addr}").parse().unwrap(),
            headers: HeaderMap::new(),
        }
    }

    pub(crate) fn header(mut self, name: &'static str, value: &str) -> Self {
        self.headers.insert(
            HeaderName::from_static(name),
            HeaderValue::from_str(value).unwrap(),
        );
        self
    }

    pub(crate) fn key(mut self, key: &str) -> Self {
        self.headers.insert(
            AUTHORIZATION,
            HeaderValue::from_str(&format!("Bearer {key}")).unwrap(),
        );
        self
    }

    pub(crate) async fn send(&self, method: Method, path: &str, body: impl Into<Bytes>) -> Stream {
        self.try_send(method, path, body).await.unwrap()
    }

    /// None if the instance does not answer at all.
    pub(crate) async fn try_send(
        &self,
        method: Method,
        path: &str,
        body: impl Into<Bytes>,
    ) -> Option<Stream> {
        let mut headers = self.headers.clone();
        if method == Method::POST && !headers.contains_key(CONTENT_TYPE) {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        let response = self
            .http
            .send(method, &self.endpoint, path, headers, body.into(), LIMIT)
            .await
            .ok()?;
        let (parts, body) = response.into_parts();
        Some(Stream {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body,
        })
    }

    pub(crate) async fn raw(&self, path: &str, body: impl Into<Bytes>) -> Answer {
        self.send(Method::POST, path, body).await.whole().await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.raw(path, body.to_string()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, "").await.whole().await
    }

    pub(crate) async fn open(&self, path: &str, body: &Value) -> Stream {
        self.send(Method::POST, path, body.to_string()).await
    }

    /// A completion that must succeed.
    pub(crate) async fn complete(&self, body: &Value) -> Value {
        let answer = self.post("/v1/completions", body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }

    /// The text of a prompt's completion.
    pub(crate) async fn text(&self, prompt: &str, max_tokens: u32) -> String {
        let answer = self
            .complete(&json!({"prompt": prompt, "max_tokens": max_tokens}))
            .await;
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    }
}

impl Stream {
    /// The next bytes.
    pub(crate) async fn chunk(&mut self) -> Option<Bytes> {
        next_chunk(&mut self.body, "server", LIMIT).await.unwrap()
    }

    pub(crate) async fn whole(self) -> Answer {
        let body = collect_body(self.body, "server", 1 << 26, LIMIT)
            .await
            .unwrap();
        Answer {
            status: self.status,
            headers: self.headers,
            body,
        }
    }

    /// All JSON events of a stream, which must end with exactly one `[DONE]`.
    pub(crate) async fn events(self) -> Vec<Value> {
        assert_eq!(self.status, 200);
        let kind = self.headers[CONTENT_TYPE].to_str().unwrap().to_owned();
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        let answer = self.whole().await;
        let text = answer.text();
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        let events: Vec<&str> = text.strip_suffix("\n\n").unwrap().split("\n\n").collect();
        let (last, events) = events.split_last().unwrap();
        assert_eq!(*last, "data: [DONE]");
        events
            .iter()
            .map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap())
            .collect()
    }
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// Checks the one error shape and returns `(status, code, param, message)`.
    pub(crate) fn error(&self) -> (u16, String, Option<String>, String) {
        assert_eq!(self.headers[CONTENT_TYPE], "application/json");
        let body = self.json();
        assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
        let error = body["error"].as_object().unwrap();
        let keys: Vec<&str> = error.keys().map(String::as_str).collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        assert!(error["type"].is_string());
        let text = |name: &str| error[name].as_str().map(str::to_owned);
        (
            self.status,
            text("code").unwrap(),
            text("param"),
            text("message").unwrap(),
        )
    }
}
