//! Launches of the GPU kernels of [`Embedding`] and [`EmbeddingGrad`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Embedding, EmbeddingGrad};
use crate::device::{ELEMENTWISE_THREADS, Floats, lanes, plane, suffix, warps_of};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[
        ("LOADS", LOADS as i64),
        ("DIGITS", DIGITS as i64),
        ("DIGIT_BITS", DIGIT_BITS as i64),
        ("RUN", RUN as i64),
        ("SUM_WARPS", SUM_WARPS as i64),
    ]],
    structs: &[Lookup::LAYOUT, Sort::LAYOUT, Gradient::LAYOUT],
    ..KernelSource::new("embedding/kernel.cu", include_str!("kernel.cu"))
};

/// Loads that a thread of the lookup has in flight.
const LOADS: usize = 4;
/// Values of a digit in a pass of the radix sort; also the threads per block.
const DIGITS: usize = 512;
const DIGIT_BITS: u32 = DIGITS.ilog2();
/// Sorted tokens of a run, which one warp sums.
const RUN: usize = 32;
/// Warps per block of the kernels that clear and sum; each handles a run or a row.
const SUM_WARPS: usize = 8;
/// Maximum number of tiles of the sort. Each tile reads the digit counts of all tiles.
const MAX_TILES: usize = 128;
/// Minimum number of tokens in a tile.
const MIN_TILE: usize = 2 * DIGITS;

kernel_struct! {
    struct Lookup {
        ids: DevicePtr,
        table: DevicePtr,
        x: DevicePtr,
        tokens: u64,
        rows: u64,
        width: u32,
    }
}

impl CudaKernel for Embedding {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (ids, table, x) = (operands.inputs[0], operands.inputs[1], operands.outputs[0]);
        let (rows, width) = table.ty.shape.rows_cols();
        let row_bytes = table.ty.dtype.bytes(width);
        let unit = if row_bytes % 16 == 0 { 16 } else { table.ty.dtype.bytes(1) };
        let tokens = ids.ty.numel();
        let arguments = Lookup {
            ids: ids.place,
            table: table.place,
            x: x.place,
            tokens: tokens as u64,
            rows: rows as u64,
            width: (row_bytes / unit) as u32,
        };
        let function = gpu.function(&SOURCE, &[], &format!("embedding_{unit}"))?;
        let threads = warps_of((row_bytes / unit).div_ceil(LOADS), ELEMENTWISE_THREADS as usize);
        // SAFETY: the kernel takes one `Lookup`. There are `tokens` ids; the table has `rows` rows and x has
        // `tokens`, each of `width` units and aligned to a unit. Ids outside of the table are not looked up.
        Ok(unsafe { Work::launch(function, Launch::row(tokens.max(1) as u32, threads), arguments) })
    }
}

kernel_struct! {
    struct Sort {
        rows: DevicePtr,
        tokens: DevicePtr,
        rows_to: DevicePtr,
        tokens_to: DevicePtr,
        counts: DevicePtr,
        occurs: DevicePtr,
        count: u32,
        tile: u32,
        shift: u32,
        table_rows: u32,
    }
}

kernel_struct! {
    struct Gradient {
        dx: DevicePtr,
        rows: DevicePtr,
        tokens: DevicePtr,
        occurs: DevicePtr,
        dtable: Floats,
        parts: DevicePtr,
        count: u32,
        table_rows: u32,
        width: u32,
        accumulate: u32,
    }
}

/// Tokens in a tile of the sort.
fn tile(tokens: usize) -> usize {
    tokens.div_ceil(MAX_TILES).next_multiple_of(DIGITS).max(MIN_TILE)
}

impl CudaKernel for EmbeddingGrad {
    /// Two buffers of (row, token) pairs, between which the passes of the sort alternate; counts of digits;
    /// flags of the rows that occur; partial sums of runs.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (tokens, width) = inputs[1].shape.rows_cols();
        let words = |shape: [usize; 2]| TensorType::new(DType::U32, shape);
        vec![
            words([2, tokens]),
            words([2, tokens]),
            words([tokens.div_ceil(tile(tokens)).max(1), DIGITS]),
            words([1, self.vocab_size]),
            TensorType::new(DType::F32, [2 * tokens.div_ceil(RUN), width]),
        ]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, workspace } = operands;
        let dx = inputs[1];
        let (tokens, width) = dx.ty.shape.rows_cols();
        let tiles = tokens.div_ceil(tile(tokens)).max(1);
        let mut works = Vec::new();

        // Ids outside of the table are sorted as row vocab_size.
        let bits = usize::BITS - self.vocab_size.leading_zeros();
        let mut sorted = (inputs[0].place, DevicePtr(0));
        for pass in 0..bits.div_ceil(DIGIT_BITS).max(1) {
            let to = workspace[pass as usize % 2].place;
            let arguments = Sort {
                rows: sorted.0,
                tokens: sorted.1,
                rows_to: to,
                tokens_to: to.offset(DType::U32.bytes(tokens)),
                counts: workspace[2].place,
                occurs: workspace[3].place,
                count: tokens as u32,
                tile: tile(tokens) as u32,
                shift: pass * DIGIT_BITS,
                table_rows: self.vocab_size as u32,
            };
            for name in ["embedding_sort_count", "embedding_sort_move"] {
                let function = gpu.function(&SOURCE, &[], name)?;
                // SAFETY: the kernels take one `Sort`. The buffers that are read and written are distinct and
                // hold a row and a token for each of `count` tokens (the first pass reads the ids instead);
                // the counts hold DIGITS words for each block.
                works.push(unsafe {
                    Work::launch(function, Launch::row(tiles as u32, DIGITS as u32), arguments)
                });
            }
            sorted = (arguments.rows_to, arguments.tokens_to);
        }

        let (path, n) = if width % lanes(dx.ty) == 0 { ("vector", lanes(dx.ty)) } else { ("any", 1) };
        let arguments = Gradient {
            dx: dx.place,
            rows: sorted.0,
            tokens: sorted.1,
            occurs: workspace[3].place,
            dtable: outputs[0].into(),
            parts: workspace[4].place,
            count: tokens as u32,
            table_rows: self.vocab_size as u32,
            width: width as u32,
            accumulate: outputs[0].accumulate.into(),
        };
        let threads = [32 * SUM_WARPS as u32, 1];
        let rows = plane([self.vocab_size.div_ceil(SUM_WARPS), 1], threads);
        let runs = plane([tokens.div_ceil(RUN * SUM_WARPS), width.div_ceil(32 * n)], threads);
        let clear = (!outputs[0].accumulate).then_some(("clear", rows));
        for (name, launch) in clear.into_iter().chain([("sum", runs), ("rest", runs)]) {
            let name = format!("embedding_{name}_{path}_{}", suffix(dx.ty));
            let function = gpu.function(&SOURCE, &[], &name)?;
            // SAFETY: the kernels take one `Gradient`. dx is [count, width] of the type in the kernel's name;
            // with the path "vector", its rows are whole 16-byte vectors. The table's gradient is
            // [table_rows, width], and `parts` holds two rows for each run. Sorted tokens are indices of rows
            // of dx, and rows outside of the table are skipped.
            works.push(unsafe { Work::launch(function, launch, arguments) });
        }
        Ok(Work::sequence(works))
    }
}
