//! Launch of the GPU kernel of [`RecordLosses`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::RecordLosses;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("step_losses/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of the only block.
const THREADS: u32 = 32;

kernel_struct! {
    struct Arguments {
        loss: DevicePtr,
        objective: DevicePtr,
        micro_step: DevicePtr,
        losses: DevicePtr,
        /// Null without sources.
        sources: DevicePtr,
        count: u32,
        columns: u32,
    }
}

impl CudaKernel for RecordLosses {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [loss, objective, micro_step] = [0, 1, 2].map(|n| operands.inputs[n].place);
        let losses = operands.outputs[0];
        let arguments = Arguments {
            loss,
            objective,
            micro_step,
            losses: losses.place,
            sources: operands.inputs.get(4).map_or(DevicePtr(0), |sources| sources.place),
            count: losses.ty.shape[0] as u32,
            columns: losses.ty.shape[1] as u32,
        };
        let function = gpu.function(&SOURCE, &[], "record_losses")?;
        // SAFETY: the kernel takes one `Arguments` and runs in one block. The inputs have the sizes and types
        // that `infer` checks, and there are `count` rows of `columns` numbers.
        Ok(unsafe { Work::launch(function, Launch::row(1, THREADS), arguments) })
    }
}
