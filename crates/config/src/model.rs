//! What a Hugging Face `config.json` says about a model, checked and in one spelling.
//!
//! Both generations of the format are read: `torch_dtype` and `dtype`, `rope_theta` with
//! `rope_scaling` and `rope_parameters`, `type` and `rope_type`. Where two spellings of one thing
//! stand side by side they must agree. A value that the engine cannot honour is an error, never
//! ignored.

mod fields;
mod memory;
mod rope;
mod tensors;
#[cfg(test)]
mod tests;

pub use memory::{KvBudget, KvShape, MemoryError, format_bytes, parse_bytes};
pub use rope::{Rope, RopeScaling, Yarn};
pub use tensors::{TensorSpec, TensorSpecs};

use fields::Fields;
use serde_json::Value;
use std::fmt::Write as _;

/// Architectures that the engine serves, by their name in `architectures`.
pub const SERVED_ARCHITECTURES: &[&str] = &["DeepseekV3ForCausalLM"];

/// Most layers.
pub const MAX_LAYERS: usize = 256;
/// Most routed experts of a layer.
pub const MAX_EXPERTS: usize = 1024;
/// Most groups that they are cut into.
pub const MAX_GROUPS: usize = 64;

/// Fields of config.json that say nothing about the forward pass.
const NEUTRAL_FIELDS: &[&str] = &[
    "_name_or_path",
    "add_cross_attention",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "eos_token_id",
    "ep_size",
    "finetuning_task",
    "head_dim",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "seq_aux",
    "task_specific_params",
    "tokenizer_class",
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

/// Multi-head latent attention (DeepSeek-V2 report, section 2.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlaConfig {
    /// Query heads.
    pub heads: usize,
    /// Width of the query's low-rank form; none: one plain query projection.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent that is cached.
    pub kv_lora_rank: usize,
    /// Part of a query head without position.
    pub qk_nope_head_dim: usize,
    /// Part of a query head, and width of the shared key, that rotates with the position.
    pub qk_rope_head_dim: usize,
    /// Width of a head's output.
    pub v_head_dim: usize,
}

/// Routed and shared experts (DeepSeek-V3 report, section 2.1.2).
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Routed experts per layer.
    pub experts: usize,
    /// Routed experts per token.
    pub top_k: usize,
    /// Consecutive groups that the experts are cut into.
    pub groups: usize,
    /// Groups a token may use.
    pub top_groups: usize,
    /// Shared experts; they are one network of `shared * intermediate` width.
    pub shared: usize,
    /// Width inside an expert.
    pub intermediate: usize,
    /// Leading layers that have a dense network instead of experts.
    pub dense_layers: usize,
    /// Divide the chosen scores by their sum.
    pub normalize: bool,
    /// Factor on the routed experts' weights.
    pub scale: f32,
}

/// A model's shape and constants, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Name in `architectures`; one of [`SERVED_ARCHITECTURES`].
    pub architecture: String,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers of the model proper; MTP layers are not among them.
    pub layers: usize,
    /// MTP layers in the checkpoint, numbered from `layers`.
    pub mtp_layers: usize,
    /// Width inside a dense network.
    pub intermediate_size: usize,
    /// Attention.
    pub mla: MlaConfig,
    /// Experts.
    pub moe: MoeConfig,
    /// Added to the mean square in the layers' norms.
    pub rms_norm_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Longest sequence, in tokens: `original_max_position_embeddings * factor` under YaRN, else
    /// `max_position_embeddings`.
    pub context: usize,
    /// The embedding is the head.
    pub tied_head: bool,
    /// What `torch_dtype` or `dtype` announces.
    pub stored_dtype: Option<StoredDtype>,
    /// Fields that nothing here reads; worth a warning.
    pub unread: Vec<String>,
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
    /// No served architecture.
    #[error("config.json: architectures is {name}; served: {}", SERVED_ARCHITECTURES.join(", "))]
    Architecture {
        /// What stands there.
        name: String,
    },
}

