//! Launches of the GPU kernels of [`DelayedScaling`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{DelayedScaling, OPERANDS};
use crate::device::table;
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work};

pub(super) const SOURCE: KernelSource =
    KernelSource::new("delayed_scaling/kernel.cu", include_str!("kernel.cu"));

/// Threads per block; equal in the kernels.
const THREADS: u32 = 256;

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    tensors: DevicePtr,
    max_amax: DevicePtr,
    latest: u32,
    padding: u32,
}

impl CudaKernel for DelayedScaling {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, .. } = operands;
        // `Tensor` of the kernel, as five words of 8 bytes.
        let mut words = Vec::new();
        for (n, tensor) in self.tensors.iter().enumerate() {
            let (history, scale) = (outputs[1 + 2 * n], outputs[2 + 2 * n]);
            let length = history.ty.numel() as u64;
            words.extend([inputs[OPERANDS * n].place.0, history.place.0, scale.place.0]);
            words.push(length | u64::from(tensor.pow2_scales) << 32);
            words.push(self.target(tensor).to_bits().into());
        }
        let tensors = table(gpu, &words)?;
        let arguments = Arguments {
            tensors: tensors.pointer(),
            max_amax: outputs[0].place,
            latest: self.latest.into(),
            padding: 0,
        };
        let clear = gpu.function(&SOURCE, &[], "delayed_scaling_clear")?;
        let scale = gpu.function(&SOURCE, &[], "delayed_scaling")?;
        let blocks = self.tensors.len() as u32;
        Ok(Work::new(move |stream| {
            // Keeps the table's memory allocated as long as this work.
            let _table = &tensors;
            // SAFETY: the kernels take one `Arguments`. The table holds one `Tensor` for each block, whose
            // history has the length in it.
            unsafe { clear.launch(Launch::row(1, 1), &arguments, stream)? };
            if blocks > 0 {
                // SAFETY: as above.
                unsafe { scale.launch(Launch::row(blocks, THREADS), &arguments, stream)? };
            }
            Ok(())
        }))
    }
}
