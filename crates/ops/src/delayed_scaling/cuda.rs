//! Launches of the GPU kernels of [`DelayedScaling`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{DelayedScaling, DelayedTensor, OPERANDS};
use crate::device::table;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64)]],
    structs: &[Arguments::LAYOUT, Tensor::LAYOUT],
    ..KernelSource::new("delayed_scaling/kernel.cu", include_str!("kernel.cu"))
};

/// Threads per block.
const THREADS: u32 = 256;

kernel_struct! {
    struct Arguments {
        tensors: DevicePtr,
        max_amax: DevicePtr,
        /// Null without the input.
        halted: DevicePtr,
        latest: u32,
        padding: u32,
    }

    struct Tensor {
        amax: DevicePtr,
        history: DevicePtr,
        scale: DevicePtr,
        length: u32,
        pow2: u32,
        target: f32,
        in_pieces: u32,
    }
}

impl CudaKernel for DelayedScaling {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, .. } = operands;
        let tensor = |(n, tensor): (usize, &DelayedTensor)| {
            let (history, scale) = (outputs[1 + 2 * n], outputs[2 + 2 * n]);
            Tensor {
                amax: inputs[OPERANDS * n].place,
                history: history.place,
                scale: scale.place,
                length: history.ty.numel() as u32,
                pow2: u32::from(tensor.pow2_scales),
                target: self.target(tensor),
                in_pieces: tensor.in_pieces.into(),
            }
        };
        let tensors: Vec<Tensor> = self.tensors.iter().enumerate().map(tensor).collect();
        let tensors = table(gpu, &tensors)?;
        let arguments = Arguments {
            tensors: tensors.pointer(),
            max_amax: outputs[0].place,
            halted: inputs.get(OPERANDS * self.tensors.len()).map_or(DevicePtr(0), |halted| halted.place),
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
