//! The engine of one rank: requests in, steps, events out. One thread drives it; nothing here waits.

mod sequence;
mod step;

use crate::blocks::BlockPool;
use crate::output::{OutputState, piece_bytes};
use crate::phase::Phase;
use crate::prefix::BlockChain;
use crate::sampler::{Sampler, check_allowed, check_length, check_prompt};
use crate::scheduler::{FetchEnd, Hint, NewSeq, Permit, Plan, Scheduler, StepLimits};
use crate::speculation::DraftLength;
use crate::{
    DraftWork, EngineConfig, EngineStats, Event, ExecError, Executor, FinishReason, KvGeometry,
    KvOutcome, KvSource, Logprob, MAX_DRAFTS, PromptTokenTotals, Request, RequestId, SeqWork,
    SpeculationStats, StepOutput, TokenLogprobs,
};
use sequence::Sequence;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use twinfer_protocol::limits::MAX_LOGPROBS;
use twinfer_protocol::{ApiError, ErrorKind, TokenId};
use twinfer_sys::BlockArena;
use twinfer_text::Tokenizer;

/// Most logits of one step that log-probabilities of prompts may take: 64 MiB.
const MAX_SCORED_LOGITS: usize = 16 << 20;

/// Prompt tokens of one step whose logits may be wanted.
fn max_scored_tokens(vocab: usize) -> usize {
    (MAX_SCORED_LOGITS / vocab.max(1)).max(1)
}

/// Most that log-probabilities of prompts take until their prompts are computed, those of one request aside.
const MAX_SCORE_BYTES: usize = 48 << 20;

/// Bytes that log-probabilities of a prompt's token take, with `top` of the best tokens.
fn token_score_bytes(top: usize) -> usize {
    /// What an allocation takes beside its content.
    const ALLOCATION: usize = 16;
    size_of::<TokenLogprobs>() + top.saturating_mul(size_of::<Logprob>()) + ALLOCATION
}

/// Bytes that the log-probabilities of a request's prompt take, 0 if they are not wanted.
fn score_bytes(request: &Request) -> usize {
    let top = request.params.prompt_logprobs;
    top.map_or(0, |top| {
        token_score_bytes(top as usize).saturating_mul(request.prompt.len())
    })
}

/// Most bytes that log-probabilities of prompts take in an engine of such limits.
pub(crate) fn most_score_bytes(max_model_len: usize, seqs: usize) -> u64 {
    let top = MAX_LOGPROBS as usize;
    let one = token_score_bytes(top).saturating_mul(max_model_len);
    one.saturating_mul(seqs).min(MAX_SCORE_BYTES.max(one)) as u64
}

/// Most rows of logits of a step: one for each sequence and each of its drafts, and those of prompts whose
/// log-probabilities are wanted.
pub(crate) fn max_logits_rows(tokens: usize, seqs: usize, drafts: usize, vocab: usize) -> usize {
    let drawn = seqs.saturating_mul(drafts + 1);
    drawn.saturating_add(max_scored_tokens(vocab)).min(tokens)
}

/// Scheduler, sampler and executor of one rank, and the requests in them.
///
/// Every request that [`Self::submit`] accepts ends with exactly one [`Event::Output`] that has a
/// `finish`, and nothing follows it (but a [`Event::KvFetchCancel`] beside it).
pub struct Engine {
    config: EngineConfig,
    executor: Box<dyn Executor>,
    tokenizer: Arc<Tokenizer>,
    scheduler: Scheduler,
    sampler: Sampler,
    sequences: HashMap<RequestId, Sequence>,
    /// Requests that end at the next step, in the order they were named.
    ending: Vec<(RequestId, FinishReason)>,
    /// A step failed: sequences count tokens as computed that are not.
    failed: bool,
    buffers: Buffers,
    steps: u64,
    prompt_tokens: PromptTokenTotals,
    output_tokens: u64,
    speculation: SpeculationStats,
}

/// What a step needs, kept from step to step so that none allocates.
#[derive(Default)]
struct Buffers {
    plan: Plan,
    logits: Vec<f32>,
    done: Vec<Done>,
    drafts: Vec<TokenId>,
    batch: Vec<SeqWork<'static>>,
    draft_works: Vec<DraftWork<'static>>,
}

/// What a step meant for one sequence.
struct Done {
    id: RequestId,
    /// Index of its work.
    work: usize,
    start: usize,
    /// Rows of the work that are settled: computed, and the token after them is known.
    rows: usize,
    /// Tokens to propose next.
    drafts: usize,
    /// Its end, and the place of its last event.
    end: Option<(usize, FinishReason)>,
}

