//! The engine of one rank: requests in, steps, events out. One thread drives it; nothing here waits.

use crate::blocks::BlockPool;
use crate::output::OutputState;
use crate::sampler::{
    RowContext, SampleError, Sampler, SamplingLimits, TokenCounts, check_allowed, check_length,
    check_prompt,
};
use crate::scheduler::{Aborted, FetchEnd, Plan, Scheduler, StepLimits, Work};
use crate::{
    EngineConfig, EngineStats, Event, ExecError, Executor, Finish, FinishReason, KvGeometry,
    KvOutcome, KvSource, OutputToken, PromptSources, PromptTokenTotals, Request, RequestId,
    SeqWork,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use twinfer_protocol::{ApiError, ErrorKind, TokenId};
use twinfer_sys::BlockArena;
use twinfer_text::Tokenizer;

/// Room for output tokens that a sequence gets at once; more is added as it grows.
const FIRST_OUTPUT_ROOM: usize = 256;

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
    logits: Vec<f32>,
    /// A step failed: sequences count tokens as computed that are not.
    failed: bool,
    steps: u64,
    prompt_tokens: PromptTokenTotals,
    output_tokens: u64,
}

struct Sequence {
    request: Request,
    /// Prompt and output.
    tokens: Vec<TokenId>,
    counts: TokenCounts,
    output: OutputState,
    sources: PromptSources,
    ending: bool,
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
        ] {
            if value == 0 {
                return refuse(field, 0, "numbers from 1".to_owned());
            }
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
            logits: Vec::new(),
            failed: false,
            steps: 0,
            prompt_tokens: PromptTokenTotals::default(),
            output_tokens: 0,
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

    /// Takes a request, or refuses it with nothing changed.
    ///
    /// # Errors
    /// `InvalidRequest` for a value out of range, `ContextLengthExceeded` when prompt and `max_tokens`
    /// together exceed [`Self::max_len`] (so also what can never fit the blocks), `Overloaded` when too
    /// many requests wait, `Internal` when the id is in use.
    pub fn submit(&mut self, request: Request) -> Result<(), ApiError> {
        let vocab = self.executor.vocab_size();
        check_prompt(&request.prompt, vocab)?;
        request.params.validate(vocab, &SamplingLimits::default())?;
        check_length(
            request.prompt.len(),
            request.params.max_tokens,
            self.config.max_model_len,
        )?;
        check_allowed(&request.params, self.tokenizer.eos_ids())?;
        let output = OutputState::new(&request.params, &self.tokenizer)?;
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
        let remote = request.kv == KvSource::Remote;
        if !self.scheduler.add(request.id, request.prompt.len(), remote) {
            let message = format!("request id {} is in use", request.id.0);
            return Err(ApiError::new(ErrorKind::Internal, message));
        }
        let room = (request.params.max_tokens as usize).min(FIRST_OUTPUT_ROOM);
        let mut tokens = Vec::with_capacity(request.prompt.len() + room);
        tokens.extend_from_slice(&request.prompt);
        let counts = TokenCounts::new(&request.params, &request.prompt);
        let sources = PromptSources::default();
        let id = request.id;
        self.sequences.insert(
            id,
            Sequence {
                request,
                tokens,
                counts,
                output,
                sources,
                ending: false,
            },
        );
        Ok(())
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
        if self.failed {
            return Err(ExecError::AfterFailure);
        }
        let result = self.try_step();
        self.failed = result.is_err();
        result
    }

    fn try_step(&mut self) -> Result<Vec<Event>, ExecError> {
        let mut events = Vec::new();
        for (id, reason) in std::mem::take(&mut self.ending) {
            self.end_early(id, reason, &mut events);
        }
        let plan = self.scheduler.schedule();
        for fetch in &plan.fetches {
            let tokens = u32::try_from(fetch.tokens).unwrap_or(u32::MAX);
            events.push(Event::KvFetch {
                id: fetch.id,
                blocks: fetch.blocks.clone(),
                tokens,
            });
        }
        if !plan.works.is_empty() {
            self.compute(&plan)?;
            self.take_results(&plan, &mut events)?;
        }
        Ok(events)
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
                    let remote = sequence.request.prompt.len() as u64 - 1;
                    sequence.sources.remote = u32::try_from(remote).unwrap_or(u32::MAX);
                    self.prompt_tokens.remote += remote;
                }
            }
            KvOutcome::Failed(error) => self.end_at_next_step(id, FinishReason::Error(error)),
            KvOutcome::Recompute => {}
        }
    }

    /// Frees the blocks of a request that ended with [`Finish::held`]; false if there are none (any
    /// more).
    pub fn release_held(&mut self, id: RequestId) -> bool {
        self.scheduler.release_held(id)
    }

    /// Counters and gauges.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            load: self.scheduler.load(),
            steps: self.steps,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            preemptions: self.scheduler.preemptions(),
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

    fn end_early(&mut self, id: RequestId, reason: FinishReason, events: &mut Vec<Event>) {
        let Some(mut sequence) = self.sequences.remove(&id) else {
            return;
        };
        if self.scheduler.abort(id) == Aborted::CancelFetch {
            events.push(Event::KvFetchCancel { id });
        }
        let text = sequence.output.flush();
        let finish = sequence.finish(reason, None);
        events.push(Event::Output {
            id,
            tokens: Vec::new(),
            text,
            finish: Some(finish),
        });
    }

    fn compute(&mut self, plan: &Plan) -> Result<(), ExecError> {
        let mut batch = Vec::with_capacity(plan.works.len());
        for work in &plan.works {
            let sequence = self.sequences.get(&work.id);
            let tokens = sequence.and_then(|s| s.tokens.get(work.start..work.start + work.len));
            batch.push(SeqWork {
                tokens: tokens.ok_or_else(|| out_of_step(work))?,
                start: work.start,
                blocks: self.scheduler.blocks(work.id),
                logits_from: work.last.then(|| work.len - 1),
            });
        }
        self.executor.execute(&batch, &mut self.logits)?;
        self.steps += 1;
        let rows = plan.works.iter().filter(|work| work.last).count();
        let expected = rows * self.executor.vocab_size();
        if self.logits.len() != expected {
            let got = self.logits.len();
            return Err(ExecError::OutOfRange(format!(
                "{got} logits came back, {expected} were wanted"
            )));
        }
        Ok(())
    }

    fn take_results(&mut self, plan: &Plan, events: &mut Vec<Event>) -> Result<(), ExecError> {
        let logits = std::mem::take(&mut self.logits);
        let mut rows = logits.chunks_exact(self.executor.vocab_size().max(1));
        for work in &plan.works {
            let sequence = self
                .sequences
                .get_mut(&work.id)
                .ok_or_else(|| out_of_step(work))?;
            self.prompt_tokens.computed += sequence.count_computed(work);
            if work.last {
                let row = rows.next().ok_or_else(|| out_of_step(work))?;
                let drawn = sequence.sample(&mut self.sampler, row, self.tokenizer.eos_ids());
                events.push(self.advance(work.id, drawn)?);
            }
        }
        self.logits = logits;
        Ok(())
    }

    /// Takes the outcome of a draw into the request, and ends it where that is the end.
    fn advance(
        &mut self,
        id: RequestId,
        drawn: Result<OutputToken, SampleError>,
    ) -> Result<Event, ExecError> {
        let unknown = || ExecError::OutOfRange(format!("request {} is not there", id.0));
        let sequence = self.sequences.get_mut(&id).ok_or_else(unknown)?;
        let (tokens, text, reason) = match drawn {
            Ok(token) => {
                sequence.tokens.push(token.id);
                sequence.counts.push(token.id);
                self.output_tokens += 1;
                let step = sequence.output.push(token.id);
                (vec![token], step.text, step.finish)
            }
            Err(error) => {
                let kind = match error {
                    SampleError::NotFinite => ErrorKind::Internal,
                    SampleError::NothingAllowed => ErrorKind::InvalidRequest,
                };
                let reason = FinishReason::Error(ApiError::new(kind, error.to_string()));
                (Vec::new(), sequence.output.flush(), Some(reason))
            }
        };
        let finish = match reason {
            None => {
                self.scheduler.append(id);
                None
            }
            Some(reason) => {
                let sequence = self.sequences.remove(&id).ok_or_else(unknown)?;
                let hold = sequence.request.hold_kv && !matches!(reason, FinishReason::Error(_));
                let held = self.scheduler.finish(id, hold);
                Some(sequence.finish(reason, held))
            }
        };
        Ok(Event::Output {
            id,
            tokens,
            text,
            finish,
        })
    }
}

