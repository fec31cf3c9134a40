//! From a row of logits to the next token, in vLLM's order: log-probabilities are those of the raw
//! logits; then masks, bad words, bias and penalties; greedy stops there; then temperature, min_p, top_k, top_p and
//! the draw. All of it depends on the row and on the request alone.

mod math;
mod philox;
mod validate;

pub use philox::uniform;
pub(crate) use validate::check_allowed;
pub use validate::{check_length, check_prompt};

use crate::{Logprob, OutputToken, SamplingParams};
use std::collections::HashMap;
use twinfer_protocol::TokenId;

/// Below this temperature the best token is taken.
const GREEDY_BELOW: f32 = 1e-5;
/// Smaller temperatures are raised to this.
const MIN_TEMPERATURE: f32 = 0.01;
/// Best tokens that top_p looks at first; eight times as many whenever they do not suffice.
const FIRST_SORTED: usize = 64;

/// Buffers for one row, reused from row to row.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Logits after masks, bias and penalties.
    values: Vec<f32>,
    /// Tokens that may be drawn, ascending; `values` are theirs from then on.
    kept: Vec<TokenId>,
    /// Their weights: probabilities up to a common factor.
    weights: Vec<f64>,
    /// Numbers that sort as wanted.
    keys: Vec<u64>,
    /// Best values of a row, with their tokens.
    best: Vec<(f32, TokenId)>,
}

/// What penalties and `bad_words` of one request have to know about its tokens. Empty if it has none.
#[derive(Clone, Debug, Default)]
pub struct TokenCounts {
    active: bool,
    /// Occurrences in the output, of every token of prompt or output.
    counts: HashMap<TokenId, u32>,
    /// The last tokens of the output, as many as stand before the last token of the longest bad word.
    recent: Vec<TokenId>,
    /// Most of them.
    keep: usize,
}

/// Where a row stands in its request.
#[derive(Clone, Copy, Debug)]
pub struct RowContext<'a> {
    /// The request's parameters.
    pub params: &'a SamplingParams,
    /// Its tokens so far.
    pub counts: &'a TokenCounts,
    /// End-of-sequence ids of the model; may not be drawn before `min_tokens`.
    pub eos: &'a [TokenId],
    /// Output tokens so far.
    pub output_len: u32,
    /// Absolute position of the token to be drawn.
    pub position: u64,
}

/// Why no token can be drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// The model computed nonsense.
    #[error("the model's logits contain NaN or no finite maximum")]
    NotFinite,
    /// Masks and biases leave no token.
    #[error("allowed_token_ids, bad_words and min_tokens together leave no token to draw")]
    NothingAllowed,
}

impl TokenCounts {
    /// Counts for a request whose output is empty.
    pub fn new(params: &SamplingParams, prompt: &[TokenId]) -> Self {
        let active = params.repetition_penalty != 1.0
            || params.frequency_penalty != 0.0
            || params.presence_penalty != 0.0;
        let seen = if active { prompt } else { &[] };
        let longest = params.bad_words.iter().map(Vec::len).max().unwrap_or(0);
        let keep = longest.saturating_sub(1);
        Self {
            active,
            counts: seen.iter().map(|&token| (token, 0)).collect(),
            recent: Vec::with_capacity(keep),
            keep,
        }
    }

    /// One more token of output.
    pub fn push(&mut self, token: TokenId) {
        if self.active {
            *self.counts.entry(token).or_insert(0) += 1;
        }
        if self.keep > 0 {
            if self.recent.len() == self.keep {
                self.recent.remove(0);
            }
            self.recent.push(token);
        }
    }
}

impl Sampler {
    /// Chooses the next token from a row of logits.
    ///
    /// # Errors
    /// [`SampleError`]; the request cannot go on.
    pub fn sample(
        &mut self,
        row: &[f32],
        context: &RowContext<'_>,
    ) -> Result<OutputToken, SampleError> {
        let mut top = Vec::new();
        let (id, own) = self.choose(row, context, &mut top)?;
        Ok(OutputToken {
            id,
            logprobs: own.map(|own| (own, top)),
        })
    }