impl Engine {
    /// An engine over the first `num_blocks` blocks of the executor's arena. `max_model_len` is lowered
    /// to what the blocks have room for; [`Self::max_len`] tells the result.
    ///
    /// # Errors
    /// `InvalidRequest` that names the field of `config` (or `num_blocks`), its value and what is allowed.
    pub fn new(
        config: EngineConfig,
        executor: Box<dyn Executor>,
        tokenizer: Arc<Tokenizer>,
        num_blocks: u32,
    ) -> Result<Self, ApiError> {
        let refuse = |field: &str, value: u64, allowed: String| {
            Err(ApiError::invalid(
                field,
                format!("{field} is {value}; allowed are {allowed}"),
            ))
        };
        let block_size = executor.geometry().block_size;
        if block_size == 0 {
            return refuse("block_size", 0, "numbers from 1".to_owned());
        }
        let arena_blocks = executor.arena().num_blocks();
        if num_blocks == 0 || num_blocks > arena_blocks {
            return refuse(
                "num_blocks",
                num_blocks.into(),
                format!("1 to {arena_blocks}"),
            );
        }
        let context = executor.max_context();
        if config.max_model_len < 2 || config.max_model_len as usize > context {
            return refuse(
                "max_model_len",
                config.max_model_len.into(),
                format!("2 to {context}"),
            );
        }
        for (field, value) in [
            ("max_num_seqs", config.max_num_seqs),
            ("max_num_batched_tokens", config.max_num_batched_tokens),
            ("prefill_any_interval", config.prefill_any_interval),
        ] {
            if value == 0 {
                return refuse(field, 0, "numbers from 1".to_owned());
            }
        }
        let most_drafts = match executor.draft_layers() {
            0 => 0,
            _ => MAX_DRAFTS,
        };
        let num_drafts = config.num_speculative_tokens;
        if num_drafts as usize > most_drafts {
            let allowed = match most_drafts {
                0 => "0: the model has no draft layer, or it is not loaded".to_owned(),
                most => format!("0 to {most}"),
            };
            return refuse("num_speculative_tokens", num_drafts.into(), allowed);
        }
        let pool = BlockPool::new(num_blocks, block_size);
        let capacity = u32::try_from(pool.capacity_tokens()).unwrap_or(u32::MAX);
        if capacity < 2 {
            return refuse(
                "num_blocks",
                num_blocks.into(),
                "enough for 2 tokens".to_owned(),
            );
        }
        let limits = StepLimits {
            max_num_seqs: config.max_num_seqs as usize,
            max_num_batched_tokens: config.max_num_batched_tokens as usize,
            max_scored_tokens: max_scored_tokens(executor.vocab_size()),
            max_score_bytes: MAX_SCORE_BYTES,
            prefill_any_interval: config.prefill_any_interval as usize,
            max_drafts: num_drafts as usize,
        };
        Ok(Self {
            config: EngineConfig {
                max_model_len: config.max_model_len.min(capacity),
                ..config
            },
            scheduler: Scheduler::new(limits, pool),
            executor,
            tokenizer,
            sampler: Sampler::default(),
            sequences: HashMap::new(),
            ending: Vec::new(),
            failed: false,
            buffers: Buffers::default(),
            steps: 0,
            prompt_tokens: PromptTokenTotals::default(),
            output_tokens: 0,
            speculation: SpeculationStats::default(),
        })
    }

    /// Input and output together, in tokens, that a request may have: the smaller of `max_model_len` and
    /// what the KV blocks have room for.
    pub fn max_len(&self) -> u32 {
        self.config.max_model_len
    }

    /// Width of a logits row: token ids of requests are below it.
    pub fn vocab_size(&self) -> usize {
        self.executor.vocab_size()
    }

    /// Rows of logits that a step asks the executor for at most: what its workspace is planned for.
    pub fn max_logits_rows(&self) -> usize {
        let config = &self.config;
        max_logits_rows(
            config.max_num_batched_tokens as usize,
            config.max_num_seqs as usize,
            config.num_speculative_tokens as usize,
            self.vocab_size(),
        )
    }

