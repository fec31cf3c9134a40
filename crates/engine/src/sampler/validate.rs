//! What a request may ask for. Every refusal names the field, its value and what is allowed.

use crate::SamplingParams;
use std::fmt::Display;
use std::ops::RangeInclusive;
use twinfer_protocol::limits::{
    MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_BYTES, MAX_STOP_TOKEN_IDS, MAX_STOPS,
};
use twinfer_protocol::{ApiError, ErrorKind, TokenId};

/// Token sequences of one word in `bad_words`: without and with a space in front.
const WORD_FORMS: usize = 2;

impl SamplingParams {
    /// Greedy, `max_tokens` tokens, nothing else: what a request means that asks for no more.
    pub fn greedy(max_tokens: u32) -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            allowed_token_ids: None,
            seed: 0,
            choice: 0,
            max_tokens,
            min_tokens: 0,
            ignore_eos: false,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            include_stop_str_in_output: false,
            logprobs: None,
            prompt_logprobs: None,
            skip_special_tokens: true,
        }
    }

    /// Checks every range; `vocab` is the width of a logits row. NaN is in no range.
    ///
    /// # Errors
    /// `InvalidRequest` with the field as `param`.
    pub fn validate(&self, vocab: usize) -> Result<(), ApiError> {
        in_range(
            "temperature",
            self.temperature,
            0.0..=f32::MAX,
            "finite numbers from 0",
        )?;
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(refuse("top_p", self.top_p, "above 0 and at most 1"));
        }
        in_range("min_p", self.min_p, 0.0..=1.0, "0 to 1")?;
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            let allowed = "finite numbers above 0";
            return Err(refuse(
                "repetition_penalty",
                self.repetition_penalty,
                allowed,
            ));
        }
        in_range(
            "frequency_penalty",
            self.frequency_penalty,
            -2.0..=2.0,
            "-2 to 2",
        )?;
        in_range(
            "presence_penalty",
            self.presence_penalty,
            -2.0..=2.0,
            "-2 to 2",
        )?;
        if self.min_tokens > self.max_tokens {
            let allowed = format!("0 to max_tokens, which is {}", self.max_tokens);
            return Err(refuse("min_tokens", self.min_tokens, &allowed));
        }
        for (field, k) in [
            ("logprobs", self.logprobs),
            ("prompt_logprobs", self.prompt_logprobs),
        ] {
            if let Some(k) = k.filter(|&k| k > MAX_LOGPROBS) {
                let allowed = format!("0 to {MAX_LOGPROBS}");
                return Err(refuse(field, k, &allowed));
            }
        }
        self.validate_ids(vocab)?;
        self.validate_stops()
    }

    fn validate_ids(&self, vocab: usize) -> Result<(), ApiError> {
        at_most(
            "logit_bias",
            self.logit_bias.len(),
            MAX_LOGIT_BIASES,
            "entries",
        )?;
        for &(id, bias) in &self.logit_bias {
            check_id("logit_bias", id, vocab)?;
            in_range(
                &format!("logit_bias[{id}]"),
                bias,
                -100.0..=100.0,
                "-100 to 100",
            )
            .map_err(|error| error.with_param("logit_bias"))?;
        }
        at_most(
            "stop_token_ids",
            self.stop_token_ids.len(),
            MAX_STOP_TOKEN_IDS,
            "entries",
        )?;
        for &id in &self.stop_token_ids {
            check_id("stop_token_ids", id, vocab)?;
        }
        at_most(
            "bad_words",
            self.bad_words.len(),
            MAX_BAD_WORDS * WORD_FORMS,
            "token sequences",
        )?;
        for word in &self.bad_words {
            if word.is_empty() {
                let allowed = "words of at least one token";
                return Err(refuse("bad_words", "[[]]", allowed));
            }
            for &id in word {
                check_id("bad_words", id, vocab)?;
            }
        }
        if let Some(allowed) = &self.allowed_token_ids {
            if allowed.is_empty() {
                return Err(refuse(
                    "allowed_token_ids",
                    "[]",
                    "lists of at least one token id",
                ));
            }
            at_most("allowed_token_ids", allowed.len(), vocab, "entries")?;
            for &id in allowed {
                check_id("allowed_token_ids", id, vocab)?;
            }
        }
        Ok(())
    }

    fn validate_stops(&self) -> Result<(), ApiError> {
        at_most("stop", self.stop.len(), MAX_STOPS, "strings")?;
        for (index, stop) in self.stop.iter().enumerate() {
            if stop.is_empty() || stop.len() > MAX_STOP_BYTES {
                let message = format!(
                    "stop[{index}] has {} bytes; allowed are 1 to {}",
                    stop.len(),
                    MAX_STOP_BYTES
                );
                return Err(ApiError::invalid("stop", message));
            }
        }
        Ok(())
    }
}

