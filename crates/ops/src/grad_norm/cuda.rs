//! Launches of the GPU kernels of [`GradNorm`] and [`SquaredNorm`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{GradNorm, SquaredNorm};
use crate::device::{Floats, suffix, table};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaTensor, DeviceMemory, DevicePtr, Gpu, Header, KernelSource, Launch, Operands,
    Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

/// Sums of squares, and the sum over a block.
pub(crate) const SQUARES: Header = Header::new("grad_norm/squares.cuh", include_str!("squares.cuh"));

pub(super) const SOURCE: KernelSource = KernelSource {
    headers: &[SQUARES],
    constants: &[&[("THREADS", THREADS as i64), ("SUM_THREADS", SUM_THREADS as i64)]],
    structs: &[Arguments::LAYOUT, Chunk::LAYOUT, TotalArguments::LAYOUT],
    ..KernelSource::new("grad_norm/kernel.cu", include_str!("kernel.cu"))
};

/// Elements of a chunk, which one block sums.
pub(crate) const CHUNK: usize = 32 * 1024;
/// Threads per block of the first launch, and of the second.
pub(crate) const THREADS: u32 = 256;
const SUM_THREADS: u32 = 1024;

kernel_struct! {
    struct Arguments {
        chunks: DevicePtr,
        sums: DevicePtr,
        norm: Floats,
        count: u32,
    }

    struct TotalArguments {
        sums: DevicePtr,
        total: DevicePtr,
        count: u64,
    }

    struct Chunk {
        first: DevicePtr,
        elements: u32,
        is_bf16: u32,
    }
}

impl CudaKernel for GradNorm {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        workspace(inputs)
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (table, count) = chunk_table(gpu, operands.inputs)?;
        let arguments = Arguments {
            chunks: table.pointer(),
            sums: operands.workspace[0].place,
            norm: operands.outputs[0].into(),
            count,
        };
        let chunks = gpu.function(&SOURCE, &[], "grad_norm_chunks")?;
        let sum = gpu.function(&SOURCE, &[], "grad_norm_sum")?;
        Ok(Work::new(move |stream| {
            // Keeps the table's memory allocated as long as this work.
            let _table = &table;
            if count > 0 {
                // SAFETY: the kernel takes one `Arguments`. The table holds one `Chunk` for each block, whose
                // elements lie in a gradient and have the type of its flag; the workspace holds one sum for
                // each block.
                unsafe { chunks.launch(Launch::row(count, THREADS), &arguments, stream)? };
            }
            // SAFETY: as above; the first launch wrote all `count` sums, and the norm is one number.
            unsafe { sum.launch(Launch::row(1, SUM_THREADS), &arguments, stream) }
        }))
    }
}

impl CudaKernel for SquaredNorm {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        workspace(inputs)
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (table, count) = chunk_table(gpu, operands.inputs)?;
        let sums = operands.workspace[0].place;
        let arguments = Arguments { chunks: table.pointer(), sums, norm: Floats::none(), count };
        let totals = TotalArguments { sums, total: operands.outputs[0].place, count: count.into() };
        let chunks = gpu.function(&SOURCE, &[], "grad_norm_chunks")?;
        let total = gpu.function(&SOURCE, &[], "squared_norm_total")?;
        Ok(Work::new(move |stream| {
            // Keeps the table's memory allocated as long as this work.
            let _table = &table;
            if count > 0 {
                // SAFETY: as for `GradNorm`; this kernel does not use the norm.
                unsafe { chunks.launch(Launch::row(count, THREADS), &arguments, stream)? };
            }
            // SAFETY: the kernel takes one `TotalArguments`. The first launch wrote all `count` sums, and the
            // total is one f64.
            unsafe { total.launch(Launch::row(1, SUM_THREADS), &totals, stream) }
        }))
    }
}

/// One f64 sum for each chunk.
fn workspace(gradients: &[TensorType]) -> Vec<TensorType> {
    let chunks = gradients.iter().map(|grad| grad.numel().div_ceil(CHUNK)).sum::<usize>();
    vec![TensorType::new(DType::F64, [chunks])]
}

/// The table of all chunks, and their number.
fn chunk_table(gpu: &Gpu, gradients: &[CudaTensor]) -> Result<(DeviceMemory, u32), CudaError> {
    let mut chunks = Vec::new();
    for grad in gradients {
        let is_bf16 = u32::from(suffix(grad.ty) == "bf16");
        for first in (0..grad.ty.numel()).step_by(CHUNK) {
            let elements = CHUNK.min(grad.ty.numel() - first) as u32;
            let first = grad.place.offset(grad.ty.dtype.bytes(first));
            chunks.push(Chunk { first, elements, is_bf16 });
        }
    }
    Ok((table(gpu, &chunks)?, chunks.len() as u32))
}
