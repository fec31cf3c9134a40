use super::{Architecture, AttentionConfig, GqaConfig, MlaConfig, ModelConfig, MoeConfig, Routing};

/// What a tensor is to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorKind {
    /// Token embedding `[vocab, hidden]`.
    Embedding,
    /// A vector: norm or bias.
    Vector,
    /// The matrix of a linear layer `[out, in]`: may be quantised.
    Linear,
    /// The matrix of a router `[experts, hidden]`: never quantised.
    Router,
}

/// A tensor that a checkpoint must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape; matrices are `[out, in]`.
    pub shape: Vec<usize>,
    /// What it is.
    pub kind: TensorKind,
}

/// All tensors that a checkpoint of a config must hold, by name, in the order of the forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpecs {
    /// Tensors.
    pub tensors: Vec<TensorSpec>,
    /// The embedding is the head.
    pub tied_head: bool,
    /// Tensors of MTP layers are among them.
    pub with_mtp: bool,
    layers: usize,
    mtp_layers: usize,
}

/// The routed expert that a tensor of this name is part of, by its number in its layer.
pub fn expert_of(name: &str) -> Option<u32> {
    let (_, rest) = name.split_once(".experts.")?;
    rest.split('.').next()?.parse().ok()
}

/// Parts of an MTP layer that no other layer has.
const MTP_ONLY: &[&str] = &[
    "eh_proj.",
    "enorm.",
    "hnorm.",
    "shared_head.",
    "embed_tokens.",
];

impl TensorSpec {
    /// Number of values.
    pub fn len(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).product()
    }

    /// Has a dimension of 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Name of the module that the tensor is the weight of.
    pub fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }
}

/// Collects tensors under a layer's prefix.
struct List {
    tensors: Vec<TensorSpec>,
    prefix: String,
}

impl List {
    fn add(&mut self, name: &str, kind: TensorKind, shape: &[usize]) {
        self.tensors.push(TensorSpec {
            name: format!("{}{name}", self.prefix),
            shape: shape.to_vec(),
            kind,
        });
    }

    fn vector(&mut self, name: &str, len: usize) {
        self.add(name, TensorKind::Vector, &[len]);
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize) {
        self.add(&format!("{name}.weight"), TensorKind::Linear, &[rows, cols]);
    }

    /// A gated network; `names` are those of gate, up and down.
    fn ffn(&mut self, path: &str, names: [&str; 3], width: usize, hidden: usize) {
        self.linear(&format!("{path}{}", names[0]), width, hidden);
        self.linear(&format!("{path}{}", names[1]), width, hidden);
        self.linear(&format!("{path}{}", names[2]), hidden, width);
    }
}

impl ModelConfig {
    /// The tensors of the main model and, if asked for, of the MTP layers. With a tied head
    /// `lm_head.weight` is left out; the copies of embedding and head that MTP layers may bring are
    /// never asked for.
    pub fn tensors(&self, with_mtp: bool) -> TensorSpecs {
        let hidden = self.hidden_size;
        let mut list = List {
            tensors: Vec::new(),
            prefix: String::new(),
        };
        list.add(
            "model.embed_tokens.weight",
            TensorKind::Embedding,
            &[self.vocab_size, hidden],
        );
        let mtp = if with_mtp { self.mtp_layers } else { 0 };
        for layer in 0..self.layers + mtp {
            list.prefix = format!("model.layers.{layer}.");
            if layer >= self.layers {
                list.vector("enorm.weight", hidden);
                list.vector("hnorm.weight", hidden);
                list.linear("eh_proj", hidden, 2 * hidden);
            }
            list.vector("input_layernorm.weight", hidden);
            match &self.attention {
                AttentionConfig::Gqa(gqa) => gqa_tensors(&mut list, gqa, hidden),
                AttentionConfig::Mla(mla) => mla_tensors(&mut list, mla, hidden),
            }
            list.vector("post_attention_layernorm.weight", hidden);
            match self.moe.as_ref().filter(|_| self.is_moe(layer)) {
                Some(moe) => moe_tensors(&mut list, moe, self.architecture, hidden),
                None => list.ffn(
                    "mlp.",
                    ["gate_proj", "up_proj", "down_proj"],
                    self.intermediate_size.unwrap_or(0),
                    hidden,
                ),
            }
            if layer >= self.layers {
                list.vector("shared_head.norm.weight", hidden);
            }
        }
        list.prefix = String::new();
        list.vector("model.norm.weight", hidden);
        if !self.tied_head {
            list.linear("lm_head", self.vocab_size, hidden);
        }
        TensorSpecs {
            tensors: list.tensors,
            tied_head: self.tied_head,
            with_mtp,
            layers: self.layers,
            mtp_layers: self.mtp_layers,
        }
    }
}

fn gqa_tensors(list: &mut List, gqa: &GqaConfig, hidden: usize) {
    let (query, key) = (gqa.heads * gqa.head_dim, gqa.kv_heads * gqa.head_dim);
    for (name, rows) in [("q_proj", query), ("k_proj", key), ("v_proj", key)] {
        list.linear(&format!("self_attn.{name}"), rows, hidden);
        if gqa.qkv_bias {
            list.vector(&format!("self_attn.{name}.bias"), rows);
        }
    }
    if gqa.head_norms {
        list.vector("self_attn.q_norm.weight", gqa.head_dim);
        list.vector("self_attn.k_norm.weight", gqa.head_dim);
    }
    list.linear("self_attn.o_proj", hidden, query);
    if gqa.out_bias {
        list.vector("self_attn.o_proj.bias", hidden);
    }
}

