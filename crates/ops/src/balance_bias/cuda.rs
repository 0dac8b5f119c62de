//! Launch of the GPU kernel of [`BalanceBias`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::BalanceBias;
use crate::device::table;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[Layer::LAYOUT, Arguments::LAYOUT],
    ..KernelSource::new("balance_bias/kernel.cu", include_str!("kernel.cu"))
};

kernel_struct! {
    struct Layer {
        bias: DevicePtr,
        /// The place of its first load among the sums.
        first: u64,
        experts: u64,
    }

    struct Arguments {
        layers: DevicePtr,
        skip: DevicePtr,
        sums: DevicePtr,
        rate: f32,
    }
}

impl CudaKernel for BalanceBias {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let layer = |(bias, &first): (&xtrain_cuda::CudaOutput, &usize)| Layer {
            bias: bias.place,
            first: first as u64,
            experts: bias.ty.numel() as u64,
        };
        let layers: Vec<Layer> = operands.outputs.iter().zip(&self.loads).map(layer).collect();
        if layers.is_empty() {
            return Ok(Work::sequence(Vec::new()));
        }
        let blocks = layers.len() as u32;
        let layers = table(gpu, &layers)?;
        let [skip, sums] = [0, 1].map(|n| operands.inputs[n].place);
        let arguments = Arguments { layers: layers.pointer(), skip, sums, rate: self.rate };
        let function = gpu.function(&SOURCE, &[], "balance_bias")?;
        Ok(Work::new(move |stream| {
            // Keeps the table's memory allocated as long as this work.
            let _table = &layers;
            // SAFETY: the kernel takes one `Arguments`, with a `Layer` for each block, whose bias is an f32
            // vector of `experts` elements. As many loads from `first` on are within the sums.
            unsafe { function.launch(Launch::row(blocks, 32), &arguments, stream) }
        }))
    }
}
