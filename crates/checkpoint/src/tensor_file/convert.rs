//! Stored floats to `f32`, on all cores.

use half::f16;
use rayon::prelude::*;

use super::StoredDtype;

/// Elements that one task converts.
const TASK_ELEMENTS: usize = 1 << 16;

/// Converts little-endian `bytes` of F64, F32, F16 or BF16 elements; other types leave `out` alone.
pub(super) fn widen(dtype: StoredDtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        StoredDtype::F64 => each(bytes, out, |b: [u8; 8]| f64::from_le_bytes(b) as f32),
        StoredDtype::F32 => each(bytes, out, f32::from_le_bytes),
        StoredDtype::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        StoredDtype::BF16 => each(bytes, out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)),
        _ => {}
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32 + Sync) {
    let (elements, _) = bytes.as_chunks::<N>();
    elements.par_chunks(TASK_ELEMENTS).zip(out.par_chunks_mut(TASK_ELEMENTS)).for_each(|(src, dst)| {
        for (src, dst) in src.iter().zip(dst) {
            *dst = convert(*src);
        }
    });
}