/// Checks that a prompt has tokens and that the model has an embedding row for each.
///
/// # Errors
/// `InvalidRequest` with `prompt` as `param`.
pub fn check_prompt(prompt: &[TokenId], vocab: usize) -> Result<(), ApiError> {
    if prompt.is_empty() {
        return Err(ApiError::invalid(
            "prompt",
            "the prompt has 0 tokens; at least 1 is needed",
        ));
    }
    prompt
        .iter()
        .try_for_each(|&id| check_id("prompt", id, vocab))
}

/// Checks that prompt and output together fit `max_len` tokens.
///
/// # Errors
/// `ContextLengthExceeded` with the numbers, blaming the prompt if it leaves no room for one token,
/// else `max_tokens`.
pub fn check_length(prompt_len: usize, max_tokens: u32, max_len: u32) -> Result<(), ApiError> {
    let room = (max_len as usize).saturating_sub(prompt_len);
    // Nothing to generate: the prompt may fill the context.
    let scored_only = max_tokens == 0 && prompt_len <= max_len as usize;
    let (param, message) = if room == 0 && !scored_only {
        let message = format!(
            "the prompt has {prompt_len} tokens; the context is {max_len} tokens, prompt and output \
             together, so a prompt may have at most {}",
            max_len.saturating_sub(1)
        );
        ("prompt", message)
    } else if max_tokens as usize > room {
        let message = format!(
            "max_tokens is {max_tokens}; the prompt has {prompt_len} tokens and the context is {max_len} \
             tokens, prompt and output together, so at most {room} are left"
        );
        ("max_tokens", message)
    } else {
        return Ok(());
    };
    Err(ApiError::new(ErrorKind::ContextLengthExceeded, message).with_param(param))
}

/// Checks that `min_tokens`, which masks the tokens that end, leaves one of `allowed_token_ids`.
pub(crate) fn check_allowed(params: &SamplingParams, eos: &[TokenId]) -> Result<(), ApiError> {
    let ends = |id: &TokenId| eos.contains(id) || params.stop_token_ids.contains(id);
    match &params.allowed_token_ids {
        Some(allowed) if params.min_tokens > 0 && allowed.iter().all(ends) => {
            Err(ApiError::invalid(
                "allowed_token_ids",
                format!(
                    "allowed_token_ids contains only tokens that end the output, and min_tokens is {}; \
                     allowed are lists with another token, or min_tokens 0",
                    params.min_tokens
                ),
            ))
        }
        _ => Ok(()),
    }
}

fn check_id(param: &str, id: TokenId, vocab: usize) -> Result<(), ApiError> {
    if (id as usize) < vocab {
        return Ok(());
    }
    let allowed = format!("0 to {}", vocab.saturating_sub(1));
    Err(ApiError::invalid(
        param,
        format!("{param} contains token id {id}; allowed are {allowed}"),
    ))
}

fn in_range(
    param: &str,
    value: f32,
    range: RangeInclusive<f32>,
    allowed: &str,
) -> Result<(), ApiError> {
    if range.contains(&value) {
        Ok(())
    } else {
        Err(refuse(param, value, allowed))
    }
}

fn at_most(param: &str, len: usize, limit: usize, what: &str) -> Result<(), ApiError> {
    if len <= limit {
        return Ok(());
    }
    Err(ApiError::invalid(
        param,
        format!("{param} has {len} {what}; allowed are at most {limit}"),
    ))
}

