//! Between f32 and the stored types.

use crate::error::ensure_shape;
use crate::{DType, KernelError};

/// Nearest bf16 (ties to even) of each value, as little-endian bytes; NaN stays NaN. For KV writes and weights.
///
/// # Errors
/// [`KernelError::Shape`] unless `out` has two bytes per value.
pub fn f32_to_bf16(values: &[f32], out: &mut [u8]) -> Result<(), KernelError> {
    ensure_shape!(
        out.len() == values.len() * 2,
        "{} values into {} bytes of bf16",
        values.len(),
        out.len()
    );
    for (value, bytes) in values.iter().zip(out.as_chunks_mut::<2>().0) {
        *bytes = round_bits(*value).to_le_bytes();
    }
    Ok(())
}

/// The exact f32 of each bf16.
///
/// # Errors
/// [`KernelError::Shape`] unless `bytes` has two bytes per value.
pub fn bf16_to_f32(bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    ensure_shape!(
        bytes.len() == out.len() * 2,
        "{} bytes of bf16 into {} values",
        bytes.len(),
        out.len()
    );
    for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
    Ok(())
}

/// Replaces each value by the nearest bf16, as storing and loading it would.
pub fn round_to_bf16(values: &mut [f32]) {
    for value in values {
        *value = f32::from_bits(u32::from(round_bits(*value)) << 16);
    }
}

/// Stores values as `dtype`.
///
/// # Errors
/// [`KernelError::Shape`] unless `out` has `dtype.size()` bytes per value.
pub fn store_f32(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), KernelError> {
    match dtype {
        DType::Bf16 => f32_to_bf16(values, out),
        DType::F32 => {
            ensure_shape!(
                out.len() == values.len() * 4,
                "{} values into {} bytes of f32",
                values.len(),
                out.len()
            );
            out.copy_from_slice(bytemuck::cast_slice(values));
            Ok(())
        }
    }
}

/// Loads values stored as `dtype`; the bytes need not be aligned.
///
/// # Errors
/// [`KernelError::Shape`] unless `bytes` has `dtype.size()` bytes per value.
pub fn load_f32(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    match dtype {
        DType::Bf16 => bf16_to_f32(bytes, out),
        DType::F32 => {
            ensure_shape!(
                bytes.len() == out.len() * 4,
                "{} bytes of f32 into {} values",
                bytes.len(),
                out.len()
            );
            bytemuck::cast_slice_mut(out).copy_from_slice(bytes);
            Ok(())
        }
    }
}

/// Upper half of the nearest value with an empty lower half.
#[inline(always)]
pub(crate) fn round_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    // Rounding a NaN could carry into infinity; a set quiet bit keeps it a NaN.
    let quiet = ((bits >> 16) | 0x0040) as u16;
    if value.is_nan() { quiet } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rounding_is_that_of_the_half_crate(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            let expected = bf16::from_f32(value);
            let mut bytes = [0; 2];
            f32_to_bf16(&[value], &mut bytes).unwrap();
            prop_assert_eq!(u16::from_le_bytes(bytes), expected.to_bits());
            let mut back = [0.0];
            bf16_to_f32(&bytes, &mut back).unwrap();
            prop_assert_eq!(back[0].to_bits(), expected.to_f32().to_bits());
            let mut rounded = [value];
            round_to_bf16(&mut rounded);
            prop_assert_eq!(rounded[0].to_bits(), back[0].to_bits());
        }
    }

    #[test]
    fn ties_go_to_even_and_overflow_to_infinity() {
        for (value, expected) in [
            (0x3f80_8000, 0x3f80),
            (0x3f81_8000, 0x3f82),
            (0x7f7f_ffff, 0x7f80),
            (0x8000_0000, 0x8000),
        ] {
            assert_eq!(round_bits(f32::from_bits(value)), expected, "{value:x}");
        }
    }

    #[test]
    fn f32_is_copied_and_lengths_are_checked() {
        let mut bytes = vec![0; 9];
        assert!(store_f32(DType::F32, &[1.5, -2.0], &mut bytes).is_err());
        store_f32(DType::F32, &[1.5, -2.0], &mut bytes[1..]).unwrap();
        let mut back = [0.0; 2];
        load_f32(DType::F32, &bytes[1..], &mut back).unwrap();
        assert_eq!(back, [1.5, -2.0]);
        assert!(load_f32(DType::Bf16, &bytes, &mut back).is_err());
    }
}
