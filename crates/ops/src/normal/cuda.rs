//! Launch of the GPU kernel of [`Normal`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Normal;
use crate::device::ELEMENTWISE_THREADS;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("PER_THREAD", PER_THREAD as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("normal/kernel.cu", include_str!("kernel.cu"))
};

/// Elements per thread.
const PER_THREAD: u64 = 4;

kernel_struct! {
    struct Arguments {
        y: DevicePtr,
        elements: u64,
        drawn: u64,
        first: u64,
        seed_low: u32,
        seed_high: u32,
        step: u32,
        site: u32,
        std: f64,
    }
}

impl CudaKernel for Normal {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let y = operands.outputs[0];
        let function = gpu.function(&SOURCE, &[], "normal_f32")?;
        let elements = y.ty.numel() as u64;
        let arguments = Arguments {
            y: y.place,
            elements,
            drawn: self.elements as u64,
            first: self.first_element,
            seed_low: self.seed as u32,
            seed_high: (self.seed >> 32) as u32,
            step: self.step,
            site: self.site,
            std: f64::from(self.std),
        };
        // The first block of random words may begin before the first element.
        let numbers = elements + self.first_element % PER_THREAD;
        let blocks = numbers.div_ceil(u64::from(ELEMENTWISE_THREADS) * PER_THREAD).max(1) as u32;
        // SAFETY: the kernel takes one `Arguments`; y has `elements` f32 elements.
        Ok(unsafe { Work::launch(function, Launch::row(blocks, ELEMENTWISE_THREADS), arguments) })
    }
}
