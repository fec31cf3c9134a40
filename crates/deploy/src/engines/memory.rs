//! Memory of a device: weights, buffers and what is left for KV. Arithmetic on the model's shape.

use serde::Serialize;
use std::fmt;
use twinfer_config::model::{AttentionConfig, KvShape, TensorKind, expert_of};
use twinfer_config::{Dtype, ModelConfig};

const GIB: f64 = (1u64 << 30) as f64;

/// How a model is spread and run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    pub(crate) dp: u32,
    pub(crate) tp: u32,
    pub(crate) ep: Option<u32>,
    /// Bytes of a weight of a linear layer.
    pub(crate) weight_bytes: f64,
    pub(crate) drafts: u64,
    pub(crate) utilization: f64,
    /// Bytes of a device.
    pub(crate) device: f64,
    /// `HCCL_BUFFSIZE` in MB; none: no such library.
    pub(crate) buffer_mb: Option<f64>,
    pub(crate) max_num_seqs: u64,
    pub(crate) max_num_batched_tokens: u64,
    pub(crate) max_model_len: u64,
    pub(crate) block: usize,
}

/// Memory of one device of an instance, in GiB.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceMemory {
    /// Instance.
    pub instance: String,
    /// Of the device.
    pub device: f64,
    /// Weights.
    pub weights: f64,
    /// Hidden states and logits of the largest step; the engine's own buffers are not known.
    pub workspace: f64,
    /// Buffers of the collective library: two of `HCCL_BUFFSIZE` per communicator.
    pub collectives: f64,
    /// KV, of what `gpu-memory-utilization` permits.
    pub kv: f64,
    /// Left outside it, after the collective library's buffers.
    pub spare: f64,
    /// Tokens that KV holds.
    pub kv_tokens: u64,
    /// Sequences of `max-model-len` that it holds.
    pub full_windows: f64,
}

impl fmt::Display for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {:.1} GiB = weights {:.1} + largest step {:.1} + KV {:.1} ({} tokens, {:.1} full windows) + collectives {:.1} + spare {:.1}; \
             graphs and the engine's own buffers come out of KV",
            self.instance,
            self.device,
            self.weights,
            self.workspace,
            self.kv,
            self.kv_tokens,
            self.full_windows,
            self.collectives,
            self.spare
        )
    }
}

/// Numbers of weights of a model, by how they are spread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Weights {
    /// Of experts: in linear layers, in all else.
    experts: [f64; 2],
    /// Of linear layers, embeddings, and all else, which each device has whole.
    linear: f64,
    embeddings: f64,
    whole: f64,
}

impl Weights {
    /// Counts those of `model`, with its draft layers if `drafts`.
    pub(crate) fn of(model: &ModelConfig, drafts: bool) -> Self {
        let mut weights = Self::default();
        for tensor in &model.tensors(drafts).tensors {
            let linear = tensor.kind == TensorKind::Linear;
            let place = match tensor.kind {
                _ if expert_of(&tensor.name).is_some() => {
                    &mut weights.experts[usize::from(!linear)]
                }
                TensorKind::Linear => &mut weights.linear,
                TensorKind::Embedding => &mut weights.embeddings,
                _ => &mut weights.whole,
            };
            *place += tensor.len() as f64;
        }
        weights
    }

    /// Bytes of a device.
    fn bytes(&self, spread: &Spread) -> f64 {
        let tp = f64::from(spread.tp);
        // Experts are spread over `ep` devices whole, or over `tp` in slices.
        let experts = f64::from(spread.ep.unwrap_or(spread.tp));
        (self.experts[0] * spread.weight_bytes + self.experts[1] * 2.0) / experts
            + (self.linear * spread.weight_bytes + self.embeddings * 2.0) / tp
            + self.whole * 2.0
    }
}

/// Memory of a device, in GiB.
pub(crate) fn of(
    instance: &str,
    model: &ModelConfig,
    weights: &Weights,
    spread: &Spread,
) -> DeviceMemory {
    let tp = f64::from(spread.tp);
    let weights = weights.bytes(spread);
    let hidden = model.hidden_size as f64;
    let tokens = spread.max_num_batched_tokens as f64;
    let rows = (spread.max_num_seqs * (1 + spread.drafts)) as f64;
    // Residual, normed and attention output in bf16; logits in f32.
    let workspace = tokens * hidden * 2.0 * 4.0 + rows * model.vocab_size as f64 * 4.0 / tp;
    let communicators = [
        spread.tp > 1,
        spread.dp > 1,
        spread.ep.is_some_and(|ep| ep > 1),
    ]
    .into_iter()
    .filter(|used| *used)
    .count() as f64;
    let collectives = spread
        .buffer_mb
        .map_or(0.0, |mb| mb * 1e6 * 2.0 * communicators);
    let budget = spread.device * spread.utilization;
    let kv = (budget - weights - workspace).max(0.0);
    let share = match &model.attention {
        // The latent is the same on all devices of a rank.
        AttentionConfig::Mla(_) => 1.0,
        AttentionConfig::Gqa(gqa) => tp.min(gqa.kv_heads as f64),
    };
    let shape = KvShape::of(model, Dtype::Bf16, spread.block);
    let token = shape.token_bytes() as f64 / share;
    let kv_tokens = (kv / token) as u64;
    DeviceMemory {
        instance: instance.to_owned(),
        device: spread.device / GIB,
        weights: weights / GIB,
        workspace: workspace / GIB,
        collectives: collectives / GIB,
        kv: kv / GIB,
        spare: (spread.device - budget - collectives) / GIB,
        kv_tokens,
        full_windows: kv_tokens as f64 / spread.max_model_len.max(1) as f64,
    }
}
