use super::tensors::ROPE_DIVISORS;
use super::{Gguf, GgufError, GgufType, MetaValue};
use crate::model::MAX_EXPERTS;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// An architecture as files name it, and its names in Hugging Face checkpoints.
#[derive(Debug)]
pub(super) struct Family {
    /// `general.architecture`.
    gguf: &'static str,
    /// Has experts.
    moe: bool,
    pub(super) architecture: &'static str,
    model_type: &'static str,
    /// Query and key rows lie in pairs.
    pub(super) pairs: bool,
    /// Module that holds router and experts.
    pub(super) moe_block: &'static str,
    pub(super) router: Option<&'static str>,
    /// Gate, up and down of an expert.
    pub(super) experts: Option<[&'static str; 3]>,
}

const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const DENSE: Family = Family {
    gguf: "",
    moe: false,
    architecture: "",
    model_type: "",
    pairs: false,
    moe_block: "mlp",
    router: None,
    experts: None,
};

const FAMILIES: &[Family] = &[
    Family {
        gguf: "llama",
        architecture: "LlamaForCausalLM",
        model_type: "llama",
        pairs: true,
        ..DENSE
    },
    Family {
        gguf: "llama",
        moe: true,
        architecture: "MixtralForCausalLM",
        model_type: "mixtral",
        pairs: true,
        moe_block: "block_sparse_moe",
        router: Some("block_sparse_moe.gate"),
        experts: Some(["w1", "w3", "w2"]),
    },
    Family {
        gguf: "qwen2",
        architecture: "Qwen2ForCausalLM",
        model_type: "qwen2",
        ..DENSE
    },
    Family {
        gguf: "qwen3",
        architecture: "Qwen3ForCausalLM",
        model_type: "qwen3",
        ..DENSE
    },
    Family {
        gguf: "qwen3moe",
        moe: true,
        architecture: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        router: Some("mlp.gate"),
        experts: Some(PROJECTIONS),
        ..DENSE
    },
];

impl Gguf {
    pub(super) fn family(&self) -> Result<&'static Family, GgufError> {
        let name = self.text("general.architecture")?;
        let moe = self
            .integer_if(&format!("{name}.expert_count"))?
            .unwrap_or(0)
            > 0;
        FAMILIES
            .iter()
            .find(|family| family.gguf == name && family.moe == moe)
            .ok_or_else(|| {
                let with = if moe { " with experts" } else { "" };
                self.bad(format!(
                    "general.architecture is {name:?}{with}; served from GGUF: llama (also with experts), qwen2, qwen3, qwen3moe"
                ))
            })
    }

    pub(super) fn heads(&self) -> Result<usize, GgufError> {
        self.size("attention.head_count")
    }

    pub(super) fn experts(&self) -> Result<usize, GgufError> {
        match self.size("expert_count")? {
            experts if experts <= MAX_EXPERTS => Ok(experts),
            experts => Err(self.bad(format!(
                "expert_count is {experts}; allowed: up to {MAX_EXPERTS}"
            ))),
        }
    }

    pub(super) fn kv_heads(&self) -> Result<usize, GgufError> {
        let key = self.key("attention.head_count_kv")?;
        match self.integer_if(&key)? {
            Some(heads) => Ok(usize::try_from(heads).unwrap_or(usize::MAX)),
            None => self.heads(),
        }
    }

