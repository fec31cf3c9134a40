//! Fixed scales of the inputs of int8 layers. They are few bytes, so that they are read and compared before any matrix is.

use super::scheme::{Scheme, fused};
use super::shard::WeightDtype;
use super::{Checkpoint, WeightsError};
use std::collections::HashMap;
use twinfer_config::model::{TensorKind, TensorSpecs};
use twinfer_kernels::{Activation, bf16};

/// How the input of `module` becomes int8; why it cannot.
pub(crate) fn fixed_input(module: &str, scale: f32, offset: f32) -> Result<Activation, String> {
    if !(scale > 0.0 && scale.is_finite()) {
        return Err(format!(
            "{module}.input_scale is {scale}; allowed: a number above 0"
        ));
    }
    if offset.fract() != 0.0 || !(-128.0..=127.0).contains(&offset) {
        return Err(format!(
            "the input's offset of {module} is {offset}; allowed: -128 to 127"
        ));
    }
    Ok(Activation::Static {
        scale,
        offset: offset as i32,
    })
}

impl Checkpoint {
    /// Sentences for fixed inputs that are not served, or differ between matrices of one weight, which take the same input.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub(super) fn wrong_inputs(&self, specs: &TensorSpecs) -> Result<Vec<String>, WeightsError> {
        let mut first: HashMap<(&str, &str), (&str, Activation)> = HashMap::new();
        let mut wrong = Vec::new();
        let linear = specs.tensors.iter();
        for spec in linear.filter(|spec| spec.kind == TensorKind::Linear) {
            let offset = match self.scheme(&spec.name) {
                Scheme::Static { .. } => "input_zero_point",
                Scheme::SlimStatic => "input_offset",
                _ => continue,
            };
            let module = spec.module();
            let number = |part: &str| self.number(&format!("{module}.{part}"));
            let (scale, offset) = (number("input_scale")?, number(offset)?);
            let found = fixed_input(module, scale.unwrap_or(0.0), offset.unwrap_or(0.0));
            let activation = match found {
                Ok(activation) => activation,
                Err(reason) => {
                    wrong.push(reason);
                    continue;
                }
            };
            let (other, expected) = *first.entry(fused(spec)).or_insert((&spec.name, activation));
            if activation != expected {
                wrong.push(format!(
                    "{} is quantised for {activation:?}, but {other}, which takes the same input, for {expected:?}; allowed: the same for both",
                    spec.name
                ));
            }
        }
        Ok(wrong)
    }

    /// The value of a tensor of one; none if the files have no such tensor.
    fn number(&self, name: &str) -> Result<Option<f32>, WeightsError> {
        let Some(place) = self.places.get(name) else {
            return Ok(None);
        };
        let mut bytes = [0; 8];
        let Some(bytes) = bytes.get_mut(..place.len) else {
            return Ok(None);
        };
        self.read(name, bytes)?;
        Ok(match (place.dtype, &*bytes) {
            (WeightDtype::Bf16, &[a, b]) => {
                Some(bf16::from_bits(u16::from_le_bytes([a, b])).to_f32())
            }
            (WeightDtype::F16, &[a, b]) => {
                Some(half::f16::from_bits(u16::from_le_bytes([a, b])).to_f32())
            }
            (WeightDtype::F32, &[a, b, c, d]) => Some(f32::from_le_bytes([a, b, c, d])),
            (WeightDtype::I32, &[a, b, c, d]) => Some(i32::from_le_bytes([a, b, c, d]) as f32),
            (WeightDtype::I8, &[a]) => Some(f32::from(a.cast_signed())),
            _ => None,
        })
    }
}
