//! Launch of the GPU kernel of [`PackSums`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::PackSums;
use crate::device::{plane, table};
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Operands, Work, kernel_struct};

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[PackedSums::LAYOUT, Arguments::LAYOUT],
    ..KernelSource::new("pack_sums/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of a block.
const THREADS: u32 = 256;

kernel_struct! {
    /// The numbers of an input, and their place in the output.
    struct PackedSums {
        /// Null for zeros.
        sums: DevicePtr,
        first: u32,
        count: u32,
    }

    struct Arguments {
        /// A [`PackedSums`] for each input.
        inputs: DevicePtr,
        packed: DevicePtr,
        accumulate: u32,
    }
}

impl CudaKernel for PackSums {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let packed = operands.outputs[0];
        let mut all = 0;
        let mut inputs: Vec<PackedSums> = Vec::new();
        for input in operands.inputs {
            let (first, count) = (all, input.ty.numel() as u32);
            inputs.push(PackedSums { sums: input.place, first, count });
            all += count;
        }
        if packed.ty.numel() as u32 > all {
            inputs.push(PackedSums { sums: DevicePtr(0), first: all, count: 1 });
        }
        let most = inputs.iter().map(|input| input.count).max().unwrap_or(0);
        let grid = plane([inputs.len(), most.div_ceil(THREADS) as usize], [THREADS, 1]);
        let inputs = table(gpu, &inputs)?;
        let arguments = Arguments {
            inputs: inputs.pointer(),
            packed: packed.place,
            accumulate: packed.accumulate.into(),
        };
        let function = gpu.function(&SOURCE, &[], "pack_sums")?;
        Ok(Work::new(move |stream| {
            // Keeps the table's memory allocated as long as this work.
            let _table = &inputs;
            // SAFETY: the kernel takes one `Arguments`. The table has an entry for each block of the grid's
            // first extent, with a pointer to `count` floats or null; `first + count` is at most the floats
            // of the output.
            unsafe { function.launch(grid, &arguments, stream) }
        }))
    }
}
