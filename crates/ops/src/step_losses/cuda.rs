//! Launch of the GPU kernel of [`RecordLosses`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::RecordLosses;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("step_losses/kernel.cu", include_str!("kernel.cu"))
};

kernel_struct! {
    struct Arguments {
        loss: DevicePtr,
        objective: DevicePtr,
        micro_step: DevicePtr,
        losses: DevicePtr,
        count: u64,
    }
}

impl CudaKernel for RecordLosses {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [loss, objective, micro_step] = [0, 1, 2].map(|n| operands.inputs[n].place);
        let losses = operands.outputs[0];
        let count = losses.ty.shape[0] as u64;
        let arguments = Arguments { loss, objective, micro_step, losses: losses.place, count };
        let function = gpu.function(&SOURCE, &[], "record_losses")?;
        // SAFETY: the kernel takes one `Arguments` and runs in one thread. The inputs are one number each, of
        // the types that `infer` checks, and there are `count` rows of two losses.
        Ok(unsafe { Work::launch(function, Launch::row(1, 1), arguments) })
    }
}