fn mla_tensors(list: &mut List, mla: &MlaConfig, hidden: usize) {
    let query = mla.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim);
    match mla.q_lora_rank {
        Some(rank) => {
            list.linear("self_attn.q_a_proj", rank, hidden);
            list.vector("self_attn.q_a_layernorm.weight", rank);
            list.linear("self_attn.q_b_proj", query, rank);
        }
        None => list.linear("self_attn.q_proj", query, hidden),
    }
    let rank = mla.kv_lora_rank;
    list.linear(
        "self_attn.kv_a_proj_with_mqa",
        rank + mla.qk_rope_head_dim,
        hidden,
    );
    list.vector("self_attn.kv_a_layernorm.weight", rank);
    let expanded = mla.heads * (mla.qk_nope_head_dim + mla.v_head_dim);
    list.linear("self_attn.kv_b_proj", expanded, rank);
    list.linear("self_attn.o_proj", hidden, mla.heads * mla.v_head_dim);
}

fn moe_tensors(list: &mut List, moe: &MoeConfig, architecture: Architecture, hidden: usize) {
    let (path, names) = match architecture {
        Architecture::Mixtral => ("block_sparse_moe.", ["w1", "w3", "w2"]),
        _ => ("mlp.", ["gate_proj", "up_proj", "down_proj"]),
    };
    for expert in 0..moe.experts {
        list.ffn(
            &format!("{path}experts.{expert}."),
            names,
            moe.intermediate,
            hidden,
        );
    }
    if moe.shared > 0 {
        list.ffn(
            &format!("{path}shared_experts."),
            names,
            moe.shared * moe.intermediate,
            hidden,
        );
    }
    list.add(
        &format!("{path}gate.weight"),
        TensorKind::Router,
        &[moe.experts, hidden],
    );
    if matches!(moe.routing, Routing::BiasedSigmoid { .. }) {
        list.vector(&format!("{path}gate.e_score_correction_bias"), moe.experts);
    }
}

/// Layer number and rest of a tensor's name.
fn layer_of(name: &str) -> Option<(usize, &str)> {
    let (index, tail) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((index.parse().ok()?, tail))
}

impl TensorSpecs {
    /// Number of values of all tensors.
    pub fn values(&self) -> u64 {
        self.tensors.iter().map(TensorSpec::len).sum()
    }

    /// May a checkpoint hold this tensor although it is not read? MTP layers or their copies of
    /// embedding and head, a head that is tied, and the frequency tables that old exports carry.
    pub fn is_spare(&self, name: &str) -> bool {
        if self.tied_head && name == "lm_head.weight" {
            return true;
        }
        let Some((layer, tail)) = layer_of(name) else {
            return false;
        };
        let mtp = (self.layers..self.layers + self.mtp_layers).contains(&layer);
        let copy = tail.starts_with("embed_tokens.") || tail.starts_with("shared_head.head.");
        (mtp && (!self.with_mtp || copy)) || tail == "self_attn.rotary_emb.inv_freq"
    }

    /// What shows that `num_hidden_layers` or `num_nextn_predict_layers` is not that of the files: a
    /// layer behind the last, a part of an MTP layer in another one, an MTP layer without such parts.
    /// One text per layer. Taken at its word, such a config would drop layers or run an MTP layer as a
    /// plain one, and the text would be fluent and wrong.
    pub fn contradictions<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<String> {
        let end = self.layers + self.mtp_layers;
        let mut found = std::collections::BTreeMap::new();
        let mut mtp: Vec<(Option<&str>, bool)> = vec![(None, false); self.mtp_layers];
        for name in names {
            let Some((layer, tail)) = layer_of(name) else {
                continue;
            };
            let special = MTP_ONLY.iter().any(|part| tail.starts_with(part));
            if layer >= end {
                found.entry(layer).or_insert_with(|| {
                    format!(
                        "{name} is behind the last layer: num_hidden_layers is {} and num_nextn_predict_layers {}",
                        self.layers, self.mtp_layers
                    )
                });
            } else if layer < self.layers {
                if special {
                    found.entry(layer).or_insert_with(|| {
                        format!(
                            "{name} is part of an MTP layer, but num_hidden_layers is {}, so that layer {layer} is a plain one",
                            self.layers
                        )
                    });
                }
            } else if let Some((first, any)) = mtp.get_mut(layer - self.layers) {
                first.get_or_insert(name);
                *any |= special;
            }
        }
        for (index, (first, special)) in mtp.into_iter().enumerate() {
            if let Some(name) = first.filter(|_| !special) {
                let layer = self.layers + index;
                found.entry(layer).or_insert_with(|| {
                    format!(
                        "{name} is part of a plain layer, but num_hidden_layers is {}, so that layer {layer} is an MTP layer",
                        self.layers
                    )
                });
            }
        }
        found.into_values().collect()
    }
}
