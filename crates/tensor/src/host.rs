//! Tensors in host memory.

use crate::formats::to_bf16;
use crate::{DType, TensorType, refusable};
use bytemuck::{Pod, Zeroable};
use half::bf16;

/// The alignment of every buffer in host memory and of every tensor in an arena: a multiple of cache lines
/// and of the widest vector loads.
pub const ALIGN_BYTES: usize = 256;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u8; ALIGN_BYTES]);

/// Zero-initialised bytes aligned to [`ALIGN_BYTES`].
#[derive(Clone)]
pub struct AlignedBytes {
    lines: Vec<CacheLine>,
    len: usize,
}

impl AlignedBytes {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        AlignedBytes { lines: bytemuck::zeroed_vec(len.div_ceil(ALIGN_BYTES)), len }
    }

    /// `len` zero bytes; None if the system refuses them.
    pub fn try_zeroed(len: usize) -> Option<Self> {
        let lines = refusable(|| bytemuck::try_zeroed_vec(len.div_ceil(ALIGN_BYTES))).ok()?;
        Some(AlignedBytes { lines, len })
    }

    /// Makes the system provide all pages now. Otherwise it provides each at its first write, which takes
    /// longer than many a copy.
    pub fn commit_pages(&mut self) {
        const PAGE_BYTES: usize = 4096;
        for byte in self.as_mut_slice().iter_mut().step_by(PAGE_BYTES) {
            *std::hint::black_box(byte) = 0;
        }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// A tensor in host memory: its type and its bytes, rows contiguous.
#[derive(Clone)]
pub struct HostTensor {
    ty: TensorType,
    bytes: AlignedBytes,
}

impl HostTensor {
    /// A tensor of zeros.
    pub fn zeros(ty: TensorType) -> Self {
        HostTensor { ty, bytes: AlignedBytes::zeroed(ty.bytes()) }
    }

    /// A tensor of type `ty` with these elements, each rounded to nearest even.
    ///
    /// # Panics
    /// If the number of elements differs from the shape's.
    pub fn from_f64(ty: TensorType, values: &[f64]) -> Self {
        assert_eq!(ty.numel(), values.len(), "{ty} does not hold {} elements", values.len());
        let mut t = HostTensor::zeros(ty);
        let out = t.bytes.as_mut_slice();
        match ty.dtype {
            DType::F64 => out.copy_from_slice(bytemuck::cast_slice(values)),
            DType::F32 => cast_into(out, values, |v| v as f32),
            DType::BF16 => cast_into(out, values, |v| to_bf16(round_to_odd(v))),
            DType::I32 => cast_into(out, values, |v| v as i32),
            DType::U32 => cast_into(out, values, |v| v as u32),
            DType::U8 => cast_into(out, values, |v| v as u8),
            DType::E4M3 => cast_into(out, values, |v| crate::formats::to_e4m3(round_to_odd(v))),
            DType::E5M2 => cast_into(out, values, |v| crate::formats::to_e5m2(round_to_odd(v))),
            DType::E5M6 => {
                let values: Vec<f32> = values.iter().map(|&v| round_to_odd(v)).collect();
                crate::formats::pack_e5m6(&values, out);
            }
        }
        t
    }

    /// The tensor's type.
    pub fn ty(&self) -> TensorType {
        self.ty
    }

    /// The raw bytes.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    /// The raw bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.as_mut_slice()
    }

    /// The elements, exactly, as f64.
    pub fn to_f64(&self) -> Vec<f64> {
        decode(self.ty, self.bytes())
    }
}

/// The elements of a tensor's raw bytes as f64, exactly.
///
/// # Panics
/// If the length of `bytes` differs from the type's, or `bytes` is not aligned for the element type.
pub fn decode(ty: TensorType, bytes: &[u8]) -> Vec<f64> {
    assert_eq!(bytes.len(), ty.bytes(), "{ty} has {} bytes", ty.bytes());
    fn read<E: Pod>(bytes: &[u8], f: impl Fn(E) -> f64) -> Vec<f64> {
        bytemuck::cast_slice::<u8, E>(bytes).iter().map(|&e| f(e)).collect()
    }
    match ty.dtype {
        DType::F64 => read(bytes, |e: f64| e),
        DType::F32 => read(bytes, |e: f32| e.into()),
        DType::BF16 => read(bytes, |e: bf16| e.into()),
        DType::I32 => read(bytes, |e: i32| e.into()),
        DType::U32 => read(bytes, |e: u32| e.into()),
        DType::U8 => read(bytes, |e: u8| e.into()),
        DType::E4M3 => read(bytes, |e: u8| crate::formats::from_e4m3(e).into()),
        DType::E5M2 => read(bytes, |e: u8| crate::formats::from_e5m2(e).into()),
        DType::E5M6 => {
            let mut out = vec![0.0; ty.numel()];
            crate::formats::unpack_e5m6(bytes, &mut out);
            out.into_iter().map(f64::from).collect()
        }
    }
}

/// `v` rounded to odd: f32 with the last bit set if `v` lies between two f32 numbers. A second rounding, to a
/// format narrower by at least two bits, then gives the same number as one rounding of `v`.
fn round_to_odd(v: f64) -> f32 {
    let near = v as f32;
    let bits = near.to_bits();
    if v.is_nan() || f64::from(near) == v || bits % 2 == 1 {
        return near;
    }
    f32::from_bits(if f64::from(near).abs() > v.abs() { bits - 1 } else { bits + 1 })
}

fn cast_into<E: Pod>(out: &mut [u8], values: &[f64], f: impl Fn(f64) -> E) {
    for (o, &v) in bytemuck::cast_slice_mut::<u8, E>(out).iter_mut().zip(values) {
        *o = f(v);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// f64 resolves numbers closer to a tie than f32 can.
        #[test]
        fn numbers_next_to_a_tie_are_rounded_once(mantissa in 0u32..64, exponent in -8i32..8, off in -52i32..-9) {
            let unit = 2f64.powi(exponent - 7);
            let even = f64::from(128 + 2 * mantissa) * unit;
            let tie = even + 0.5 * unit;
            let distance = 2f64.powi(exponent + off);
            let values = [tie - distance, tie, tie + distance, -tie - distance];
            let tensor = HostTensor::from_f64(TensorType::new(DType::BF16, [4]), &values).to_f64();
            prop_assert_eq!(tensor, [even, even, even + unit, -even - unit]);
        }

        #[test]
        fn f32_becomes_bf16_as_everywhere(bits in any::<u32>().prop_filter("number", |&b| !f32::from_bits(b).is_nan())) {
            let x = f32::from_bits(bits);
            let tensor = HostTensor::from_f64(TensorType::new(DType::BF16, [1]), &[x.into()]);
            prop_assert_eq!(tensor.bytes(), to_bf16(x).to_le_bytes());
        }
    }
}
