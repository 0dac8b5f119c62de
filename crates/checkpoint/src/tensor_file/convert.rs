//! Conversion of stored floats to `f32`.

use half::f16;
use xtrain_tensor::{DType, formats, vectorized};

use super::StoredDtype;

/// Converts little-endian F64, F32, F16, BF16, F8_E4M3 or F8_E8M0 elements to `f32`; other types leave `out`
/// unchanged. F64 rounds to nearest even. Returns the position and value of the first finite F64 that
/// overflows.
pub(super) fn widen(dtype: StoredDtype, bytes: &[u8], out: &mut [f32]) -> Option<(usize, f64)> {
    match dtype {
        StoredDtype::F64 => {
            convert_each(bytes, out, |b: [u8; 8]| f64::from_le_bytes(b) as f32);
            let doubles = bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b));
            let mut pairs = doubles.zip(out).enumerate();
            return pairs.find_map(|(i, (x, y))| (x.is_finite() && y.is_infinite()).then_some((i, x)));
        }
        StoredDtype::F32 => convert_each(bytes, out, f32::from_le_bytes),
        StoredDtype::F16 => convert_each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        StoredDtype::BF16 => {
            convert_each(bytes, out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16))
        }
        StoredDtype::F8_E4M3 => vectorized(
            #[inline(always)]
            || formats::widen(DType::E4M3, bytes, out),
        ),
        StoredDtype::F8_E8M0 => convert_each(bytes, out, |[exponent]: [u8; 1]| match exponent {
            // OCP's microscaling formats, section 5.4.1: a power of two without sign, and one NaN.
            0 => f32::from_bits(1 << 22),
            u8::MAX => f32::NAN,
            exponent => f32::from_bits(u32::from(exponent) << 23),
        }),
        _ => {}
    }
    None
}

fn convert_each<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (src, dst) in elements.iter().zip(out) {
        *dst = convert(*src);
    }
}
