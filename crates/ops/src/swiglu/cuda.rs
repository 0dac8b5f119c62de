//! The GPU kernels of [`Swiglu`] and [`SwigluGrad`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Swiglu, SwigluGrad};
use crate::device::{ELEMENTWISE_THREADS, lanes, plane, suffix, warps_of};
use crate::tail::{TAIL, end_of_groups};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Function, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};
use xtrain_tensor::TensorType;

pub(super) const SOURCE: KernelSource = KernelSource {
    headers: &[super::GATE, TAIL],
    structs: &[SwigluArguments::LAYOUT, SwigluGradArguments::LAYOUT],
    ..KernelSource::new("swiglu/kernel.cu", include_str!("kernel.cu"))
};

kernel_struct! {
    struct SwigluArguments {
        gate_up: DevicePtr,
        weights: DevicePtr,
        y: DevicePtr,
        end: DevicePtr,
        rows: u64,
        width: u32,
    }

    struct SwigluGradArguments {
        dy: DevicePtr,
        gate_up: DevicePtr,
        weights: DevicePtr,
        dweights: DevicePtr,
        end: DevicePtr,
        rows: u64,
        width: u32,
    }
}

/// Neighbours of a thread whose block has a whole row.
const NEIGHBOURS: usize = 8;

/// The kernel for y or dy of this type, and its grid: a block for each piece of a row, or for each row.
fn kernel(gpu: &Gpu, name: &str, y: TensorType, by_row: bool) -> Result<(Function, Launch), CudaError> {
    let (rows, width) = y.shape.rows_cols();
    let vector = if by_row { NEIGHBOURS } else { lanes(y) };
    let (path, n) = if width.is_multiple_of(vector) { ("vector", vector) } else { ("any", 1) };
    let n = if by_row { NEIGHBOURS } else { n };
    let threads = warps_of(width.div_ceil(n), ELEMENTWISE_THREADS as usize);
    let function = gpu.function(&SOURCE, &[], &format!("{name}_{path}_{}", suffix(y)))?;
    let pieces = if by_row { 1 } else { width.div_ceil(n * threads as usize) };
    Ok((function, plane([rows, pieces], [threads, 1])))
}

impl CudaKernel for Swiglu {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (gate_up, y) = (operands.inputs[0], operands.outputs[0]);
        let (rows, width) = y.ty.shape.rows_cols();
        let name = if self.weighted { "swiglu_weighted" } else { "swiglu" };
        let (function, launch) = kernel(gpu, name, y.ty, false)?;
        let arguments = SwigluArguments {
            gate_up: gate_up.place,
            weights: operands.inputs.get(1).map_or(DevicePtr(0), |weights| weights.place),
            y: y.place,
            end: end_of_groups(self.tail, operands.inputs.get(Swiglu::STARTS)),
            rows: rows as u64,
            width: width as u32,
        };
        // SAFETY: the kernel takes one `SwigluArguments`; gate_up is [rows, 2 width] and y [rows, width] of
        // the type that the name says, in rows of whole vectors where the path is that, and the weights that
        // the weighted kernel reads are f32[rows]. The end of groups is in `starts`, or null.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }
}

impl CudaKernel for SwigluGrad {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        // With `rematerialise`, y replaces dy in memory.
        let (dy, gate_up) = (operands.inputs[0], operands.outputs[0]);
        let (rows, width) = dy.ty.shape.rows_cols();
        let weighted = if self.weighted { "_weighted" } else { "" };
        let rematerialise = if self.rematerialise { "_rematerialise" } else { "" };
        let name = format!("swiglu{weighted}_grad{rematerialise}");
        let (function, launch) = kernel(gpu, &name, dy.ty, self.weighted)?;
        let dweights = if self.weighted { operands.outputs[1].place } else { DevicePtr(0) };
        let arguments = SwigluGradArguments {
            dy: dy.place,
            gate_up: gate_up.place,
            weights: operands.inputs.get(2).map_or(DevicePtr(0), |weights| weights.place),
            dweights,
            end: end_of_groups(self.tail, operands.inputs.get(SwigluGrad::STARTS)),
            rows: rows as u64,
            width: width as u32,
        };
        // SAFETY: as above with dy for y; a thread reads gate, up and dy of its columns before it overwrites
        // them. The weights and their gradients are f32[rows].
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }
}
