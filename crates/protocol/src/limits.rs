//! Sizes that a request may not exceed. HTTP, `generate` and the engine hold every request to these.

/// Most log-probabilities per position.
pub const MAX_LOGPROBS: u32 = 20;
/// Most strings in `stop`.
pub const MAX_STOPS: usize = 32;
/// Longest string in `stop`, in bytes.
pub const MAX_STOP_BYTES: usize = 1024;
/// Most entries of `stop_token_ids`.
pub const MAX_STOP_TOKEN_IDS: usize = 1024;
/// Most entries of `logit_bias`.
pub const MAX_LOGIT_BIASES: usize = 1024;
/// Most strings in `bad_words`.
pub const MAX_BAD_WORDS: usize = 256;
/// Longest string in `bad_words`, in bytes.
pub const MAX_BAD_WORD_BYTES: usize = 1024;