    /// Takes a request, or refuses it with nothing changed.
    ///
    /// # Errors
    /// `InvalidRequest` for a value out of range, `ContextLengthExceeded` when prompt and `max_tokens`
    /// together exceed [`Self::max_len`] (so also what can never fit the blocks), `Overloaded` when too
    /// many requests wait, `Internal` when the id is in use.
    pub fn submit(&mut self, request: Request) -> Result<(), ApiError> {
        let vocab = self.executor.vocab_size();
        check_prompt(&request.prompt, vocab)?;
        request.params.validate(vocab)?;
        if request.kv == KvSource::Remote && request.params.prompt_logprobs.is_some() {
            let message = "prompt_logprobs is given for a prompt whose KV comes from another instance; \
                           log-probabilities of a prompt need all of it computed here";
            return Err(ApiError::invalid("prompt_logprobs", message));
        }
        let (prompt, resumed) = request.split();
        if prompt.is_empty() || (!resumed.is_empty() && request.params.prompt_logprobs.is_some()) {
            let message = format!(
                "{} of {} tokens are output of another engine; a prompt before them is needed, and its \
                 log-probabilities are not computed again",
                request.resumed,
                request.prompt.len()
            );
            return Err(ApiError::invalid("resumed", message));
        }
        check_length(
            prompt.len(),
            request.params.max_tokens,
            self.config.max_model_len,
        )?;
        check_allowed(&request.params, self.tokenizer.eos_ids())?;
        let mut output = OutputState::new(&request.params, &self.tokenizer)?;
        if output.replay(resumed, &mut String::new()).is_some() {
            let message = format!(
                "the output has ended within the {} tokens given",
                resumed.len()
            );
            return Err(ApiError::invalid("resumed", message));
        }
        let max_len = prompt.len() + request.params.max_tokens as usize;
        // Those that will get a place in the next step do not count as waiting.
        let room = self.config.max_waiting as usize + self.scheduler.open_slots();
        if self.scheduler.waiting() >= room {
            let message = format!(
                "{} requests wait; allowed are {}",
                self.scheduler.waiting(),
                self.config.max_waiting
            );
            return Err(ApiError::new(ErrorKind::Overloaded, message));
        }
        let block_size = self.scheduler.pool().block_size();
        let mut chain = self.chain(&request);
        let mut keys = Vec::new();
        if let Some(chain) = &mut chain {
            keys.reserve(max_len / block_size);
            keys.extend(std::iter::from_fn(|| {
                chain.next(&request.prompt, block_size)
            }));
        }
        let new = NewSeq {
            prompt_len: request.prompt.len(),
            max_len,
            remote: request.kv == KvSource::Remote,
            keys,
            caches: self.config.enable_prefix_caching,
            score_bytes: score_bytes(&request),
            leader: request.leader,
        };
        if !self.scheduler.add(request.id, new) {
            let message = format!("request id {} is in use", request.id.0);
            return Err(ApiError::new(ErrorKind::Internal, message));
        }
        let draft_length = DraftLength::new(
            self.config.num_speculative_tokens as usize,
            self.config.adaptive_draft_length,
        );
        let id = request.id;
        let sequence = Sequence::new(request, output, chain, draft_length);
        self.sequences.insert(id, sequence);
        Ok(())
    }

    /// The chain of a request's block keys; none if it shares its KV with no other.
    fn chain(&self, request: &Request) -> Option<BlockChain> {
        let seed = self.config.cache_seed;
        let draft_layer = self.executor.draft_layers() > 0;
        if self.config.enable_prefix_caching {
            return Some(BlockChain::new(
                seed,
                request.cache_salt.as_deref(),
                draft_layer,
            ));
        }
        let leader = request.leader?;
        Some(BlockChain::private(seed, leader.0, draft_layer))
    }

    /// Ends a request at the next [`Self::step`], in whatever state it is: its blocks are free then, or,
    /// while they are being fetched into, with the answer to [`Event::KvFetchCancel`]. An unknown id is
    /// ignored; so is a request that has ended: blocks held for a decode instance, which may be reading
    /// them, are freed by [`Self::release_held`] alone.
    pub fn abort(&mut self, id: RequestId) {
        self.end_at_next_step(id, FinishReason::Abort);
    }

    /// Runs one step at most. Reports aborts and fetches also when there is nothing to compute.
    ///
    /// # Errors
    /// The executor cannot go on, and neither can the engine: every later step fails too.
    pub fn step(&mut self) -> Result<Vec<Event>, ExecError> {
        let mut out = StepOutput::new();
        self.step_into(&mut out)?;
        Ok(out.drain_events().collect())
    }

