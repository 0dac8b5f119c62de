//! Launch of the GPU kernel of [`SumRanks`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{MAX_RANKS, SumRanks};
use crate::device::{ELEMENTWISE_THREADS, suffix};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("PER_THREAD", PER_THREAD as i64), ("GROUP_LEVELS", GROUP_LEVELS as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("sum_ranks/kernel.cu", include_str!("kernel.cu"))
};

/// Elements per thread.
const PER_THREAD: u64 = 8;
/// Ranks whose sum is one tree in registers.
const TREE: usize = 8;
/// Levels of the counter that adds the sums of groups of as many ranks.
const GROUP_LEVELS: u32 = (MAX_RANKS / TREE).ilog2();

kernel_struct! {
    struct Arguments {
        x: DevicePtr,
        sum: DevicePtr,
        /// Elements of the tensor of one rank.
        elements: u64,
        ranks: u32,
        accumulate: u32,
    }
}

impl CudaKernel for SumRanks {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (x, sum) = (operands.inputs[0], operands.outputs[0]);
        let name = if x.ty.shape[0] > TREE { "sum_many_ranks" } else { "sum_ranks" };
        let function = gpu.function(&SOURCE, &[], &format!("{name}_{}", suffix(x.ty)))?;
        let elements = sum.ty.numel() as u64;
        let arguments = Arguments {
            x: x.place,
            sum: sum.place,
            elements,
            ranks: x.ty.shape[0] as u32,
            accumulate: sum.accumulate.into(),
        };
        let blocks = elements.div_ceil(u64::from(ELEMENTWISE_THREADS) * PER_THREAD).max(1) as u32;
        // SAFETY: the kernel takes one `Arguments`; x has `ranks` times `elements` elements of the type that
        // the name says, and the sum has `elements` f32 elements.
        Ok(unsafe { Work::launch(function, Launch::row(blocks, ELEMENTWISE_THREADS), arguments) })
    }
}
