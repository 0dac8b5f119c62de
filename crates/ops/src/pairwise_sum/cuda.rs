//! Launches of the GPU kernels of [`PairwiseAdd`] and [`PairwiseTotal`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{PairwiseAdd, PairwiseTotal};
use crate::device::ELEMENTWISE_THREADS;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("PER_THREAD", PER_THREAD as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("pairwise_sum/kernel.cu", include_str!("kernel.cu"))
};

/// Elements per thread.
const PER_THREAD: u64 = 8;

kernel_struct! {
    struct Arguments {
        x: DevicePtr,
        micro_step: DevicePtr,
        levels: DevicePtr,
        /// Null if the sum is stored in a level.
        total: DevicePtr,
        elements: u64,
        count: u32,
        padding: u32,
    }
}

impl CudaKernel for PairwiseAdd {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        launch(gpu, operands, "pairwise_add", operands.outputs[0].place, DevicePtr(0))
    }
}

impl CudaKernel for PairwiseTotal {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        launch(gpu, operands, "pairwise_total", operands.inputs[2].place, operands.outputs[0].place)
    }
}

fn launch(
    gpu: &Gpu,
    operands: &Operands<'_>,
    kernel: &str,
    levels: DevicePtr,
    total: DevicePtr,
) -> Result<Work, CudaError> {
    let [x, micro_step] = [operands.inputs[0], operands.inputs[1]];
    let elements = x.ty.numel() as u64;
    let count = operands.inputs[2].ty.shape[0] as u32;
    let micro_step = micro_step.place;
    let arguments = Arguments { x: x.place, micro_step, levels, total, elements, count, padding: 0 };
    let blocks = elements.div_ceil(u64::from(ELEMENTWISE_THREADS) * PER_THREAD).max(1) as u32;
    let function = gpu.function(&SOURCE, &[], kernel)?;
    // SAFETY: the kernels take one `Arguments`. x and each of `count` levels have `elements` f32 elements,
    // and so has the total, if it is not null; the number of the micro-step is one word.
    Ok(unsafe { Work::launch(function, Launch::row(blocks, ELEMENTWISE_THREADS), arguments) })
}
