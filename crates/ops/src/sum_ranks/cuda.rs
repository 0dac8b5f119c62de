//! Launches of the GPU kernel of [`SumRanks`], [`SumParts`] and [`SumSources`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{MAX_RANKS, SumParts, SumRanks, SumSources};
use crate::device::{ELEMENTWISE_THREADS, plane, suffix};
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Operands, Work, kernel_struct};
use xtrain_tensor::DType;

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
        sum(gpu, operands, 1, operands.inputs[0].ty.shape[0])
    }
}

impl CudaKernel for SumParts {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        sum(gpu, operands, 1, operands.inputs[0].ty.shape[0])
    }
}

impl CudaKernel for SumSources {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        sum(gpu, operands, self.experts, self.ranks)
    }
}

/// `sums` sums, each over `ranks` tensors.
fn sum(gpu: &Gpu, operands: &Operands<'_>, sums: usize, ranks: usize) -> Result<Work, CudaError> {
    let (x, sum) = (operands.inputs[0], operands.outputs[0]);
    let name = if ranks > TREE { "sum_many_ranks" } else { "sum_ranks" };
    let rounded = if sum.ty.dtype == DType::BF16 { "_rounded" } else { "" };
    let function = gpu.function(&SOURCE, &[], &format!("{name}_{}{rounded}", suffix(x.ty)))?;
    let elements = sum.ty.numel() / sums;
    let arguments = Arguments {
        x: x.place,
        sum: sum.place,
        elements: elements as u64,
        ranks: ranks as u32,
        accumulate: sum.accumulate.into(),
    };
    let blocks = elements.div_ceil(ELEMENTWISE_THREADS as usize * PER_THREAD as usize);
    let launch = plane([blocks, sums], [ELEMENTWISE_THREADS, 1]);
    // SAFETY: the kernel takes one `Arguments`; for each sum, x has `ranks` times `elements` elements of the
    // type that the name says, and the sum has `elements` elements, bf16 if it is rounded, else f32.
    Ok(unsafe { Work::launch(function, launch, arguments) })
}
