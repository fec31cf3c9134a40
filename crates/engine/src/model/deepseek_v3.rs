//! DeepSeek-V3: multi-head latent attention in absorbed form, dense and expert layers.
//!
//! Formulas: DeepSeek-V2 report (arXiv 2405.04434) section 2.1 for attention, DeepSeek-V3 report
//! (arXiv 2412.19437) section 2.1 for routing, YaRN (arXiv 2309.00071) for positions. Attention has
//! one form for prefill and decode: queries are moved into latent space, so that the cached row
//! `[latent | rotated key]` is key and value at once.

use super::moe::{Experts, Ffn};
use super::rope::RopeTable;
use super::rows::for_rows;
use super::scratch::{Scratch, sized};
use super::{Builder, KvStep, Probe, ProbeRows, Tap};
use crate::{ExecError, ModelError, SeqWork};
use twinfer_config::ModelConfig;
use twinfer_kernels::{
    DType, HeadRows, KernelError, Matrix, MlaParams, MlaSeq, ThreadTeam, add, linear, mla_attention, per_head_linear,
    rms_norm, rms_norm_row_in_place, rope_interleaved,
};

/// The two low-rank norms use this whatever the config's `rms_norm_eps` says.
const LOW_RANK_EPS: f32 = 1e-6;

/// Weights and constants of a model.
#[derive(Debug)]
pub(crate) struct DeepseekV3 {
    config: ModelConfig,
    rope: RopeTable,
    softmax_scale: f32,
    embedding: Matrix,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// None: the embedding is the head.
    head: Option<Matrix>,
}

#[derive(Debug)]
struct Layer {
    input_norm: Vec<f32>,
    attention: Attention,
    post_norm: Vec<f32>,
    mlp: Mlp,
}

#[derive(Debug)]
struct Attention {
    query: Query,
    /// To latent and key `[kv_lora_rank + rope, hidden]`.
    kv_down: Matrix,
    kv_norm: Vec<f32>,
    /// Per head, transposed: query without position into latent space `[kv_lora_rank, nope]`.
    key_up: Vec<Matrix>,
    /// Per head: latent space to the head's output `[v, kv_lora_rank]`.
    value_up: Vec<Matrix>,
    out: Matrix,
}

#[derive(Debug)]
enum Query {
    Plain(Matrix),
    LowRank { down: Matrix, norm: Vec<f32>, up: Matrix },
}

#[derive(Debug)]
enum Mlp {
    Dense(Ffn),
    Moe { routed: Experts, shared: Option<Ffn> },
}

/// What a step computes on, beside the weights.
pub(crate) struct StepContext<'a> {
    pub(crate) team: &'a ThreadTeam,
    pub(crate) works: &'a [SeqWork<'a>],
    pub(crate) kv_type: DType,
    pub(crate) block_size: usize,
}

impl DeepseekV3 {
    /// Reads all weights, on `threads` threads.
    pub(crate) fn build(config: &ModelConfig, builder: &Builder<'_>, threads: usize) -> Result<Self, ModelError> {
        // The two largest matrices first, so that they do not come last on one thread.
        let embedding = builder.matrix("model.embed_tokens.weight")?;
        let head = if config.tied_head { None } else { Some(builder.matrix("lm_head.weight")?) };
        let layers = builder.parts(config.layers, threads, |layer| Layer::build(config, builder, layer))?;
        let norm = builder.vector("model.norm.weight")?;
        let frequencies = config.rope.frequencies(config.mla.qk_rope_head_dim);
        Ok(Self {
            rope: RopeTable::new(frequencies, config.rope.cos_sin_factor()),
            softmax_scale: config.softmax_scale(),
            config: config.clone(),
            embedding,
            layers,
            norm,
            head,
        })
    }

    /// One pass over the rows of all works, in order. `logits` gets a row per work that wants one.
    pub(crate) fn forward(
        &self,
        step: &StepContext<'_>,
        kv: &mut KvStep<'_>,
        scratch: &mut Scratch,
        mut probe: Option<&mut (dyn Probe + 'static)>,
        logits: &mut Vec<f32>,
    ) -> Result<(), ExecError> {
        let hidden = self.config.hidden_size;
        let rows: usize = step.works.iter().map(|work| work.tokens.len()).sum();
        self.place_rows(step.works, scratch);
        self.embed(step, scratch)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let see = &mut |tap, values: &[f32], s: &Scratch| tell(&mut probe, tap, index, s, rows, values);
            see(Tap::Hidden, &scratch.hidden[..rows * hidden], scratch);
            let _ = see;
            layer.attend(self, step, index, kv, scratch, rows, &mut probe)?;
            layer.feed(self, step, index, scratch, rows, &mut probe)?;
        }
        self.head(step, scratch, rows, &mut probe, logits)
    }
}
