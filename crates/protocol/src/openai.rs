//! OpenAI's completions and chat bodies with vLLM's extras. Requests are read field by field, so that an
//! error names the field; unknown fields are tolerated, null is the same as absent, and what cannot be
//! honoured is refused by name.

mod fields;
mod prompt;
mod request;
mod response;
mod sampling;

pub use fields::{Fields, Pairs, cut_object, shown};
pub use prompt::{MAX_PROMPTS, Prompt};
pub use request::{
    ChatRequest, Common, CompletionRequest, MAX_N, Role as MessageRole, kv_transfer_params,
};
pub use response::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatLogprobs, ChatMessage, ChatResponse,
    ChatTokenLogprob, ChatTopLogprob, Completion, CompletionChoice, CompletionChunk,
    CompletionChunkChoice, CompletionLogprobs, Delta, ModelCard, ModelList, PromptTokensDetails,
    SharedJson, StopReason, Usage,
};
pub use sampling::SamplingOptions;