fn refuse(param: &str, value: impl Display, allowed: &str) -> ApiError {
    ApiError::invalid(param, format!("{param} is {value}; allowed are {allowed}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use twinfer_protocol::openai::CompletionRequest;

    const VOCAB: usize = 512;

    fn refusal(change: impl FnOnce(&mut SamplingParams)) -> ApiError {
        let mut params = SamplingParams::greedy(16);
        change(&mut params);
        params.validate(VOCAB).unwrap_err()
    }

    fn accept(change: impl FnOnce(&mut SamplingParams)) {
        let mut params = SamplingParams::greedy(16);
        change(&mut params);
        assert_eq!(params.validate(VOCAB), Ok(()));
    }

    fn assert_names(error: &ApiError, param: &str, value: &str) {
        assert_eq!(
            (error.kind.status(), error.param.as_deref()),
            (400, Some(param)),
            "{error}"
        );
        assert!(error.message.contains(param), "{error}");
        assert!(
            error.message.contains(value),
            "{error} does not name {value}"
        );
        assert!(error.message.contains("allowed are"), "{error}");
    }

    #[test]
    fn a_value_out_of_range_is_refused_with_field_value_and_range() {
        for (value, shown) in [(f32::NAN, "NaN"), (-0.5, "-0.5"), (f32::INFINITY, "inf")] {
            assert_names(&refusal(|p| p.temperature = value), "temperature", shown);
            assert_names(
                &refusal(|p| p.repetition_penalty = value),
                "repetition_penalty",
                shown,
            );
            assert_names(&refusal(|p| p.top_p = value), "top_p", shown);
            assert_names(&refusal(|p| p.min_p = value), "min_p", shown);
        }
        for (value, shown) in [(f32::NAN, "NaN"), (-2.5, "-2.5"), (2.5, "2.5")] {
            assert_names(
                &refusal(|p| p.frequency_penalty = value),
                "frequency_penalty",
                shown,
            );
            assert_names(
                &refusal(|p| p.presence_penalty = value),
                "presence_penalty",
                shown,
            );
        }
        assert_names(&refusal(|p| p.top_p = 0.0), "top_p", "0");
        assert_names(&refusal(|p| p.top_p = 1.5), "top_p", "1.5");
        assert_names(&refusal(|p| p.min_p = 1.5), "min_p", "1.5");
        assert_names(
            &refusal(|p| p.repetition_penalty = 0.0),
            "repetition_penalty",
            "0",
        );
        accept(|p| p.max_tokens = 0);
        assert_names(&refusal(|p| p.min_tokens = 17), "min_tokens", "17");
        assert_names(
            &refusal(|p| p.logprobs = Some(1_000_000)),
            "logprobs",
            "1000000",
        );
        assert_names(
            &refusal(|p| p.logit_bias = vec![(3, f32::NAN)]),
            "logit_bias",
            "NaN",
        );
        assert_names(
            &refusal(|p| p.logit_bias = vec![(3, 101.0)]),
            "logit_bias",
            "101",
        );
        accept(|p| {
            p.temperature = 5.0;
            p.repetition_penalty = 1e-6;
            p.top_p = 1e-9;
            p.min_p = 1.0;
            p.logprobs = Some(20);
            p.logit_bias = vec![(511, -100.0), (0, 100.0)];
            p.min_tokens = 16;
        });
    }

    #[test]
    fn token_ids_out_of_range_are_refused_wherever_they_stand() {
        for id in [512u32, 1 << 31, u32::MAX] {
            let shown = id.to_string();
            assert_names(
                &refusal(|p| p.logit_bias = vec![(1, 0.0), (id, 1.0)]),
                "logit_bias",
                &shown,
            );
            assert_names(
                &refusal(|p| p.stop_token_ids = vec![1, id]),
                "stop_token_ids",
                &shown,
            );
            assert_names(
                &refusal(|p| p.bad_words = vec![vec![1], vec![2, id]]),
                "bad_words",
                &shown,
            );
            let allowed = refusal(|p| p.allowed_token_ids = Some(vec![1, id]));
            assert_names(&allowed, "allowed_token_ids", &shown);
            assert_names(
                &check_prompt(&[1, id], VOCAB).unwrap_err(),
                "prompt",
                &shown,
            );
        }
        accept(|p| {
            p.logit_bias = vec![(511, 1.0)];
            p.stop_token_ids = vec![511];
            p.allowed_token_ids = Some((0..512).collect());
        });
        assert_eq!(check_prompt(&[0, 511], VOCAB), Ok(()));
        assert_eq!(
            check_prompt(&[], VOCAB).unwrap_err().param.as_deref(),
            Some("prompt")
        );
    }

    #[test]
    fn lists_without_end_are_refused() {
        assert_names(
            &refusal(|p| p.logit_bias = vec![(1, 0.0); 1_000_000]),
            "logit_bias",
            "1000000",
        );
        assert_names(
            &refusal(|p| p.stop_token_ids = vec![1; 100_000]),
            "stop_token_ids",
            "100000",
        );
        assert_names(
            &refusal(|p| p.bad_words = vec![vec![1]; 100_000]),
            "bad_words",
            "100000",
        );
        assert_names(
            &refusal(|p| p.bad_words = vec![Vec::new()]),
            "bad_words",
            "[[]]",
        );
        let allowed = refusal(|p| p.allowed_token_ids = Some(vec![1; 100_000]));
        assert_names(&allowed, "allowed_token_ids", "100000");
        assert_names(
            &refusal(|p| p.allowed_token_ids = Some(Vec::new())),
            "allowed_token_ids",
            "[]",
        );
        assert_names(
            &refusal(|p| p.stop = vec!["x".to_owned(); 100_000]),
            "stop",
            "100000",
        );
        assert_names(
            &refusal(|p| p.stop = vec!["x".repeat(1 << 20)]),
            "stop",
            "1048576",
        );
        assert_names(
            &refusal(|p| p.stop = vec!["x".to_owned(), String::new()]),
            "stop",
            "stop[1]",
        );
    }

    /// HTTP let 1024 stop tokens pass and the engine refused the request; 64 stop texts were the other way round.
    #[test]
    fn what_http_reads_the_engine_takes_up_to_the_same_sizes() {
        let read = |more: usize| {
            let list = |n: usize, what: &dyn Fn(usize) -> String| {
                (0..n + more).map(what).collect::<Vec<_>>().join(",")
            };
            [
                (
                    "stop",
                    format!("[{}]", list(MAX_STOPS, &|i| format!("\"{i}\""))),
                ),
                (
                    "stop_token_ids",
                    format!("[{}]", list(MAX_STOP_TOKEN_IDS, &|i| i.to_string())),
                ),
                (
                    "logit_bias",
                    format!("{{{}}}", list(MAX_LOGIT_BIASES, &|i| format!("\"{i}\":1"))),
                ),
                ("stop", format!("\"{}\"", "x".repeat(MAX_STOP_BYTES + more))),
                ("logprobs", (MAX_LOGPROBS as usize + more).to_string()),
            ]
        };
        for ((name, full), (_, over)) in read(0).into_iter().zip(read(1)) {
            let body = |value: &str| format!("{{\"prompt\":\"x\",\"{name}\":{value}}}");
            let parse = |value: &str| CompletionRequest::parse(body(value).as_bytes());
            let common = parse(&full).expect(name).common;
            let params = SamplingParams {
                stop: common.sampling.stop,
                stop_token_ids: common.sampling.stop_token_ids,
                logit_bias: common.sampling.logit_bias,
                logprobs: common.logprobs,
                ..SamplingParams::greedy(1)
            };
            assert_eq!(params.validate(2048), Ok(()), "{name}");
            assert!(parse(&over).is_err(), "{name}");
        }
        refusal(|p| p.stop = vec!["x".to_owned(); MAX_STOPS + 1]);
        refusal(|p| p.stop = vec!["x".repeat(MAX_STOP_BYTES + 1)]);
        refusal(|p| p.stop_token_ids = vec![1; MAX_STOP_TOKEN_IDS + 1]);
        refusal(|p| p.logit_bias = vec![(1, 0.0); MAX_LOGIT_BIASES + 1]);
        refusal(|p| p.logprobs = Some(MAX_LOGPROBS + 1));
    }

    #[test]
    fn prompt_and_output_share_the_context() {
        assert_eq!(check_length(99, 1, 100), Ok(()));
        assert_eq!(check_length(1, 99, 100), Ok(()));
        for (prompt, max_tokens, param, number) in [
            (100, 1, "prompt", "at most 99"),
            (1000, 1, "prompt", "1000 tokens"),
            (99, 2, "max_tokens", "at most 1 "),
            (1, 1_000_000, "max_tokens", "1000000"),
        ] {
            let error = check_length(prompt, max_tokens, 100).unwrap_err();
            assert_eq!(error.kind, ErrorKind::ContextLengthExceeded);
            assert_eq!(error.param.as_deref(), Some(param));
            assert!(error.message.contains(number), "{error}");
            assert!(error.message.contains("100 tokens"), "{error}");
        }
    }
}