impl Sequence {
    fn sample(
        &self,
        sampler: &mut Sampler,
        row: &[f32],
        eos: &[TokenId],
    ) -> Result<OutputToken, SampleError> {
        let context = RowContext {
            params: &self.request.params,
            counts: &self.counts,
            eos,
            output_len: self.output.tokens(),
            position: self.tokens.len() as u64,
        };
        sampler.sample(row, &context)
    }

    /// Notes that the step computed prompt tokens; returns how many of them for the first time, since
    /// what is computed again after a preemption has been counted.
    fn count_computed(&mut self, work: &Work) -> u64 {
        let known = (self.sources.computed + self.sources.remote + self.sources.cached) as usize;
        let end = (work.start + work.len).min(self.request.prompt.len());
        let new = end.saturating_sub(known.max(work.start));
        self.sources.computed += u32::try_from(new).unwrap_or(u32::MAX);
        new as u64
    }

    fn finish(&self, reason: FinishReason, held: Option<crate::HeldKv>) -> Finish {
        Finish {
            reason,
            sources: self.sources,
            output_tokens: self.output.tokens(),
            held,
        }
    }
}

fn out_of_step(work: &Work) -> ExecError {
    ExecError::OutOfRange(format!(
        "request {} and the plan of the step do not agree",
        work.id.0
    ))
}
