//! Launches of the GPU kernels of [`Permute`], [`Unpermute`], [`UnpermuteTree`] and the ops of gates.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Permute, PermuteByTree, PermuteGates, Unpermute, UnpermuteGates, UnpermuteTree};
use crate::device::{Floats, elementwise_launch, row_launch, suffix};
use crate::sparse_tree::SPARSE_TREE;
use crate::tail::{NO_SOURCE, TAIL_SOURCE};
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Operands, Work, kernel_struct};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("EMPTY", EMPTY as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("permute/kernel.cu", include_str!("kernel.cu"))
};

pub(super) const TREE_SOURCE: KernelSource = KernelSource {
    constants: &[&[("TREE_LEVELS", UnpermuteTree::MAX_GROUPS.ilog2() as i64)]],
    headers: &[SPARSE_TREE],
    structs: &[TreeArguments::LAYOUT],
    ..KernelSource::new("permute/tree.cu", include_str!("tree.cu"))
};

/// Rows that a block looks through for those without a token, one for each lane of a warp.
const EMPTY: usize = 32;

kernel_struct! {
    struct Arguments {
        x: DevicePtr,
        shared: DevicePtr,
        sources: DevicePtr,
        rows: DevicePtr,
        y: DevicePtr,
        tokens: u32,
        top_k: u32,
        capacity: u32,
        width: u32,
        zero_from: i32,
        padding: u32,
    }
}

kernel_struct! {
    struct TreeArguments {
        y: DevicePtr,
        rows: DevicePtr,
        ids: DevicePtr,
        shared: Floats,
        x: Floats,
        top_k: u32,
        width: u32,
        experts: u32,
        of_group: u32,
        groups: u32,
        padding: u32,
    }
}

fn arguments(operands: &Operands<'_>) -> Arguments {
    let [x, sources, rows] = [0, 1, 2].map(|n| operands.inputs[n]);
    let (tokens, top_k) = rows.ty.shape.rows_cols();
    Arguments {
        x: x.place,
        shared: operands.inputs.get(3).map_or(DevicePtr(0), |shared| shared.place),
        sources: sources.place,
        rows: rows.place,
        y: operands.outputs[0].place,
        tokens: tokens as u32,
        top_k: top_k as u32,
        capacity: sources.ty.numel() as u32,
        width: x.ty.shape.last().map_or(1, |width| *width as u32),
        zero_from: TAIL_SOURCE,
        padding: 0,
    }
}

/// A kernel with so many blocks, times those that share the columns of a row.
fn of_rows(
    gpu: &Gpu,
    name: &str,
    operands: &Operands<'_>,
    blocks: usize,
    arguments: Arguments,
) -> Result<Work, CudaError> {
    let y = operands.outputs[0].ty;
    let (path, launch) = row_launch(y, blocks);
    let function = gpu.function(&SOURCE, &[], &format!("{name}_{path}_{}", suffix(y)))?;
    if blocks == 0 {
        return Ok(Work::sequence(Vec::new()));
    }
    // SAFETY: the kernel takes one `Arguments` of tensors with the shapes of `infer`, in rows of whole
    // vectors where the path is that. Rows and sources come from `dispatch`: they are -1 or within the
    // tensors.
    Ok(unsafe { Work::launch(function, launch, arguments) })
}

/// A kernel with a thread for each element of the output.
fn of_elements(gpu: &Gpu, name: &str, operands: &Operands<'_>) -> Result<Work, CudaError> {
    let launch = elementwise_launch(operands.outputs[0].ty.numel());
    let function = gpu.function(&SOURCE, &[], name)?;
    // SAFETY: as above; gates are f32.
    Ok(unsafe { Work::launch(function, launch, arguments(operands)) })
}

impl CudaKernel for Permute {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (tokens, rows) = (operands.inputs[0].ty.shape.rows_cols().0, operands.inputs[1].ty.numel());
        let zero_from = if self.tail.is_undefined() { NO_SOURCE } else { TAIL_SOURCE };
        let arguments = Arguments { zero_from, ..arguments(operands) };
        of_rows(gpu, "permute", operands, tokens + rows.div_ceil(EMPTY), arguments)
    }
}

impl CudaKernel for PermuteByTree {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        self.permute().prepare(gpu, &Operands { inputs: &operands.inputs[..3], ..*operands })
    }
}

impl CudaKernel for Unpermute {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let tokens = operands.outputs[0].ty.shape.rows_cols().0;
        of_rows(gpu, "unpermute", operands, tokens, arguments(operands))
    }
}

impl CudaKernel for UnpermuteTree {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [y, rows, ids] = [0, 2, 3].map(|n| operands.inputs[n]);
        let (tokens, top_k) = rows.ty.shape.rows_cols();
        let arguments = TreeArguments {
            y: y.place,
            rows: rows.place,
            ids: ids.place,
            shared: operands.inputs.get(4).map_or(Floats::none(), |&shared| shared.into()),
            x: operands.outputs[0].into(),
            top_k: top_k as u32,
            width: y.ty.shape.rows_cols().1 as u32,
            experts: self.experts as u32,
            of_group: self.of_group() as u32,
            groups: self.groups as u32,
            padding: 0,
        };
        let (path, launch) = row_launch(y.ty, tokens);
        let function = gpu.function(&TREE_SOURCE, &[], &format!("unpermute_tree_{path}_{}", suffix(y.ty)))?;
        if tokens == 0 {
            return Ok(Work::sequence(Vec::new()));
        }
        // SAFETY: the kernel takes one `TreeArguments` of tensors with the shapes of `infer`; as in `of_rows`
        // otherwise.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }
}

impl CudaKernel for PermuteGates {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        of_elements(gpu, "permute_gates", operands)
    }
}

impl CudaKernel for UnpermuteGates {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        of_elements(gpu, "unpermute_gates", operands)
    }
}
