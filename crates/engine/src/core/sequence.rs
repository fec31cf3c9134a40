//! One request inside the engine.

use crate::output::OutputState;
use crate::prefix::{BlockChain, BlockKey};
use crate::sampler::{RowContext, SampleError, Sampler, TokenCounts};
use crate::scheduler::Work;
use crate::speculation::DraftLength;
use crate::{
    Finish, FinishReason, HeldKv, Logprob, MAX_DRAFTS, PromptSources, Request, TokenLogprobs,
};
use twinfer_protocol::TokenId;

pub(super) struct Sequence {
    pub(super) request: Request,
    /// Prompt and output, then drafts.
    tokens: Vec<TokenId>,
    /// Those that are no drafts.
    known: usize,
    chain: Option<BlockChain>,
    counts: TokenCounts,
    pub(super) output: OutputState,
    pub(super) sources: PromptSources,
    pub(super) draft_length: DraftLength,
    /// Log-probabilities of the prompt so far: of tokens `1..`.
    prompt_logprobs: Vec<TokenLogprobs>,
    /// They are out.
    prompt_logprobs_given: bool,
    pub(super) ending: bool,
}

impl Sequence {
    pub(super) fn new(
        request: Request,
        output: OutputState,
        chain: Option<BlockChain>,
        draft_length: DraftLength,
    ) -> Self {
        let (prompt, resumed) = request.split();
        let most = prompt.len() + request.params.max_tokens as usize + MAX_DRAFTS;
        let mut tokens = Vec::with_capacity(most.max(request.prompt.len() + MAX_DRAFTS));
        tokens.extend_from_slice(&request.prompt);
        let mut counts = TokenCounts::new(&request.params, prompt);
        for &token in resumed {
            counts.push(token);
        }
        Self {
            known: request.prompt.len(),
            tokens,
            chain,
            counts,
            output,
            sources: PromptSources::default(),
            draft_length,
            prompt_logprobs: Vec::new(),
            prompt_logprobs_given: false,
            ending: false,
            request,
        }
    }

    /// Key of the next block that prompt and output fill, if there is one.
    pub(super) fn next_key(&mut self, block_size: usize) -> Option<BlockKey> {
        let known = &self.tokens[..self.known];
        self.chain.as_mut()?.next(known, block_size)
    }

    /// Prompt and output.
    pub(super) fn known(&self) -> &[TokenId] {
        &self.tokens[..self.known]
    }

    /// Output tokens that may follow.
    pub(super) fn left(&self) -> usize {
        (self
            .request
            .params
            .max_tokens
            .saturating_sub(self.output.tokens())) as usize
    }

    /// Keeps the first `n` drafts.
    pub(super) fn cut_drafts(&mut self, n: usize) {
        self.tokens.truncate(self.known + n);
    }

    /// Its KV is gone, and with it what was scored of a prompt that was not computed to its end.
    pub(super) fn preempted(&mut self) {
        self.cut_drafts(0);
        self.prompt_logprobs = Vec::new();
    }

    /// Proposes tokens; earlier drafts are gone.
    pub(super) fn propose(&mut self, drafts: &[TokenId]) {
        self.cut_drafts(0);
        self.tokens.extend_from_slice(drafts);
    }

    /// The tokens of a work, drafts included.
    pub(super) fn tokens_of(&self, work: &Work) -> Option<&[TokenId]> {
        self.tokens.get(work.start..work.start + work.len)
    }

    /// First row of a work whose logits are needed: the first prompt row without log-probabilities, if
    /// they are wanted, or that of the last known token, if another is to be drawn.
    pub(super) fn logits_from(&self, work: &Work) -> Option<usize> {
        let draw = work.last && self.request.params.max_tokens > 0;
        let draw = draw.then(|| work.len - work.drafts - 1);
        let row = self.prompt_logprobs.len();
        let wanted = self.request.params.prompt_logprobs.is_some()
            && !self.prompt_logprobs_given
            && row + 1 < self.request.prompt.len()
            && row < work.start + work.len;
        let score = wanted.then(|| row.saturating_sub(work.start));
        match (score, draw) {
            (Some(score), Some(draw)) => Some(score.min(draw)),
            (score, draw) => score.or(draw),
        }
    }

