//! Tensors in host memory.

use crate::{DType, TensorType};
use bytemuck::{Pod, Zeroable};
use half::bf16;

/// The alignment of every buffer in host memory, and of every tensor inside an arena: a cache line, and what the
/// widest vector loads want.
pub const ALIGN_BYTES: usize = 64;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; ALIGN_BYTES]);

/// Zero-initialised bytes aligned to [`ALIGN_BYTES`].
#[derive(Clone)]
pub struct AlignedBytes {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedBytes {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        AlignedBytes { lines: bytemuck::zeroed_vec(len.div_ceil(ALIGN_BYTES)), len }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    /// The bytes, to be written.
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

    /// A tensor of `ty` whose elements are given as f64 and rounded to nearest even into its type.
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
            DType::BF16 => cast_into(out, values, bf16::from_f64),
            DType::I32 => cast_into(out, values, |v| v as i32),
            DType::U32 => cast_into(out, values, |v| v as u32),
            DType::U8 => cast_into(out, values, |v| v as u8),
            DType::E4M3 => cast_into(out, values, |v| crate::formats::to_e4m3(v as f32)),
            DType::E5M2 => cast_into(out, values, |v| crate::formats::to_e5m2(v as f32)),
            DType::E5M6 => {
                let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
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

    /// The raw bytes, to be written.
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
/// If `bytes` is not as long as `ty` says or not aligned for its element type.
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

fn cast_into<E: Pod>(out: &mut [u8], values: &[f64], f: impl Fn(f64) -> E) {
    for (o, &v) in bytemuck::cast_slice_mut::<u8, E>(out).iter_mut().zip(values) {
        *o = f(v);
    }
}
