//! Launch of the GPU kernel of [`Add`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Add;
use crate::device::{ELEMENTWISE_THREADS, suffix};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("add/kernel.cu", include_str!("kernel.cu"))
};

kernel_struct! {
    struct Arguments {
        /// Overwritten with the sum.
        a: DevicePtr,
        b: DevicePtr,
        elements: u64,
    }
}

impl CudaKernel for Add {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (sum, b) = (operands.outputs[0], operands.inputs[1]);
        let function = gpu.function(&SOURCE, &[], &format!("add_{}", suffix(sum.ty)))?;
        let elements = sum.ty.numel() as u64;
        let arguments = Arguments { a: sum.place, b: b.place, elements };
        let blocks = elements.div_ceil(u64::from(ELEMENTWISE_THREADS) * (16 / sum.ty.dtype.bytes(1) as u64));
        // SAFETY: the kernel takes one `Arguments`; both tensors have `elements` elements of the type that
        // the name says.
        Ok(unsafe {
            Work::launch(function, Launch::row(blocks.max(1) as u32, ELEMENTWISE_THREADS), arguments)
        })
    }
}
