//! Launch of the GPU kernels of [`Cast`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Cast;
use crate::device::{ELEMENTWISE_THREADS, suffix};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("PER_THREAD", PER_THREAD as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("cast/kernel.cu", include_str!("kernel.cu"))
};

/// Elements per thread.
const PER_THREAD: u64 = 8;

kernel_struct! {
    struct Arguments {
        x: DevicePtr,
        y: DevicePtr,
        elements: u64,
    }
}

impl CudaKernel for Cast {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (x, y) = (operands.inputs[0], operands.outputs[0]);
        let function = gpu.function(&SOURCE, &[], &format!("cast_{}_{}", suffix(x.ty), suffix(y.ty)))?;
        let elements = x.ty.numel() as u64;
        let arguments = Arguments { x: x.place, y: y.place, elements };
        let blocks = elements.div_ceil(u64::from(ELEMENTWISE_THREADS) * PER_THREAD).max(1) as u32;
        // SAFETY: the kernel takes one `Arguments`; x and y have `elements` elements of the types that the
        // name says.
        Ok(unsafe { Work::launch(function, Launch::row(blocks, ELEMENTWISE_THREADS), arguments) })
    }
}
