//! The kernels of [`Embedding`] and [`EmbeddingGrad`] on a GPU.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Embedding, EmbeddingGrad};
use crate::device::{ELEMENTWISE_THREADS, Floats, lanes, plane, suffix, warps_of};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[Lookup::LAYOUT, Sort::LAYOUT, Gradient::LAYOUT],
    ..KernelSource::new("embedding/kernel.cu", include_str!("kernel.cu"))
};

/// Units that a thread copies at once; this and what follows as in the source.
const AT_ONCE: usize = 4;
/// Digits of a pass of the sort, and threads of its blocks.
const DIGITS: usize = 512;
const DIGIT_BITS: u32 = DIGITS.ilog2();
/// Sorted tokens of a run.
const RUN: usize = 32;
/// Runs, or rows, of a block.
const SUM_WARPS: usize = 8;
/// Tiles that are sorted by themselves, at most: each reads the counts of all.
const TILES: usize = 128;
/// Tokens of a tile, at least.
const LEAST_TILE: usize = 2 * DIGITS;

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
        let threads = warps_of((row_bytes / unit).div_ceil(AT_ONCE), ELEMENTWISE_THREADS as usize);
        // SAFETY: the kernel takes one `Lookup`; there are `tokens` ids, the table has `rows` rows and x one
        // a token, of `width` units that rows consist of and are aligned to. Ids outside the table are not
        // looked up.
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

/// Tokens of a tile.
fn tile(tokens: usize) -> usize {
    tokens.div_ceil(TILES).next_multiple_of(DIGITS).max(LEAST_TILE)
}

impl CudaKernel for EmbeddingGrad {
    /// Rows and tokens before and after a pass of the sort, counts of digits, which rows occur, and parts of
    /// runs.
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

        // Row vocab_size stands for all that the table does not have.
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
                // SAFETY: the kernels take one `Sort`. What is read has a row, and from the second pass on a
                // token, for each of `count` tokens, and so has what is written, which is the other buffer;
                // the counts have DIGITS for each block.
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
            // SAFETY: the kernels take one `Gradient`. dx is [count, width] of the type that the name says,
            // in rows of whole vectors where the path is that; the table's gradient is [table_rows, width],
            // the parts hold two rows for each run. Sorted tokens are those of dx, and rows that the table
            // does not have are left out.
            works.push(unsafe { Work::launch(function, launch, arguments) });
        }
        Ok(Work::sequence(works))
    }
}
