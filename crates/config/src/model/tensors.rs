use super::ModelConfig;

/// A tensor that a checkpoint must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape; matrices are `[out, in]`.
    pub shape: Vec<usize>,
}

/// All tensors that a checkpoint of a config must hold, by name, in the order of the forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpecs {
    /// Tensors.
    pub tensors: Vec<TensorSpec>,
    /// The embedding is the head.
    pub tied_head: bool,
    layers: usize,
}

impl TensorSpec {
    /// Number of values.
    pub fn len(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).product()
    }

    /// Has a dimension of 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ModelConfig {
    /// The tensors of the main model: MTP layers and, with a tied head, `lm_head.weight` are left
    /// out.
    pub fn tensors(&self) -> TensorSpecs {
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize]| {
            tensors.push(TensorSpec {
                name,
                shape: shape.to_vec(),
            });
        };
        let (mla, moe, hidden) = (&self.mla, &self.moe, self.hidden_size);
        let query = mla.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim);
        let rank = mla.kv_lora_rank;
        add(
            "model.embed_tokens.weight".to_owned(),
            &[self.vocab_size, hidden],
        );
        for layer in 0..self.layers {
            let mut at =
                |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}"), shape);
            at("input_layernorm.weight", &[hidden]);
            match mla.q_lora_rank {
                Some(q_rank) => {
                    at("self_attn.q_a_proj.weight", &[q_rank, hidden]);
                    at("self_attn.q_a_layernorm.weight", &[q_rank]);
                    at("self_attn.q_b_proj.weight", &[query, q_rank]);
                }
                None => at("self_attn.q_proj.weight", &[query, hidden]),
            }
            at(
                "self_attn.kv_a_proj_with_mqa.weight",
                &[self.kv_width(), hidden],
            );
            at("self_attn.kv_a_layernorm.weight", &[rank]);
            let expanded = mla.heads * (mla.qk_nope_head_dim + mla.v_head_dim);
            at("self_attn.kv_b_proj.weight", &[expanded, rank]);
            at(
                "self_attn.o_proj.weight",
                &[hidden, mla.heads * mla.v_head_dim],
            );
            at("post_attention_layernorm.weight", &[hidden]);
            let mut ffn = |name: &str, width: usize| {
                at(&format!("mlp.{name}gate_proj.weight"), &[width, hidden]);
                at(&format!("mlp.{name}up_proj.weight"), &[width, hidden]);
                at(&format!("mlp.{name}down_proj.weight"), &[hidden, width]);
            };
            if !self.is_moe(layer) {
                ffn("", self.intermediate_size);
                continue;
            }
            for expert in 0..moe.experts {
                ffn(&format!("experts.{expert}."), moe.intermediate);
            }
            if moe.shared > 0 {
                ffn("shared_experts.", moe.shared * moe.intermediate);
            }
            at("mlp.gate.weight", &[moe.experts, hidden]);
            at("mlp.gate.e_score_correction_bias", &[moe.experts]);
        }
        add("model.norm.weight".to_owned(), &[hidden]);
        if !self.tied_head {
            add("lm_head.weight".to_owned(), &[self.vocab_size, hidden]);
        }
        TensorSpecs {
            tensors,
            layers: self.layers,
            tied_head: self.tied_head,
        }
    }
}

impl TensorSpecs {
    /// Number of values of all tensors.
    pub fn values(&self) -> u64 {
        self.tensors.iter().map(TensorSpec::len).sum()
    }

    /// May a checkpoint hold this tensor although the main model does not read it? MTP layers, a
    /// head that is tied, and the frequency tables that old exports carry.
    pub fn is_spare(&self, name: &str) -> bool {
        if self.tied_head && name == "lm_head.weight" {
            return true;
        }
        let Some(rest) = name.strip_prefix("model.layers.") else {
            return false;
        };
        let Some((index, tail)) = rest.split_once('.') else {
            return false;
        };
        index
            .parse::<usize>()
            .is_ok_and(|index| index >= self.layers)
            || tail == "self_attn.rotary_emb.inv_freq"
    }
}
