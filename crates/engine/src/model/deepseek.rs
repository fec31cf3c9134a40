//! DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3, R1, V3.1 (arXiv 2412.19437).
//!
//! Layer: `x += attention(norm(x))`, `x += network(norm(x))`, multi-head latent attention with
//! interleaved rotation. The first layers have one network, the others routed and shared experts. V2
//! chooses them by softmax, V3 by sigmoids and a bias; both may limit the choice to a few groups. V3's
//! checkpoints carry a layer for multi-token prediction behind the last.

use super::Builder;
use super::decoder::{Attention, Layer, Mlp};
use super::ffn::{Ffn, USUAL_NAMES};
use super::mla::Mla;
use super::moe::Moe;
use crate::ModelError;
use twinfer_config::ModelConfig;
use twinfer_config::model::MlaConfig;

pub(super) fn layer(
    config: &ModelConfig,
    mla: &MlaConfig,
    builder: &Builder<'_>,
    index: usize,
) -> Result<Layer, ModelError> {
    let name = |part: &str| format!("model.layers.{index}.{part}");
    let epsilon = config.rms_norm_eps;
    let experts = config.moe.as_ref().filter(|_| config.is_moe(index));
    Ok(Layer {
        input_norm: builder.norm(&name("input_layernorm"), epsilon)?,
        attention: Attention::Mla(Box::new(Mla::build(
            mla,
            builder,
            &name("self_attn"),
            config.softmax_scale(),
        )?)),
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
