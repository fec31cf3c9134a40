//! Values of a tensor as its file holds them.

use twinfer_kernels::bf16;

/// Values as stored.
pub(super) enum Stored {
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    F16(Vec<half::f16>),
    F8(Vec<u8>),
    I8(Vec<i8>),
    I32(Vec<i32>),
    I64(Vec<i64>),
}

impl Stored {
    pub(super) fn floats(self) -> Vec<f32> {
        match self {
            Self::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::F32(values) => values,
            Self::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::F8(values) => {
                let table = e4m3_table();
                values
                    .iter()
                    .map(|byte| table[usize::from(*byte)])
                    .collect()
            }
            Self::I8(values) => values.iter().map(|value| f32::from(*value)).collect(),
            Self::I32(values) => values.iter().map(|value| *value as f32).collect(),
            Self::I64(values) => values.iter().map(|value| *value as f32).collect(),
        }
    }
}

/// fp8 e4m3fn (Micikevicius et al. 2022, arXiv 2209.05433): bias 7, subnormals m/8 * 2^-6, no infinity.
pub(super) fn e4m3_table() -> [f32; 256] {
    std::array::from_fn(|byte| {
        let (exponent, mantissa) = ((byte >> 3 & 15) as i32, (byte & 7) as f32);
        let magnitude = match (exponent, byte & 7) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa / 8.0 * 2f32.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
        };
        if byte & 0x80 == 0 {
            magnitude
        } else {
            -magnitude
        }
    })
}