    /// [`Self::sample`] that returns the token with its log-probability, if that was asked for, and adds
    /// the best tokens to `top`.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub fn choose(
        &mut self,
        row: &[f32],
        context: &RowContext<'_>,
        top: &mut Vec<Logprob>,
    ) -> Result<(TokenId, Option<Logprob>), SampleError> {
        let max = finite_max(row).ok_or(SampleError::NotFinite)?;
        let params = context.params;
        let id = if is_greedy(params) && !changes_logits(context) {
            first_at(row, max)
        } else {
            self.process(row, context);
            let max = finite_max(&self.values).ok_or(SampleError::NothingAllowed)?;
            if is_greedy(params) {
                first_at(&self.values, max)
            } else {
                self.distribution(params, max);
                let number = uniform(params.seed, params.choice, context.position);
                draw(&self.kept, &self.weights, number).ok_or(SampleError::NothingAllowed)?
            }
        };
        let own = params
            .logprobs
            .map(|k| raw_logprobs(row, max, id, k as usize, &mut self.best, top));
        Ok((id, own))
    }

    /// Log-probability of a token that was not drawn: one of the prompt. Adds the `k` best to `top`.
    ///
    /// # Errors
    /// `NotFinite`.
    pub fn score(
        &mut self,
        row: &[f32],
        token: TokenId,
        k: u32,
        top: &mut Vec<Logprob>,
    ) -> Result<Logprob, SampleError> {
        let max = finite_max(row).ok_or(SampleError::NotFinite)?;
        let best = &mut self.best;
        Ok(raw_logprobs(row, max, token, k as usize, best, top))
    }

    /// Fills `values`: masks, bad words, bias, penalties.
    fn process(&mut self, row: &[f32], context: &RowContext<'_>) {
        let params = context.params;
        let values = &mut self.values;
        values.clear();
        match &params.allowed_token_ids {
            None => values.extend_from_slice(row),
            Some(allowed) => {
                values.resize(row.len(), f32::NEG_INFINITY);
                for &id in allowed {
                    if let (Some(to), Some(&from)) =
                        (values.get_mut(id as usize), row.get(id as usize))
                    {
                        *to = from;
                    }
                }
            }
        }
        for word in &params.bad_words {
            // The prompt is no part of a word.
            if let Some((&last, before)) = word.split_last()
                && context.counts.recent.ends_with(before)
            {
                set(values, last, |_| f32::NEG_INFINITY);
            }
        }
        if context.output_len < params.min_tokens {
            for &id in context.eos.iter().chain(&params.stop_token_ids) {
                set(values, id, |_| f32::NEG_INFINITY);
            }
        }
        for &(id, bias) in &params.logit_bias {
            set(values, id, |value| value + bias);
        }
        for (&id, &count) in &context.counts.counts {
            set(values, id, |value| {
                let r = params.repetition_penalty;
                // A small divisor must not make the best of many infinite.
                let value = if value > 0.0 {
                    (value / r).min(f32::MAX)
                } else {
                    value * r
                };
                let present = if count > 0 {
                    params.presence_penalty
                } else {
                    0.0
                };
                value - params.frequency_penalty * count as f32 - present
            });
        }
    }

    /// Fills `kept` and `weights` from `values`, whose largest is `max`.
    fn distribution(&mut self, params: &SamplingParams, max: f32) {
        let temperature = f64::from(params.temperature.max(MIN_TEMPERATURE));
        let k = params.top_k as usize;
        self.kept.clear();
        if 0 < k && k < self.values.len() {
            self.keep_top_k(k);
        } else {
            self.kept.extend((0..).take(self.values.len()));
        }
        math::exp_all(&self.values, max, temperature, &mut self.weights);
        if params.min_p > 0.0 {
            self.cut_min_p(f64::from(params.min_p));
        }
        if params.top_p < 1.0 {
            self.cut_top_p(f64::from(params.top_p));
        }
    }

    /// Keeps the values not below the k-th largest: ties with it stay. `values` are those of `kept`
    /// afterwards.
    fn keep_top_k(&mut self, k: usize) {
        self.keys.clear();
        self.keys.extend(
            self.values
                .iter()
                .map(|&value| u64::from(descending(value))),
        );
        let last = *self.keys.select_nth_unstable(k - 1).1;
        let ids = self.values.iter().zip(0..);
        let keep = ids.filter(|&(&value, _)| u64::from(descending(value)) <= last);
        self.kept.extend(keep.map(|(_, id)| id));
        for (to, &id) in self.kept.iter().enumerate() {
            self.values[to] = self.values[id as usize];
        }
        self.values.truncate(self.kept.len());
    }

    /// Keeps the weights not below `min_p`: the best token has weight 1.
    fn cut_min_p(&mut self, min_p: f64) {
        let mut to = 0;
        for from in 0..self.kept.len() {
            if self.weights[from] >= min_p {
                self.move_kept(from, to);
                to += 1;
            }
        }
        self.truncate_kept(to);
    }

    fn move_kept(&mut self, from: usize, to: usize) {
        self.kept[to] = self.kept[from];
        self.values[to] = self.values[from];
        self.weights[to] = self.weights[from];
    }

    fn truncate_kept(&mut self, len: usize) {
        self.kept.truncate(len);
        self.values.truncate(len);
        self.weights.truncate(len);
    }

    /// Keeps the smallest set of best tokens whose mass reaches `p`; of equal ones the lower ids.
    fn cut_top_p(&mut self, p: f64) {
        let wanted = p * math::sum(&self.weights);
        // Best first; the low half is the place in `kept`, which is in order of id.
        let place = |key: u64| (key & 0xFFFF_FFFF) as usize;
        self.keys.clear();
        let keys = self.values.iter().zip(0u64..);
        self.keys
            .extend(keys.map(|(&value, at)| u64::from(descending(value)) << 32 | at));
        let mut sorted = 0;
        let mut above = 0.0;
        let cut = loop {
            let end = (sorted * 8).max(FIRST_SORTED).min(self.keys.len());
            let next = &mut self.keys[sorted..];
            if end - sorted < next.len() {
                next.select_nth_unstable(end - sorted);
            }
            next[..end - sorted].sort_unstable();
            let cut = self.keys[sorted..end].iter().position(|&key| {
                let out = above >= wanted;
                above += self.weights[place(key)];
                out
            });
            match cut {
                Some(cut) => break (sorted + cut).max(1),
                None if end == self.keys.len() => break end,
                None => sorted = end,
            }
        };
        self.keys.truncate(cut);
        let mut places = std::mem::take(&mut self.keys);
        places.iter_mut().for_each(|key| *key = place(*key) as u64);
        places.sort_unstable();
        for (to, &from) in places.iter().enumerate() {
            self.move_kept(from as usize, to);
        }
        self.truncate_kept(cut);
        self.keys = places;
    }
}

