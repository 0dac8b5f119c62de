//! The GPU kernels of [`CastStatistics`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::CastStatistics;
use crate::device::{Floats, PARTS};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};
use xtrain_tensor::formats::{max_finite, overflow};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("cast_statistics/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of a block of both launches.
const THREADS: u32 = 256;

/// Blocks of the first launch.
fn parts(rows: usize) -> usize {
    rows.clamp(1, PARTS)
}

kernel_struct! {
    struct Arguments {
        x: Floats,
        q: DevicePtr,
        inv_scale: DevicePtr,
        counts: DevicePtr,
        sizes: DevicePtr,
        squares: DevicePtr,
        block_counts: DevicePtr,
        rows: u32,
        cols: u32,
        region_rows: u32,
        region_cols: u32,
        down: u32,
        across: u32,
        transposed: u32,
        is_e5m2: u32,
        max_finite: f32,
        overflow: f32,
        parts: u32,
        padding: u32,
    }
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
        let ((region_rows, region_cols), (down, across)) =
            (self.scaling.region(q_rows, q_cols), self.scaling.steps(q_rows, q_cols));
        let parts = parts(rows) as u32;
        let arguments = Arguments {
            x: x.into(),
            q: q.place,
            inv_scale: operands.inputs[2].place,
            counts: operands.outputs[0].place,
            sizes: operands.outputs[1].place,
            squares: operands.workspace[0].place,
            block_counts: operands.workspace[1].place,
            rows: rows as u32,
            cols: cols as u32,
            region_rows: region_rows as u32,
            region_cols: region_cols as u32,
            down: down as u32,
            across: across as u32,
            transposed: self.transposed.into(),
            is_e5m2: u32::from(q.ty.dtype == DType::E5M2),
            max_finite: max_finite(q.ty.dtype),
            overflow: overflow(q.ty.dtype),
            parts,
            padding: 0,
        };
        let rows = (gpu.function(&SOURCE, &[], "cast_statistics_rows")?, Launch::row(parts, THREADS));
        let sum = (gpu.function(&SOURCE, &[], "cast_statistics_sum")?, Launch::row(1, THREADS));
        // SAFETY: both kernels take one `Arguments`. x is [rows, cols] of the type that it says; q is [rows,
        // cols] bytes, or [cols, rows] if it is transposed, with a scale for each region; the workspace has a
        // part for each block of the first launch.
        let work = |(function, launch)| unsafe { Work::launch(function, launch, arguments) };
        Ok(Work::sequence(vec![work(rows), work(sum)]))
    }
}
