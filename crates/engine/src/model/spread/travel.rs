//! Rows on their way to experts, in the smallest form of which the experts' first product makes the same bits.
//!
//! Rows of a form are, for int8, the largest magnitude of each row as f32, then all values; otherwise the values alone.

use crate::ExecError;
use twinfer_kernels::{Activation, Isa, bf16, bf16_to_f32, quantize_rows};

/// Magnitudes below it count as it when a row is quantised: see [`quantize_rows`].
const SMALLEST: f32 = 1e-10;
/// 2^-56: products in bf16 take smaller magnitudes for zero, also those that would be rounded up to it.
const SMALLEST_BF16: f32 = f32::from_bits((127 - 56) << 23);
/// Largest integer of a row that is quantised by its own scale.
const LARGEST: f32 = 127.0;

/// What a row's values travel as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowForm {
    /// As they are.
    F32,
    /// As products in bf16 round them: once more changes nothing.
    Bf16,
    /// As products in int8 quantise them.
    Int8,
}

/// Rows in a form, kept between steps.
#[derive(Debug, Default)]
pub(crate) struct PackedRows {
    /// Of each row, in the order of [`RowForm`]'s bytes.
    values: Vec<u8>,
    quantised: Vec<i8>,
    largest: Vec<f32>,
    scales: Vec<f32>,
    width: usize,
}

impl RowForm {
    /// Bytes of `rows` rows of `width` values.
    pub(crate) fn bytes(self, rows: usize, width: usize) -> usize {
        let row = match self {
            Self::F32 => 4 * width,
            Self::Bf16 => 2 * width,
            Self::Int8 => 4 + width,
        };
        rows * row
    }

    /// Adds the rows `[rows, width]` in `bytes` to `out`; none if there are not as many. Bytes begin at a multiple of 4.
    pub(crate) fn read(
        self,
        bytes: &[u8],
        rows: usize,
        width: usize,
        out: &mut Vec<f32>,
    ) -> Option<()> {
        (bytes.len() == self.bytes(rows, width)).then_some(())?;
        let first = out.len();
        match self {
            Self::F32 => out.extend_from_slice(bytemuck::try_cast_slice(bytes).ok()?),
            Self::Bf16 => {
                out.resize(first + rows * width, 0.0);
                bf16_to_f32(bytes, &mut out[first..]).ok()?;
            }
            Self::Int8 => {
                let (largest, values) = bytes.split_at(4 * rows);
                let largest: &[f32] = bytemuck::try_cast_slice(largest).ok()?;
                let values: &[i8] = bytemuck::cast_slice(values);
                for (row, largest) in values.chunks_exact(width).zip(largest) {
                    out.extend(row.iter().map(|value| restored(*value, *largest)));
                }
            }
        }
        Some(())
    }
}

/// A value of which quantising makes `value` again, in a row whose largest magnitude is `largest`: the scale is that
/// magnitude / 127, a multiple of it by a small integer is off by less than a thousandth of a step, and the largest
/// magnitude itself is not left to rounding.
fn restored(value: i8, largest: f32) -> f32 {
    let value = f32::from(value);
    let scaled = value * (largest / LARGEST);
    if value.abs() >= LARGEST || !largest.is_finite() {
        // Also what is not finite must stay so.
        return largest.copysign(value);
    }
    scaled
}

impl PackedRows {
    /// Takes rows of `x` `[rows, width]`.
    ///
    /// # Errors
    /// `x` is of another length.
    pub(crate) fn pack(
        &mut self,
        form: RowForm,
        isa: Isa,
        x: &[f32],
        width: usize,
    ) -> Result<(), ExecError> {
        self.width = width;
        match form {
            RowForm::F32 => {
                self.values.clear();
                self.values.extend_from_slice(bytemuck::cast_slice(x));
            }
            RowForm::Bf16 => {
                self.values.clear();
                for value in x {
                    let small = value.abs() < SMALLEST_BF16;
                    let near = bf16::from_f32(if small { 0.0 } else { *value });
                    self.values.extend_from_slice(&near.to_le_bytes());
                }
            }
            RowForm::Int8 => {
                self.quantised.resize(x.len(), 0);
                self.scales.resize(x.len() / width, 0.0);
                let (values, scales) = (&mut self.quantised, &mut self.scales);
                quantize_rows(isa, Activation::PerToken, x, width, values, scales)?;
                self.largest.clear();
                let rows = x.chunks_exact(width).zip(&self.scales);
                self.largest.extend(rows.map(|(row, scale)| {
                    if scale.is_nan() {
                        return f32::NAN;
                    }
                    row.iter()
                        .fold(SMALLEST, |most, value| most.max(value.abs()))
                }));
            }
        }
        Ok(())
    }

