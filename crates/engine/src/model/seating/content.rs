//! An expert's weights as bytes: of both matrices one after the other a head, the packed weight, and the bias if there
//! is one. A head is the kind of format, the bits of the scale and the offset of static activations, values of the bias,
//! bytes of the packed weight; little-endian.

use crate::model::ffn::Ffn;
use twinfer_kernels::{Activation, DType, Format, KernelError, Weight, WeightContent};

/// Bytes of a head: four times u32, once u64.
const HEAD: usize = 24;

/// Most bytes of an expert of this one's form.
pub(super) fn longest(ffn: &Ffn) -> usize {
    let of = |weight: &Weight| HEAD + weight.size_bytes() + 4 * weight.bias_len();
    of(&ffn.gate_up) + of(&ffn.down)
}

/// Appends an expert's content.
pub(super) fn append(ffn: &Ffn, out: &mut Vec<u8>) {
    for weight in [&ffn.gate_up, &ffn.down] {
        let content = weight.content();
        let (kind, scale, offset) = match content.format {
            Format::Plain(DType::F32) => (0u32, 0, 0),
            Format::Plain(DType::Bf16) => (1, 0, 0),
            Format::Bf16 => (2, 0, 0),
            Format::Int8(Activation::PerToken) => (3, 0, 0),
            Format::Int8(Activation::Static { scale, offset }) => {
                (4, scale.to_bits(), offset as u32)
            }
        };
        let bias = content.bias.unwrap_or_default();
        for number in [kind, scale, offset, bias.len() as u32] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&(content.packed.len() as u64).to_le_bytes());
        out.extend_from_slice(content.packed);
        for value in bias {
            out.extend_from_slice(&value.to_le_bytes());
        }
    }
}

/// Puts content in place of an expert's.
///
/// # Errors
/// It is none of an expert of the same form.
pub(super) fn overwrite(ffn: &mut Ffn, content: &[u8]) -> Result<(), KernelError> {
    let cut = || KernelError::Shape("bytes that are no expert's weights".to_owned());
    let (gate_up, rest) = parse(content).ok_or_else(cut)?;
    let (down, rest) = parse(rest).ok_or_else(cut)?;
    if !rest.is_empty() {
        return Err(cut());
    }
    for (weight, part) in [(&mut ffn.gate_up, gate_up), (&mut ffn.down, down)] {
        weight.overwrite(WeightContent {
            format: part.format,
            packed: part.packed,
            bias: part.bias.as_deref(),
        })?;
    }
    Ok(())
}

struct Part<'a> {
    format: Format,
    packed: &'a [u8],
    bias: Option<Vec<f32>>,
}

/// The first weight's content, and what is behind it.
fn parse(bytes: &[u8]) -> Option<(Part<'_>, &[u8])> {
    let (head, rest) = bytes.split_at_checked(HEAD)?;
    let (numbers, length) = head.split_at(HEAD - 8);
    let mut numbers = numbers.as_chunks::<4>().0.iter();
    let mut number = || numbers.next().map(|bytes| u32::from_le_bytes(*bytes));
    let (kind, scale, offset, bias) = (number()?, number()?, number()?, number()?);
    let format = match kind {
        0 => Format::Plain(DType::F32),
        1 => Format::Plain(DType::Bf16),
        2 => Format::Bf16,
        3 => Format::Int8(Activation::PerToken),
        4 => Format::Int8(Activation::Static {
            scale: f32::from_bits(scale),
            offset: offset as i32,
        }),
        _ => return None,
    };
    let length = u64::from_le_bytes(length.try_into().ok()?);
    let (packed, rest) = rest.split_at_checked(usize::try_from(length).ok()?)?;
    let (values, rest) = rest.split_at_checked((bias as usize).checked_mul(4)?)?;
    let values = values.as_chunks::<4>().0.iter();
    let bias = (bias > 0).then(|| values.map(|value| f32::from_le_bytes(*value)).collect());
    Some((
        Part {
            format,
            packed,
            bias,
        },
        rest,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use twinfer_kernels::{Compute, Matrix};

    fn weight(compute: Compute, rows: usize, seed: f32, bias: bool) -> Weight {
        let values = (0..rows * 8).map(|at| (at as f32 * seed).sin());
        let matrix = Matrix::from_f32(rows, 8, values.collect()).unwrap();
        let weight = Weight::pack(compute, &[&matrix]).unwrap();
        match bias {
            true => weight.with_bias(vec![seed; rows]).unwrap(),
            false => weight,
        }
    }

    fn expert(compute: Compute, seed: f32, bias: bool) -> Ffn {
        Ffn {
            gate_up: weight(compute, 16, seed, bias),
            down: weight(compute, 8, seed + 1.0, false),
        }
    }

    fn bytes(ffn: &Ffn) -> Vec<u8> {
        let mut bytes = Vec::new();
        append(ffn, &mut bytes);
        bytes
    }

    #[test]
    fn an_expert_that_came_is_the_one_that_was_sent() {
        for compute in [Compute::F32, Compute::Bf16, Compute::W8A8] {
            for bias in [false, true] {
                let other = expert(compute, 0.3, bias);
                let mut own = expert(compute, 0.7, !bias);
                let sent = bytes(&other);
                assert!(sent.len() <= longest(&own));
                assert_ne!(bytes(&own), sent);
                overwrite(&mut own, &sent).unwrap();
                assert_eq!(bytes(&own), sent);
            }
        }
    }

    #[test]
    fn content_that_is_cut_or_of_another_form_is_refused() {
        let mut own = expert(Compute::Bf16, 0.7, true);
        let before = bytes(&own);
        for length in 0..before.len() {
            assert!(overwrite(&mut own, &before[..length]).is_err());
        }
        let mut long = before.clone();
        long.push(0);
        assert!(overwrite(&mut own, &long).is_err());
        let mut kind = before.clone();
        kind[0] = 77;
        assert!(overwrite(&mut own, &kind).is_err());
        let other = bytes(&expert(Compute::W8A8, 0.7, true));
        assert!(overwrite(&mut own, &other).is_err());
        assert_eq!(bytes(&own), before);
    }
}
