//! Values of ggml's storage types, exactly as ggml's own reference decodes them.
//!
//! Source of the layouts: `ggml-common.h` and `ggml-quants.c` of the ggml project.

use half::{bf16, f16};
use twinfer_config::gguf::GgufType;

/// Values of a block of the `K` types, and of the groups inside.
const SUPER: usize = 256;

/// Decodes whole blocks. `out` takes `bytes.len() / block_bytes * block_values` values; with any other
/// length the shorter of the two counts.
pub(crate) fn decode(kind: GgufType, bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.chunks_exact(kind.block_bytes());
    let values = out.chunks_exact_mut(kind.block_values());
    for (block, out) in blocks.zip(values) {
        match kind {
            GgufType::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            GgufType::F16 => out[0] = half_at(block, 0),
            GgufType::Bf16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            GgufType::Q4_0 => nibbles(&block[2..], out, |q| (q - 8.0) * half_at(block, 0)),
            GgufType::Q4_1 => {
                let (scale, least) = (half_at(block, 0), half_at(block, 2));
                nibbles(&block[4..], out, |q| q * scale + least);
            }
            GgufType::Q5_0 => q5_0(block, out),
            GgufType::Q8_0 => {
                let scale = half_at(block, 0);
                for (out, q) in out.iter_mut().zip(&block[2..]) {
                    *out = f32::from(q.cast_signed()) * scale;
                }
            }
            GgufType::Q4K => q4_k(block, out),
            GgufType::Q6K => q6_k(block, out),
        }
    }
}

/// Brings rows that lie per head in pairs (0, h/2), (1, h/2 + 1), ... into halves. `values` is
/// `[rows, width]`, rows a multiple of 2 · `heads`.
pub(crate) fn halves_from_pairs<T: Copy>(values: &[T], heads: usize, width: usize) -> Vec<T> {
    let head = values.len() / (heads * width).max(1);
    let mut out = Vec::with_capacity(values.len());
    for rows in values.chunks_exact((head * width).max(1)) {
        for odd in 0..2 {
            for pair in 0..head / 2 {
                let row = 2 * pair + odd;
                out.extend_from_slice(&rows[row * width..(row + 1) * width]);
            }
        }
    }
    out
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Low halves of the bytes first, then the high ones.
fn nibbles(bytes: &[u8], out: &mut [f32], value: impl Fn(f32) -> f32) {
    let (low, high) = out.split_at_mut(bytes.len());
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        *low = value(f32::from(byte & 15));
        *high = value(f32::from(byte >> 4));
    }
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    let bit = |place: usize| ((fifth >> place & 1) as u8) << 4;
    for (place, byte) in block[6..22].iter().enumerate() {
        let value = |q: u8| (f32::from(q) - 16.0) * scale;
        out[place] = value(byte & 15 | bit(place));
        out[place + 16] = value(byte >> 4 | bit(place + 16));
    }
}

/// Scale and minimum of group `group` of eight, 6 bits each, packed in 12 bytes.
fn scale_and_minimum(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, least) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        (
            packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
            packed[group + 4] >> 4 | packed[group] >> 6 << 4,
        )
    };
    (f32::from(scale), f32::from(least))
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    let packed = &block[4..16];
    for (pair, bytes) in block[16..144].chunks_exact(32).enumerate() {
        for high in 0..2 {
            let group = 2 * pair + high;
            let (s, m) = scale_and_minimum(packed, group);
            let (s, m) = (scale * s, least * m);
            for (out, byte) in out[group * 32..][..32].iter_mut().zip(bytes) {
                let q = if high == 0 { byte & 15 } else { byte >> 4 };
                *out = s * f32::from(q) - m;
            }
        }
    }
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let scale = half_at(rest, 16);
    for half in 0..SUPER / 128 {
        let (low, high, scales) = (&low[half * 64..], &high[half * 32..], &rest[half * 8..]);
        for place in 0..32 {
            let top = |shift: u8| (high[place] >> shift & 3) << 4;
            let quarters = [
                low[place] & 15 | top(0),
                low[place + 32] & 15 | top(2),
                low[place] >> 4 | top(4),
                low[place + 32] >> 4 | top(6),
            ];
            for (quarter, q) in quarters.into_iter().enumerate() {
                let group = f32::from(scales[place / 16 + 2 * quarter].cast_signed());
                out[half * 128 + quarter * 32 + place] = scale * group * (f32::from(q) - 32.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;
    use std::path::Path;

    /// Values from the gguf package's own decoder over random bytes, with the blocks beside them.
    #[test]
    fn blocks_of_every_type_decode_as_ggml_decodes_them() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/gguf/blocks.safetensors");
        let file = std::fs::read(path).unwrap();
        let golden = SafeTensors::deserialize(&file).unwrap();
        let kinds = [
            GgufType::F16,
            GgufType::Bf16,
            GgufType::Q4_0,
            GgufType::Q4_1,
            GgufType::Q5_0,
            GgufType::Q8_0,
            GgufType::Q4K,
            GgufType::Q6K,
        ];
        for kind in kinds {
            let name = kind.name();
            let blocks = golden.tensor(&format!("{name}.blocks")).unwrap();
            let expected: Vec<f32> = golden
                .tensor(&format!("{name}.values"))
                .unwrap()
                .data()
                .chunks_exact(4)
                .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
                .collect();
            let mut out = vec![f32::NAN; expected.len()];
            decode(kind, blocks.data(), &mut out);
            for (place, (ours, theirs)) in out.iter().zip(&expected).enumerate() {
                let error = (ours - theirs).abs();
                assert!(
                    error <= theirs.abs() * 1e-6,
                    "{name} value {place}: {ours} instead of {theirs}"
                );
            }
        }
    }

    #[test]
    fn paired_rows_come_back_into_halves() {
        // Two heads of four rows, one column: HF order 0 1 2 3 is stored as 0 2 1 3.
        let stored = [0, 2, 1, 3, 10, 12, 11, 13];
        assert_eq!(
            halves_from_pairs(&stored, 2, 1),
            [0, 1, 2, 3, 10, 11, 12, 13]
        );
    }
}
