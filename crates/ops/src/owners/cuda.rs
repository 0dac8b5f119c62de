//! Launches of the GPU kernels of [`SumOwners`] and [`SelectOwner`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{MAX_RANKS, SelectOwner, SumOwners};
use crate::device::{Floats, elementwise_launch, row_launch, suffix};
use crate::sparse_tree::SPARSE_TREE;
use xtrain_cuda::{
    CudaError, CudaKernel, CudaTensor, DevicePtr, Gpu, KernelSource, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("RANK_LEVELS", MAX_RANKS.ilog2() as i64)]],
    headers: &[SPARSE_TREE],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("owners/kernel.cu", include_str!("kernel.cu"))
};

/// Ranks whose sum is one tree in registers: the leaves of `sparse_tree<3, N>` in the kernel.
const TREE: usize = 8;
const _: () = assert!(TREE == 1 << 3, "TREE must be the leaves of `sparse_tree<3, N>` in owners/kernel.cu");

kernel_struct! {
    struct Arguments {
        x: DevicePtr,
        ids: DevicePtr,
        shared: Floats,
        y: Floats,
        tokens: u32,
        top_k: u32,
        width: u32,
        ranks: u32,
        experts: u32,
        padding: u32,
    }
}

/// The arguments of both kernels; `shared` is what is added, if anything is.
fn arguments(experts: usize, operands: &Operands<'_>, shared: Option<&CudaTensor>) -> Arguments {
    let [x, ids] = [0, 1].map(|n| operands.inputs[n]);
    let (tokens, top_k) = ids.ty.shape.rows_cols();
    Arguments {
        x: x.place,
        ids: ids.place,
        shared: shared.map_or(Floats::none(), |&shared| shared.into()),
        y: operands.outputs[0].into(),
        tokens: tokens as u32,
        top_k: top_k as u32,
        width: x.ty.shape[2] as u32,
        ranks: x.ty.shape[0] as u32,
        experts: experts as u32,
        padding: 0,
    }
}

impl CudaKernel for SumOwners {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let x = operands.inputs[0].ty;
        let (ranks, tokens, width) = (x.shape[0], x.shape[1], x.shape[2]);
        let (path, launch) = row_launch(x, tokens);
        let name = if ranks > TREE { "sum_many_owners" } else { "sum_owners" };
        let function = gpu.function(&SOURCE, &[], &format!("{name}_{path}_{}", suffix(x)))?;
        if tokens * width == 0 {
            return Ok(Work::sequence(Vec::new()));
        }
        let shared = operands.inputs.get(Self::SHARED).filter(|_| !self.like);
        // SAFETY: the kernel takes one `Arguments` of tensors with the shapes of `infer`, in rows of whole
        // vectors where the path is that. It reads x of ranks below `ranks`, whatever ids are.
        Ok(unsafe { Work::launch(function, launch, arguments(self.experts, operands, shared)) })
    }
}

impl CudaKernel for SelectOwner {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let launch = elementwise_launch(operands.outputs[0].ty.numel());
        let function = gpu.function(&SOURCE, &[], "select_owner")?;
        // SAFETY: as above; x and y are f32.
        Ok(unsafe { Work::launch(function, launch, arguments(self.experts, operands, None)) })
    }
}
