//! Launches of the GPU kernels of [`Permute`], [`Unpermute`] and those of gates.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Permute, PermuteGates, Unpermute, UnpermuteGates};
use crate::device::{ELEMENTWISE_THREADS, lanes, plane, suffix, warps_of};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("EMPTY", EMPTY as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("permute/kernel.cu", include_str!("kernel.cu"))
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
    }
}

/// A kernel with so many blocks, times those that share the columns of a row.
fn of_rows(gpu: &Gpu, name: &str, operands: &Operands<'_>, blocks: usize) -> Result<Work, CudaError> {
    let y = operands.outputs[0].ty;
    let width = y.shape.rows_cols().1;
    let (path, n) = if width.is_multiple_of(lanes(y)) { ("vector", lanes(y)) } else { ("any", 1) };
    let threads = warps_of(width.div_ceil(n), ELEMENTWISE_THREADS as usize);
    let launch = plane([blocks, width.div_ceil(n * threads as usize)], [threads, 1]);
    let function = gpu.function(&SOURCE, &[], &format!("{name}_{path}_{}", suffix(y)))?;
    if blocks == 0 {
        return Ok(Work::sequence(Vec::new()));
    }
    // SAFETY: the kernel takes one `Arguments` of tensors with the shapes of `infer`, in rows of whole
    // vectors where the path is that. Rows and sources come from `dispatch`: they are -1 or within the
    // tensors.
    Ok(unsafe { Work::launch(function, launch, arguments(operands)) })
}

/// A kernel with a thread for each element of the output.
fn of_elements(gpu: &Gpu, name: &str, operands: &Operands<'_>) -> Result<Work, CudaError> {
    let elements = operands.outputs[0].ty.numel();
    let function = gpu.function(&SOURCE, &[], name)?;
    let blocks = elements.div_ceil(ELEMENTWISE_THREADS as usize).max(1);
    // SAFETY: as above; gates are f32.
    Ok(unsafe {
        Work::launch(function, Launch::row(blocks as u32, ELEMENTWISE_THREADS), arguments(operands))
    })
}

impl CudaKernel for Permute {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (tokens, rows) = (operands.inputs[0].ty.shape.rows_cols().0, operands.inputs[1].ty.numel());
        of_rows(gpu, "permute", operands, tokens + rows.div_ceil(EMPTY))
    }
}

impl CudaKernel for Unpermute {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let tokens = operands.outputs[0].ty.shape.rows_cols().0;
        of_rows(gpu, "unpermute", operands, tokens)
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
