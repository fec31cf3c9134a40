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
    tokens: u32,
    detokenizer: IncrementalDetokenizer,
    stops: StopMatcher,
}

/// What one token led to.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputStep {
    /// Text that became certain.
    pub text: String,
    /// Set when the request has ended; `text` is its last then.
    pub finish: Option<FinishReason>,
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
            tokens: 0,
            detokenizer: IncrementalDetokenizer::new(
                Arc::clone(tokenizer),
                params.skip_special_tokens,
            ),
            stops: StopMatcher::new(&params.stop, params.include_stop_str_in_output)?,
        })
    }

    /// Output tokens so far.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Takes the next token. The order of ends is: end-of-sequence, stop token (neither is shown as
    /// text), length, stop text; but a stop text completed by the last permitted token is reported
    /// rather than the length. Stop texts are looked for in what follows the first `min_tokens - 1`
    /// tokens.
    pub fn push(&mut self, token: TokenId) -> OutputStep {
        self.tokens += 1;
        // The sampler draws neither before `min_tokens`.
        if self.eos.contains(&token) {
            return self.end(String::new(), FinishReason::Eos);
        }
        if self.stop_token_ids.contains(&token) {
            return self.end(String::new(), FinishReason::StopToken(token));
        }
        let piece = match self.detokenizer.push(token) {
            Ok(piece) => piece,
            Err(error) => {
                let error = ApiError::new(ErrorKind::Internal, error.to_string());
                return self.end(String::new(), FinishReason::Error(error));
            }
        };
        let text = self.look(&piece);
        if self.stops.matched().is_some() || self.tokens >= self.max_tokens {
            return self.end(text, FinishReason::Length);
        }
        OutputStep { text, finish: None }
    }

    /// Ends the output for a reason of the caller: gives out what was held back.
    pub fn flush(&mut self) -> String {
        let piece = self.detokenizer.finish();
        let mut text = self.look(&piece);
        text.push_str(&self.stops.finish());
        text
    }

    /// Text of the next piece that may be shown.
    fn look(&mut self, piece: &str) -> String {
        if self.tokens < self.min_tokens {
            self.stops.pass(piece)
        } else {
            self.stops.push(piece).text
        }
    }

    /// Ends with `reason`, unless a stop text was found, the flushed rest included.
    fn end(&mut self, mut text: String, reason: FinishReason) -> OutputStep {
        text.push_str(&self.flush());
        let reason = match (self.stops.matched(), reason) {
            (Some(stop), FinishReason::Length) => FinishReason::StopText(stop.to_owned()),
            (_, reason) => reason,
        };
        OutputStep {
            text,
            finish: Some(reason),
        }
    }
}
