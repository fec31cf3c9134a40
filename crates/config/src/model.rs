//! What a Hugging Face `config.json` says about a model, checked and in one spelling.
//!
//! Both generations of the format are read: `torch_dtype` and `dtype`, `rope_theta` with
//! `rope_scaling` and `rope_parameters`, `type` and `rope_type`. Where two spellings of one thing
//! stand side by side they must agree. A value that the engine cannot honour is an error, never
//! ignored.

mod architecture;
mod attention;
#[cfg(test)]
mod family_tests;
mod fields;
mod memory;
mod moe;
mod quantization;
mod rope;
mod tensors;
#[cfg(test)]
mod tests;
mod v4;

pub use architecture::{Architecture, SERVED_ARCHITECTURES};
pub use attention::{AttentionConfig, GqaConfig, MlaConfig};
pub use memory::{KvBudget, KvShape, MemoryError, ModelBytes, StepSize, format_bytes, parse_bytes};
pub use moe::{MAX_EXPERTS, MAX_GROUPS, MoeConfig, Routing};
pub use quantization::{CompressedTensors, QuantizationConfig, QuantizedActivations, Strategy};
pub use rope::{Llama3Rope, Rope, RopeScaling, Yarn};
pub use tensors::{TensorKind, TensorSpec, TensorSpecs, expert_of};
pub use v4::{V4_ENGINES, V4Config, V4Layer};

use fields::Fields;
use serde_json::Value;
use std::fmt::Write as _;

/// Most layers.
pub const MAX_LAYERS: usize = 256;

/// Fields of config.json that say nothing about the forward pass.
const NEUTRAL_FIELDS: &[&str] = &[
    "_name_or_path",
    "add_cross_attention",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "ep_size",
    "finetuning_task",
    "head_dim",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "quantize",
    "return_dict",
    "rope_interleaved",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
    "task_specific_params",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "use_cache",
];

/// Type of the values in the weight files, as config.json announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredDtype {
    /// bfloat16.
    Bf16,
    /// float32.
    F32,
}

/// A model's shape and constants, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers of the model proper; MTP layers are not among them.
    pub layers: usize,
    /// MTP layers in the checkpoint, numbered from `layers`.
    pub mtp_layers: usize,
    /// Width inside a dense network; none when all layers have experts and no width is given.
    pub intermediate_size: Option<usize>,
    /// Attention.
    pub attention: AttentionConfig,
    /// Experts, in models that have them.
    pub moe: Option<MoeConfig>,
    /// Added to the mean square in the layers' norms.
    pub rms_norm_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Longest sequence, in tokens: `original_max_position_embeddings * factor` under YaRN, else
    /// `max_position_embeddings`.
    pub context: usize,
    /// The embedding is the head.
    pub tied_head: bool,
    /// Quantisation that config.json announces; other formats announce theirs in files of their own.
    pub quantization: Option<QuantizationConfig>,
    /// What `torch_dtype` or `dtype` announces.
    pub stored_dtype: Option<StoredDtype>,
    /// Fields that nothing here reads; worth a warning.
    pub unread: Vec<String>,
}

/// A config.json of any architecture that is known here.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelFile {
    /// The native engine serves it.
    Served(ModelConfig),
    /// Other engines serve it; read for planning.
    V4(V4Config),
}

/// Why a config.json was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelConfigError {
    /// Not a JSON object.
    #[error("config.json is not a JSON object: {0}")]
    Json(String),
    /// A field is absent.
    #[error("config.json lacks {field}; it must be {allowed}")]
    Missing {
        /// Field, dotted path.
        field: String,
        /// Allowed values.
        allowed: String,
    },
    /// A field has a value that is malformed or not served.
    #[error("config.json: {field} is {value}; allowed: {allowed}")]
    Value {
        /// Field, dotted path.
        field: String,
        /// The value as JSON, shortened.
        value: String,
        /// Allowed values.
        allowed: String,
    },
    /// Two fields exclude each other.
    #[error("config.json contradicts itself: {left} but {right}")]
    Contradiction {
        /// One field and its value.
        left: String,
        /// The other field and its value.
        right: String,
    },
    /// No known architecture.
    #[error("config.json: architectures is {name}; served: {}", SERVED_ARCHITECTURES.join(", "))]
    Architecture {
        /// What stands there.
        name: String,
    },
    /// An architecture that is known, but served by other engines only.
    #[error(
        "config.json: architectures is {name}, which the native engine does not serve; engines that do: {}; served natively: {}",
        engines.join(", "), SERVED_ARCHITECTURES.join(", ")
    )]
    OtherEngine {
        /// Architecture.
        name: &'static str,
        /// Engines that serve it.
        engines: &'static [&'static str],
    },
}

impl ModelFile {
    /// Parses and checks the text of a config.json.
    ///
    /// # Errors
    /// The first field that is absent, malformed, contradictory or not served.
    pub fn parse(text: &str) -> Result<Self, ModelConfigError> {
        let root: Value = serde_json::from_str(text)
            .map_err(|error| ModelConfigError::Json(error.to_string()))?;
        let Value::Object(map) = root else {
            return Err(ModelConfigError::Json(
                "the top level is not an object".to_owned(),
            ));
        };
        let f = Fields::new(&map, "");
        let architecture = Architecture::parse(&f)?;
        if architecture.engines().is_some() {
            V4Config::parse(&map, architecture).map(Self::V4)
        } else {
            ModelConfig::from_fields(&f, architecture).map(Self::Served)
        }
    }
}

