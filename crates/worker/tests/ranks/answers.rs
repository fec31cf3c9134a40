//! A model, its requests, and the answers of one rank to its part of them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use twinfer_comm::Group;
use twinfer_config::{Dtype, MoeComm};
use twinfer_engine::eplb::EplbOptions;
use twinfer_engine::exchange::{RankLink, SentBytes};
use twinfer_engine::phase::PhasePolicy;
use twinfer_engine::testing::byte_tokenizer;
use twinfer_engine::{
    Engine, EngineConfig, Generated, KvMemory, KvSource, LoadOptions, LoadedModel, RankEngine,
    Request, RequestId, SamplingParams, generate, generate_together, load,
};
use twinfer_protocol::Fingerprint;
use twinfer_worker::GroupExchange;

/// Experts of other seats after every plan, whatever the loads are.
pub(crate) const FORCED: EplbOptions = EplbOptions {
    interval: 2,
    after_prefill: false,
    redundant: 0,
    forced: true,
};

/// How a model is served; the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) model: &'static str,
    pub(crate) dtype: Dtype,
    pub(crate) quantize: bool,
    pub(crate) drafts: u32,
    pub(crate) comm: MoeComm,
    pub(crate) eplb: EplbOptions,
    pub(crate) policy: PhasePolicy,
    pub(crate) requests: u64,
    /// Tokens of a step.
    pub(crate) tokens: u32,
}

/// A request's tokens and the bits of their log-probabilities.
pub(crate) type Answer = (u64, Vec<(u32, u32)>);

/// What one rank has to tell.
pub(crate) struct Outcome {
    pub(crate) answers: Vec<Answer>,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) file_bytes: u64,
    pub(crate) weight_bytes: u64,
    pub(crate) workspace_bytes: u64,
    /// Steps of the group; 0 for a rank alone.
    pub(crate) steps: u64,
    /// What went to other ranks.
    pub(crate) sent: SentBytes,
}

impl Case {
    pub(crate) const QWEN: Self = Self {
        model: "qwen3_moe",
        dtype: Dtype::Bf16,
        quantize: false,
        drafts: 0,
        comm: MoeComm::AllToAll,
        eplb: EplbOptions {
            interval: 0,
            after_prefill: false,
            redundant: 0,
            forced: false,
        },
        policy: PhasePolicy::DEFAULT,
        requests: 13,
        tokens: 48,
    };

    fn dir(&self) -> PathBuf {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/golden");
        PathBuf::from(golden).join(self.model)
    }

