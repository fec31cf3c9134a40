use super::Builder;
use super::scratch::sized;
use crate::ModelError;
use twinfer_kernels::{KernelError, ThreadTeam, Weight, product, product_gated};

/// One gated network: down(silu(gate(x)) * up(x)).
#[derive(Debug)]
pub(crate) struct Ffn {
    /// Gate above up `[2 * width, hidden]`.
    pub(crate) gate_up: Weight,
    /// `[hidden, width]`.
    pub(crate) down: Weight,
}

/// Names of a network's matrices in a family's checkpoints.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FfnNames {
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

/// What all families but Mixtral call them.
pub(crate) const USUAL_NAMES: FfnNames = FfnNames {
    gate: "gate_proj",
    up: "up_proj",
    down: "down_proj",
};

impl Ffn {
    pub(crate) fn build(
        builder: &Builder<'_>,
        path: &str,
        names: FfnNames,
    ) -> Result<Self, ModelError> {
        let name = |part: &str| format!("{path}.{part}");
        Ok(Self {
            gate_up: builder.linear(&[name(names.gate), name(names.up)])?,
            down: builder.linear(&[name(names.down)])?,
        })
    }

    /// `x` `[rows, hidden]` to `out` `[rows, hidden]`.
    pub(crate) fn forward(
        &self,
        team: &ThreadTeam,
        x: &[f32],
        gate_up: &mut Vec<f32>,
        gated: &mut Vec<f32>,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let rows = x.len() / self.gate_up.cols();
        let gate_up = sized(gate_up, rows * self.gate_up.rows());
        product(team, x, &self.gate_up, gate_up)?;
        product_gated(team, gate_up, &self.down, gated, out)
    }
}
