use super::ModelConfigError;
use super::fields::Fields;
use serde_json::Value;

/// A family of models: names of tensors and order of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2.
    Llama,
    /// Mixtral: Llama with experts.
    Mixtral,
    /// Qwen2 and Qwen2.5: Llama with biases on query, key and value.
    Qwen2,
    /// Qwen3: a norm on every query and key head.
    Qwen3,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// DeepSeek-V2 and V2-Lite.
    DeepseekV2,
    /// DeepSeek-V3, R1, V3.1 and Kimi-K2.
    DeepseekV3,
    /// DeepSeek-V4; not served natively.
    DeepseekV4,
    /// DeepSeek-V4.1; not served natively.
    DeepseekV41,
}

/// Architectures that the native engine serves, by their name in `architectures`.
pub const SERVED_ARCHITECTURES: &[&str] = &[
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
];

const ALL: &[Architecture] = &[
    Architecture::Llama,
    Architecture::Mixtral,
    Architecture::Qwen2,
    Architecture::Qwen3,
    Architecture::Qwen3Moe,
    Architecture::DeepseekV2,
    Architecture::DeepseekV3,
    Architecture::DeepseekV4,
    Architecture::DeepseekV41,
];

impl Architecture {
    /// Name in `architectures`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::DeepseekV2 => "DeepseekV2ForCausalLM",
            Self::DeepseekV3 => "DeepseekV3ForCausalLM",
            Self::DeepseekV4 => "DeepseekV4ForCausalLM",
            Self::DeepseekV41 => "DeepseekV41ForCausalLM",
        }
    }

    /// The engines that serve it, if the native one does not.
    pub const fn engines(self) -> Option<&'static [&'static str]> {
        match self {
            Self::DeepseekV4 | Self::DeepseekV41 => Some(super::V4_ENGINES),
            _ => None,
        }
    }

    /// Multi-head latent attention?
    pub const fn is_mla(self) -> bool {
        matches!(self, Self::DeepseekV2 | Self::DeepseekV3)
    }

    const fn model_types(self) -> &'static [&'static str] {
        match self {
            Self::Llama => &["llama"],
            Self::Mixtral => &["mixtral"],
            Self::Qwen2 => &["qwen2"],
            Self::Qwen3 => &["qwen3"],
            Self::Qwen3Moe => &["qwen3_moe"],
            Self::DeepseekV2 => &["deepseek_v2"],
            Self::DeepseekV3 => &["deepseek_v3", "kimi_k2"],
            Self::DeepseekV4 => &["deepseek_v4"],
            Self::DeepseekV41 => &["deepseek_v41"],
        }
    }

    /// Reads `architectures` and compares `model_type` with it.
    pub(super) fn parse(f: &Fields<'_>) -> Result<Self, ModelConfigError> {
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
        let Some([name]) = names.as_deref() else {
            return Err(f.bad("architectures", value, &allowed()));
        };
        // V4.1 wraps a text model, and its files name the whole.
        let name = match *name {
            "DeepseekV41ForConditionalGeneration" => Self::DeepseekV41.name(),
            other => other,
        };
        let architecture = ALL
            .iter()
            .copied()
            .find(|architecture| architecture.name() == name)
            .ok_or_else(|| ModelConfigError::Architecture {
                name: name.to_owned(),
            })?;
        f.one_of("model_type", architecture.model_types())?;
        Ok(architecture)
    }

    /// Values under which the model would compute something else than the engine does.
    pub(super) fn refuse_unserved(self, f: &Fields<'_>) -> Result<(), ModelConfigError> {
        f.one_of("hidden_act", &["silu"])?;
        f.only_flag("mlp_bias", false)?;
        f.absent("index_topk", "absent (full attention)")?;
        // transformers writes the attention of each layer out.
        if let Some(value) = f.get("layer_types") {
            let full = match value {
                Value::Null => true,
                Value::Array(list) => list.iter().all(|kind| kind == "full_attention"),
                _ => false,
            };
            if !full {
                return Err(f.bad_here("layer_types", "\"full_attention\" for every layer"));
            }
        }
        match self {
            Self::Qwen2 | Self::Qwen3 | Self::Qwen3Moe => {
                f.only_flag("use_sliding_window", false)?;
                // Written with any value while use_sliding_window is false.
                f.get("sliding_window");
            }
            _ => f.absent("sliding_window", "absent or null (full attention)")?,
        }
        if self.is_mla() {
            f.only_flag("attention_bias", false)?;
            f.only_flag("rope_interleave", true)?;
        } else {
            let part = f.positive_if("partial_rotary_factor")?.unwrap_or(1.0);
            if part != 1.0 {
                return Err(f.bad_here("partial_rotary_factor", "1"));
            }
        }
        Ok(())
    }
}
