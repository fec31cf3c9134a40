use twinfer_kernels::{KernelError, ThreadTeam, add, rms_norm, rms_norm_row_in_place};

use super::rows::for_rows;

/// Root-mean-square norm: `x / sqrt(mean(x^2) + epsilon) * weight + bias`. Only checkpoints with
/// suppressed outliers have a bias.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub(crate) weight: Vec<f32>,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) epsilon: f32,
}

impl Norm {
    pub(crate) fn width(&self) -> usize {
        self.weight.len()
    }

    /// Rows of `x` into `out`.
    pub(crate) fn apply(
        &self,
        team: &ThreadTeam,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        rms_norm(team, x, &self.weight, self.epsilon, out)?;
        match &self.bias {
            None => Ok(()),
            // Lengths are equal by construction.
            Some(bias) => for_rows(team, out, bias.len(), |_, row| drop(add(row, bias))),
        }
    }

    /// One row, on the calling thread.
    pub(crate) fn apply_row(&self, team: &ThreadTeam, row: &mut [f32]) -> Result<(), KernelError> {
        rms_norm_row_in_place(team.isa(), row, &self.weight, self.epsilon)?;
        match &self.bias {
            None => Ok(()),
            Some(bias) => add(row, bias),
        }
    }
}
