//! Launches of the GPU kernels of [`TransposeBytes`] and [`TransposeBlockScales`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{TransposeBlockScales, TransposeBytes};
use crate::device::plane;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("EDGE", EDGE as i64), ("THREADS", THREADS as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("transpose_bytes/kernel.cu", include_str!("kernel.cu"))
};

pub(super) const BLOCK_SCALES: KernelSource = KernelSource {
    structs: &[ScaleArguments::LAYOUT],
    ..KernelSource::new("transpose_bytes/block_scales.cu", include_str!("block_scales.cu"))
};

/// Rows and columns of a tile, which one block transposes.
const EDGE: usize = 128;
/// Threads per block. Each loads four rows of 16 bytes.
const THREADS: u32 = 256;

kernel_struct! {
    struct Arguments {
        x: DevicePtr,
        y: DevicePtr,
        rows: u64,
        cols: u64,
    }

    struct ScaleArguments {
        from: DevicePtr,
        to: DevicePtr,
        down: u32,
        stride: u32,
        width: u32,
        count: u32,
    }
}

impl CudaKernel for TransposeBytes {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (x, y) = (operands.inputs[0], operands.outputs[0]);
        let function = gpu.function(&SOURCE, &[], "transpose_bytes")?;
        let [rows, cols] = [x.ty.shape[0], x.ty.shape[1]];
        let arguments = Arguments { x: x.place, y: y.place, rows: rows as u64, cols: cols as u64 };
        // The grid's second extent is at most 65,535, and the first is not.
        let tiles = [rows.div_ceil(EDGE) * cols.div_ceil(EDGE), 1];
        // SAFETY: the kernel takes one `Arguments`; x and y have `rows` times `cols` bytes.
        Ok(unsafe { Work::launch(function, plane(tiles, [THREADS, 1]), arguments) })
    }
}

impl CudaKernel for TransposeBlockScales {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (from, to) = (operands.inputs[0], operands.outputs[0]);
        let function = gpu.function(&BLOCK_SCALES, &[], "transpose_block_scales")?;
        let arguments = ScaleArguments {
            from: from.place,
            to: to.place,
            down: from.ty.shape[0] as u32,
            stride: from.ty.shape[1] as u32,
            width: to.ty.shape[1] as u32,
            count: to.ty.numel() as u32,
        };
        let launch = Launch::row(arguments.count.div_ceil(THREADS).max(1), THREADS);
        // SAFETY: the kernel takes one `ScaleArguments`. `from` has `down` rows of `stride` scales, and `to`
        // at most `stride` rows of `width`, `count` in all, each with a thread.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }
}
