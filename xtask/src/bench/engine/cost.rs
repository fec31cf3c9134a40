//! What a token costs at least, from the shapes of the weights.

use twinfer_config::ModelConfig;
use twinfer_config::model::TensorKind;

/// Values that a token meets, by where they are.
pub(super) struct Cost {
    /// Met by every token.
    always: f64,
    /// All routed experts.
    experts: f64,
    /// Experts per layer and those that a token meets; 1 of 1 without experts.
    count: f64,
    top_k: f64,
    /// Met by tokens whose logits are wanted.
    head: f64,
}

impl Cost {
    pub(super) fn of(config: &ModelConfig) -> Self {
        let (mut always, mut experts, mut head) = (0.0, 0.0, 0.0);
        for tensor in config.tensors(false).tensors {
            let values = tensor.len() as f64;
            match tensor.kind {
                TensorKind::Embedding if config.tied_head => head = values,
                TensorKind::Embedding | TensorKind::Vector => {}
                _ if tensor.name == "lm_head.weight" => head = values,
                _ if tensor.name.contains(".experts.") => experts += values,
                _ => always += values,
            }
        }
        let (count, top_k) = config
            .moe
            .as_ref()
            .map_or((1.0, 1.0), |moe| (moe.experts as f64, moe.top_k as f64));
        Self {
            always,
            experts,
            count,
            top_k,
            head,
        }
    }

    /// Operations of a prompt token, a multiply-add counting two; logits are wanted for one of many.
    pub(super) fn prefill(&self) -> f64 {
        2.0 * (self.always + self.experts * self.top_k / self.count)
    }

    /// Bytes that a decode step of `batch` tokens must read: of the experts those that are expected to
    /// be chosen by at least one token.
    pub(super) fn bytes(&self, batch: usize, bytes_per_value: f64) -> f64 {
        let met =
            1.0 - (1.0 - self.top_k / self.count).powi(i32::try_from(batch).unwrap_or(i32::MAX));
        (self.always + self.head + self.experts * met) * bytes_per_value
    }

    /// Tokens per second: the smaller of bandwidth over bytes and peak over operations.
    pub(super) fn decode_floor(
        &self,
        batch: usize,
        bytes_per_value: f64,
        bandwidth: f64,
        peak: f64,
    ) -> f64 {
        let by_reading = bandwidth / self.bytes(batch, bytes_per_value) * batch as f64;
        let by_computing = peak / (self.prefill() + 2.0 * self.head);
        by_reading.min(by_computing)
    }
}
