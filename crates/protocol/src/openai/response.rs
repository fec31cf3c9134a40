use crate::{KvTransferParams, TokenId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use std::sync::Arc;

/// JSON that was written once and stands in several places of an answer.
#[derive(Clone, Debug)]
pub struct SharedJson(Arc<RawValue>);

impl SharedJson {
    /// Writes `value`.
    ///
    /// # Errors
    /// What its `Serialize` reports.
    pub fn of<T: Serialize + ?Sized>(value: &T) -> serde_json::Result<Self> {
        Ok(Self(serde_json::value::to_raw_value(value)?.into()))
    }

    /// The text.
    pub fn get(&self) -> &str {
        self.0.get()
    }
}

impl PartialEq for SharedJson {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Serialize for SharedJson {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

/// Why a request stopped, beside `finish_reason`: the stop string or the stop token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StopReason {
    /// One of `stop_token_ids`.
    Token(TokenId),
    /// One of `stop`.
    Text(String),
}

/// Token counts. `prompt_tokens` counts each prompt once, whatever `n`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Of all prompts.
    pub prompt_tokens: u64,
    /// Sum of both.
    pub total_tokens: u64,
    /// Of all choices, stop tokens included.
    pub completion_tokens: u64,
    /// Null if all prompt tokens were computed, or that was not counted.
    #[serde(default)]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

/// Where prompt tokens came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    /// Found in the prefix cache.
    pub cached_tokens: u64,
}

/// `object: text_completion`, whole.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Completion<'a> {
    /// `cmpl-…`.
    pub id: &'a str,
    /// `text_completion`.
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// Served name.
    pub model: &'a str,
    /// One per prompt and choice, in order.
    pub choices: Vec<CompletionChoice>,
    /// Null.
    pub service_tier: Option<&'static str>,
    /// Null.
    pub system_fingerprint: Option<&'static str>,
    /// Counts.
    pub usage: Usage,
    /// The handle of a prefill instance, else null.
    pub kv_transfer_params: Option<KvTransferParams>,
}

/// Choice of a [`Completion`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompletionChoice {
    /// Prompt index times `n` plus choice.
    pub index: u32,
    /// Output.
    pub text: String,
    /// If asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`.
    pub finish_reason: &'static str,
    /// Which stop.
    pub stop_reason: Option<StopReason>,
    /// With `return_token_ids`.
    pub token_ids: Option<Vec<TokenId>>,
    /// If asked for: per prompt token an object from token ids to `logprob`, `rank`, `decoded_token`; null
    /// for the first.
    pub prompt_logprobs: Option<SharedJson>,
    /// With `return_token_ids`.
    pub prompt_token_ids: Option<Vec<TokenId>>,
}

/// Log-probabilities of a completion, one entry per token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionLogprobs {
    /// Characters of the output before each token.
    pub text_offset: Vec<u64>,
    /// Natural logarithms.
    pub token_logprobs: Vec<Option<f32>>,
    /// Texts of the tokens.
    pub tokens: Vec<String>,
    /// Alternatives by text, the token itself included.
    pub top_logprobs: Vec<Option<serde_json::Map<String, Value>>>,
}

/// `object: text_completion`, one event of a stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompletionChunk<'a> {
    /// Same in all chunks.
    pub id: &'a str,
    /// `text_completion`.
    pub object: &'static str,
    /// Same in all chunks.
    pub created: u64,
    /// Served name.
    pub model: &'a str,
    /// One, or none in the chunk that carries the usage.
    pub choices: &'a [CompletionChunkChoice],
    /// Null but where asked for.
    pub usage: Option<Usage>,
}

/// Choice of a [`CompletionChunk`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompletionChunkChoice {
    /// Choice.
    pub index: u32,
    /// What came.
    pub text: String,
    /// Of the tokens of this chunk.
    pub logprobs: Option<CompletionLogprobs>,
    /// Null until the last.
    pub finish_reason: Option<&'static str>,
    /// Which stop.
    pub stop_reason: Option<StopReason>,
    /// With `return_token_ids`, in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
    /// With `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

