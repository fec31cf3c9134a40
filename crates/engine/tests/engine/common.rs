//! What the engine's tests share: an engine over the scripted executor, requests, a way to run them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use twinfer_engine::testing::{ScriptedExecutor, ScriptedShape, byte_tokenizer, fill_kv};
use twinfer_engine::{
    Engine, EngineConfig, Event, Finish, KvOutcome, KvSource, OutputToken, Request, RequestId,
    SamplingParams, TokenLogprobs,
};
use twinfer_protocol::{BlockId, TokenId};
use twinfer_text::Tokenizer;

pub(crate) const BLOCK: usize = 4;

/// What came out of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Got {
    pub(crate) prompt_logprobs: Vec<TokenLogprobs>,
    pub(crate) tokens: Vec<OutputToken>,
    pub(crate) text: String,
    pub(crate) finish: Option<Finish>,
}

/// An engine and all that came out of it.
pub(crate) struct Bench {
    pub(crate) engine: Engine,
    pub(crate) got: BTreeMap<u64, Got>,
    /// Fetches that wait for an answer.
    pub(crate) fetches: BTreeMap<u64, (Vec<BlockId>, Range<u32>)>,
    pub(crate) cancels: Vec<u64>,
    /// Order in which requests ended.
    pub(crate) ended: Vec<u64>,
}

pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    static ONCE: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    Arc::clone(ONCE.get_or_init(|| byte_tokenizer().unwrap()))
}

pub(crate) fn roomy() -> EngineConfig {
    EngineConfig {
        max_model_len: 512,
        max_num_seqs: 64,
        max_num_batched_tokens: 512,
        max_waiting: 1024,
        ..EngineConfig::default()
    }
}

pub(crate) fn shape(num_blocks: u32) -> ScriptedShape {
    ScriptedShape {
        block_size: BLOCK,
        num_blocks,
        ..ScriptedShape::default()
    }
}

/// A bench whose drafts are right in `percent` of all places: they come from the outputs of `requests`
/// alone, and which are wrong depends on the tokens before them only.
pub(crate) fn drafting(
    config: EngineConfig,
    num_blocks: u32,
    requests: &[Request],
    percent: u64,
) -> Bench {
    let texts: Vec<Vec<TokenId>> = requests
        .iter()
        .map(|request| {
            let mut text = request.prompt.to_vec();
            text.extend(alone(request).ids());
            text
        })
        .collect();
    let shape = ScriptedShape {
        draft_layer: true,
        ..shape(num_blocks)
    };
    let executor = ScriptedExecutor::new(shape)
        .unwrap()
        .with_drafts(move |tokens| {
            let known = texts
                .iter()
                .find(|text| text.len() > tokens.len() && text.starts_with(tokens));
            let sum = tokens.iter().fold(7u64, |sum, &token| {
                (sum ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
            });
            let right = (sum >> 32) % 100 < percent;
            match known {
                Some(text) if right => text[tokens.len()],
                Some(text) => (text[tokens.len()] + 1) % 256,
                None => 0,
            }
        });
    Bench::new(engine_with(config, executor))
}

pub(crate) fn engine_with(config: EngineConfig, executor: ScriptedExecutor) -> Engine {
    use twinfer_engine::Executor as _;
    let blocks = executor.arena().num_blocks();
    Engine::new(config, Box::new(executor), tokenizer(), blocks).unwrap()
}

pub(crate) fn bench(config: EngineConfig, num_blocks: u32) -> Bench {
    Bench::new(engine_with(
        config,
        ScriptedExecutor::new(shape(num_blocks)).unwrap(),
    ))
}

/// A prompt that no other number shares a token prefix of length 1 with (below 256).
pub(crate) fn prompt(number: u64, len: usize) -> Arc<[TokenId]> {
    (0..len as u64)
        .map(|i| ((number + 7 * i * (number + 1)) % 256) as TokenId)
        .collect()
}

pub(crate) fn request(id: u64, prompt: Arc<[TokenId]>, params: SamplingParams) -> Request {
    Request {
        id: RequestId(id),
        prompt,
        params,
        kv: KvSource::Compute,
        hold_kv: false,
        cache_salt: None,
        leader: None,
        resumed: 0,
    }
}

/// Sampled, with seed and log-probabilities: every bit of the row matters to the output.
pub(crate) fn sampled(seed: u64, max_tokens: u32) -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        seed,
        ignore_eos: true,
        logprobs: Some(3),
        ..SamplingParams::greedy(max_tokens)
    }
}