/// A number that is the smaller the larger the value is; equal for 0 and -0.
fn descending(value: f32) -> u32 {
    let bits = (value + 0.0).to_bits();
    if bits >> 31 == 0 {
        !(bits | 1 << 31)
    } else {
        bits
    }
}

/// The token at which the running sum of weights passes `number` times their sum.
fn draw(kept: &[TokenId], weights: &[f64], number: f64) -> Option<TokenId> {
    let target = number * math::sum(weights);
    let mut sum = 0.0;
    let passed = weights.iter().position(|weight| {
        sum += weight;
        sum > target
    });
    // The product may round up to the sum itself.
    let index = passed.or_else(|| weights.iter().rposition(|&weight| weight > 0.0))?;
    kept.get(index).copied()
}

/// Log-probabilities of the raw logits: returns that of `chosen` and adds those of the `k` best to `top`,
/// ties by lower id.
fn raw_logprobs(
    row: &[f32],
    max: f32,
    chosen: TokenId,
    k: usize,
    best: &mut Vec<(f32, TokenId)>,
    top: &mut Vec<Logprob>,
) -> Logprob {
    let wide_max = f64::from(max);
    let norm = math::ln(math::exp_sum(row, max));
    let logprob = |value: f32| ((f64::from(value) - wide_max) - norm) as f32;

    best.clear();
    for (&value, id) in row.iter().zip(0..) {
        if best.len() == k && best.last().is_none_or(|&(worst, _)| value <= worst) {
            continue;
        }
        let at = best.partition_point(|&(other, _)| other >= value);
        best.insert(at, (value, id));
        best.truncate(k);
    }
    let mut rank = 0;
    let mut last = f32::INFINITY;
    for (&(value, token), place) in best.iter().zip(1..) {
        if value < last {
            rank = place;
            last = value;
        }
        top.push(Logprob {
            token,
            logprob: logprob(value),
            rank,
        });
    }
    let own = row
        .get(chosen as usize)
        .copied()
        .unwrap_or(f32::NEG_INFINITY);
    let larger = row.iter().filter(|&&value| value > own).count();
    Logprob {
        token: chosen,
        logprob: logprob(own),
        rank: u32::try_from(larger + 1).unwrap_or(u32::MAX),
    }
}

fn is_greedy(params: &SamplingParams) -> bool {
    params.temperature < GREEDY_BELOW
}

fn changes_logits(context: &RowContext<'_>) -> bool {
    context.params.allowed_token_ids.is_some()
        || context.output_len < context.params.min_tokens
        || !context.params.logit_bias.is_empty()
        || !context.params.bad_words.is_empty()
        || context.counts.active
}

/// The largest value; none if it is infinite or a value is NaN.
fn finite_max(row: &[f32]) -> Option<f32> {
    // Lanes, because a single running maximum is a chain of dependent steps.
    const LANES: usize = 16;
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut nan = [false; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for ((max, nan), &value) in max.iter_mut().zip(&mut nan).zip(chunk) {
            *max = if value > *max { value } else { *max };
            *nan |= value.is_nan();
        }
    }
    for ((max, nan), &value) in max.iter_mut().zip(&mut nan).zip(rest) {
        *max = if value > *max { value } else { *max };
        *nan |= value.is_nan();
    }
    let best = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
    (best.is_finite() && !nan.contains(&true)).then_some(best)
}

/// Lowest id with this value.
fn first_at(row: &[f32], value: f32) -> TokenId {
    let index = row.iter().position(|&x| x == value).unwrap_or(0);
    u32::try_from(index).unwrap_or(u32::MAX)
}

fn set(values: &mut [f32], id: TokenId, change: impl FnOnce(f32) -> f32) {
    if let Some(value) = values.get_mut(id as usize) {
        *value = change(*value);
    }
}

#[cfg(test)]
mod tests;
