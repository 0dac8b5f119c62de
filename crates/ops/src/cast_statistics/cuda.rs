//! The kernels of [`CastStatistics`] on a GPU.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{CastStatistics, overflow};
use crate::device::{Floats, PARTS};
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work};
use xtrain_tensor::formats::max_finite;
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource =
    KernelSource::new("cast_statistics/kernel.cu", include_str!("kernel.cu"));

/// Threads of a block of both launches; equal in the kernels.
const THREADS: u32 = 256;

/// Blocks of the first launch, each with a row and then every so-many-th.
fn parts(rows: usize) -> usize {
    rows.clamp(1, PARTS)
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    x: Floats,
    q: DevicePtr,
    inv_scale: DevicePtr,
    counts: DevicePtr,
    sizes: DevicePtr,
    squares: DevicePtr,
    parts_of_counts: DevicePtr,
    rows: u32,
    cols: u32,
    high: u32,
    wide: u32,
    down: u32,
    across: u32,
    transposed: u32,
    is_e5m2: u32,
    largest: f32,
    overflow: f32,
    parts: u32,
    padding: u32,
}

impl CudaKernel for CastStatistics {
    /// Two sums, four counts and the bits of a magnitude for each block.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let parts = parts(inputs[0].shape.rows_cols().0);
        vec![TensorType::new(DType::F64, [parts, 2]), TensorType::new(DType::U32, [parts, 5])]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (x, q) = (operands.inputs[0], operands.inputs[1]);
        let (rows, cols) = x.ty.shape.rows_cols();
        let (q_rows, q_cols) = q.ty.shape.rows_cols();
        let ((high, wide), (down, across)) =
            (self.scaling.region(q_rows, q_cols), self.scaling.steps(q_rows, q_cols));
        let parts = parts(rows) as u32;
        let arguments = Arguments {
            x: x.into(),
            q: q.place,
            inv_scale: operands.inputs[2].place,
            counts: operands.outputs[0].place,
            sizes: operands.outputs[1].place,
            squares: operands.workspace[0].place,
            parts_of_counts: operands.workspace[1].place,
            rows: rows as u32,
            cols: cols as u32,
            high: high as u32,
            wide: wide as u32,
            down: down as u32,
            across: across as u32,
            transposed: self.transposed.into(),
            is_e5m2: u32::from(q.ty.dtype == DType::E5M2),
            largest: max_finite(q.ty.dtype),
            overflow: overflow(q.ty.dtype),
            parts,
            padding: 0,
        };
        let rows = (gpu.function(&SOURCE, &[], "cast_statistics_rows")?, Launch::row(parts, THREADS));
        let sum = (gpu.function(&SOURCE, &[], "cast_statistics_sum")?, Launch::row(1, THREADS));
        // SAFETY: both kernels take one `Arguments`. x is [rows, cols] of the type that it says; q has as
        // many bytes, in rows of `rows` or `cols` as it is transposed or not, and a scale for each region;
        // the workspace has a part for each block of the first.
        let put = |(function, launch)| unsafe { Work::launch(function, launch, arguments) };
        Ok(Work::sequence(vec![put(rows), put(sum)]))
    }
}
