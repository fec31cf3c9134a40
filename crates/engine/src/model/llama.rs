//! Llama (Touvron et al. 2023, arXiv 2307.09288; SmolLM2 too) and Mixtral (arXiv 2401.04088).
//!
//! Layer: `x += attention(norm(x))`, `x += network(norm(x))`, grouped-query attention with half-split
//! rotation. Mixtral has eight networks in each layer instead of one; its matrices are `w1` (gate), `w3`
//! (up), `w2` (down), its router takes the softmax of the chosen experts' logits.

use super::Builder;
use super::decoder::{Layer, Mlp, gqa};
use super::ffn::{Ffn, FfnNames, USUAL_NAMES};
use super::moe::Moe;
use crate::ModelError;
use twinfer_config::ModelConfig;

const MIXTRAL_NAMES: FfnNames = FfnNames {
    gate: "w1",
    up: "w3",
    down: "w2",
};

pub(super) fn layer(
    config: &ModelConfig,
    builder: &Builder<'_>,
    index: usize,
) -> Result<Layer, ModelError> {
    let name = |part: &str| format!("model.layers.{index}.{part}");
    let epsilon = config.rms_norm_eps;
    Ok(Layer {
        input_norm: builder.norm(&name("input_layernorm"), epsilon)?,
        attention: gqa(config, builder, &name("self_attn"))?,
        post_norm: builder.norm(&name("post_attention_layernorm"), epsilon)?,
        mlp: match &config.moe {
            None => Mlp::Dense(Ffn::build(builder, &name("mlp"), USUAL_NAMES)?),
            Some(moe) => Mlp::Moe(Box::new(Moe::build(
                moe,
                builder,
                &name("block_sparse_moe"),
                MIXTRAL_NAMES,
            )?)),
        },
    })
}
