//! What a model path leads to: a directory or a GGUF file, and the texts in it.

use super::{LoadOptions, ModelError, ModelOutline, check_options, kv_shape};
use crate::weights::{WeightsError, inside, read_text};
use std::collections::BTreeMap;
use std::path::Path;
use twinfer_config::ModelConfig;
use twinfer_config::gguf::{Gguf, GgufError};
use twinfer_text::ModelTexts;

/// The texts of a model beside its weights. `path` is a directory in Hugging Face layout, or a GGUF
/// file.
///
/// # Errors
/// The path does not exist or is neither; a GGUF file is broken or lacks what a text needs.
pub fn model_texts(path: &Path) -> Result<ModelTexts, ModelError> {
    match ModelFiles::find(path)? {
        ModelFiles::Directory => Ok(ModelTexts::directory(path)),
        ModelFiles::Gguf(gguf) => {
            let text = |text: Result<String, GgufError>| text.map_err(gguf_refused);
            let texts = BTreeMap::from([
                ("config.json", text(gguf.config_json())?),
                (
                    "generation_config.json",
                    text(gguf.generation_config_json())?,
                ),
                ("tokenizer.json", text(gguf.tokenizer_json())?),
                ("tokenizer_config.json", text(gguf.tokenizer_config_json())?),
            ]);
            Ok(ModelTexts::given(path, texts))
        }
    }
}

/// What a model path leads to.
pub(super) enum ModelFiles {
    Directory,
    Gguf(Box<Gguf>),
}

impl ModelFiles {
    pub(super) fn find(path: &Path) -> Result<Self, ModelError> {
        if path.is_dir() {
            return Ok(Self::Directory);
        }
        if path
            .extension()
            .is_some_and(|extension| extension == "gguf")
        {
            let gguf = Gguf::open(path).map_err(gguf_refused)?;
            return Ok(Self::Gguf(Box::new(gguf)));
        }
        let reason = if path.exists() {
            "is neither a directory nor a .gguf file"
        } else {
            "does not exist"
        };
        Err(WeightsError::Directory {
            path: path.to_owned(),
            reason: reason.to_owned(),
        }
        .into())
    }

    pub(super) fn outline(
        &self,
        path: &Path,
        options: &LoadOptions<'_>,
    ) -> Result<ModelOutline, ModelError> {
        let isa = check_options(options)?;
        let config = self.config(path)?;
        let max_model_len = options.max_model_len.unwrap_or(config.context);
        if max_model_len < 2 || max_model_len > config.context {
            return Err(ModelError::Option {
                field: "max-model-len",
                value: max_model_len.to_string(),
                allowed: format!("2 to {}, the model's own limit", config.context),
            });
        }
        if options.mtp && config.mtp_layers != 1 {
            return Err(ModelError::Option {
                field: "num-speculative-tokens",
                value: "above 0".to_owned(),
                allowed: format!(
                    "0: the model has {} MTP layers (num_nextn_predict_layers), one is needed",
                    config.mtp_layers
                ),
            });
        }
        Ok(ModelOutline {
            kv: kv_shape(&config, options),
            config,
            max_model_len,
            isa,
        })
    }

    /// Text of config.json and where errors say it stands.
    pub(super) fn config(&self, path: &Path) -> Result<ModelConfig, ModelError> {
        let (path, text) = match self {
            Self::Directory => {
                let path = inside(path, "config.json")?;
                let text = read_text(&path)?;
                (path, text)
            }
            Self::Gguf(gguf) => (path.to_owned(), gguf.config_json().map_err(gguf_refused)?),
        };
        ModelConfig::parse(&text).map_err(|source| ModelError::Config { path, source })
    }
}

fn gguf_refused(error: GgufError) -> ModelError {
    WeightsError::from(Box::new(error)).into()
}
