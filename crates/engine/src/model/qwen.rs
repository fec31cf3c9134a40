//! Qwen2 (arXiv 2407.10671), Qwen3 and Qwen3-MoE (arXiv 2505.09388).
//!
//! As Llama, but: Qwen2 has biases on query, key and value; Qwen3 norms every query and key head before
//! it rotates; Qwen3-MoE has experts in place of the network, without shared ones.

use super::Builder;
use super::decoder::{Layer, Mlp, gqa};
use super::ffn::{Ffn, USUAL_NAMES};
use super::moe::Moe;
use crate::ModelError;
use twinfer_config::ModelConfig;

pub(super) fn layer(
    config: &ModelConfig,
    builder: &Builder<'_>,
    index: usize,
) -> Result<Layer, ModelError> {
    let name = |part: &str| format!("model.layers.{index}.{part}");
    let epsilon = config.rms_norm_eps;
    let experts = config.moe.as_ref().filter(|_| config.is_moe(index));
    Ok(Layer {
        input_norm: builder.norm(&name("input_layernorm"), epsilon)?,
        attention: gqa(config, builder, &name("self_attn"))?,
        post_norm: builder.norm(&name("post_attention_layernorm"), epsilon)?,
        mlp: match experts {
            None => Mlp::Dense(Ffn::build(builder, &name("mlp"), USUAL_NAMES)?),
            Some(moe) => {
                let moe = Moe::build(moe, builder, &name("mlp"), USUAL_NAMES)?;
                Mlp::Moe(Box::new(moe))
            }
        },
    })
}
