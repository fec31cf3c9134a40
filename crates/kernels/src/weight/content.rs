//! A weight's content on its way from one place to another.

use super::{Form, PANEL, Weight, packing};
use crate::error::ensure_shape;
use crate::{Format, KernelError};

/// All that products read of a weight but its shape.
#[derive(Debug, Clone, Copy)]
pub struct WeightContent<'a> {
    /// How `packed` is to be read.
    pub format: Format,
    /// What [`Weight::from_packed`] takes.
    pub packed: &'a [u8],
    /// The bias, padded to whole panels.
    pub bias: Option<&'a [f32]>,
}

impl Weight {
    /// The weight's content, for [`Weight::overwrite`] of another.
    pub fn content(&self) -> WeightContent<'_> {
        WeightContent {
            format: self.format(),
            packed: match &self.form {
                Form::Plain(matrix) => matrix.bytes(),
                Form::Panels(panels) => panels.bytes(),
            },
            bias: self.bias(),
        }
    }

    /// Values that a bias has in [`WeightContent::bias`].
    pub fn bias_len(&self) -> usize {
        self.rows.next_multiple_of(PANEL)
    }

    /// Puts another weight's content in place of this one's, in the same memory.
    ///
    /// # Errors
    /// [`KernelError::Shape`] unless lengths and kind of format are the same (static activations may differ), and
    /// unless the memory can be written: it is nobody else's and of a kind that can. The weight stays what it was.
    pub fn overwrite(&mut self, content: WeightContent<'_>) -> Result<(), KernelError> {
        let own = self.format();
        let same = match (own, content.format) {
            (Format::Int8(_), Format::Int8(activation)) => {
                packing::check_activation(activation)?;
                true
            }
            (own, other) => own == other,
        };
        ensure_shape!(
            same && content.packed.len() == self.size_bytes(),
            "{} bytes of {:?} in place of {self:?}",
            content.packed.len(),
            content.format
        );
        if let Some(bias) = content.bias {
            ensure_shape!(
                bias.len() == self.bias_len(),
                "{} bias values for {self:?}",
                bias.len()
            );
        }
        let shared = || KernelError::Shape("a weight whose memory is used elsewhere".to_owned());
        let bytes = match &mut self.form {
            Form::Plain(matrix) => matrix.bytes_mut(),
            Form::Panels(panels) => panels.bytes_mut(),
        };
        bytes.ok_or_else(shared)?.copy_from_slice(content.packed);
        if let (Form::Panels(panels), Format::Int8(activation)) = (&mut self.form, content.format) {
            panels.activation = Some(activation);
        }
        self.bias = content.bias.map(Into::into);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Activation, Compute, DType, Int8Rows, Isa, Matrix, RowScales, ThreadTeam, product,
    };

    const ROWS: usize = 19;
    const COLS: usize = 13;

    fn matrix(seed: f32) -> Matrix {
        let values = (0..ROWS * COLS).map(|at| (at as f32 * seed).sin());
        Matrix::from_f32(ROWS, COLS, values.collect()).unwrap()
    }

    fn bits(weight: &Weight) -> Vec<u32> {
        let team = ThreadTeam::single(Isa::best());
        let x: Vec<f32> = (0..3 * COLS).map(|at| (at as f32 * 0.7).cos()).collect();
        let mut y = vec![0.0; 3 * ROWS];
        product(&team, &x, weight, &mut y).unwrap();
        y.into_iter().map(f32::to_bits).collect()
    }

    fn fixed(scale: f32, offset: i32) -> Weight {
        let values: Vec<i8> = (0..ROWS * COLS).map(|at| (at * 7 % 251) as i8).collect();
        let scales = vec![scale; ROWS];
        let rows = Int8Rows {
            values: &values,
            scales: RowScales::Channel(&scales),
        };
        Weight::pack_int8(COLS, &[rows], Activation::Static { scale, offset }).unwrap()
    }

    #[test]
    fn an_overwritten_weight_computes_what_the_other_does() {
        for compute in [Compute::F32, Compute::Bf16, Compute::W8A8] {
            let mut weight = Weight::pack(compute, &[&matrix(0.3)]).unwrap();
            let other = Weight::pack(compute, &[&matrix(1.1)]).unwrap();
            let other = other.with_bias(vec![0.5; ROWS]).unwrap();
            assert_ne!(bits(&weight), bits(&other));
            weight.overwrite(other.content()).unwrap();
            assert_eq!(bits(&weight), bits(&other));
        }
        let mut weight = fixed(0.25, 3);
        weight.overwrite(fixed(0.5, -7).content()).unwrap();
        assert_eq!(bits(&weight), bits(&fixed(0.5, -7)));
    }

    #[test]
    fn what_does_not_fit_is_refused_and_changes_nothing() {
        let mut weight = Weight::pack(Compute::Bf16, &[&matrix(0.3)]).unwrap();
        let before = bits(&weight);
        let content = weight.content();
        let mut long = content.packed.to_vec();
        long.push(0);
        let format = Format::Plain(DType::Bf16);
        let other = Weight::pack(Compute::W8A8, &[&matrix(0.3)]).unwrap();
        let packed = content.packed.to_vec();
        for wrong in [
            WeightContent {
                packed: &long,
                ..content
            },
            WeightContent { format, ..content },
            WeightContent {
                bias: Some(&[0.0; ROWS]),
                ..content
            },
            other.content(),
        ] {
            let mut weight = Weight::pack(Compute::Bf16, &[&matrix(0.3)]).unwrap();
            assert!(weight.overwrite(wrong).is_err());
            assert_eq!(bits(&weight), before);
        }
        // Somebody else computes with the same memory.
        let shared = weight.clone();
        let content = WeightContent {
            format: Format::Bf16,
            packed: &packed,
            bias: None,
        };
        assert!(weight.overwrite(content).is_err());
        drop(shared);
        assert!(weight.overwrite(content).is_ok());
    }
}
