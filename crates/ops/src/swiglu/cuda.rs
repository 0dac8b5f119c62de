//! The GPU kernels of [`Swiglu`] and [`SwigluGrad`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Swiglu, SwigluGrad};
use crate::device::{ELEMENTWISE_THREADS, lanes, plane, suffix, warps_of};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Function, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};
use xtrain_tensor::TensorType;

pub(super) const SOURCE: KernelSource = KernelSource {
    headers: &[super::GATE],
    structs: &[SwigluArguments::LAYOUT, SwigluGradArguments::LAYOUT],
    ..KernelSource::new("swiglu/kernel.cu", include_str!("kernel.cu"))
};

kernel_struct! {
    struct SwigluArguments {
        gate_up: DevicePtr,
        y: DevicePtr,
        rows: u64,
        width: u32,
    }

    struct SwigluGradArguments {
        dy: DevicePtr,
        gate_up: DevicePtr,
        rows: u64,
        width: u32,
    }
}

/// The kernel for y or dy of this type, and its grid: a block for each piece of a row.
fn kernel(gpu: &Gpu, name: &str, y: TensorType) -> Result<(Function, Launch), CudaError> {
    let (rows, width) = y.shape.rows_cols();
    let (path, n) = if width % lanes(y) == 0 { ("vector", lanes(y)) } else { ("any", 1) };
    let threads = warps_of(width.div_ceil(n), ELEMENTWISE_THREADS as usize);
    let function = gpu.function(&SOURCE, &[], &format!("{name}_{path}_{}", suffix(y)))?;
    Ok((function, plane([rows, width.div_ceil(n * threads as usize)], [threads, 1])))
}

impl CudaKernel for Swiglu {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (gate_up, y) = (operands.inputs[0], operands.outputs[0]);
        let (rows, width) = y.ty.shape.rows_cols();
        let (function, launch) = kernel(gpu, "swiglu", y.ty)?;
        let arguments =
            SwigluArguments { gate_up: gate_up.place, y: y.place, rows: rows as u64, width: width as u32 };
        // SAFETY: the kernel takes one `SwigluArguments`; gate_up is [rows, 2 width] and y [rows, width] of
        // the type that the name says, in rows of whole vectors where the path is that.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }
}

impl CudaKernel for SwigluGrad {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        // With `rematerialise`, y replaces dy in memory.
        let (dy, gate_up) = (operands.inputs[0], operands.outputs[0]);
        let (rows, width) = dy.ty.shape.rows_cols();
        let name = if self.rematerialise { "swiglu_grad_rematerialise" } else { "swiglu_grad" };
        let (function, launch) = kernel(gpu, name, dy.ty)?;
        let arguments = SwigluGradArguments {
            dy: dy.place,
            gate_up: gate_up.place,
            rows: rows as u64,
            width: width as u32,
        };
        // SAFETY: as above with dy for y; a thread reads gate, up and dy of its columns before it overwrites
        // them.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }
}