    /// The text of the config.json that this file stands for.
    ///
    /// # Errors
    /// A value is missing, of another type, or asks for something that is not served.
    pub fn config_json(&self) -> Result<String, GgufError> {
        let family = self.family()?;
        let (heads, hidden) = (self.heads()?, self.size("embedding_length")?);
        let head_dim = match self.integer_if(&self.key("attention.key_length")?)? {
            Some(width) => width,
            None => (hidden / heads.max(1)) as u64,
        };
        for (tail, allowed) in [
            ("attention.value_length", head_dim),
            ("rope.dimension_count", head_dim),
        ] {
            let key = self.key(tail)?;
            if let Some(value) = self.integer_if(&key)?
                && value != allowed
            {
                return Err(self.bad(format!(
                    "{key} is {value}; allowed: {allowed}, the width of a key head"
                )));
            }
        }
        self.refuse_unserved()?;
        let vocab = self.embedding_rows()?;
        let mut config = Map::new();
        let mut set = |field: &str, value: Value| {
            config.insert(field.to_owned(), value);
        };
        set("architectures", json!([family.architecture]));
        set("model_type", json!(family.model_type));
        set("hidden_act", json!("silu"));
        set("vocab_size", json!(vocab));
        set("hidden_size", json!(hidden));
        set("num_hidden_layers", json!(self.size("block_count")?));
        set("num_attention_heads", json!(heads));
        set("num_key_value_heads", json!(self.kv_heads()?));
        set("head_dim", json!(head_dim));
        set(
            "max_position_embeddings",
            json!(self.size("context_length")?),
        );
        let eps = self.key("attention.layer_norm_rms_epsilon")?;
        set(
            "rms_norm_eps",
            json!(
                self.float_if(&eps)?
                    .map(shortest)
                    .ok_or_else(|| self.unexpected(&eps, None, "a number"))?
            ),
        );
        let theta = self.float_if(&self.key("rope.freq_base")?)?;
        set("rope_theta", json!(theta.map_or(10_000.0, shortest)));
        if let Some(scaling) = self.rope_scaling()? {
            set("rope_scaling", scaling);
        }
        let tied = !self
            .tensors
            .iter()
            .any(|tensor| tensor.name == "output.weight");
        set("tie_word_embeddings", json!(tied));
        if family.moe {
            set(
                "num_experts_per_tok",
                json!(self.size("expert_used_count")?),
            );
            let experts = self.size("expert_count")?;
            if family.model_type == "mixtral" {
                set("num_local_experts", json!(experts));
                set(
                    "intermediate_size",
                    json!(self.size("feed_forward_length")?),
                );
            } else {
                set("num_experts", json!(experts));
                let width = self.size("expert_feed_forward_length")?;
                set("moe_intermediate_size", json!(width));
                let dense = self.integer_if(&self.key("feed_forward_length")?)?;
                set("intermediate_size", json!(dense.unwrap_or(width as u64)));
                set("norm_topk_prob", json!(true));
                set("decoder_sparse_step", json!(1));
                set("mlp_only_layers", json!([]));
            }
        } else {
            set(
                "intermediate_size",
                json!(self.size("feed_forward_length")?),
            );
        }
        if let Some(id) = self.special_id("bos")? {
            set("bos_token_id", json!(id));
        }
        if let Some(id) = self.special_id("eos")? {
            set("eos_token_id", json!(id));
        }
        Ok(Value::Object(config).to_string())
    }

    /// Settings of the forward pass that nothing here reads: one of them would change the result.
    fn refuse_unserved(&self) -> Result<(), GgufError> {
        const READ: &[&str] = &[
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.layer_norm_rms_epsilon",
            "attention.value_length",
            "block_count",
            "context_length",
            "embedding_length",
            "expert_count",
            "expert_feed_forward_length",
            "expert_used_count",
            "feed_forward_length",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.scaling.factor",
            "rope.scaling.finetuned",
            "rope.scaling.original_context_length",
            "rope.scaling.type",
            "vocab_size",
        ];
        let prefix = self.key("")?;
        for (key, value) in &self.metadata {
            let Some(tail) = key
                .strip_prefix(&prefix)
                .filter(|tail| !READ.contains(tail))
            else {
                continue;
            };
            let nothing = matches!(value, MetaValue::Unsigned(0) | MetaValue::Bool(false));
            if !nothing {
                return Err(self.bad(format!(
                    "{key} is {value:?}; {tail} is not served from GGUF, allowed: 0 or absent"
                )));
            }
        }
        Ok(())
    }

    /// The text of the generation_config.json that this file stands for: the ids that end an answer.
    ///
    /// # Errors
    /// An id is no integer.
    pub fn generation_config_json(&self) -> Result<String, GgufError> {
        let mut ends: Vec<u64> = Vec::new();
        for name in ["eos", "eot"] {
            ends.extend(self.special_id(name)?.filter(|id| !ends.contains(id)));
        }
        let mut config = Map::new();
        if let Some(id) = self.special_id("bos")? {
            config.insert("bos_token_id".to_owned(), json!(id));
        }
        if !ends.is_empty() {
            config.insert("eos_token_id".to_owned(), json!(ends));
        }
        Ok(Value::Object(config).to_string())
    }

