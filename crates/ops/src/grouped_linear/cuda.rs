//! Launches of the GPU kernels of [`GroupedLinear`], [`GroupedDgrad`] and [`GroupedWgrad`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{GroupedDgrad, GroupedLinear, GroupedWgrad, STARTS, hopper, kernel_name};
use crate::device::{Floats, suffix};
use crate::groups::{GROUPS, Groups, TILE, slots};
use crate::ragged::Sizes;
use crate::tail::{TAIL, end_of_groups};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, TENSOR_CORES, Work, kernel_struct,
};
use xtrain_program::{LinearGemm, Tail};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("DEPTH", DEPTH as i64), ("THREADS", THREADS as i64)]],
    headers: &[TENSOR_CORES, TAIL, GROUPS],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("grouped_linear/kernel.cu", include_str!("kernel.cu"))
};

/// Products that a block sums at a time.
const DEPTH: usize = 32;
/// Threads per block.
const THREADS: usize = 256;

kernel_struct! {
    struct Arguments {
        a: DevicePtr,
        b: DevicePtr,
        starts: DevicePtr,
        end: DevicePtr,
        d: Floats,
        rows: u32,
        experts: u32,
        outputs: u32,
        inputs: u32,
        accumulate: u32,
    }
}

impl CudaKernel for GroupedLinear {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ((rows, i), (_, o)) =
            (operands.inputs[0].ty.shape.rows_cols(), operands.outputs[0].ty.shape.rows_cols());
        let Groups { experts, align, .. } = self.groups;
        let sizes = Sizes { rows, experts, align, outputs: o, inputs: i };
        let blocks = slots(rows, experts) * o.div_ceil(TILE);
        prepare(gpu, LinearGemm::Fprop, operands, sizes, blocks, self.tail)
    }
}

impl CudaKernel for GroupedDgrad {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ((rows, o), (_, i)) =
            (operands.inputs[0].ty.shape.rows_cols(), operands.outputs[0].ty.shape.rows_cols());
        let Groups { experts, align, .. } = self.groups;
        let sizes = Sizes { rows, experts, align, outputs: o, inputs: i };
        let blocks = slots(rows, experts) * i.div_ceil(TILE);
        prepare(gpu, LinearGemm::Dgrad, operands, sizes, blocks, self.tail)
    }
}

impl CudaKernel for GroupedWgrad {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ((rows, o), (_, i)) =
            (operands.inputs[0].ty.shape.rows_cols(), operands.inputs[1].ty.shape.rows_cols());
        let Groups { experts, align, .. } = self.groups;
        let sizes = Sizes { rows, experts, align, outputs: o, inputs: i };
        let blocks = experts * o.div_ceil(TILE) * i.div_ceil(TILE);
        prepare(gpu, LinearGemm::Wgrad, operands, sizes, blocks, Tail::Zeros)
    }
}

/// The fast kernel if it supports the GEMM, else that for all GPUs, of so many blocks.
fn prepare(
    gpu: &Gpu,
    gemm: LinearGemm,
    operands: &Operands<'_>,
    sizes: Sizes,
    blocks: usize,
    tail: Tail,
) -> Result<Work, CudaError> {
    let Sizes { rows, experts, outputs, inputs, .. } = sizes;
    if blocks == 0 {
        return Ok(Work::sequence(Vec::new()));
    }
    if hopper::supports(gpu, gemm, operands, sizes) {
        return hopper::prepare(gpu, gemm, operands, sizes, tail);
    }
    let [a, b, starts] = [0, 1, STARTS].map(|n| operands.inputs[n]);
    let d = operands.outputs[0];
    let arguments = Arguments {
        a: a.place,
        b: b.place,
        starts: starts.place,
        end: end_of_groups(tail, Some(&starts)),
        d: d.into(),
        rows: rows as u32,
        experts: experts as u32,
        outputs: outputs as u32,
        inputs: inputs as u32,
        accumulate: d.accumulate.into(),
    };
    let function = gpu.function(&SOURCE, &[], &format!("{}_{}", kernel_name(gemm), suffix(a.ty)))?;
    // SAFETY: the kernel takes one `Arguments`. `a` and `b` have the type in the kernel's name and, with d,
    // the extents that the op's `infer` checked; there are experts + 1 starts. The kernel accesses no rows
    // outside of the ragged tensors, whatever the starts are. Operands are aligned to 16 bytes.
    Ok(unsafe { Work::launch(function, Launch::row(blocks as u32, THREADS as u32), arguments) })
}
