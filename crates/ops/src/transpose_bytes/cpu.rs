//! CPU kernels of [`TransposeBytes`] and [`TransposeBlockScales`].

use super::{TransposeBlockScales, TransposeBytes};
use crate::host::rows::for_row_blocks;
use xtrain_tensor::{CpuKernel, View, ViewMut};

/// Rows of x that a task reads before it goes on to the next row of y, so that they stay in the L1 cache.
const ROWS: usize = 64;

impl CpuKernel for TransposeBytes {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [y] = outputs else { unreachable!("one output") };
        let [rows, cols] = [inputs[0].ty.shape[0], inputs[0].ty.shape[1]];
        let x = inputs[0].bytes();
        for_row_blocks(cols, [y], |block, [mut y]| {
            let y = y.bytes();
            for first in (0..rows).step_by(ROWS) {
                for (c, y) in block.clone().zip(y.chunks_exact_mut(rows)) {
                    for r in first..rows.min(first + ROWS) {
                        y[r] = x[r * cols + c];
                    }
                }
            }
        });
    }
}

impl CpuKernel for TransposeBlockScales {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [down, stride] = [inputs[0].ty.shape[0], inputs[0].ty.shape[1]];
        let width = outputs[0].ty.shape[1];
        let (from, mut to) = (inputs[0].reals::<f32>(), outputs[0].fresh::<f32>());
        for (across, row) in to.chunks_exact_mut(width).enumerate() {
            for (n, scale) in row.iter_mut().enumerate() {
                *scale = if n < down { from[n * stride + across] } else { 0.0 };
            }
        }
    }
}
