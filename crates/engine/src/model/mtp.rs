//! The layer for multi-token prediction of DeepSeek-V3 (arXiv 2412.19437, section 2.2), used to propose
//! tokens.
//!
//! Slot i joins what the model knows after token i with token i + 1:
//! `z = join([norm(embed(t_{i+1})) ; norm(h_i)])`, where `h_i` is the model's output behind its last norm,
//! the row that feeds the head. A decoder layer runs over the slots with KV of its own, at the positions of
//! the tokens i; `g_i = norm(layer(z))` times the head gives logits of token i + 2. For more tokens than
//! one, the layer is applied to its own output: draft and `g` take the places of token and `h`.
//!
//! The embedding of slot 0 is not zeroed (transformers; vLLM does): drafts differ a little, text does not.

use super::decoder::Layer;
use super::norm::Norm;
use super::scratch::sized;
use super::step::{Span, Step};
use super::{Builder, Scratch};
use crate::ModelError;
use twinfer_config::ModelConfig;
use twinfer_kernels::{KernelError, Weight, product};

/// Weights of the layer. Embedding and head are the model's own.
#[derive(Debug)]
pub(crate) struct Mtp {
    embed_norm: Norm,
    hidden_norm: Norm,
    /// `[hidden, 2 * hidden]`.
    join: Weight,
    pub(super) layer: Layer,
    pub(super) norm: Norm,
}

/// Buffers of drafting, kept between steps.
#[derive(Debug, Default)]
pub(crate) struct DraftScratch {
    /// Model's output behind its last norm, of all rows of the last step `[rows, hidden]`.
    pub(crate) known: Vec<f32>,
    /// Normed embeddings beside normed outputs `[rows, 2 * hidden]`.
    pub(crate) joined: Vec<f32>,
    /// Output of the layer behind its norm, of each work's last row `[works, hidden]`.
    pub(crate) last: Vec<f32>,
    pub(crate) logits: Vec<f32>,
    /// Rows of the current round.
    pub(crate) spans: Vec<Span>,
    /// Works of the current round, by their index among all.
    pub(crate) works: Vec<usize>,
    /// Where each work's drafts begin.
    pub(crate) starts: Vec<usize>,
}

impl Mtp {
    /// Layer `index` of the checkpoint.
    pub(super) fn build(
        config: &ModelConfig,
        builder: &Builder<'_>,
        index: usize,
    ) -> Result<Self, ModelError> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let epsilon = config.rms_norm_eps;
        Ok(Self {
            embed_norm: builder.norm(&name("enorm"), epsilon)?,
            hidden_norm: builder.norm(&name("hnorm"), epsilon)?,
            join: builder.linear(&[name("eh_proj")])?,
            layer: Layer::build(config, builder, index)?,
            norm: builder.norm(&name("shared_head.norm"), epsilon)?,
        })
    }

    /// Norms the pairs of embedding and known output in `joined` `[rows, 2 * hidden]` and joins them into
    /// `scratch.hidden`.
    pub(super) fn join(
        &self,
        step: &Step<'_>,
        joined: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        let width = self.embed_norm.width();
        for pair in joined.chunks_exact_mut(2 * width) {
            let (embedding, known) = pair.split_at_mut(width);
            self.embed_norm.apply_row(step.team, embedding)?;
            self.hidden_norm.apply_row(step.team, known)?;
        }
        let hidden = sized(&mut scratch.hidden, step.rows * width);
        product(step.team, joined, &self.join, hidden)
    }
}