    /// Appends some of the rows that were packed in `form`, as [`RowForm::read`] reads them.
    pub(crate) fn write(
        &self,
        form: RowForm,
        rows: impl Iterator<Item = usize> + Clone,
        send: &mut Vec<u8>,
    ) {
        let values: &[u8] = match form {
            RowForm::Int8 => {
                for row in rows.clone() {
                    send.extend_from_slice(&self.largest[row].to_ne_bytes());
                }
                bytemuck::cast_slice(&self.quantised)
            }
            _ => &self.values,
        };
        let size = form.bytes(1, self.width) - if form == RowForm::Int8 { 4 } else { 0 };
        for row in rows {
            send.extend_from_slice(&values[row * size..][..size]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use twinfer_kernels::{Compute, Matrix, ThreadTeam, Weight, product, round_to_bf16};

    fn travelled(form: RowForm, x: &[f32], width: usize) -> Vec<f32> {
        let mut rows = PackedRows::default();
        rows.pack(form, Isa::detect(None).unwrap(), x, width)
            .unwrap();
        let count = x.len() / width;
        let mut bytes = Vec::new();
        rows.write(form, 0..count, &mut bytes);
        assert_eq!(bytes.len(), form.bytes(count, width));
        // As aligned as what comes from other ranks.
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        let aligned: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        aligned[..bytes.len()].copy_from_slice(&bytes);
        let mut out = Vec::new();
        form.read(&aligned[..bytes.len()], count, width, &mut out)
            .unwrap();
        out
    }

    fn quantised(x: &[f32], width: usize) -> (Vec<i8>, Vec<u32>) {
        let (mut q, mut scales) = (vec![0; x.len()], vec![0.0; x.len() / width]);
        quantize_rows(
            Isa::detect(None).unwrap(),
            Activation::PerToken,
            x,
            width,
            &mut q,
            &mut scales,
        )
        .unwrap();
        (q, scales.iter().map(|scale| scale.to_bits()).collect())
    }

    /// Values of all sizes, with rows whose scale is at a tie when it is multiplied by 127.
    fn row() -> impl Strategy<Value = Vec<f32>> {
        let scale = (any::<u32>(), any::<bool>(), 90u32..150).prop_map(|(bits, tie, exponent)| {
            let mantissa = if tie {
                (bits & 0x7F_FF80) | 64
            } else {
                bits & 0x7F_FFFF
            };
            f32::from_bits(exponent << 23 | mantissa)
        });
        let values = prop::collection::vec(-127.0f32..127.0, 24);
        (scale, values, 0usize..24, any::<bool>()).prop_map(|(scale, mut values, at, whole)| {
            values[at] = 127.0;
            let row = values.into_iter();
            row.map(|value| scale * if whole { value.round() } else { value })
                .collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn quantising_what_came_gives_what_quantising_at_home_gives(x in row()) {
            let came = travelled(RowForm::Int8, &x, 12);
            prop_assert_eq!(quantised(&came, 12), quantised(&x, 12));
        }

        #[test]
        fn products_of_what_came_are_those_of_the_rows(x in row(), down in 0u32..60) {
            let scale = f32::from_bits((127 - down) << 23);
            let x: Vec<f32> = x.iter().map(|value| value * scale).collect();
            let weights = (0..5 * 12).map(|at| (at as f32 * 0.37).sin() * 1e6).collect();
            let weights = Matrix::from_f32(5, 12, weights).unwrap();
            let team = ThreadTeam::single(Isa::detect(None).unwrap());
            for (form, compute) in [
                (RowForm::F32, Compute::F32),
                (RowForm::Bf16, Compute::Bf16),
                (RowForm::Int8, Compute::W8A8),
            ] {
                let weight = Weight::pack(compute, &[&weights]).unwrap();
                let bits = |x: &[f32]| {
                    let mut y = vec![0.0; 2 * 5];
                    product(&team, x, &weight, &mut y).unwrap();
                    y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                prop_assert_eq!(bits(&travelled(form, &x, 12)), bits(&x));
            }
        }

        #[test]
        fn rounding_what_came_changes_nothing(x in row()) {
            let came = travelled(RowForm::Bf16, &x, 12);
            let mut rounded = x.clone();
            round_to_bf16(&mut rounded);
            prop_assert_eq!(&came, &rounded);
            prop_assert_eq!(travelled(RowForm::F32, &x, 12), x);
        }
    }

    #[test]
    fn what_products_take_for_zero_is_not_rounded_up() {
        let below = f32::from_bits(SMALLEST_BF16.to_bits() - 1);
        let came = travelled(RowForm::Bf16, &[below, -below, SMALLEST_BF16, 1.0], 4);
        assert_eq!(came, [0.0, 0.0, SMALLEST_BF16, 1.0]);
    }

    #[test]
    fn rows_of_zeros_and_of_no_numbers_stay_so() {
        let zeros = [0.0, -0.0, 1e-12, 0.0];
        let came = travelled(RowForm::Int8, &zeros, 4);
        assert_eq!(quantised(&came, 4), quantised(&zeros, 4));
        for bad in [f32::NAN, f32::INFINITY] {
            let came = travelled(RowForm::Int8, &[1.0, bad, 2.0, 3.0], 4);
            let (_, scales) = quantised(&came, 4);
            assert!(f32::from_bits(scales[0]).is_nan());
        }
    }

    #[test]
    fn bytes_that_are_not_the_rows_are_refused() {
        for form in [RowForm::F32, RowForm::Bf16, RowForm::Int8] {
            let bytes = vec![0u64; 64];
            let bytes: &[u8] = bytemuck::cast_slice(&bytes);
            let right = form.bytes(3, 8);
            for length in [right - 4, right + 4] {
                let mut out = Vec::new();
                assert!(form.read(&bytes[..length], 3, 8, &mut out).is_none());
            }
        }
    }
}
