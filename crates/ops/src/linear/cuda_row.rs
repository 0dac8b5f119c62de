//! The kernel of [`Linear`](super::Linear) for one token, where cuBLASLt stays far from the GPU's bandwidth.
#![allow(unsafe_code, reason = "it launches a kernel")]

use crate::device::{lanes, suffix};
use xtrain_cuda::{CudaError, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct};

pub(super) const SOURCE: KernelSource =
    KernelSource { structs: &[Row::LAYOUT], ..KernelSource::new("linear/row.cu", include_str!("row.cu")) };

/// Warps of a block, rows of the weight that a warp has, and pieces of each that it reads at once; equal in
/// the kernels.
const WARPS: usize = 8;
const ROWS: usize = 2;
const AT_ONCE: usize = 4;
/// Warps that keep any GPU's memory busy.
const BUSY_WARPS: usize = 2048;

kernel_struct! {
    struct Row {
        x: DevicePtr,
        w: DevicePtr,
        bias: DevicePtr,
        y: DevicePtr,
        n: u32,
        k: u32,
        split: u32,
    }
}

/// Warps that share rows of `runs` runs of 32 pieces: more where there are few rows, and each is left with
/// enough to read at once.
fn split(n: usize, runs: usize) -> usize {
    let mut split = 1;
    while split < WARPS && n.div_ceil(ROWS) * split < BUSY_WARPS && runs > AT_ONCE * split {
        split *= 2;
    }
    split
}

/// The GEMM of `x [1, k]` with `w [n, k]`, to which a bias may be added.
pub(super) fn prepare(gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
    let (x, w, y) = (operands.inputs[0], operands.inputs[1], operands.outputs[0]);
    let (n, k) = w.ty.shape.rows_cols();
    let (path, piece) = if k % lanes(w.ty) == 0 { ("vector", lanes(w.ty)) } else { ("any", 1) };
    let split = split(n, (k / piece).div_ceil(32));
    let arguments = Row {
        x: x.place,
        w: w.place,
        bias: operands.inputs.get(2).map_or(DevicePtr(0), |bias| bias.place),
        y: y.place,
        n: n as u32,
        k: k as u32,
        split: split as u32,
    };
    let function = gpu.function(&SOURCE, &[], &format!("linear_row_{path}_{}", suffix(w.ty)))?;
    let blocks = n.div_ceil(WARPS / split * ROWS).max(1);
    // SAFETY: the kernel takes one `Row`; w is [n, k], x has k elements, y and a bias have n, all of the type
    // that the name says, and the rows of w are aligned to whole pieces where the path is that.
    Ok(unsafe { Work::launch(function, Launch::row(blocks as u32, 32 * WARPS as u32), arguments) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warps_share_rows_where_there_are_few_and_long_ones() {
        assert_eq!(split(151_936, 6), 1);
        assert_eq!(split(1536, 6), 2);
        assert_eq!(split(1536, 35), 4);
        assert_eq!(split(16, 1000), 8);
        assert_eq!(split(16, 1), 1);
    }
}