impl ModelConfig {
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
        let architecture = architecture(&f)?;
        refuse_unserved(&f)?;

        let rope = Rope::parse(&f)?;
        let mut config = Self {
            architecture,
            vocab_size: f.size("vocab_size", 1 << 24)?,
            hidden_size: f.size("hidden_size", 1 << 17)?,
            layers: f.size("num_hidden_layers", MAX_LAYERS)?,
            mtp_layers: f.count_or("num_nextn_predict_layers", 0, 16)?,
            intermediate_size: f.size("intermediate_size", 1 << 20)?,
            mla: parse_mla(&f)?,
            moe: parse_moe(&f)?,
            rms_norm_eps: f.positive("rms_norm_eps")? as f32,
            context: rope.context(f.size("max_position_embeddings", 1 << 30)?)?,
            rope,
            tied_head: f.flag_or("tie_word_embeddings", false)?,
            stored_dtype: stored_dtype(&f)?,
            unread: Vec::new(),
        };
        config.unread = f.unread(NEUTRAL_FIELDS);
        Ok(config)
    }

    /// Has this layer routed experts?
    pub fn is_moe(&self, layer: usize) -> bool {
        layer >= self.moe.dense_layers
    }

    /// Values cached per token and layer: the latent and the rotated key.
    pub fn kv_width(&self) -> usize {
        self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
    }

    /// Factor on attention scores: `(nope + rope)^-0.5`, under YaRN times the square of
    /// `0.1 * mscale_all_dim * ln(factor) + 1`.
    pub fn softmax_scale(&self) -> f32 {
        let width = (self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim) as f64;
        (width.powf(-0.5) * self.rope.softmax_correction()) as f32
    }

    /// Everything here that decides the numbers of the forward pass, as one line of text in a fixed
    /// order; equal lines and equal weights give equal results. The base of the fingerprint.
    pub fn identity(&self) -> String {
        let (mla, moe) = (&self.mla, &self.moe);
        let mut text = format!(
            "{} vocab {} hidden {} layers {} dense {} heads {} q_lora {} kv_lora {} nope {} rope {} v {}",
            self.architecture,
            self.vocab_size,
            self.hidden_size,
            self.layers,
            self.intermediate_size,
            mla.heads,
            mla.q_lora_rank.unwrap_or(0),
            mla.kv_lora_rank,
            mla.qk_nope_head_dim,
            mla.qk_rope_head_dim,
            mla.v_head_dim,
        );
        let _ = write!(
            text,
            " experts {}/{} groups {}/{} shared {} expert {} dense_layers {} normalize {} scale {:08x} eps {:08x} tied {} {}",
            moe.top_k,
            moe.experts,
            moe.top_groups,
            moe.groups,
            moe.shared,
            moe.intermediate,
            moe.dense_layers,
            moe.normalize,
            moe.scale.to_bits(),
            self.rms_norm_eps.to_bits(),
            self.tied_head,
            self.rope.identity(),
        );
        text
    }
}

fn architecture(f: &Fields<'_>) -> Result<String, ModelConfigError> {
    let allowed = || format!("a list with one of {}", SERVED_ARCHITECTURES.join(", "));
    let Some(value) = f.get("architectures") else {
        return Err(ModelConfigError::Missing {
            field: "architectures".to_owned(),
            allowed: allowed(),
        });
    };
    let names: Option<Vec<&str>> = value
        .as_array()
        .map(|list| list.iter().filter_map(Value::as_str).collect());
    let name = match names.as_deref() {
        Some([name]) => (*name).to_owned(),
        _ => return Err(f.bad("architectures", value, &allowed())),
    };
    if !SERVED_ARCHITECTURES.contains(&name.as_str()) {
        return Err(ModelConfigError::Architecture { name });
    }
    f.one_of("model_type", &["deepseek_v3", "kimi_k2"])?;
    Ok(name)
}

