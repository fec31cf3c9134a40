use super::{Gguf, GgufError};

/// Storage of a tensor, with the number ggml gives it. Values come in blocks along a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufType {
    /// float32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// 32 values: f16 scale, 4 bits each, offset -8.
    Q4_0,
    /// 32 values: f16 scale and minimum, 4 bits each.
    Q4_1,
    /// 32 values: f16 scale, 5 bits each, offset -16.
    Q5_0,
    /// 32 values: f16 scale, int8 each.
    Q8_0,
    /// 256 values in eight groups with 6-bit scales and minima, 4 bits each.
    Q4K,
    /// 256 values in sixteen groups with int8 scales, 6 bits each.
    Q6K,
}

/// A tensor of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Name in the file.
    pub name: String,
    /// Slowest dimension first, as in Hugging Face files.
    pub shape: Vec<usize>,
    /// Storage.
    pub kind: GgufType,
    /// Of its first byte in the file.
    pub offset: u64,
    /// Length in the file.
    pub bytes: u64,
}

/// A tensor of a Hugging Face checkpoint and where the file holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufPart {
    /// Name in a Hugging Face checkpoint.
    pub name: String,
    /// Shape there.
    pub shape: Vec<usize>,
    /// Storage.
    pub kind: GgufType,
    /// Of its first byte in the file.
    pub offset: u64,
    /// Length in the file.
    pub bytes: u64,
    /// Rows lie per head as pairs (0, h/2), (1, h/2 + 1), ...: so many heads of rows must be brought
    /// back into halves. Files of the llama architecture hold queries and keys so.
    pub paired_heads: Option<usize>,
}

const TYPES: &[(u32, GgufType, &str)] = &[
    (0, GgufType::F32, "F32"),
    (1, GgufType::F16, "F16"),
    (30, GgufType::Bf16, "BF16"),
    (2, GgufType::Q4_0, "Q4_0"),
    (3, GgufType::Q4_1, "Q4_1"),
    (6, GgufType::Q5_0, "Q5_0"),
    (8, GgufType::Q8_0, "Q8_0"),
    (12, GgufType::Q4K, "Q4_K"),
    (14, GgufType::Q6K, "Q6_K"),
];

impl GgufType {
    pub(super) fn of(number: u32) -> Option<Self> {
        TYPES
            .iter()
            .find(|(known, ..)| *known == number)
            .map(|(_, kind, _)| *kind)
    }

    /// ggml's name.
    pub fn name(self) -> &'static str {
        TYPES
            .iter()
            .find(|(_, kind, _)| *kind == self)
            .map_or("", |(.., name)| name)
    }

    pub(super) fn names() -> String {
        let names: Vec<&str> = TYPES.iter().map(|(.., name)| *name).collect();
        names.join(", ")
    }

    /// Values of a block.
    pub fn block_values(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q6K => 210,
        }
    }
}

/// Divisors of the rotary frequencies; part of the config, not of the checkpoint.
pub(super) const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// What stands for one tensor of a layer in the file and in a Hugging Face checkpoint.
const LAYER_NAMES: &[(&str, &str)] = &[
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_q.bias", "self_attn.q_proj.bias"),
    ("attn_k.bias", "self_attn.k_proj.bias"),
    ("attn_v.bias", "self_attn.v_proj.bias"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
];

/// Files of before April 2024 hold each expert on its own: `ffn_gate.3.weight`.
fn single_expert(names: [&str; 3], tail: &str) -> Option<String> {
    let (projection, expert) = tail.strip_suffix(".weight")?.split_once('.')?;
    let place = ["ffn_gate", "ffn_up", "ffn_down"]
        .iter()
        .position(|known| *known == projection)?;
    let expert: usize = expert.parse().ok()?;
    Some(format!("experts.{expert}.{}.weight", names[place]))
}

impl Gguf {
    /// The tensors of the Hugging Face checkpoint that this file stands for.
    ///
    /// # Errors
    /// A tensor that this architecture does not have, or with another number of dimensions.
    pub fn parts(&self) -> Result<Vec<GgufPart>, GgufError> {
        let family = self.family()?;
        let mut parts = Vec::new();
        let mut unknown = Vec::new();
        for tensor in &self.tensors {
            let whole = |name: String| GgufPart {
                name,
                shape: tensor.shape.clone(),
                kind: tensor.kind,
                offset: tensor.offset,
                bytes: tensor.bytes,
                paired_heads: None,
            };
            match tensor.name.as_str() {
                ROPE_DIVISORS => {}
                "token_embd.weight" => parts.push(whole("model.embed_tokens.weight".to_owned())),
                "output_norm.weight" => parts.push(whole("model.norm.weight".to_owned())),
                "output.weight" => parts.push(whole("lm_head.weight".to_owned())),
                other => {
                    let Some((layer, tail)) = other
                        .strip_prefix("blk.")
                        .and_then(|rest| rest.split_once('.'))
                        .and_then(|(layer, tail)| Some((layer.parse::<usize>().ok()?, tail)))
                    else {
                        unknown.push(other);
                        continue;
                    };
                    let prefix = format!("model.layers.{layer}.");
                    if let Some((_, name)) = LAYER_NAMES.iter().find(|(known, _)| *known == tail) {
                        let mut part = whole(format!("{prefix}{name}"));
                        if family.pairs {
                            part.paired_heads = match tail {
                                "attn_q.weight" => Some(self.heads()?),
                                "attn_k.weight" => Some(self.kv_heads()?),
                                _ => None,
                            };
                        }
                        parts.push(part);
                    } else if let Some(name) =
                        family.router.filter(|_| tail == "ffn_gate_inp.weight")
                    {
                        parts.push(whole(format!("{prefix}{name}.weight")));
                    } else if let Some(projection) = family.experts.and_then(|names| {
                        [
                            "ffn_gate_exps.weight",
                            "ffn_up_exps.weight",
                            "ffn_down_exps.weight",
                        ]
                        .iter()
                        .position(|known| *known == tail)
                        .map(|place| names[place])
                    }) {
                        let [experts, rows, cols] = tensor.shape[..] else {
                            return Err(self.bad(format!(
                                "{} has shape {:?}; allowed: [experts, rows, columns]",
                                tensor.name, tensor.shape
                            )));
                        };
                        if experts != self.experts()? {
                            return Err(self.bad(format!(
                                "{} holds {experts} experts, expert_count is {}",
                                tensor.name,
                                self.experts()?
                            )));
                        }
                        let bytes = tensor.bytes / experts as u64;
                        parts.extend((0..experts).map(|expert| GgufPart {
                            name: format!(
                                "{prefix}{}.experts.{expert}.{projection}.weight",
                                family.moe_block
                            ),
                            shape: vec![rows, cols],
                            kind: tensor.kind,
                            offset: tensor.offset + bytes * expert as u64,
                            bytes,
                            paired_heads: None,
                        }));
                    } else if let Some(name) =
                        family.experts.and_then(|names| single_expert(names, tail))
                    {
                        parts.push(whole(format!("{prefix}{}.{name}", family.moe_block)));
                    } else {
                        unknown.push(other);
                    }
                }
            }
        }
        if unknown.is_empty() {
            return Ok(parts);
        }
        Err(self.bad(format!(
            "holds {} tensors that {} does not have here: {}",
            unknown.len(),
            family.architecture,
            unknown
                .iter()
                .take(8)
                .copied()
                .collect::<Vec<_>>()
                .join(", ")
        )))
    }
}
