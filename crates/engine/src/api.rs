//! The waist between the crate's parts and its callers: what a request is, what a step computes, what comes out.

use crate::phase::Phase;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use twinfer_config::ranges::NUM_SPECULATIVE_TOKENS;
use twinfer_protocol::{ApiError, BlockId, RankLoad, TokenId};
use twinfer_sys::BlockArena;

/// The engine's own number of a request; the caller makes it, unique per engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// How the next token is chosen. Ranges are checked by `SamplingParams::validate`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Mass kept, in (0, 1].
    pub top_p: f32,
    /// Tokens kept; 0 keeps all.
    pub top_k: u32,
    /// Least probability relative to the best, in [0, 1].
    pub min_p: f32,
    /// Above 0, finite; 1 is off. Sees prompt and output.
    pub repetition_penalty: f32,
    /// In [-2, 2]; sees the output.
    pub frequency_penalty: f32,
    /// In [-2, 2]; sees the output.
    pub presence_penalty: f32,
    /// Added to logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Token sequences that the output must not have: the last token of one may not be drawn where the output ends
    /// with the others. None is empty.
    pub bad_words: Vec<Vec<TokenId>>,
    /// Only these may be drawn, if given.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// Key of the random numbers, with `choice` and the position.
    pub seed: u64,
    /// Index of the choice among `n`.
    pub choice: u32,
    /// Most output tokens; with 0 the prompt is computed and nothing else.
    pub max_tokens: u32,
    /// No end-of-sequence before so many.
    pub min_tokens: u32,
    /// End-of-sequence does not stop.
    pub ignore_eos: bool,
    /// Texts that stop; cut from the output unless `include_stop_str_in_output`.
    pub stop: Vec<String>,
    /// Tokens that stop.
    pub stop_token_ids: Vec<TokenId>,
    /// Keep the stop text.
    pub include_stop_str_in_output: bool,
    /// Alternatives to report per output token; none: no log-probabilities.
    pub logprobs: Option<u32>,
    /// Alternatives to report per prompt token; none: no log-probabilities of the prompt. With some the
    /// whole prompt is computed here.
    pub prompt_logprobs: Option<u32>,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
}

/// What becomes of the prompt's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvSource {
    /// Computed here.
    Compute,
    /// Comes from a prefill instance: the engine allocates blocks, emits [`Event::KvFetch`] for what is not
    /// in its own prefix cache and waits for [`KvOutcome`]. A prompt that is cached, or of one token, has
    /// nothing to fetch: no such event comes.
    Remote,
}

/// A request as the engine takes it: validated, tokenised.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Id.
    pub id: RequestId,
    /// Prompt, at least one token.
    pub prompt: Arc<[TokenId]>,
    /// Sampling and stopping.
    pub params: SamplingParams,
    /// Where the prompt's KV comes from.
    pub kv: KvSource,
    /// Keep the prompt's blocks when the request has finished ([`Finish::held`]).
    pub hold_kv: bool,
    /// Only requests of the same salt share cached prefixes; none: all that have none.
    pub cache_salt: Option<Arc<str>>,
    /// An earlier request of the same prompt and salt, another choice of the same answer: this one waits
    /// until that one's prompt is computed (or it is gone) and shares its KV. Both name the first choice,
    /// that one itself too, so that they share also without prefix cache.
    pub leader: Option<RequestId>,
    /// The last so many tokens of `prompt` are output that another engine of the same fingerprint has given of
    /// this request: penalties, stops, `min_tokens` and `max_tokens` count them as output, and neither they nor
    /// their text come out again. Fewer than `prompt` has, and not so many that they end the output.
    pub resumed: u32,
}

impl Request {
    /// Prompt, and output of another engine that stands behind it.
    pub fn split(&self) -> (&[TokenId], &[TokenId]) {
        let at = self.prompt.len().saturating_sub(self.resumed as usize);
        self.prompt.split_at(at)
    }
}

/// Log-probability of a token, natural logarithm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Logprob {
    /// Token.
    pub token: TokenId,
    /// Natural logarithm of its probability before temperature, penalties and masks.
    pub logprob: f32,
    /// 1 + number of tokens with a larger value.
    pub rank: u32,
}

/// One output token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputToken {
    /// Token.
    pub id: TokenId,
    /// Its own log-probability and the `logprobs` best tokens, which may include it, if asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Log-probability of a token and of the best tokens in its place, which may include it.
pub type TokenLogprobs = (Logprob, Vec<Logprob>);

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FinishReason {
    /// End-of-sequence.
    Eos,
    /// One of `stop_token_ids`.
    StopToken(TokenId),
    /// One of `stop`.
    StopText(String),
    /// `max_tokens` or the context.
    Length,
    /// Aborted by the caller.
    Abort,
    /// Failed.
    Error(ApiError),
}

