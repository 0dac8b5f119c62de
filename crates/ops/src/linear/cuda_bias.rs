//! Launches of the GPU kernels of [`BiasGrad`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::BiasGrad;
use crate::device::{Floats, lanes, plane, suffix};
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Operands, Work, kernel_struct};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("WARPS", WARPS as i64)]],
    structs: &[Arguments::LAYOUT, Sum::LAYOUT],
    ..KernelSource::new("linear/bias.cu", include_str!("bias.cu"))
};

/// Warps per block.
const WARPS: usize = 8;
/// Maximum number of parts of the tokens: together with the columns, enough blocks for any GPU.
const MAX_PARTS: usize = 256;

kernel_struct! {
    struct Arguments {
        dy: DevicePtr,
        parts: DevicePtr,
        rows: u64,
        width: u32,
    }
}

kernel_struct! {
    struct Sum {
        parts: DevicePtr,
        dbias: Floats,
        width: u64,
        count: u32,
        accumulate: u32,
    }
}

/// Number of parts into which the tokens are split.
fn parts(rows: usize) -> usize {
    rows.div_ceil(WARPS).clamp(1, MAX_PARTS)
}

impl CudaKernel for BiasGrad {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (rows, width) = inputs[0].shape.rows_cols();
        vec![TensorType::new(DType::F32, [parts(rows), width])]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (dy, dbias, workspace) = (operands.inputs[0], operands.outputs[0], operands.workspace[0]);
        let (rows, width) = dy.ty.shape.rows_cols();
        let (path, n) = if width % lanes(dy.ty) == 0 { ("vector", lanes(dy.ty)) } else { ("any", 1) };
        let arguments =
            Arguments { dy: dy.place, parts: workspace.place, rows: rows as u64, width: width as u32 };
        let function = gpu.function(&SOURCE, &[], &format!("bias_grad_{path}_{}", suffix(dy.ty)))?;
        let launch = plane([width.div_ceil(32 * n), parts(rows)], [32, WARPS as u32]);
        // SAFETY: the kernel takes one `Arguments`; dy is [rows, width] of the type in the kernel's name,
        // with the path "vector" in rows of whole 16-byte vectors; the workspace holds a row of `width` f32
        // for each y of the grid.
        let partial = unsafe { Work::launch(function, launch, arguments) };

        let arguments = Sum {
            parts: workspace.place,
            dbias: dbias.into(),
            width: width as u64,
            count: parts(rows) as u32,
            accumulate: dbias.accumulate.into(),
        };
        let function = gpu.function(&SOURCE, &[], "bias_grad_sum")?;
        // SAFETY: the kernel takes one `Sum`; the workspace is [count, width], written by the first launch,
        // and dbias has `width` elements.
        let sum = unsafe { Work::launch(function, plane([width.div_ceil(32), 1], [32, 32]), arguments) };
        Ok(Work::sequence(vec![partial, sum]))
    }
}