    /// Takes the rows of `work`, from row `from` on, for the log-probabilities of the prompt.
    pub(super) fn score<'a>(
        &mut self,
        sampler: &mut Sampler,
        work: &Work,
        from: usize,
        rows: impl Iterator<Item = &'a [f32]>,
    ) -> Result<(), SampleError> {
        let Some(k) = self
            .request
            .params
            .prompt_logprobs
            .filter(|_| !self.prompt_logprobs_given)
        else {
            return Ok(());
        };
        for (position, row) in (work.start + from..).zip(rows) {
            let Some(&token) = self.request.prompt.get(position + 1) else {
                break;
            };
            if position == self.prompt_logprobs.len() {
                if position == 0 {
                    let rest = self.request.prompt.len() - 1;
                    self.prompt_logprobs.reserve_exact(rest);
                }
                let mut top = Vec::with_capacity(k as usize);
                let own = sampler.score(row, token, k, &mut top)?;
                self.prompt_logprobs.push((own, top));
            }
        }
        Ok(())
    }

    /// Log-probabilities of the prompt, once.
    pub(super) fn take_prompt_logprobs(&mut self) -> Vec<TokenLogprobs> {
        self.prompt_logprobs_given = true;
        std::mem::take(&mut self.prompt_logprobs)
    }

    /// Draws the next token from a row.
    pub(super) fn draw(
        &self,
        sampler: &mut Sampler,
        row: &[f32],
        eos: &[TokenId],
        top: &mut Vec<Logprob>,
    ) -> Result<(TokenId, Option<Logprob>), SampleError> {
        let context = RowContext {
            params: &self.request.params,
            counts: &self.counts,
            eos,
            output_len: self.output.tokens(),
            position: self.known as u64,
        };
        sampler.choose(row, &context, top)
    }

    /// The token is output; true if it was the next draft. Adds the text that became certain to `text`.
    pub(super) fn push(
        &mut self,
        token: TokenId,
        text: &mut String,
    ) -> (bool, Option<FinishReason>) {
        let drafted = self.tokens.get(self.known) == Some(&token);
        if !drafted {
            self.cut_drafts(0);
            self.tokens.push(token);
        }
        self.known += 1;
        self.counts.push(token);
        (drafted, self.output.push(token, text))
    }

    /// Notes that the step computed prompt tokens; returns how many of them for the first time, since
    /// what is computed again after a preemption has been counted.
    pub(super) fn count_computed(&mut self, work: &Work) -> u64 {
        let end = (work.start + work.len).min(self.request.prompt.len());
        let new = end.saturating_sub(self.counted().max(work.start));
        self.sources.computed += u32::try_from(new).unwrap_or(u32::MAX);
        new as u64
    }

    /// Notes that the first `tokens` positions came from the cache; returns how many prompt tokens of
    /// them for the first time.
    pub(super) fn count_cached(&mut self, tokens: usize) -> u64 {
        let end = tokens.min(self.request.prompt.len());
        let new = end.saturating_sub(self.counted());
        self.sources.cached += u32::try_from(new).unwrap_or(u32::MAX);
        new as u64
    }

    /// Notes that all positions but the last that were not in the cache have come from elsewhere; returns
    /// how many.
    pub(super) fn count_fetched(&mut self) -> u64 {
        let new = (self.request.prompt.len() - 1).saturating_sub(self.counted());
        self.sources.remote += u32::try_from(new).unwrap_or(u32::MAX);
        new as u64
    }

    fn counted(&self) -> usize {
        (self.sources.computed + self.sources.remote + self.sources.cached) as usize
    }

    pub(super) fn finish(&self, reason: FinishReason, held: Option<HeldKv>) -> Finish {
        Finish {
            reason,
            sources: self.sources,
            output_tokens: self.output.tokens(),
            held,
        }
    }
}
