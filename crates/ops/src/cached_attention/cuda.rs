//! The kernels of [`CachedAttention`] on a card.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::CachedAttention;
use crate::device::suffix;
use xtrain_cuda::{
    CudaError, CudaKernel, Defines, DevicePtr, Function, Gpu, KernelSource, Launch, Operands, Work,
};
use xtrain_tensor::{DType, TensorType};

/// Head widths that tests compile; others are compiled where a model has them.
const VARIANTS: &[Defines] =
    &[&[("HEAD_DIM", 20)], &[("HEAD_DIM", 64)], &[("HEAD_DIM", 128)], &[("HEAD_DIM", 256)]];

pub(super) const SOURCE: KernelSource = KernelSource {
    variants: VARIANTS,
    ..KernelSource::new("cached_attention/kernel.cu", include_str!("kernel.cu"))
};

/// Parts that the rows of the cache are cut into, as in the kernel.
const SPLITS: usize = 16;
/// Warps of a block that sums a part, as in the kernel.
const WARPS: u32 = 4;

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    qkv: DevicePtr,
    positions: DevicePtr,
    keys: DevicePtr,
    values: DevicePtr,
    o: DevicePtr,
    parts: DevicePtr,
    tokens_a_sequence: i32,
    capacity: i32,
    heads: i32,
    kv_heads: i32,
}

impl CudaKernel for CachedAttention {
    /// What each part of the cache comes to, for each token and query head.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (tokens, _) = inputs[0].shape.rows_cols();
        vec![TensorType::new(DType::F32, [tokens * self.heads * SPLITS * (self.head_dim + 2)])]
    }

    fn ready(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (qkv, positions) = (operands.inputs[0], operands.inputs[1]);
        let (o, keys, values) = (operands.outputs[0], operands.outputs[1], operands.outputs[2]);
        let (tokens, _) = qkv.ty.shape.rows_cols();
        let (sequences, capacity) = (keys.ty.shape[0], keys.ty.shape[1]);
        let arguments = Arguments {
            qkv: qkv.place,
            positions: positions.place,
            keys: keys.place,
            values: values.place,
            o: o.place,
            parts: operands.workspace[0].place,
            tokens_a_sequence: (tokens / sequences) as i32,
            capacity: capacity as i32,
            heads: self.heads as i32,
            kv_heads: self.kv_heads as i32,
        };
        let function = |part: &str| -> Result<Function, CudaError> {
            let defines = [("HEAD_DIM", self.head_dim as i64)];
            gpu.function(&SOURCE, &defines, &format!("cached_attention{part}_{}", suffix(qkv.ty)))
        };
        let over = |grid: [u32; 3], block: [u32; 3]| Launch { grid, block, ..Launch::row(1, 1) };
        let (tokens, heads) = (tokens as u32, self.heads as u32);
        let width = (self.head_dim as u32).next_multiple_of(32).min(1024);
        // SAFETY: each kernel takes one `Arguments`. This one writes rows of the caches within their capacity.
        let fill = unsafe { Work::launch(function("_fill")?, over([tokens, 1, 1], [128, 1, 1]), arguments) };
        let grid = [SPLITS as u32, heads, tokens];
        // SAFETY: the same; it reads the rows of the caches up to a token's position, and writes the token's parts.
        let attend = unsafe { Work::launch(function("")?, over(grid, [32, WARPS, 1]), arguments) };
        // SAFETY: the same; it reads the parts, and writes the output's rows.
        let combine = unsafe {
            Work::launch(function("_combine")?, over([heads, tokens, 1], [width, 1, 1]), arguments)
        };
        Ok(Work::all(vec![fill, attend, combine]))
    }
}
