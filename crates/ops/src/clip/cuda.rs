//! Launch of the GPU kernel of [`Clip`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Clip, SKIPPED};
use crate::device::Floats;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("clip/kernel.cu", include_str!("kernel.cu"))
};

kernel_struct! {
    struct Arguments {
        norm: Floats,
        loss: Floats,
        /// Points to the loss if the op has no amax.
        amax: Floats,
        applied: DevicePtr,
        coefficient: DevicePtr,
        skip: DevicePtr,
        max_norm: f32,
        skipped: f32,
    }
}

impl CudaKernel for Clip {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, .. } = operands;
        let arguments = Arguments {
            norm: inputs[0].into(),
            loss: inputs[1].into(),
            amax: inputs.get(3).map_or(inputs[1], |amax| *amax).into(),
            applied: outputs[0].place,
            coefficient: outputs[1].place,
            skip: outputs[2].place,
            max_norm: self.max_norm as f32,
            // The amax is the loss if there is no other.
            skipped: if inputs.len() > 3 { SKIPPED } else { f32::INFINITY },
        };
        let function = gpu.function(&SOURCE, &[], "clip")?;
        // SAFETY: the kernel takes one `Arguments` and runs in one thread; every operand is one number, of
        // the type that `infer` checks.
        Ok(unsafe { Work::launch(function, Launch::row(1, 1), arguments) })
    }
}
