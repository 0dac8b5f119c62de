//! The kernel of [`DelayedScaling`] on a GPU.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{DelayedScaling, OPERANDS};
use crate::device::table;
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work};

pub(super) const SOURCE: KernelSource =
    KernelSource::new("delayed_scaling/kernel.cu", include_str!("kernel.cu"));

/// Threads of a block; equal in the kernels.
const THREADS: u32 = 256;

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    tensors: DevicePtr,
    largest: DevicePtr,
    latest: u32,
    padding: u32,
}

impl CudaKernel for DelayedScaling {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, .. } = operands;
        // The source's `Tensor`, in words of 8 bytes.
        let mut words = Vec::new();
        for (n, tensor) in self.tensors.iter().enumerate() {
            let (history, scale) = (outputs[1 + 2 * n], outputs[2 + 2 * n]);
            let length = history.ty.numel() as u64;
            words.extend([inputs[OPERANDS * n].place.0, history.place.0, scale.place.0]);
            words.push(length | u64::from(tensor.pow2_scales) << 32);
            words.push(self.most(tensor).to_bits().into());
        }
        let tensors = table(gpu, &words)?;
        let arguments = Arguments {
            tensors: tensors.pointer(),
            largest: outputs[0].place,
            latest: self.latest.into(),
            padding: 0,
        };
        let clear = gpu.function(&SOURCE, &[], "delayed_scaling_clear")?;
        let scale = gpu.function(&SOURCE, &[], "delayed_scaling")?;
        let blocks = self.tensors.len() as u32;
        Ok(Work::new(move |stream| {
            // The table lives as long as the work.
            let _table = &tensors;
            // SAFETY: the kernels take one `Arguments`. The table has a `Tensor` for each block, with a
            // history as long as it says.
            unsafe { clear.launch(Launch::row(1, 1), &arguments, stream)? };
            if blocks > 0 {
                // SAFETY: as above.
                unsafe { scale.launch(Launch::row(blocks, THREADS), &arguments, stream)? };
            }
            Ok(())
        }))
    }
}