/// Where the prompt tokens of a request came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptSources {
    /// Computed here.
    pub computed: u32,
    /// Read from a prefill instance.
    pub remote: u32,
    /// Found in the prefix cache.
    pub cached: u32,
}

/// KV kept after a request has finished, until `Engine::release_held` is called for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldKv {
    /// Blocks in order of position.
    pub blocks: Vec<BlockId>,
    /// Prompt tokens they cover; the last block may be partial.
    pub tokens: u32,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// Where the prompt tokens came from.
    pub sources: PromptSources,
    /// Output tokens, all counted (stop tokens too).
    pub output_tokens: u32,
    /// KV kept for a decode instance, when the request asked for it and ended well.
    pub held: Option<HeldKv>,
}

/// What a step, an admission or an abort makes known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// New output of a request, and its end.
    Output {
        /// Request.
        id: RequestId,
        /// Log-probabilities of the prompt's tokens but the first, if asked for; all of them on the first
        /// event of the request.
        prompt_logprobs: Vec<TokenLogprobs>,
        /// Tokens of this step.
        tokens: Vec<OutputToken>,
        /// Text that became certain: never ends inside a character or inside a possible stop text.
        text: String,
        /// Set on the last event of the request.
        finish: Option<Finish>,
    },
    /// Blocks are ready to be filled; answer with [`KvOutcome`] by `Engine::kv_loaded`. Until then the
    /// engine does not touch these blocks.
    KvFetch {
        /// Request.
        id: RequestId,
        /// Blocks in order of position, those of `positions` only.
        blocks: Vec<BlockId>,
        /// Positions to fill: from the first that is not in the prefix cache, which begins a block, to the
        /// prompt's last but one.
        positions: Range<u32>,
    },
    /// The request of a running fetch is gone; stop it and answer with any [`KvOutcome`]: only then
    /// are its blocks free.
    KvFetchCancel {
        /// Request.
        id: RequestId,
    },
}

/// How a fetch ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvOutcome {
    /// All positions are filled and verified.
    Loaded,
    /// Nothing usable came; the request fails with this error.
    Failed(ApiError),
    /// Nothing usable came; what is not cached of the prompt is computed here.
    Recompute,
}

/// Shape of the KV of a model: one unit is one layer's share of one block, token-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGeometry {
    /// Layers that have KV.
    pub layers: usize,
    /// Values per token and layer.
    pub width: usize,
    /// Bytes per value: 2 (bf16) or 4 (f32).
    pub value_bytes: usize,
    /// Tokens per block.
    pub block_size: usize,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug)]
pub struct SeqWork<'a> {
    /// Tokens to compute, at positions `start..start + tokens.len()`.
    pub tokens: &'a [TokenId],
    /// Position of the first of them; KV of all earlier positions is in `blocks`.
    pub start: usize,
    /// Block table, covers at least `start + tokens.len()` positions.
    pub blocks: &'a [BlockId],
    /// Logits of rows `logits_from..tokens.len()` are wanted; of none if absent.
    pub logits_from: Option<usize>,
}

/// One sequence's share of a draft: rows of the last step whose tokens are settled, and how many tokens
/// to propose after them.
#[derive(Clone, Debug)]
pub struct DraftWork<'a> {
    /// Index of the sequence's work in the batch of the last [`Executor::execute`].
    pub work: usize,
    /// Rows of that work that are settled, at least one; those behind them were rejected drafts.
    pub rows: Range<usize>,
    /// The token that follows each of these rows.
    pub next: &'a [TokenId],
    /// Block table, covers the settled rows and `count - 1` positions behind them.
    pub blocks: &'a [BlockId],
    /// Tokens to propose; 0 fills the draft layer's KV only.
    pub count: usize,
}

impl SeqWork<'_> {
    /// Number of rows whose logits are wanted.
    pub fn logits_rows(&self) -> usize {
        self.logits_from
            .map_or(0, |from| self.tokens.len().saturating_sub(from))
    }
}

/// Why a step could not be computed: the instance cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// Another holder of a block broke the protocol.
    #[error("KV block {block} is in use elsewhere")]
    BlockBusy {
        /// Block.
        block: BlockId,
    },
    /// A block table or token id is out of range.
    #[error("step input out of range: {0}")]
    OutOfRange(String),
    /// A compute thread died.
    #[error("compute thread failed: {0}")]
    Thread(String),
    /// The ranks of the instance cannot go on together.
    #[error("ranks: {0}")]
    Ranks(String),
    /// Another rank is the reason for it.
    #[error("ranks: {message}")]
    RankLost {
        /// The rank at fault.
        rank: u32,
        /// Which rank, what became of it, and where.
        message: String,
    },
    /// An earlier step failed: what the blocks contain is unknown.
    #[error("an earlier step failed")]
    AfterFailure,
}

