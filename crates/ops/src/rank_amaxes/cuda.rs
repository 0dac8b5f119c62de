//! Launches of the GPU kernels of [`RankAmaxes`] and [`MaxAmaxes`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{MaxAmaxes, RankAmaxes};
use crate::device::{plane, table};
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Operands, Work, kernel_struct};
use xtrain_tensor::TensorType;

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[TensorAmaxes::LAYOUT, Arguments::LAYOUT],
    ..KernelSource::new("rank_amaxes/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of a block.
const THREADS: u32 = 256;

kernel_struct! {
    /// The amaxes of a tensor, and their place in a row.
    struct TensorAmaxes {
        amaxes: DevicePtr,
        first: u32,
        count: u32,
    }

    struct Arguments {
        /// A [`TensorAmaxes`] for each tensor.
        tensors: DevicePtr,
        /// The rows of ranks.
        rows: DevicePtr,
        /// Amaxes of a row.
        all: u32,
        ranks: u32,
    }
}

impl CudaKernel for RankAmaxes {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let tensors = operands.inputs.iter().map(|amaxes| (amaxes.ty, amaxes.place));
        launch(gpu, "rank_amaxes", tensors, operands.outputs[0].place, 1)
    }
}

impl CudaKernel for MaxAmaxes {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let tensors = operands.outputs.iter().map(|amaxes| (amaxes.ty, amaxes.place));
        let rows = operands.inputs[0];
        let ranks = rows.ty.numel() / self.lengths.iter().sum::<usize>();
        launch(gpu, "max_amaxes", tensors, rows.place, ranks)
    }
}

fn launch(
    gpu: &Gpu,
    kernel: &str,
    tensors: impl Iterator<Item = (TensorType, DevicePtr)>,
    rows: DevicePtr,
    ranks: usize,
) -> Result<Work, CudaError> {
    let mut all = 0;
    let tensors: Vec<TensorAmaxes> = tensors
        .map(|(ty, amaxes)| {
            let (first, count) = (all, ty.numel() as u32);
            all += count;
            TensorAmaxes { amaxes, first, count }
        })
        .collect();
    let most = tensors.iter().map(|tensor| tensor.count).max().unwrap_or(0);
    let grid = plane([tensors.len(), most.div_ceil(THREADS) as usize], [THREADS, 1]);
    let none = tensors.is_empty();
    let tensors = table(gpu, &tensors)?;
    let arguments = Arguments { tensors: tensors.pointer(), rows, all, ranks: ranks as u32 };
    let function = gpu.function(&SOURCE, &[], kernel)?;
    Ok(Work::new(move |stream| {
        // Keeps the table's memory allocated as long as this work.
        let _table = &tensors;
        if none {
            return Ok(());
        }
        // SAFETY: the kernels take one `Arguments`. The table has an entry for each block of the grid's first
        // extent, with a pointer to `count` words; `first + count` is at most `all`, the words of each of
        // `ranks` rows.
        unsafe { function.launch(grid, &arguments, stream) }
    }))
}
