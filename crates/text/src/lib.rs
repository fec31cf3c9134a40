//! Text on its way into and out of a model: tokenizer, chat template, incremental detokeniser and
//! stop strings. Everything is synchronous; nothing here but the loaders touches a file.
#![forbid(unsafe_code)]

mod detokenize;
mod error;
mod files;
mod stop;
mod template;
mod token_bytes;
mod tokenizer;

pub use detokenize::IncrementalDetokenizer;
pub use error::{TemplateError, TextError};
pub use files::ModelTexts;
pub use stop::StopMatcher;
pub use template::{ChatTemplate, TemplateState};
pub use tokenizer::Tokenizer;
