//! Launch of the matrix-vector kernel of [`Linear`](super::Linear) for a single token, for which cuBLASLt
//! falls far short of the GPU's memory bandwidth.
#![allow(unsafe_code, reason = "it launches a kernel")]

use crate::device::{lanes, suffix};
use xtrain_cuda::{CudaError, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("WARPS", WARPS as i64), ("ROWS", ROWS as i64), ("IN_FLIGHT", IN_FLIGHT as i64)]],
    structs: &[Row::LAYOUT],
    ..KernelSource::new("linear/row.cu", include_str!("row.cu"))
};

/// Warps per block.
const WARPS: usize = 8;
/// Rows of the weight per warp.
const ROWS: usize = 2;
/// Loads per row that a lane has in flight.
const IN_FLIGHT: usize = 4;
/// Number of warps that saturates the memory of any GPU.
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

/// Number of warps that share a row of `runs` runs of 32 pieces: more if there are few rows, as long as each
/// warp keeps [`IN_FLIGHT`] loads in flight.
fn split(n: usize, runs: usize) -> usize {
    let mut split = 1;
    while split < WARPS && n.div_ceil(ROWS) * split < BUSY_WARPS && runs > IN_FLIGHT * split {
        split *= 2;
    }
    split
}

/// The launch of y = w x + bias, with x `[1, k]` and w `[n, k]`.
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
    // SAFETY: the kernel takes one `Row`; w is [n, k], x has k elements, y and the bias, if any, have n, all
    // of the type in the kernel's name; with the path "vector", the rows of w are whole 16-byte pieces.
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
