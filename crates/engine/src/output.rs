//! From tokens to text and to an end: incremental detokenisation, stop texts, stop tokens, length.

use crate::{FinishReason, SamplingParams};
use std::sync::Arc;
use twinfer_protocol::{ApiError, ErrorKind, TokenId};
use twinfer_text::{IncrementalDetokenizer, StopMatcher, TextError, Tokenizer};

/// Text and end of one request.
#[derive(Debug)]
pub struct OutputState {
    eos: Vec<TokenId>,
    stop_token_ids: Vec<TokenId>,
    max_tokens: u32,
    min_tokens: u32,
    /// A stop token, too, is shown as text.
    shows_stop: bool,
    tokens: u32,
    detokenizer: IncrementalDetokenizer,
    stops: StopMatcher,
    /// Text of the last token.
    piece: String,
}

/// Room for the text of a token, so that nothing is allocated while tokens come: with what may be held back before it,
/// which is shown as a replacement character of three bytes where it is no text.
pub(crate) fn piece_bytes(tokenizer: &Tokenizer) -> usize {
    tokenizer.longest_token() + 128
}

impl OutputState {
    /// At the start of an output. Validated parameters make no error.
    ///
    /// # Errors
    /// A stop string is empty.
    pub fn new(params: &SamplingParams, tokenizer: &Arc<Tokenizer>) -> Result<Self, TextError> {
        let eos = if params.ignore_eos {
            &[]
        } else {
            tokenizer.eos_ids()
        };
        Ok(Self {
            eos: eos.to_vec(),
            stop_token_ids: params.stop_token_ids.clone(),
            max_tokens: params.max_tokens,
            min_tokens: params.min_tokens,
            shows_stop: params.include_stop_str_in_output,
            tokens: 0,
            detokenizer: IncrementalDetokenizer::new(
                Arc::clone(tokenizer),
                params.skip_special_tokens,
            ),
            stops: StopMatcher::new(&params.stop, params.include_stop_str_in_output)?,
            piece: String::with_capacity(piece_bytes(tokenizer)),
        })
    }

    /// Output tokens so far.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Takes the next token, adds the text that became certain to `out`, and returns the end if this is
    /// it. The order of ends is: end-of-sequence, stop token (neither is shown as text unless stops are), length, stop text;
    /// but a stop text completed by the last permitted token is reported rather than the length. Stop
    /// texts are looked for in what follows the first `min_tokens - 1` tokens.
    pub fn push(&mut self, token: TokenId, out: &mut String) -> Option<FinishReason> {
        self.tokens += 1;
        // The sampler draws neither before `min_tokens`.
        let stop = if self.eos.contains(&token) {
            Some(FinishReason::Eos)
        } else if self.stop_token_ids.contains(&token) {
            Some(FinishReason::StopToken(token))
        } else {
            None
        };
        if stop.is_none() || self.shows_stop {
            self.piece.clear();
            if let Err(error) = self.detokenizer.push_into(token, &mut self.piece) {
                let error = ApiError::new(ErrorKind::Internal, error.to_string());
                return Some(self.end(FinishReason::Error(error), out));
            }
            self.look(out);
        }
        if let Some(reason) = stop {
            return Some(self.end(reason, out));
        }
        let ends = self.stops.matched().is_some() || self.tokens >= self.max_tokens;
        ends.then(|| self.end(FinishReason::Length, out))
    }

    /// Takes tokens that another engine has output, as [`Self::push`] does each.
    pub fn replay(&mut self, tokens: &[TokenId], out: &mut String) -> Option<FinishReason> {
        let ends = |&token: &TokenId| self.push(token, out);
        tokens.iter().find_map(ends)
    }

    /// Ends the output for a reason of the caller: adds what was held back to `out`.
    pub fn flush(&mut self, out: &mut String) {
        self.piece.clear();
        self.detokenizer.finish_into(&mut self.piece);
        self.look(out);
        self.stops.finish_into(out);
    }

    /// Adds what may be shown of the piece to `out`.
    fn look(&mut self, out: &mut String) {
        if self.tokens < self.min_tokens {
            self.stops.pass_into(&self.piece, out);
        } else {
            self.stops.push_into(&self.piece, out);
        }
    }

    /// Ends with `reason`, unless a stop text was found, the flushed rest included.
    fn end(&mut self, reason: FinishReason, out: &mut String) -> FinishReason {
        self.flush(out);
        match (self.stops.matched(), reason) {
            (Some(stop), FinishReason::Length) => FinishReason::StopText(stop.to_owned()),
            (_, reason) => reason,
        }
    }
}