pub(crate) fn alone(request: &Request) -> Got {
    let mut bench = bench(roomy(), 256);
    let id = request.id.0;
    let computed = Request {
        kv: KvSource::Compute,
        hold_kv: false,
        ..request.clone()
    };
    bench.engine.submit(computed).unwrap();
    bench.run();
    bench.got.remove(&id).unwrap()
}

impl Got {
    pub(crate) fn ids(&self) -> Vec<TokenId> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    /// All but where the prompt tokens came from and what is held.
    pub(crate) fn assert_same_output(&self, other: &Got, what: &str) {
        assert_eq!(
            self.tokens, other.tokens,
            "{what}: tokens or log-probabilities"
        );
        assert_eq!(
            self.prompt_logprobs, other.prompt_logprobs,
            "{what}: log-probabilities of the prompt"
        );
        assert_eq!(self.text, other.text, "{what}: text");
        let reason = |got: &Got| {
            got.finish
                .as_ref()
                .map(|f| (f.reason.clone(), f.output_tokens))
        };
        assert_eq!(reason(self), reason(other), "{what}: end");
    }
}

impl Bench {
    pub(crate) fn new(engine: Engine) -> Self {
        Self {
            engine,
            got: BTreeMap::new(),
            fetches: BTreeMap::new(),
            cancels: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// One step, after which all books must balance.
    pub(crate) fn step(&mut self) -> usize {
        let events = self.engine.step().unwrap();
        self.engine.audit().unwrap();
        let n = events.len();
        for event in events {
            self.take(event);
        }
        n
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Output {
                id,
                prompt_logprobs,
                tokens,
                text,
                finish,
            } => {
                let got = self.got.entry(id.0).or_default();
                assert!(
                    got.finish.is_none(),
                    "request {} goes on after its end",
                    id.0
                );
                got.prompt_logprobs.extend(prompt_logprobs);
                got.tokens.extend(tokens);
                got.text.push_str(&text);
                if finish.is_some() {
                    self.ended.push(id.0);
                }
                got.finish = finish;
            }
            Event::KvFetch {
                id,
                blocks,
                positions,
            } => {
                let first = positions.start as usize / BLOCK;
                assert!(!positions.is_empty() && positions.start as usize == first * BLOCK);
                assert_eq!(
                    first + blocks.len(),
                    (positions.end as usize).div_ceil(BLOCK)
                );
                assert!(self.fetches.insert(id.0, (blocks, positions)).is_none());
            }
            Event::KvFetchCancel { id } => self.cancels.push(id.0),
        }
    }

    pub(crate) fn run(&mut self) {
        for _ in 0..100_000 {
            if !self.engine.has_work() {
                return;
            }
            self.step();
        }
        panic!("the engine does not come to rest");
    }

    /// Answers a fetch as a prefill instance would.
    pub(crate) fn load(&mut self, id: u64, prompt: &[TokenId]) {
        let (blocks, positions) = self.fetches.remove(&id).unwrap();
        let prompt = &prompt[..positions.end as usize + 1];
        let first = positions.start as usize;
        fill_kv(self.engine.arena(), BLOCK, &blocks, prompt, first).unwrap();
        self.engine.kv_loaded(RequestId(id), KvOutcome::Loaded);
    }

    /// Answers a fetch after the rows of another prompt were written.
    pub(crate) fn load_foreign(&mut self, id: u64, prompt: &[TokenId], outcome: KvOutcome) {
        let (blocks, positions) = self.fetches.remove(&id).unwrap();
        let first = positions.start as usize;
        fill_kv(self.engine.arena(), BLOCK, &blocks, prompt, first).unwrap();
        self.engine.kv_loaded(RequestId(id), outcome);
    }

    /// Nothing runs, nothing is kept.
    pub(crate) fn assert_idle(&self) {
        self.engine.audit().unwrap();
        let load = self.engine.stats().load;
        assert!(self.engine.is_idle() && !self.engine.has_work());
        assert_eq!(
            (load.running, load.waiting, load.waiting_prefill_tokens),
            (0, 0, 0)
        );
        assert_eq!((load.kv_blocks.used, load.kv_blocks.held), (0, 0));
    }
}