    fn options(&self, link: Option<&Arc<RankLink>>) -> LoadOptions<'static> {
        LoadOptions {
            dtype: self.dtype,
            quantize: self.quantize,
            mtp: self.drafts > 0,
            max_drafts: self.drafts as usize,
            max_num_batched_tokens: self.tokens as usize,
            max_num_seqs: 8,
            kv: KvMemory::Blocks(256),
            ranks: link.map(Arc::clone),
            moe_comm: self.comm,
            eplb: self.eplb,
            ..LoadOptions::default()
        }
    }

    fn engine(&self, loaded: LoadedModel) -> Engine {
        let config = EngineConfig {
            max_model_len: 512,
            max_num_seqs: 8,
            max_num_batched_tokens: self.tokens,
            num_speculative_tokens: self.drafts,
            ..EngineConfig::default()
        };
        let tokenizer = byte_tokenizer().unwrap();
        Engine::new(
            config,
            Box::new(loaded.executor),
            tokenizer,
            loaded.num_blocks,
        )
        .unwrap()
    }

    /// The requests that `rank` of `ranks` gets: they take turns.
    fn requests(&self, rank: u32, ranks: u32) -> Vec<Request> {
        let mut state = 1_u64;
        let mut random = move |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let all = (0..self.requests).map(|id| {
            let length = 1 + random(70);
            let prompt: Vec<u32> = (0..length).map(|_| random(250) as u32).collect();
            let temperature = if id % 3 == 0 { 0.0 } else { 0.8 };
            Request {
                id: RequestId(id),
                prompt: prompt.into(),
                params: SamplingParams {
                    temperature,
                    seed: id,
                    ignore_eos: true,
                    // Others of the model's tokens have no text, and would end the request.
                    allowed_token_ids: Some((0..250).collect()),
                    logprobs: Some(0),
                    ..SamplingParams::greedy(5 + random(20) as u32)
                },
                kv: KvSource::Compute,
                hold_kv: false,
                cache_salt: None,
                leader: None,
                resumed: 0,
            }
        });
        all.filter(|request| request.id.0 % u64::from(ranks) == u64::from(rank))
            .collect()
    }

    pub(crate) fn alone(&self) -> Outcome {
        let options = self.options(None);
        let checked = twinfer_engine::check(&self.dir(), &options).unwrap();
        let (file_bytes, weight_bytes) = (checked.file_bytes, checked.weight_bytes);
        let workspace_bytes = checked.workspace_bytes;
        let loaded = load(&self.dir(), &options).unwrap();
        let fingerprint = loaded.fingerprint.clone();
        let mut engine = self.engine(loaded);
        let answers = generate(&mut engine, self.requests(0, 1), 8, |_| {}).unwrap();
        Outcome {
            answers: bits(answers),
            fingerprint,
            file_bytes,
            weight_bytes,
            workspace_bytes,
            steps: 0,
            sent: SentBytes::default(),
        }
    }

    pub(crate) fn as_rank(&self, group: Group) -> Result<Outcome, String> {
        let patience = Duration::from_secs(20);
        let exchange = GroupExchange::new(group, patience, Duration::from_secs(60));
        let link = Arc::new(RankLink::new(Box::new(exchange)));
        let options = self.options(Some(&link));
        let checked =
            twinfer_engine::check(&self.dir(), &options).map_err(|error| error.to_string())?;
        let (file_bytes, weight_bytes) = (checked.file_bytes, checked.weight_bytes);
        let workspace_bytes = checked.workspace_bytes;
        let loaded = checked.load(&options).map_err(|error| error.to_string())?;
        let fingerprint = loaded.fingerprint.clone();
        let requests = self.requests(link.rank(), link.ranks());
        let engine = self.engine(loaded);
        let mut rank = RankEngine::new(engine, self.policy, Arc::clone(&link)).unwrap();
        let answers = generate_together(&mut rank, requests, 8, |_| {});
        Ok(Outcome {
            answers: bits(answers.map_err(|error| error.to_string())?),
            fingerprint,
            file_bytes,
            weight_bytes,
            workspace_bytes,
            steps: rank.steps(),
            sent: link.sent(),
        })
    }
}

fn bits(results: Vec<Generated>) -> Vec<Answer> {
    let token = |token: twinfer_engine::OutputToken| {
        let bits = token.logprobs.map_or(0, |(own, _)| own.logprob.to_bits());
        (token.id, bits)
    };
    results
        .into_iter()
        .map(|result| (result.id.0, result.tokens.into_iter().map(token).collect()))
        .collect()
}

/// The ranks' answers together are those of one rank, and so is the identity of the model.
pub(crate) fn assert_equal(alone: &Outcome, ranks: &[Outcome], what: &str) {
    let mut answers: Vec<&Answer> = ranks.iter().flat_map(|rank| &rank.answers).collect();
    answers.sort();
    assert_eq!(answers.len(), alone.answers.len(), "{what}");
    for (got, expected) in answers.into_iter().zip(&alone.answers) {
        assert_eq!(got, expected, "{what}");
    }
    let longest = alone.answers.iter().map(|(_, tokens)| tokens.len()).max();
    assert!(longest >= Some(5), "{what}");
    for rank in ranks {
        assert_eq!(rank.fingerprint, alone.fingerprint, "{what}");
        assert_eq!(rank.steps, ranks[0].steps, "{what}");
        assert!(rank.steps > 0, "{what}");
    }
}
