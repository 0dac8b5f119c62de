//! Attention on the CUDA cores of a GPU, in f32: the fallback for operands that no faster kernel supports
//! (f32, heads that are not a multiple of 16 wide).
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Attention;
use super::block::scale_define;
use super::operands::{Backward, Forward};
use crate::device::suffix;
use xtrain_cuda::{Constants, CudaError, Function, Gpu, KernelSource, Launch, Operands, Work};

/// Head widths and tile sizes that tests compile. Others are compiled when a model needs them.
const VARIANTS: &[Constants] = &[
    &[("HEAD_DIM", 32), ("TILE", 64)],
    &[("HEAD_DIM", 64), ("TILE", 64)],
    // The backward of keys on GPUs with 99 KiB of shared memory per block.
    &[("HEAD_DIM", 64), ("TILE", 32)],
    &[("HEAD_DIM", 128), ("TILE", 32)],
    // Tiles of the forward, and of the backward.
    &[("HEAD_DIM", 256), ("TILE", 32)],
    &[("HEAD_DIM", 256), ("TILE", 16)],
    // Widths for which rows are read four elements at a time, and one.
    &[("HEAD_DIM", 20), ("TILE", 64)],
    &[("HEAD_DIM", 6), ("TILE", 64)],
];

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("X", THREADS[0] as i64), ("Y", THREADS[1] as i64)]],
    structs: &[Forward::LAYOUT, Backward::LAYOUT],
    variants: || VARIANTS.iter().map(|list| list.to_vec()).collect(),
    ..KernelSource::new("attention/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of a block.
const THREADS: [u32; 3] = [8, 16, 1];
/// Queries per block of the kernel that computes delta, a warp each.
const DELTA_QUERIES: u32 = 8;

/// The largest tile size for which `wide` tiles of a head's width and `square` tiles of scores fit into the
/// shared memory of a block, and their bytes.
fn tile(op: &Attention, gpu: &Gpu, wide: usize, square: usize) -> (usize, u32) {
    let pitch = op.head_dim.next_multiple_of(16) + 4;
    let bytes = |tile: usize| 4 * tile * (wide * pitch + square * (tile + 4));
    // With wide heads, large tiles would spill registers.
    let max_tile = if op.head_dim <= 64 { 64 } else { 32 };
    let fits = [64, 32].into_iter().find(|&t| t <= max_tile && bytes(t) <= gpu.info().shared_bytes_per_block);
    let tile = fits.unwrap_or(16);
    (tile, bytes(tile) as u32)
}

impl Attention {
    /// A kernel for this tile size, and its launch over the tiles of `heads` heads of all sequences.
    fn tiled(
        &self,
        gpu: &Gpu,
        name: &str,
        (tile, shared): (usize, u32),
        heads: usize,
        tokens: usize,
    ) -> Result<(Function, Launch), CudaError> {
        let mut defines = vec![("HEAD_DIM", self.head_dim as i64), ("TILE", tile as i64)];
        defines.extend(scale_define(self.scale));
        let function = gpu.function(&SOURCE, &defines, name)?;
        function.allow_shared(shared)?;
        let tiles = self.seq_len.div_ceil(tile) as u32;
        let grid = [tiles, heads as u32, (tokens / self.seq_len) as u32];
        Ok((function, Launch { grid, block: THREADS, ..Launch::row(1, 1) }.shared(shared)))
    }

    pub(super) fn plain_forward(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let qkv = operands.inputs[0].ty;
        let (tokens, _) = qkv.shape.rows_cols();
        let name = format!("attention_{}", suffix(qkv));
        let (function, launch) = self.tiled(gpu, &name, tile(self, gpu, 3, 1), self.heads, tokens)?;
        let arguments = Forward::new(self, operands);
        // SAFETY: the kernel takes one `Forward`. It accesses the rows and columns of qkv, o and lse that
        // `infer` checked, in the type of its name, and document starts, if any.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }

    pub(super) fn plain_backward(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let qkv = operands.inputs[1].ty;
        let (tokens, _) = qkv.shape.rows_cols();
        let arguments = Backward::new(self, operands);
        let name = |part: &str| format!("attention_{part}_{}", suffix(qkv));
        let queries = self.tiled(gpu, &name("queries"), tile(self, gpu, 4, 1), self.heads, tokens)?;
        let keys = self.tiled(gpu, &name("keys"), tile(self, gpu, 4, 2), self.kv_heads, tokens)?;
        let (delta, _) = self.tiled(gpu, &name("delta"), tile(self, gpu, 4, 1), self.heads, tokens)?;
        let blocks = (self.seq_len as u32).div_ceil(DELTA_QUERIES);
        let grid = [blocks, self.heads as u32, (tokens / self.seq_len) as u32];
        let delta_launch = Launch { grid, block: [32, DELTA_QUERIES, 1], ..Launch::row(1, 1) };
        // SAFETY: the kernel takes one `Backward`; it reads do and o, and writes delta, one number for each
        // query and head.
        let delta = unsafe { Work::launch(delta, delta_launch, arguments) };
        // SAFETY: as above; it reads delta, which the first launch wrote, and writes the columns of queries.
        let queries = unsafe { Work::launch(queries.0, queries.1, arguments) };
        // SAFETY: as above; it writes the columns of keys and values.
        let keys = unsafe { Work::launch(keys.0, keys.1, arguments) };
        Ok(Work::sequence(vec![delta, queries, keys]))
    }
}
