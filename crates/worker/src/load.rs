//! From a model directory, or from a test, to an engine that has run once.

use crate::ServeError;
use crate::defaults::SamplingDefaults;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use twinfer_engine::exchange::RankLink;
use twinfer_engine::phase::PhasePolicy;
use twinfer_engine::{
    Engine, EngineConfig, Executor, GenerateError, KvSource, RankEngine, Request, RequestId,
    SamplingParams, generate, generate_together,
};
use twinfer_protocol::{Fingerprint, TokenId};
use twinfer_text::{ChatTemplate, Tokenizer};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Prompt tokens of the warm-up request; enough to touch every weight and buffer.
const WARM_UP_TOKENS: u32 = 64;

/// A model before it serves: what [`crate::serve()`] makes of a model directory.
pub struct Model {
    /// Runs steps.
    pub executor: Box<dyn Executor>,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Chats to text.
    pub template: ChatTemplate,
    /// What must be equal for KV or text to be exchanged.
    pub fingerprint: Fingerprint,
    /// KV blocks to use of the executor's arena.
    pub num_blocks: u32,
    /// Longest sequence, in tokens.
    pub max_model_len: u32,
    /// What requests get that do not say otherwise.
    pub defaults: SamplingDefaults,
}

/// How far loading is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of weights read.
    pub done: u64,
    /// Bytes of weights in all; 0 until known.
    pub total: u64,
}

/// Of the model and of chance: clients cannot know which blocks have which key.
fn cache_seed(fingerprint: &Fingerprint) -> Result<u64, ServeError> {
    let random = getrandom::u64().map_err(|e| ServeError::System {
        what: "draw the seed of the prefix cache",
        source: std::io::Error::other(e.to_string()),
    })?;
    Ok(xxh3_64_with_seed(fingerprint.id.as_bytes(), random))
}

pub(crate) struct WarmEngine {
    pub(crate) engine: Engine,
    pub(crate) progress: Arc<AtomicU64>,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) template: ChatTemplate,
    pub(crate) defaults: SamplingDefaults,
}

/// A rank among others that has run a request together with them.
pub(crate) struct WarmRank {
    pub(crate) rank: RankEngine,
    pub(crate) fingerprint: Fingerprint,
}

fn build(model: Model, limits: EngineConfig) -> Result<WarmEngine, ServeError> {
    let progress = model.executor.progress().unwrap_or_default();
    let config = EngineConfig {
        max_model_len: model.max_model_len,
        cache_seed: cache_seed(&model.fingerprint)?,
        ..limits
    };
    let engine = Engine::new(config, model.executor, model.tokenizer, model.num_blocks)
        .map_err(|e| ServeError::Config(e.message))?;
    Ok(WarmEngine {
        engine,
        progress,
        fingerprint: model.fingerprint,
        template: model.template,
        defaults: model.defaults,
    })
}

/// Builds the engine and runs one request through it, in the thread that will run the others.
pub(crate) fn warm_up(model: Model, limits: EngineConfig) -> Result<WarmEngine, ServeError> {
    let mut warm = build(model, limits)?;
    let request = warm_up_request(&warm.engine);
    generate(&mut warm.engine, vec![request], 1, |_| {}).map_err(|e| failed(&e))?;
    Ok(warm)
}

/// As [`warm_up`], of a rank: all ranks do it at the same time.
pub(crate) fn warm_up_rank(
    model: Model,
    limits: EngineConfig,
    policy: PhasePolicy,
    link: Arc<RankLink>,
) -> Result<WarmRank, ServeError> {
    let WarmEngine {
        engine,
        fingerprint,
        ..
    } = build(model, limits)?;
    let request = warm_up_request(&engine);
    let mut rank =
        RankEngine::new(engine, policy, link).map_err(|error| ServeError::Config(error.message))?;
    generate_together(&mut rank, vec![request], 1, |_| {}).map_err(|e| failed(&e))?;
    Ok(WarmRank { rank, fingerprint })
}

fn failed(error: &GenerateError) -> ServeError {
    ServeError::Model(format!("the warm-up request failed: {error}"))
}

fn warm_up_request(engine: &Engine) -> Request {
    let length = WARM_UP_TOKENS
        .min(engine.max_len().saturating_sub(2))
        .max(1);
    let most = engine.vocab_size() as TokenId;
    Request {
        id: RequestId(0),
        prompt: (0..length).map(|i| i % most.max(1)).collect(),
        params: SamplingParams {
            ignore_eos: true,
            ..SamplingParams::greedy(2.min(engine.max_len() - length))
        },
        kv: KvSource::Compute,
        hold_kv: false,
        cache_salt: None,
        leader: None,
        resumed: 0,
    }
}