/// Values under which the model would compute something else than this engine does.
fn refuse_unserved(f: &Fields<'_>) -> Result<(), ModelConfigError> {
    f.one_of("hidden_act", &["silu"])?;
    f.one_of("topk_method", &["noaux_tc"])?;
    f.one_of("scoring_func", &["sigmoid"])?;
    f.only_flag("attention_bias", false)?;
    f.only_flag("mlp_bias", false)?;
    f.only_flag("rope_interleave", true)?;
    for field in ["quantization_config", "compression_config"] {
        f.absent(field, "absent (weights in bf16 or f32)")?;
    }
    f.absent("sliding_window", "absent or null (full attention)")?;
    f.absent("index_topk", "absent (full attention)")?;
    if f.count_or("moe_layer_freq", 1, usize::MAX)? != 1 {
        return Err(f.bad_here("moe_layer_freq", "1"));
    }
    Ok(())
}

fn parse_mla(f: &Fields<'_>) -> Result<MlaConfig, ModelConfigError> {
    let heads = f.size("num_attention_heads", 4096)?;
    if f.given("num_key_value_heads") && f.size("num_key_value_heads", 4096)? != heads {
        return Err(f.contradiction("num_key_value_heads", "num_attention_heads"));
    }
    let mla = MlaConfig {
        heads,
        q_lora_rank: if f.given("q_lora_rank") {
            Some(f.size("q_lora_rank", 1 << 16)?)
        } else {
            None
        },
        kv_lora_rank: f.size("kv_lora_rank", 1 << 14)?,
        qk_nope_head_dim: f.size("qk_nope_head_dim", 1 << 14)?,
        qk_rope_head_dim: f.size("qk_rope_head_dim", 1 << 14)?,
        v_head_dim: f.size("v_head_dim", 1 << 14)?,
    };
    if !mla.qk_rope_head_dim.is_multiple_of(2) {
        return Err(f.bad_here("qk_rope_head_dim", "an even number"));
    }
    if f.given("qk_head_dim")
        && f.size("qk_head_dim", 1 << 15)? != mla.qk_nope_head_dim + mla.qk_rope_head_dim
    {
        return Err(f.contradiction("qk_head_dim", "qk_nope_head_dim"));
    }
    Ok(mla)
}

fn parse_moe(f: &Fields<'_>) -> Result<MoeConfig, ModelConfigError> {
    let moe = MoeConfig {
        experts: f.size("n_routed_experts", MAX_EXPERTS)?,
        top_k: f.size("num_experts_per_tok", 256)?,
        groups: f.size("n_group", MAX_GROUPS)?,
        top_groups: f.size("topk_group", MAX_GROUPS)?,
        shared: f.count_or("n_shared_experts", 0, 256)?,
        intermediate: f.size("moe_intermediate_size", 1 << 18)?,
        dense_layers: f.count_or("first_k_dense_replace", 0, MAX_LAYERS)?,
        normalize: f.flag_or("norm_topk_prob", true)?,
        scale: f.positive("routed_scaling_factor")? as f32,
    };
    if !moe.experts.is_multiple_of(moe.groups) {
        return Err(f.bad_here(
            "n_group",
            &format!("a divisor of n_routed_experts ({})", moe.experts),
        ));
    }
    let group = moe.experts / moe.groups;
    if moe.groups > 1 && group < 2 {
        let most = moe.experts / 2;
        return Err(f.bad_here(
            "n_group",
            &format!("at most {most}: a group's score is the sum of its two best"),
        ));
    }
    if moe.top_groups > moe.groups {
        return Err(f.bad_here("topk_group", &format!("1 to n_group ({})", moe.groups)));
    }
    if moe.top_k > moe.top_groups * group {
        let most = moe.top_groups * group;
        return Err(f.bad_here(
            "num_experts_per_tok",
            &format!("1 to {most}, the experts of topk_group groups"),
        ));
    }
    Ok(moe)
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
