//! The kernels of [`CachedAttention`] on a GPU.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::CachedAttention;
use crate::attention::block::scale_define;
use crate::device::{suffix, table};
use xtrain_cuda::{
    CudaError, CudaKernel, Defines, DevicePtr, Function, Gpu, KernelSource, Launch, Operands, Work,
};
use xtrain_tensor::{DType, TensorType};

/// Widths and numbers of heads that tests compile; others are compiled where a model has them.
const VARIANTS: &[Defines] = &[
    &[("HEAD_DIM", 20), ("HEADS", 4)],
    &[("HEAD_DIM", 64), ("HEADS", 4)],
    &[("HEAD_DIM", 96), ("HEADS", 2)],
    &[("HEAD_DIM", 128), ("HEADS", 1)],
    &[("HEAD_DIM", 128), ("HEADS", 2)],
    &[("HEAD_DIM", 256), ("HEADS", 4)],
];

pub(super) const SOURCE: KernelSource = KernelSource {
    variants: VARIANTS,
    ..KernelSource::new("cached_attention/kernel.cu", include_str!("kernel.cu"))
};

/// Warps of a block, and parts that the rows of the cache are cut into at most, as in the kernel.
const WARPS: u32 = 8;
const MOST_SPLITS: usize = 64;
/// Blocks that keep any GPU busy.
const BUSY_BLOCKS: usize = 1024;
/// The widest head of which a block has several.
const WIDE: usize = 256;

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    qkv: DevicePtr,
    positions: DevicePtr,
    keys: DevicePtr,
    values: DevicePtr,
    o: DevicePtr,
    parts: DevicePtr,
    done: DevicePtr,
    tokens_a_sequence: i32,
    capacity: i32,
    heads: i32,
    kv_heads: i32,
    splits: i32,
}

impl CachedAttention {
    /// Query heads of a block, which share a key/value head.
    fn heads_a_block(&self) -> usize {
        let group = self.heads / self.kv_heads;
        let fits = |&heads: &usize| group.is_multiple_of(heads) && self.head_dim <= WIDE;
        [4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// Parts that the rows of the cache are cut into at most: as many as blocks are missing.
    fn splits(&self, tokens: usize) -> usize {
        (BUSY_BLOCKS / (tokens * self.heads / self.heads_a_block()).max(1)).clamp(1, MOST_SPLITS)
    }
}

impl CudaKernel for CachedAttention {
    /// What each part of the cache comes to, for each token and query head.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (tokens, _) = inputs[0].shape.rows_cols();
        match self.splits(tokens) {
            1 => Vec::new(),
            splits => {
                vec![TensorType::new(DType::F32, [tokens * self.heads * splits * (self.head_dim + 2)])]
            }
        }
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (qkv, positions) = (operands.inputs[0], operands.inputs[1]);
        let (o, keys, values) = (operands.outputs[0], operands.outputs[1], operands.outputs[2]);
        let (tokens, _) = qkv.ty.shape.rows_cols();
        let (sequences, capacity) = (keys.ty.shape[0], keys.ty.shape[1]);
        let groups = self.heads / self.heads_a_block();
        let done = table(gpu, &vec![0; (tokens * groups).div_ceil(2)])?;
        let arguments = Arguments {
            qkv: qkv.place,
            positions: positions.place,
            keys: keys.place,
            values: values.place,
            o: o.place,
            parts: operands.workspace.first().map_or(DevicePtr(0), |parts| parts.place),
            done: done.pointer(),
            tokens_a_sequence: (tokens / sequences) as i32,
            capacity: capacity as i32,
            heads: self.heads as i32,
            kv_heads: self.kv_heads as i32,
            splits: self.splits(tokens) as i32,
        };
        let function = |part: &str| -> Result<Function, CudaError> {
            let mut defines =
                vec![("HEAD_DIM", self.head_dim as i64), ("HEADS", self.heads_a_block() as i64)];
            defines.extend(scale_define(self.scale));
            gpu.function(&SOURCE, &defines, &format!("cached_attention{part}_{}", suffix(qkv.ty)))
        };
        let grid = [arguments.splits as u32, groups as u32, tokens as u32];
        let launch = Launch { grid, ..Launch::row(1, 32 * WARPS) };
        let attend = function("")?;
        let attend = Work::new(move |stream| {
            // The counts live as long as the work.
            let _done = &done;
            // SAFETY: the kernel takes one `Arguments`. It reads the rows of the caches up to a token's
            // position, and writes the output's rows; the workspace has the parts that the rows are cut into,
            // and there is a count for each token and block of heads. Where a sequence has one new token it
            // writes that token's row of the caches, within their capacity.
            unsafe { attend.launch(launch, &arguments, stream) }
        });
        if tokens == sequences {
            return Ok(attend);
        }
        // SAFETY: the same; this one writes rows of the caches within their capacity.
        let fill =
            unsafe { Work::launch(function("_fill")?, Launch::row(tokens.max(1) as u32, 128), arguments) };
        Ok(Work::sequence(vec![fill, attend]))
    }
}
