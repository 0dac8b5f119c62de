//! Launches of the GPU kernels of [`CachedAttention`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::CachedAttention;
use crate::attention::block::scale_define;
use crate::device::{suffix, table};
use xtrain_cuda::{
    Constants, CudaError, CudaKernel, DevicePtr, Function, Gpu, KernelSource, Launch, Operands, Work,
    kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

/// Head widths and numbers of heads per block that tests compile. Others are compiled when a model needs
/// them.
const VARIANTS: &[Constants] = &[
    &[("HEAD_DIM", 20), ("HEADS", 4)],
    &[("HEAD_DIM", 64), ("HEADS", 4)],
    &[("HEAD_DIM", 96), ("HEADS", 2)],
    &[("HEAD_DIM", 128), ("HEADS", 1)],
    &[("HEAD_DIM", 128), ("HEADS", 2)],
    &[("HEAD_DIM", 256), ("HEADS", 4)],
];

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("WARPS", WARPS as i64), ("MAX_SPLITS", MAX_SPLITS as i64)]],
    structs: &[Arguments::LAYOUT],
    variants: || VARIANTS.iter().map(|list| list.to_vec()).collect(),
    ..KernelSource::new("cached_attention/kernel.cu", include_str!("kernel.cu"))
};

/// Warps per block.
const WARPS: u32 = 8;
/// Maximum number of parts into which the rows of the cache are split.
const MAX_SPLITS: usize = 64;
/// Number of blocks that occupies any GPU.
const BUSY_BLOCKS: usize = 1024;
/// Maximum width of heads of which a block computes several.
const MAX_GROUPED_WIDTH: usize = 256;

kernel_struct! {
    struct Arguments {
        qkv: DevicePtr,
        positions: DevicePtr,
        keys: DevicePtr,
        values: DevicePtr,
        o: DevicePtr,
        parts: DevicePtr,
        finished: DevicePtr,
        tokens_per_sequence: i32,
        capacity: i32,
        heads: i32,
        kv_heads: i32,
        splits: i32,
    }
}

impl CachedAttention {
    /// Query heads that a block computes; they share a key/value head.
    fn heads_per_block(&self) -> usize {
        let group = self.heads / self.kv_heads;
        let fits = |&heads: &usize| group.is_multiple_of(heads) && self.head_dim <= MAX_GROUPED_WIDTH;
        [4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// Maximum number of parts into which the rows of the cache are split: as many as occupy the GPU.
    fn splits(&self, tokens: usize) -> usize {
        (BUSY_BLOCKS / (tokens * self.heads / self.heads_per_block()).max(1)).clamp(1, MAX_SPLITS)
    }
}

impl CudaKernel for CachedAttention {
    /// Partial results of each part of the cache, for each token and query head.
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
        let groups = self.heads / self.heads_per_block();
        let finished = table(gpu, &vec![0u64; (tokens * groups).div_ceil(2)])?;
        let arguments = Arguments {
            qkv: qkv.place,
            positions: positions.place,
            keys: keys.place,
            values: values.place,
            o: o.place,
            parts: operands.workspace.first().map_or(DevicePtr(0), |parts| parts.place),
            finished: finished.pointer(),
            tokens_per_sequence: (tokens / sequences) as i32,
            capacity: capacity as i32,
            heads: self.heads as i32,
            kv_heads: self.kv_heads as i32,
            splits: self.splits(tokens) as i32,
        };
        let function = |part: &str| -> Result<Function, CudaError> {
            let mut defines =
                vec![("HEAD_DIM", self.head_dim as i64), ("HEADS", self.heads_per_block() as i64)];
            defines.extend(scale_define(self.scale));
            gpu.function(&SOURCE, &defines, &format!("cached_attention{part}_{}", suffix(qkv.ty)))
        };
        let grid = [arguments.splits as u32, groups as u32, tokens as u32];
        let launch = Launch { grid, ..Launch::row(1, 32 * WARPS) };
        let attend = function("")?;
        let attend = Work::new(move |stream| {
            // Keeps the counters' memory allocated as long as this work.
            let _finished = &finished;
            // SAFETY: the kernel takes one `Arguments`. It reads the rows of the caches up to a token's
            // position and writes the rows of the output. The workspace holds the partial results of all
            // parts, and there is a counter for each token and group of heads. If a sequence has one new
            // token, the kernel writes that token's row of the caches, within their capacity.
            unsafe { attend.launch(launch, &arguments, stream) }
        });
        if tokens == sequences {
            return Ok(attend);
        }
        // SAFETY: as above; this kernel writes rows of the caches, within their capacity.
        let fill =
            unsafe { Work::launch(function("_fill")?, Launch::row(tokens.max(1) as u32, 128), arguments) };
        Ok(Work::sequence(vec![fill, attend]))
    }
}
