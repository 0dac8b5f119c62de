//! Launch of the GPU kernel of [`Dropout`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Dropout;
use crate::device::{ELEMENTWISE_THREADS, suffix};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("PER_THREAD", PER_THREAD as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("dropout/kernel.cu", include_str!("kernel.cu"))
};

/// Elements per thread.
const PER_THREAD: u64 = 8;

kernel_struct! {
    struct Arguments {
        x: DevicePtr,
        rng: DevicePtr,
        elements: u64,
        width: u64,
        site: u32,
        p: f32,
        scale: f32,
    }
}

impl CudaKernel for Dropout {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        if self.p == 0.0 {
            return Ok(Work::sequence(Vec::new())); // In place: y already holds x.
        }
        let x = operands.outputs[0];
        let function = gpu.function(&SOURCE, &[], &format!("dropout_{}", suffix(x.ty)))?;
        let elements = x.ty.numel() as u64;
        let arguments = Arguments {
            x: x.place,
            rng: operands.inputs[1].place,
            elements,
            width: x.ty.shape.rows_cols().1 as u64,
            site: self.site,
            p: self.p,
            scale: 1.0 / (1.0 - self.p),
        };
        let blocks = elements.div_ceil(u64::from(ELEMENTWISE_THREADS) * PER_THREAD).max(1) as u32;
        // SAFETY: the kernel takes one `Arguments`; x has `elements` elements of the type that the name says,
        // and rng is four words.
        Ok(unsafe { Work::launch(function, Launch::row(blocks, ELEMENTWISE_THREADS), arguments) })
    }
}
