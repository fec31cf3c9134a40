//! Writing and reading packed weights.

use super::{Activation, Format, Int8Rows, LINE, PANEL, RowScales};
use crate::error::ensure_shape;
use crate::panels::{quantize_row, round_small_bf16};
use crate::{DType, Isa, KernelError, Matrix};

/// What an int8 weight is stored with on top.
pub(crate) const SHIFT: u8 = 0x80;

/// Rows one after the other.
pub(super) fn plain(dtype: DType, parts: &[&Matrix], out: &mut [u8]) -> Result<(), KernelError> {
    let mut rest = out;
    for part in parts {
        let row_bytes = part.cols() * dtype.size();
        let (mine, behind) = rest.split_at_mut(part.rows() * row_bytes);
        rest = behind;
        if part.dtype() == dtype {
            mine.copy_from_slice(part.bytes());
            continue;
        }
        let mut values = vec![0.0; part.cols()];
        for (row, out) in mine.chunks_mut(row_bytes).enumerate() {
            part.dense_row_f32(row, &mut values)?;
            crate::store_f32(dtype, &values, out)?;
        }
    }
    Ok(())
}

pub(super) fn bf16(k: usize, parts: &[&Matrix], out: &mut [u8]) -> Result<(), KernelError> {
    let lines = k.div_ceil(2);
    out.fill(0);
    let mut values = vec![0.0; lines * 2];
    let mut bits = vec![0u16; lines * 2];
    let mut index = 0;
    for part in parts {
        for row in 0..part.rows() {
            part.dense_row_f32(row, &mut values[..k])?;
            for (bits, value) in bits.iter_mut().zip(&values) {
                *bits = round_small_bf16(*value);
            }
            let pairs = bits.as_chunks::<2>().0;
            scatter(
                out,
                lines,
                index,
                pairs
                    .iter()
                    .map(|[a, b]| u32::from(*a) | u32::from(*b) << 16),
            );
            index += 1;
        }
    }
    Ok(())
}

/// Scales each row by its largest magnitude.
pub(super) fn quantize(
    n: usize,
    k: usize,
    parts: &[&Matrix],
    out: &mut [u8],
) -> Result<(), KernelError> {
    let isa = Isa::best();
    let lines = k.div_ceil(4);
    let (panels, scales, addends) = split(n, k, out);
    addends.fill(0);
    let mut values = vec![0.0; k];
    let mut quantized = vec![0i8; lines * 4];
    let mut index = 0;
    for part in parts {
        for row in 0..part.rows() {
            part.dense_row_f32(row, &mut values)?;
            let scale = quantize_row(isa, Activation::PerToken, &values, &mut quantized[..k]);
            scatter(panels, lines, index, shifted(&quantized));
            put(scales, index, scale.to_le_bytes());
            index += 1;
        }
    }
    pad(panels, scales, lines, n);
    Ok(())
}

