//! Linear layers that checkpoints store as int8, with their scales, offsets and biases.

use super::{Builder, joined, refused};
use crate::ModelError;
use crate::model::stored::Stored;
use crate::weights::{Scheme, fixed_input};
use twinfer_kernels::{Activation, Int8Rows, RowScales, Weight};

/// int8 rows of one matrix, with what scales them.
pub(super) struct Quantised {
    pub(super) values: Vec<i8>,
    pub(super) scales: Scales,
    pub(super) activation: Activation,
    pub(super) bias: Option<Vec<f32>>,
}

pub(super) enum Scales {
    Channel(Vec<f32>),
    Dequant { scale: Vec<f32>, bias: Vec<i32> },
}

impl Builder<'_> {
    /// Linear layers stored as int8.
    pub(super) fn int8<S: AsRef<str>>(
        &self,
        joint: &str,
        modules: &[S],
    ) -> Result<(Weight, Option<Vec<f32>>), ModelError> {
        let mut parts = Vec::with_capacity(modules.len());
        let mut cols = 0;
        for module in modules {
            let name = format!("{}.weight", module.as_ref());
            cols = self.shape(&name)?.1;
            parts.push(self.quantised(module.as_ref())?);
        }
        // One for all parts: the checkpoint was refused if they differ.
        let Some(activation) = parts.first().map(|part| part.activation) else {
            return Err(refused("a linear layer of no matrices".to_owned()));
        };
        let rows: Vec<Int8Rows<'_>> = parts
            .iter()
            .map(|part| Int8Rows {
                values: &part.values,
                scales: match &part.scales {
                    Scales::Channel(scales) => RowScales::Channel(scales),
                    Scales::Dequant { scale, bias } => RowScales::Dequant { scale, bias },
                },
            })
            .collect();
        let weight = self.pack_int8(joint, cols, &rows, activation)?;
        drop(rows);
        let counts: Vec<usize> = parts.iter().map(|part| part.values.len() / cols).collect();
        let biases = parts.into_iter().map(|part| part.bias).collect();
        Ok((weight, joined(biases, &counts)))
    }

    /// One matrix in int8 with all that belongs to it.
    pub(super) fn quantised(&self, module: &str) -> Result<Quantised, ModelError> {
        let name = format!("{module}.weight");
        let part = |part: &str| format!("{module}.{part}");
        let (rows, cols) = self.shape(&name)?;
        let Stored::I8(values) = self.stored(&name)? else {
            return Err(refused(format!("{name} is not I8")));
        };
        let offset = self.floats_if(&part("weight_offset"))?;
        if offset.is_some_and(|offset| offset.iter().any(|value| *value != 0.0)) {
            return Err(refused(format!(
                "{} is not zero; allowed: symmetric weights, whose offset is 0",
                part("weight_offset")
            )));
        }
        let bias = self.floats_if(&part("bias"))?;
        let scheme = self.checkpoint.scheme(&name);
        let channel = || -> Result<Vec<f32>, ModelError> {
            let mut scales = self.floats(&part("weight_scale"))?;
            if scales.len() == 1 {
                scales.resize(rows, scales[0]);
            }
            Ok(scales)
        };
        let fixed = |offset: &str| -> Result<Activation, ModelError> {
            let scale = self.floats(&part("input_scale"))?;
            let offset = self.floats_if(&part(offset))?.unwrap_or_default();
            let offset = offset.first().copied().unwrap_or(0.0);
            let scale = scale.first().copied().unwrap_or(0.0);
            fixed_input(module, scale, offset).map_err(refused)
        };
        let (scales, activation, bias) = match scheme {
            Scheme::Static { .. } => (
                Scales::Channel(channel()?),
                fixed("input_zero_point")?,
                bias,
            ),
            Scheme::SlimStatic => {
                // Read for the hash of the weights; it is part of deq_scale.
                self.floats_if(&part("weight_scale"))?;
                let scales = Scales::Dequant {
                    scale: self.deq_scale(&part("deq_scale"))?,
                    bias: self.integers(&part("quant_bias"))?,
                };
                // quant_bias holds the layer's own bias too.
                (scales, fixed("input_offset")?, None)
            }
            Scheme::SlimMix => {
                let scale = self.deq_scale(&part("deq_scale"))?;
                let quant_bias = self.integers(&part("quant_bias"))?;
                let Activation::Static { offset, .. } = fixed("input_offset")? else {
                    return Err(refused(format!("{name} has no static activations")));
                };
                let own = own_bias(&values, cols, offset, &quant_bias, &scale);
                (
                    Scales::Channel(channel()?),
                    Activation::PerToken,
                    bias.or(own),
                )
            }
            _ => (Scales::Channel(channel()?), Activation::PerToken, bias),
        };
        Ok(Quantised {
            values,
            scales,
            activation,
            bias,
        })
    }

    /// ModelSlim's `deq_scale`: f32, or i64 that holds the bits of an f32.
    fn deq_scale(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        Ok(match self.stored(name)? {
            Stored::I64(values) => values
                .iter()
                .map(|value| f32::from_bits(*value as u32))
                .collect(),
            other => other.floats(),
        })
    }

    pub(in crate::model) fn integers(&self, name: &str) -> Result<Vec<i32>, ModelError> {
        match self.stored(name)? {
            Stored::I32(values) => Ok(values),
            _ => Err(refused(format!("{name} is not I32"))),
        }
    }
}

/// The layer's own bias inside `quant_bias`, if there is one: what is left when the offset's part
/// `-offset * sum(row)` is taken out, times `deq_scale`.
fn own_bias(
    values: &[i8],
    cols: usize,
    offset: i32,
    quant_bias: &[i32],
    deq_scale: &[f32],
) -> Option<Vec<f32>> {
    let bias: Vec<f32> = values
        .chunks_exact(cols)
        .zip(quant_bias)
        .zip(deq_scale)
        .map(|((row, quant), scale)| {
            let sum: i64 = row.iter().map(|q| i64::from(*q)).sum();
            (i64::from(*quant) + i64::from(offset) * sum) as f32 * scale
        })
        .collect();
    bias.iter().any(|value| *value != 0.0).then_some(bias)
}
