//! What a token costs at least, from the shapes of the weights.

use super::Machine;
use twinfer_config::ModelConfig;
use twinfer_config::model::{AttentionConfig, TensorKind, TensorSpec};

/// Scale and addend that lie beside each output of a matrix in int8.
const BYTES_BESIDE_ROW: f64 = 8.0;

/// Weights of a part of the model.
#[derive(Clone, Copy, Default)]
struct Part {
    /// Values multiplied in the type of the weights.
    values: f64,
    /// Values that stay bf16 whatever the others are: kv_b_proj of latent attention, routers.
    wide: f64,
    /// Bytes in memory.
    bytes: f64,
}

/// Weights of a model by when they are met, and what attention adds.
pub(super) struct Cost {
    quantised: bool,
    /// Met by every token.
    always: Part,
    /// All routed experts.
    experts: Part,
    /// Met by tokens whose logits are wanted.
    head: Part,
    /// MTP layer, without its experts, and its experts.
    mtp: (Part, Part),
    /// Share of the experts that a token meets; 1 without experts.
    chosen: f64,
    /// Operations per token and position attended to, in all layers.
    attention: f64,
    /// Are those bf16, whatever the weights are?
    latent: bool,
    /// Bytes of KV per position, in all layers.
    kv: f64,
}

impl Part {
    fn add(&mut self, tensor: &TensorSpec, quantised: bool) {
        let values = tensor.len() as f64;
        let rows = tensor.shape.first().copied().unwrap_or(0) as f64;
        let wide = tensor.kind == TensorKind::Router || tensor.name.ends_with("kv_b_proj.weight");
        match tensor.kind {
            TensorKind::Vector => self.bytes += values * 4.0,
            _ if wide => {
                self.wide += values;
                self.bytes += values * 2.0;
            }
            _ => {
                self.values += values;
                self.bytes += if quantised {
                    values + rows * BYTES_BESIDE_ROW
                } else {
                    values * 2.0
                };
            }
        }
    }
}

impl Cost {
    /// Of a model in bf16, or with linear layers and head in int8.
    pub(super) fn of(config: &ModelConfig, quantised: bool) -> Self {
        let (mut always, mut experts, mut head) =
            (Part::default(), Part::default(), Part::default());
        let mut mtp = (Part::default(), Part::default());
        let behind_last = format!("model.layers.{}.", config.layers);
        for tensor in config.tensors(config.mtp_layers > 0).tensors {
            let in_mtp = tensor.name.starts_with(&behind_last);
            let part = match (tensor.kind, tensor.name.contains(".experts."), in_mtp) {
                (TensorKind::Embedding, ..) if config.tied_head => &mut head,
                (TensorKind::Embedding, ..) => continue,
                _ if tensor.name == "lm_head.weight" => &mut head,
                (_, false, false) => &mut always,
                (_, true, false) => &mut experts,
                (_, false, true) => &mut mtp.0,
                (_, true, true) => &mut mtp.1,
            };
            part.add(&tensor, quantised);
        }
        let layers = config.layers as f64;
        let (attention, width, latent) = match &config.attention {
            AttentionConfig::Gqa(gqa) => (
                4 * gqa.heads * gqa.head_dim,
                2 * gqa.kv_heads * gqa.head_dim,
                false,
            ),
            AttentionConfig::Mla(mla) => (
                2 * mla.heads * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim),
                mla.kv_lora_rank + mla.qk_rope_head_dim,
                true,
            ),
        };
        Self {
            quantised,
            always,
            experts,
            head,
            mtp,
            chosen: config
                .moe
                .as_ref()
                .map_or(1.0, |moe| moe.top_k as f64 / moe.experts as f64),
            attention: attention as f64 * layers,
            latent,
            kv: (width * 2) as f64 * layers,
        }
    }

    /// Tokens per second of a prompt of `tokens` by arithmetic alone; logits are wanted for one of many.
    pub(super) fn prefill_floor(&self, tokens: usize, machine: &Machine) -> f64 {
        let positions = (tokens as f64 + 1.0) / 2.0;
        1.0 / self.seconds(positions, 0.0, machine)
    }

    /// Bytes that a decode step of `batch` tokens must read, each after `context` others: of the experts
    /// those that are expected to be chosen by at least one token.
    pub(super) fn bytes(&self, batch: usize, context: usize) -> f64 {
        let batch = batch as f64;
        self.always.bytes
            + self.head.bytes
            + self.experts.bytes * self.met(batch)
            + self.kv * batch * context as f64
    }

    /// Bytes of a round with one draft after `context` tokens: two rows are verified; then the MTP layer
    /// takes the settled ones, two if the draft stood, and the head names the next draft.
    pub(super) fn round_bytes(&self, accepted: f64, context: usize) -> f64 {
        let of_layer = |settled: f64| self.mtp.1.bytes * self.met(settled);
        let experts = of_layer(1.0) * (1.0 - accepted) + of_layer(2.0) * accepted;
        let verify = self.always.bytes + self.head.bytes + self.experts.bytes * self.met(2.0);
        verify + self.mtp.0.bytes + experts + self.head.bytes + self.kv * context as f64
    }

    /// Tokens per second: the smaller of bandwidth over bytes and arithmetic.
    pub(super) fn decode_floor(&self, batch: usize, context: usize, machine: &Machine) -> f64 {
        let by_reading = machine.read / self.bytes(batch, context) * batch as f64;
        let by_computing = 1.0 / self.seconds(context as f64, self.head.values, machine);
        by_reading.min(by_computing)
    }

    /// Time of a token's arithmetic.
    fn seconds(&self, positions: f64, head: f64, machine: &Machine) -> f64 {
        let values = self.always.values + self.experts.values * self.chosen + head;
        let attention = self.attention * positions;
        let (fast, slow) = if self.latent {
            (2.0 * values, 2.0 * self.always.wide + attention)
        } else {
            (2.0 * values + attention, 2.0 * self.always.wide)
        };
        let peak = if self.quantised {
            machine.int8
        } else {
            machine.bf16
        };
        fast / peak + slow / machine.bf16
    }

    /// Share of the experts that at least one of so many tokens meets.
    fn met(&self, tokens: f64) -> f64 {
        1.0 - (1.0 - self.chosen).powf(tokens)
    }
}