    fn rope_scaling(&self) -> Result<Option<Value>, GgufError> {
        let key = self.key("rope.scaling.type")?;
        let factor = self
            .float_if(&self.key("rope.scaling.factor")?)?
            .map(shortest);
        match self.get(&key) {
            None => self.llama3_scaling(),
            Some(MetaValue::Text(kind)) if kind == "none" => self.llama3_scaling(),
            Some(MetaValue::Text(kind)) if kind == "linear" => {
                Ok(Some(json!({"rope_type": "linear", "factor": factor})))
            }
            Some(MetaValue::Text(kind)) if kind == "yarn" => {
                let original = self.size("rope.scaling.original_context_length")?;
                Ok(Some(json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "original_max_position_embeddings": original,
                })))
            }
            found => Err(self.unexpected(&key, found, "none, linear, yarn")),
        }
    }

    /// Files of Llama 3.1 and later hold no parameters of their scaling, but what each frequency is
    /// divided by. The parameters follow from these, given the two bounds that all published models
    /// share, and are checked against every divisor.
    fn llama3_scaling(&self) -> Result<Option<Value>, GgufError> {
        const LOW: f64 = 1.0;
        const HIGH: f64 = 4.0;
        let Some(divisors) = self.small_tensor(ROPE_DIVISORS)? else {
            return Ok(None);
        };
        let theta = self
            .float_if(&self.key("rope.freq_base")?)?
            .map_or(10_000.0, shortest);
        let factor = divisors.iter().copied().fold(1.0, f64::max);
        let turns = |place: usize| {
            theta.powf(-(place as f64) / divisors.len() as f64) / (2.0 * std::f64::consts::PI)
        };
        let share = |divisor: f64| (1.0 / divisor - 1.0 / factor) / (1.0 - 1.0 / factor);
        let between = |divisor: &f64| *divisor > 1.0 + 1e-4 && *divisor < factor * (1.0 - 1e-4);
        let original = match divisors.iter().position(between) {
            Some(place) => (LOW + share(divisors[place]) * (HIGH - LOW)) / turns(place),
            // Frequencies that stay end where the first slow one begins.
            None => match divisors.iter().position(|divisor| *divisor > 1.0 + 1e-4) {
                Some(place) => LOW / turns(place),
                None => return Ok(None),
            },
        }
        .round();
        let expected = |place: usize| {
            let rotations = original * turns(place);
            let part = ((rotations - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
            1.0 / ((1.0 - part) / factor + part)
        };
        let fits = |(place, divisor): (usize, &f64)| (expected(place) / divisor - 1.0).abs() < 1e-3;
        if !divisors.iter().enumerate().all(fits) {
            return Err(self.bad(format!(
                "{ROPE_DIVISORS} divides the rotary frequencies in a way that is not that of Llama 3"
            )));
        }
        Ok(Some(json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": original as u64,
        })))
    }

    /// The values of a small f32 tensor.
    fn small_tensor(&self, name: &str) -> Result<Option<Vec<f64>>, GgufError> {
        let Some(tensor) = self.tensors.iter().find(|tensor| tensor.name == name) else {
            return Ok(None);
        };
        if tensor.kind != GgufType::F32 || tensor.bytes > 1 << 16 {
            return Err(self.bad(format!(
                "{name} is {} with shape {:?}; allowed: F32, up to 16384 values",
                tensor.kind.name(),
                tensor.shape
            )));
        }
        let mut bytes = vec![0; usize::try_from(tensor.bytes).unwrap_or(0)];
        File::open(&self.path)
            .and_then(|file| file.read_exact_at(&mut bytes, tensor.offset))
            .map_err(|source| GgufError::Io {
                path: self.path.clone(),
                source,
            })?;
        let values = bytes
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        Ok(Some(values.collect()))
    }

    /// The vocabulary size as the embedding has it; the key is optional.
    fn embedding_rows(&self) -> Result<usize, GgufError> {
        self.tensors
            .iter()
            .find(|tensor| tensor.name == "token_embd.weight")
            .and_then(|tensor| tensor.shape.first().copied())
            .ok_or_else(|| self.bad("lacks the tensor token_embd.weight".to_owned()))
    }

    /// `{architecture}.{tail}`.
    fn key(&self, tail: &str) -> Result<String, GgufError> {
        Ok(format!("{}.{tail}", self.text("general.architecture")?))
    }

    fn size(&self, tail: &str) -> Result<usize, GgufError> {
        let key = self.key(tail)?;
        Ok(usize::try_from(self.integer(&key)?).unwrap_or(usize::MAX))
    }
}

/// The shortest decimal that is this f32: 1e-5 was written as f32 and shall not become
/// 9.999999747378752e-6.
fn shortest(value: f64) -> f64 {
    #[expect(clippy::cast_possible_truncation, reason = "files hold f32")]
    let narrow = value as f32;
    if f64::from(narrow) == value {
        format!("{narrow:e}").parse().unwrap_or(value)
    } else {
        value
    }
}
