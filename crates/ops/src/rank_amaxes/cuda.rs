//! Launches of the GPU kernels of [`RankAmaxes`] and [`MaxAmaxes`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{MaxAmaxes, RankAmaxes};
use crate::device::table;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("rank_amaxes/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of a block.
const THREADS: u32 = 256;

kernel_struct! {
    struct Arguments {
        /// Pointers to the amaxes of tensors.
        amaxes: DevicePtr,
        /// The rows of ranks.
        rows: DevicePtr,
        tensors: u32,
        ranks: u32,
    }
}

impl CudaKernel for RankAmaxes {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let amaxes: Vec<DevicePtr> = operands.inputs.iter().map(|amax| amax.place).collect();
        launch(gpu, "rank_amaxes", &amaxes, operands.outputs[0].place, 1)
    }
}

impl CudaKernel for MaxAmaxes {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let amaxes: Vec<DevicePtr> = operands.outputs.iter().map(|amax| amax.place).collect();
        let rows = operands.inputs[0];
        launch(gpu, "max_amaxes", &amaxes, rows.place, rows.ty.shape[0])
    }
}

fn launch(
    gpu: &Gpu,
    kernel: &str,
    amaxes: &[DevicePtr],
    rows: DevicePtr,
    ranks: usize,
) -> Result<Work, CudaError> {
    let tensors = amaxes.len() as u32;
    let amaxes = table(gpu, amaxes)?;
    let arguments = Arguments { amaxes: amaxes.pointer(), rows, tensors, ranks: ranks as u32 };
    let function = gpu.function(&SOURCE, &[], kernel)?;
    Ok(Work::new(move |stream| {
        // Keeps the table's memory allocated as long as this work.
        let _table = &amaxes;
        // SAFETY: the kernels take one `Arguments`. The table holds a pointer to one f32 for each of
        // `tensors` tensors, and there are `ranks` rows of as many f32.
        unsafe { function.launch(Launch::row(tensors.div_ceil(THREADS).max(1), THREADS), &arguments, stream) }
    }))
}