impl ModelConfig {
    /// Parses and checks the text of a config.json of a model that the native engine serves.
    ///
    /// # Errors
    /// As [`ModelFile::parse`]; also [`ModelConfigError::OtherEngine`].
    pub fn parse(text: &str) -> Result<Self, ModelConfigError> {
        match ModelFile::parse(text)? {
            ModelFile::Served(config) => Ok(config),
            ModelFile::V4(config) => Err(ModelConfigError::OtherEngine {
                name: config.architecture.name(),
                engines: V4_ENGINES,
            }),
        }
    }

    fn from_fields(f: &Fields<'_>, architecture: Architecture) -> Result<Self, ModelConfigError> {
        architecture.refuse_unserved(f)?;
        let rope = Rope::parse(f)?;
        let layers = f.size("num_hidden_layers", MAX_LAYERS)?;
        let hidden_size = f.size("hidden_size", 1 << 17)?;
        let vocab_size = f.size("vocab_size", 1 << 24)?;
        let moe = MoeConfig::parse(f, architecture, layers)?;
        let dense = moe.as_ref().is_none_or(|moe| moe.layers.contains(&false));
        let mut config = Self {
            architecture,
            vocab_size,
            hidden_size,
            layers,
            mtp_layers: match architecture {
                Architecture::DeepseekV3 => f.count_or("num_nextn_predict_layers", 0, 16)?,
                _ => 0,
            },
            intermediate_size: if dense || f.given("intermediate_size") {
                Some(f.size("intermediate_size", 1 << 20)?)
            } else {
                None
            },
            attention: AttentionConfig::parse(f, architecture, hidden_size)?,
            moe,
            rms_norm_eps: f.positive("rms_norm_eps")? as f32,
            context: rope.context(f.size_from("max_position_embeddings", 2, 1 << 30)?)?,
            rope,
            tied_head: f.flag_or("tie_word_embeddings", false)?,
            quantization: QuantizationConfig::parse(f)?,
            stored_dtype: stored_dtype(f)?,
            unread: Vec::new(),
        };
        check_token_ids(f, vocab_size)?;
        config.unread = f.unread(NEUTRAL_FIELDS);
        Ok(config)
    }

    /// Has this layer routed experts? MTP layers, numbered from `layers`, have them where the model has
    /// any.
    pub fn is_moe(&self, layer: usize) -> bool {
        self.moe
            .as_ref()
            .is_some_and(|moe| moe.layers.get(layer).copied().unwrap_or(true))
    }

    /// Values cached per token and layer.
    pub fn kv_width(&self) -> usize {
        match &self.attention {
            AttentionConfig::Gqa(gqa) => 2 * gqa.kv_heads * gqa.head_dim,
            AttentionConfig::Mla(mla) => mla.kv_lora_rank + mla.qk_rope_head_dim,
        }
    }

    /// Width that rotates with the position.
    pub fn rope_dim(&self) -> usize {
        match &self.attention {
            AttentionConfig::Gqa(gqa) => gqa.head_dim,
            AttentionConfig::Mla(mla) => mla.qk_rope_head_dim,
        }
    }

    /// Factor on attention scores: the width of a key to the power of -0.5; for MLA under YaRN times the
    /// square of `0.1 * mscale_all_dim * ln(factor) + 1`.
    pub fn softmax_scale(&self) -> f32 {
        match &self.attention {
            AttentionConfig::Gqa(gqa) => (gqa.head_dim as f64).powf(-0.5) as f32,
            AttentionConfig::Mla(mla) => {
                let width = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) as f64;
                (width.powf(-0.5) * self.rope.softmax_correction()) as f32
            }
        }
    }

    /// Everything here that decides the numbers of the forward pass, as one line of text in a fixed
    /// order; equal lines and equal weights give equal results. The base of the fingerprint.
    pub fn identity(&self) -> String {
        let mut text = format!(
            "{} vocab {} hidden {} layers {} {}",
            self.architecture.name(),
            self.vocab_size,
            self.hidden_size,
            self.layers,
            self.attention.identity(),
        );
        if let Some(width) = self.intermediate_size {
            let _ = write!(text, " dense {width}");
        }
        if let Some(moe) = &self.moe {
            let _ = write!(text, " {}", moe.identity());
        }
        let _ = write!(
            text,
            " eps {:08x} tied {} {}",
            self.rms_norm_eps.to_bits(),
            self.tied_head,
            self.rope.identity(),
        );
        text
    }
}

/// The ids of the first and the last token of a text: an id of the vocabulary or a list of such. The
/// tokenizer may take them from another file; wrong ones here are wrong all the same.
fn check_token_ids(f: &Fields<'_>, vocab_size: usize) -> Result<(), ModelConfigError> {
    let good = |value: &Value| value.as_u64().is_some_and(|id| id < vocab_size as u64);
    for field in ["bos_token_id", "eos_token_id"] {
        let fine = match f.get(field) {
            None | Some(Value::Null) => true,
            Some(Value::Array(list)) => !list.is_empty() && list.iter().all(good),
            Some(value) => good(value),
        };
        if !fine {
            return Err(f.bad_here(
                field,
                &format!("an id below vocab_size ({vocab_size}) or a list of such"),
            ));
        }
    }
    Ok(())
}

fn stored_dtype(f: &Fields<'_>) -> Result<Option<StoredDtype>, ModelConfigError> {
    const ALLOWED: &[&str] = &["bfloat16", "float32"];
    let old = f.one_of("torch_dtype", ALLOWED)?;
    let new = f.one_of("dtype", ALLOWED)?;
    if old.is_some() && new.is_some() && old != new {
        return Err(f.contradiction("torch_dtype", "dtype"));
    }
    Ok(new.or(old).map(|name| {
        if name == "float32" {
            StoredDtype::F32
        } else {
            StoredDtype::Bf16
        }
    }))
}