    /// [`Self::step`] into buffers of the caller, whose old content goes: a step in which nothing begins
    /// or ends allocates nothing.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn step_into(&mut self, out: &mut StepOutput) -> Result<(), ExecError> {
        self.step_within(Permit::ALL, out).map(|_| ())
    }

    /// [`Self::step_into`] of a rank among others, as far as they have agreed. Returns the rows that were
    /// computed; with none, and a step agreed, the rank owes the others [`Self::dummy_step`].
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn step_within(
        &mut self,
        permit: Permit,
        out: &mut StepOutput,
    ) -> Result<usize, ExecError> {
        out.clear(self.sequences.len() * piece_bytes(&self.tokenizer));
        if self.failed {
            return Err(ExecError::AfterFailure);
        }
        let mut buffers = std::mem::take(&mut self.buffers);
        let result = self.try_step(permit, &mut buffers, out);
        let rows = buffers.plan.works.iter().map(|work| work.len).sum();
        self.buffers = buffers;
        self.failed = result.is_err();
        result.map(|()| rows)
    }

    /// Takes part in the others' step without rows of its own.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn dummy_step(&mut self) -> Result<(), ExecError> {
        if self.failed {
            return Err(ExecError::AfterFailure);
        }
        let result = self.executor.dummy();
        self.steps += 1;
        self.failed = result.is_err();
        result
    }

    /// Lets experts change their places after a step of this phase, as all ranks do.
    pub(crate) fn rearrange(&mut self, phase: Phase) -> Result<(), ExecError> {
        let result = self.executor.rearrange(phase);
        self.failed |= result.is_err();
        result
    }

    /// What the next step could do, for the ranks to agree on it.
    pub fn hint(&self) -> Hint {
        let hint = self.scheduler.hint();
        Hint {
            local: hint.local || !self.ending.is_empty(),
            ..hint
        }
    }

    /// Limits.
    pub(crate) fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Most drafts of a sequence in a step; none without a draft layer.
    pub(crate) fn drafts(&self) -> Option<u32> {
        (self.executor.draft_layers() > 0).then_some(self.config.num_speculative_tokens)
    }

    /// Would [`Self::step`] do something now? Not while all requests wait for KV, or for blocks that are
    /// held or being fetched into.
    pub fn has_work(&self) -> bool {
        !self.ending.is_empty() || self.scheduler.can_step()
    }

    /// Takes the answer to a [`Event::KvFetch`] or [`Event::KvFetchCancel`]. The caller no longer touches
    /// the blocks. An answer that nobody waits for is ignored.
    pub fn kv_loaded(&mut self, id: RequestId, outcome: KvOutcome) {
        let loaded = outcome == KvOutcome::Loaded;
        if self.scheduler.fetched(id, loaded) != FetchEnd::Running {
            return;
        }
        match outcome {
            KvOutcome::Loaded => {
                if let Some(sequence) = self.sequences.get_mut(&id) {
                    self.prompt_tokens.remote += sequence.count_fetched();
                }
            }
            KvOutcome::Failed(error) => self.end_at_next_step(id, FinishReason::Error(error)),
            KvOutcome::Recompute => {}
        }
    }

    /// Frees the blocks of a request that ended with [`crate::Finish::held`]; false if there are none (any
    /// more).
    pub fn release_held(&mut self, id: RequestId) -> bool {
        self.scheduler.release_held(id)
    }

    /// Counters and gauges.
    pub fn stats(&self) -> EngineStats {
        let cache = self.scheduler.cache_stats();
        EngineStats {
            load: self.scheduler.load(),
            steps: self.steps,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            preemptions: self.scheduler.preemptions(),
            cache_queries: cache.queries,
            cache_hits: cache.hits,
            speculation: self.speculation,
        }
    }

    /// The KV memory.
    pub fn arena(&self) -> &Arc<BlockArena> {
        self.executor.arena()
    }

    /// Shape of the KV.
    pub fn geometry(&self) -> KvGeometry {
        self.executor.geometry()
    }

    /// The executor's progress counter, to watch a step from another thread.
    pub fn progress(&self) -> Option<Arc<AtomicU64>> {
        self.executor.progress()
    }

    /// The tokenizer that turns output into text.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// No request is inside and no fetch is being cancelled; held blocks may remain.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Checks that every block is accounted for and every request is in one place. For tests.
    ///
    /// # Errors
    /// What does not add up.
    pub fn audit(&self) -> Result<(), String> {
        self.scheduler.audit()?;
        match self.sequences.keys().find(|&&id| !self.scheduler.knows(id)) {
            Some(id) => Err(format!("{id:?} is unknown to the scheduler")),
            None => Ok(()),
        }
    }

    fn end_at_next_step(&mut self, id: RequestId, reason: FinishReason) {
        if let Some(sequence) = self.sequences.get_mut(&id)
            && !std::mem::replace(&mut sequence.ending, true)
        {
            self.ending.push((id, reason));
        }
    }
}