/// Checks parts and counts their rows.
pub(super) fn int8_rows(
    k: usize,
    parts: &[Int8Rows<'_>],
    activation: Activation,
) -> Result<usize, KernelError> {
    check_activation(activation)?;
    ensure_shape!(k > 0, "int8 rows of no values");
    let mut rows = 0;
    for part in parts {
        let count = match part.scales {
            RowScales::Channel(scales) => scales.len(),
            RowScales::Dequant { scale, bias } => {
                ensure_shape!(
                    scale.len() == bias.len(),
                    "{} scales beside {} integer biases",
                    scale.len(),
                    bias.len()
                );
                ensure_shape!(
                    activation != Activation::PerToken,
                    "integer biases need static activations"
                );
                scale.len()
            }
        };
        ensure_shape!(
            count.checked_mul(k) == Some(part.values.len()),
            "{count} scales for {} values in rows of {k}",
            part.values.len()
        );
        rows += count;
    }
    ensure_shape!(rows > 0, "a weight of no rows");
    Ok(rows)
}

pub(super) fn check_activation(activation: Activation) -> Result<(), KernelError> {
    if let Activation::Static { scale, offset } = activation {
        ensure_shape!(
            scale > 0.0 && scale.is_finite() && (-128..=127).contains(&offset),
            "static activation of scale {scale} and offset {offset}: the scale must be above 0, the offset in -128 ..= 127"
        );
    }
    Ok(())
}

/// Lengths are checked by [`int8_rows`] and `check_room`.
pub(super) fn int8(
    n: usize,
    k: usize,
    parts: &[Int8Rows<'_>],
    activation: Activation,
    out: &mut [u8],
) {
    let lines = k.div_ceil(4);
    let (panels, scales, addends) = split(n, k, out);
    addends.fill(0);
    let mut quantized = vec![0i8; lines * 4];
    let mut index = 0;
    for part in parts {
        for (row, values) in part.values.chunks(k).enumerate() {
            quantized[..k].copy_from_slice(values);
            scatter(panels, lines, index, shifted(&quantized));
            let (scale, addend) = match (part.scales, activation) {
                (RowScales::Dequant { scale, bias }, _) => (scale[row], bias[row]),
                (RowScales::Channel(scales), Activation::PerToken) => (scales[row], 0),
                (RowScales::Channel(scales), Activation::Static { scale, offset }) => {
                    let sum: i32 = values.iter().map(|&value| i32::from(value)).sum();
                    (scale * scales[row], offset.wrapping_mul(sum).wrapping_neg())
                }
            };
            put(scales, index, scale.to_le_bytes());
            put(addends, index, addend.to_le_bytes());
            index += 1;
        }
    }
    pad(panels, scales, lines, n);
}

/// The value of one row of w.
pub(super) fn unpack_row(
    format: Format,
    n: usize,
    k: usize,
    bytes: &[u8],
    row: usize,
    out: &mut [f32],
) {
    let per_line = format.line_values();
    let lines = k.div_ceil(per_line);
    let panel = &bytes[row / PANEL * lines * LINE..][..lines * LINE];
    let column = row % PANEL * 4;
    let cells = panel.chunks(LINE).map(|line| {
        [
            line[column],
            line[column + 1],
            line[column + 2],
            line[column + 3],
        ]
    });
    let scale = match format {
        Format::Int8(_) => {
            let tail = n.div_ceil(PANEL) * lines * LINE + row * 4;
            f32::from_le_bytes([
                bytes[tail],
                bytes[tail + 1],
                bytes[tail + 2],
                bytes[tail + 3],
            ])
        }
        _ => 1.0,
    };
    // With static activations the stored scale holds the activation's too.
    let scale = match format {
        Format::Int8(Activation::Static { scale: input, .. }) => scale / input,
        _ => scale,
    };
    for (out, cell) in out.chunks_mut(per_line).zip(cells) {
        for (place, out) in out.iter_mut().enumerate() {
            *out = match format {
                Format::Int8(_) => f32::from((cell[place] ^ SHIFT) as i8) * scale,
                _ => {
                    let bits = u16::from_le_bytes([cell[2 * place], cell[2 * place + 1]]);
                    f32::from_bits(u32::from(bits) << 16)
                }
            };
        }
    }
}

/// Panels, scales and addends of int8 bytes.
fn split(n: usize, k: usize, out: &mut [u8]) -> (&mut [u8], &mut [u8], &mut [u8]) {
    let columns = n.next_multiple_of(PANEL);
    let (panels, tail) = out.split_at_mut(columns / PANEL * k.div_ceil(4) * LINE);
    let (scales, addends) = tail.split_at_mut(columns * 4);
    (panels, scales, addends)
}

/// Writes a row's cells of four bytes into its column of every line.
fn scatter(panels: &mut [u8], lines: usize, row: usize, cells: impl Iterator<Item = u32>) {
    let panel = &mut panels[row / PANEL * lines * LINE..][..lines * LINE];
    let column = row % PANEL * 4;
    for (line, cell) in panel.as_chunks_mut::<LINE>().0.iter_mut().zip(cells) {
        line[column..column + 4].copy_from_slice(&cell.to_le_bytes());
    }
}

fn shifted(quantized: &[i8]) -> impl Iterator<Item = u32> {
    quantized.as_chunks::<4>().0.iter().map(|cell| {
        u32::from_le_bytes(cell.map(|value| value as u8)) ^ u32::from_le_bytes([SHIFT; 4])
    })
}

fn put(values: &mut [u8], index: usize, value: [u8; 4]) {
    values[index * 4..index * 4 + 4].copy_from_slice(&value);
}

/// Zeros in the columns behind the last row.
fn pad(panels: &mut [u8], scales: &mut [u8], lines: usize, n: usize) {
    for row in n..n.next_multiple_of(PANEL) {
        let zeros = std::iter::repeat_n(u32::from_le_bytes([SHIFT; 4]), lines);
        scatter(panels, lines, row, zeros);
        put(scales, row, [0; 4]);
    }
}
