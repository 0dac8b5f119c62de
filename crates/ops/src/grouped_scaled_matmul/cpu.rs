//! CPU kernel of [`GroupedScaledMatmul`]: both operands are dequantized to f32, and each expert's parts of
//! them are multiplied.

use super::{GroupedScaledMatmul, STARTS};
use crate::host::groups::{for_each_gradient, for_each_group};
use crate::host::matmul::{Addend, MatmulOperand, matmul_of_group};
use crate::quantize::dequantized;
use std::ops::Range;
use xtrain_program::LinearGemm;
use xtrain_tensor::{CpuKernel, DType, Pooled, TensorType, View, ViewMut};

impl CpuKernel for GroupedScaledMatmul {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [a, b] = [0, 1].map(|n| Dequantized {
            reals: dequantized(inputs[2 * n], inputs[2 * n + 1], self.scaling[n]),
            cols: inputs[2 * n].ty.shape[1],
        });
        let (starts, d) = (inputs[STARTS], &mut outputs[0]);
        let [o, i] = [0, 2].map(|n| inputs[n].ty.shape[0]);
        if self.gemm == LinearGemm::Wgrad {
            return for_each_gradient(starts.ints(), d, |rows, dw_oi, addend| {
                let [dy_oc, x_ic] = [&a, &b].map(|operand| operand.columns(rows.clone()));
                let [dy_oc, x_ic] =
                    [(&dy_oc, o), (&x_ic, i)].map(|(part, lines)| operand(part, lines, rows.len()));
                matmul_of_group(dy_oc, x_ic.t(), dw_oi, addend);
            });
        }
        let (k, n) = (a.cols, d.ty.shape[1]);
        for_each_group(starts, d, self.tail, |e, rows, d| {
            let a = operand(a.rows(rows.clone()), rows.len(), k);
            match self.gemm {
                LinearGemm::Dgrad => {
                    let w_io = b.columns(e * k..(e + 1) * k);
                    matmul_of_group(a, operand(&w_io, n, k).t(), d, Addend::None);
                }
                _ => matmul_of_group(a, operand(b.rows(e * n..(e + 1) * n), n, k).t(), d, Addend::None),
            }
        });
    }

    /// Both operands, dequantized to f32, copies of columns, and the result before it is rounded.
    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        let (a, b) = (inputs[0], inputs[2]);
        let copied = match self.gemm {
            LinearGemm::Fprop => 0,
            LinearGemm::Dgrad => b.numel(),
            LinearGemm::Wgrad => a.numel() + b.numel(),
        };
        let sums = match self.gemm {
            _ if self.out == DType::F32 => 0,
            LinearGemm::Fprop => a.shape[0] * b.shape[0] / self.groups.experts,
            LinearGemm::Dgrad => a.shape[0] * b.shape[0],
            LinearGemm::Wgrad => self.groups.experts * a.shape[0] * b.shape[0],
        };
        size_of::<f32>() * (a.numel() + b.numel() + copied + sums)
    }
}

/// A dequantized matrix.
struct Dequantized {
    reals: Pooled<f32>,
    cols: usize,
}

impl Dequantized {
    fn rows(&self, rows: Range<usize>) -> &[f32] {
        &self.reals[rows.start * self.cols..rows.end * self.cols]
    }

    /// A copy of these columns.
    fn columns(&self, cols: Range<usize>) -> Pooled<f32> {
        let rows = self.reals.len() / self.cols;
        let mut part = Pooled::take(rows * cols.len());
        let lines = self.reals.chunks_exact(self.cols).zip(part.chunks_exact_mut(cols.len().max(1)));
        lines.for_each(|(from, to)| to.copy_from_slice(&from[cols.clone()]));
        part
    }
}

/// Numbers as a matrix of these extents.
fn operand(reals: &[f32], rows: usize, cols: usize) -> MatmulOperand<'_> {
    let ty = TensorType::new(DType::F32, [rows, cols]);
    MatmulOperand::new(View::new(ty, bytemuck::cast_slice(reals)), rows, cols)
}