/// Computes steps: the CPU model, or a scripted one for tests.
pub trait Executor: Send {
    /// Shape of the KV.
    fn geometry(&self) -> KvGeometry;
    /// The rank's KV memory.
    fn arena(&self) -> &Arc<BlockArena>;
    /// Width of a logits row.
    fn vocab_size(&self) -> usize;
    /// Longest sequence the model was made for, in tokens.
    fn max_context(&self) -> usize;
    /// Runs one forward pass. `logits` is cleared, then holds one row of `vocab_size` values per
    /// row that is wanted, in order of the works and of their rows. Writes KV of every computed
    /// position.
    fn execute(&mut self, batch: &[SeqWork<'_>], logits: &mut Vec<f32>) -> Result<(), ExecError>;
    /// Draft (MTP) layers that can propose tokens; their KV is part of [`Self::geometry`]. 0: none.
    fn draft_layers(&self) -> usize {
        0
    }
    /// Runs the draft layer over settled rows of the last [`Self::execute`], whose hidden rows the
    /// executor kept, writing that layer's KV at the rows' own positions. `drafts` is cleared, then
    /// holds `count` tokens per work, in order of the works: the first from the last settled row, the
    /// others from the layer's own output, each a position further. Drafts are guesses: whatever they
    /// are, the text is the same.
    fn draft(
        &mut self,
        works: &[DraftWork<'_>],
        drafts: &mut Vec<TokenId>,
    ) -> Result<(), ExecError> {
        drafts.clear();
        if works.is_empty() {
            return Ok(());
        }
        Err(ExecError::OutOfRange("the model has no draft layer".into()))
    }
    /// Takes part in a step of the other ranks without rows of its own: all their collectives, those of the
    /// draft layer included. A model on one rank has none.
    fn dummy(&mut self) -> Result<(), ExecError> {
        Ok(())
    }
    /// Called on all ranks after a step of this phase, before the next: experts may change their places. No answer
    /// depends on it.
    fn rearrange(&mut self, _phase: Phase) -> Result<(), ExecError> {
        Ok(())
    }
    /// A number that changes with every layer that was computed, readable while [`Self::execute`]
    /// runs: how a long step is told from a stalled one. None: only whole steps are seen.
    fn progress(&self) -> Option<Arc<AtomicU64>> {
        None
    }
}

/// Limits of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Input and output together, in tokens.
    pub max_model_len: u32,
    /// Sequences with blocks at the same time.
    pub max_num_seqs: u32,
    /// Tokens of one step.
    pub max_num_batched_tokens: u32,
    /// Requests that may wait.
    pub max_waiting: u32,
    /// Requests share the KV of equal prefixes, also of earlier ones.
    pub enable_prefix_caching: bool,
    /// Seed of the cache's keys: any number that clients do not know.
    pub cache_seed: u64,
    /// Tokens that the draft layer proposes per step, 0 to [`MAX_DRAFTS`].
    pub num_speculative_tokens: u32,
    /// Propose fewer where few were accepted, at least one.
    pub adaptive_draft_length: bool,
    /// Prompts are computed in every Nth step at most while others generate; 1: in any.
    pub prefill_any_interval: u32,
}

impl Default for EngineConfig {
    /// What `serve` does if told nothing, but for sequences of 4096 tokens.
    fn default() -> Self {
        Self {
            max_model_len: 4096,
            max_num_seqs: 32,
            max_num_batched_tokens: 512,
            max_waiting: 256,
            enable_prefix_caching: true,
            cache_seed: 0,
            num_speculative_tokens: 0,
            adaptive_draft_length: false,
            prefill_any_interval: 1,
        }
    }
}

/// Most tokens that are proposed per step.
pub const MAX_DRAFTS: usize = *NUM_SPECULATIVE_TOKENS.end() as usize;

/// Counters since start and gauges now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStats {
    /// Gauges.
    pub load: RankLoad,
    /// Steps run.
    pub steps: u64,
    /// Prompt tokens by source, of all requests.
    pub prompt_tokens: PromptTokenTotals,
    /// Output tokens of all requests.
    pub output_tokens: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Prompt tokens of requests that looked for a cached prefix: all but those that want log-probabilities
    /// of their prompt.
    pub cache_queries: u64,
    /// Those that were found.
    pub cache_hits: u64,
    /// Drafts and what became of them.
    pub speculation: SpeculationStats,
}

/// Drafts since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpeculationStats {
    /// Verifications of at least one draft.
    pub rounds: u64,
    /// Drafts verified, by place: the first of a round, the second, ...
    pub drafted: [u64; MAX_DRAFTS],
    /// Drafts that were delivered as output, by place.
    pub accepted: [u64; MAX_DRAFTS],
}

/// Prompt tokens by source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokenTotals {
    /// Computed here.
    pub computed: u64,
    /// Read from prefill instances.
    pub remote: u64,
    /// Found in the prefix cache.
    pub cached: u64,
}
