use std::path::PathBuf;
use twinfer_protocol::{ApiError, ErrorKind};

/// Why a tokenizer could not be loaded, or a text or an id not be converted.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file of the model directory could not be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file that every model has is not there.
    #[error("{} is missing; a model needs it, download it with the weights", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file of the model directory is not what it should be.
    #[error("{path}: {message}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Field, value and what is allowed.
        message: String,
    },
    /// A token id that the vocabulary does not have.
    #[error("token id {id} is out of range; the vocabulary has ids 0 to {}", .limit.saturating_sub(1))]
    UnknownToken {
        /// The id.
        id: u32,
        /// First id that does not exist.
        limit: u32,
    },
    /// The tokenizer library refused a text.
    #[error("the text cannot be tokenised: {0}")]
    Encode(String),
    /// A text that has more tokens than may be.
    #[error("the text has more than {limit} tokens")]
    TooLong {
        /// Tokens that may be.
        limit: usize,
    },
    /// A stop string that can never or always match.
    #[error("stop string {index} is empty; a stop string has at least one character")]
    EmptyStop {
        /// Place in the request's list.
        index: usize,
    },
}

/// Why a chat could not be rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The model directory has no template.
    #[error(
        "the model has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json); use /v1/completions"
    )]
    Missing,
    /// The model's template cannot be used at all.
    #[error("the model's chat template is unusable: {0}")]
    Broken(String),
    /// The template itself refused the messages (`raise_exception`).
    #[error("the chat template refuses the messages: {0}")]
    Refused(String),
    /// The template failed on these messages.
    #[error("the chat template failed on the messages: {0}")]
    Failed(String),
    /// The template worked or wrote more than it may.
    #[error("the chat template exceeded its limit of {0}")]
    Limit(&'static str),
    /// The messages have a shape that no template gets to see.
    #[error("{param}: {message}")]
    Messages {
        /// Field of the request, `messages[2].content`.
        param: String,
        /// What is wrong and what is allowed.
        message: String,
    },
    /// A key of `chat_template_kwargs` that a request may not set.
    #[error("chat_template_kwargs may not contain {0:?}")]
    ReservedKwarg(String),
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        let kind = match error {
            TextError::UnknownToken { .. } | TextError::Encode(_) | TextError::EmptyStop { .. } => {
                ErrorKind::InvalidRequest
            }
            TextError::TooLong { .. } => ErrorKind::ContextLengthExceeded,
            TextError::Read { .. } | TextError::Missing { .. } | TextError::Invalid { .. } => {
                ErrorKind::Internal
            }
        };
        let param = matches!(error, TextError::EmptyStop { .. }).then(|| "stop".to_owned());
        Self {
            param,
            ..Self::new(kind, error.to_string())
        }
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        let param = match &error {
            TemplateError::Messages { param, .. } => param.clone(),
            TemplateError::ReservedKwarg(_) => "chat_template_kwargs".to_owned(),
            _ => "messages".to_owned(),
        };
        Self::new(ErrorKind::ChatTemplate, error.to_string()).with_param(param)
    }
}