/// `object: chat.completion`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatResponse<'a> {
    /// `chatcmpl-…`.
    pub id: &'a str,
    /// `chat.completion`.
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// Served name.
    pub model: &'a str,
    /// In order of the index.
    pub choices: Vec<ChatChoice>,
    /// Null.
    pub service_tier: Option<&'static str>,
    /// Null.
    pub system_fingerprint: Option<&'static str>,
    /// Counts.
    pub usage: Usage,
    /// As in [`CompletionChoice`].
    pub prompt_logprobs: Option<SharedJson>,
    /// With `return_token_ids`.
    pub prompt_token_ids: Option<Vec<TokenId>>,
    /// The handle of a prefill instance, else null.
    pub kv_transfer_params: Option<KvTransferParams>,
}

/// Choice of a [`ChatResponse`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChoice {
    /// Choice.
    pub index: u32,
    /// Output.
    pub message: ChatMessage,
    /// If asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop` or `length`.
    pub finish_reason: &'static str,
    /// Which stop.
    pub stop_reason: Option<StopReason>,
    /// With `return_token_ids`.
    pub token_ids: Option<Vec<TokenId>>,
}

/// An assistant's message as vLLM writes it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatMessage {
    /// `assistant`.
    pub role: &'static str,
    /// Text.
    pub content: String,
    /// Null.
    pub refusal: Option<String>,
    /// Null.
    pub annotations: Option<Value>,
    /// Null.
    pub audio: Option<Value>,
    /// Null.
    pub function_call: Option<Value>,
    /// Empty.
    pub tool_calls: Vec<Value>,
    /// Null: reasoning is part of the content.
    pub reasoning_content: Option<String>,
}

/// Log-probabilities of a chat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatLogprobs {
    /// One entry per token.
    pub content: Vec<ChatTokenLogprob>,
}

/// One token of [`ChatLogprobs`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatTokenLogprob {
    /// Text, U+FFFD for parts of characters.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f32,
    /// Exact bytes.
    pub bytes: Option<Vec<u8>>,
    /// Alternatives, best first.
    pub top_logprobs: Vec<ChatTopLogprob>,
}

/// An alternative of a [`ChatTokenLogprob`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatTopLogprob {
    /// Text, U+FFFD for parts of characters.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f32,
    /// Exact bytes.
    pub bytes: Option<Vec<u8>>,
}

/// `object: chat.completion.chunk`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunk<'a> {
    /// Same in all chunks.
    pub id: &'a str,
    /// `chat.completion.chunk`.
    pub object: &'static str,
    /// Same in all chunks.
    pub created: u64,
    /// Served name.
    pub model: &'a str,
    /// One, or none in the chunk that carries the usage.
    pub choices: &'a [ChatChunkChoice],
    /// Absent but where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// With `return_token_ids`, in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
}

/// Choice of a [`ChatChunk`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunkChoice {
    /// Choice.
    pub index: u32,
    /// What came.
    pub delta: Delta,
    /// Of the tokens of this chunk.
    pub logprobs: Option<ChatLogprobs>,
    /// Null until the last.
    pub finish_reason: Option<&'static str>,
    /// Which stop; only in the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<Option<StopReason>>,
    /// With `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<TokenId>>,
}

/// What a chat chunk adds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Delta {
    /// `assistant` in the first delta of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

/// Answer of `GET /v1/models`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelList {
    /// `list`.
    pub object: String,
    /// One per served model.
    pub data: Vec<ModelCard>,
}

/// Entry of a [`ModelList`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// Served name.
    pub id: String,
    /// `model`.
    pub object: String,
    /// Unix seconds.
    pub created: u64,
    /// `twinfer`.
    pub owned_by: String,
    /// The same as `id`.
    pub root: Option<String>,
    /// Null.
    pub parent: Option<String>,
    /// Input and output together, in tokens.
    pub max_model_len: Option<u32>,
}

impl Usage {
    /// Counts of a request.
    pub fn new(prompt_tokens: u64, completion_tokens: u64) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: None,
        }
    }

    /// Of the prompt tokens so many were found in the prefix cache.
    #[must_use]
    pub fn with_cached(mut self, cached_tokens: u64) -> Self {
        self.prompt_tokens_details =
            (cached_tokens > 0).then_some(PromptTokensDetails { cached_tokens });
        self
    }
}
