//! Launch of the GPU kernel of [`Scale`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Scale;
use crate::device::{ELEMENTWISE_THREADS, suffix};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("scale/kernel.cu", include_str!("kernel.cu"))
};

kernel_struct! {
    struct Arguments {
        /// Overwritten with the product.
        x: DevicePtr,
        elements: u64,
        factor: f32,
    }
}

impl CudaKernel for Scale {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let y = operands.outputs[0];
        let function = gpu.function(&SOURCE, &[], &format!("scale_{}", suffix(y.ty)))?;
        let elements = y.ty.numel() as u64;
        let arguments = Arguments { x: y.place, elements, factor: self.0 };
        let blocks = elements.div_ceil(u64::from(ELEMENTWISE_THREADS) * (16 / y.ty.dtype.bytes(1) as u64));
        // SAFETY: the kernel takes one `Arguments`; the tensor has `elements` elements of the type that the
        // name says.
        Ok(unsafe {
            Work::launch(function, Launch::row(blocks.max(1) as u32, ELEMENTWISE_THREADS), arguments)
        })
    }
}
