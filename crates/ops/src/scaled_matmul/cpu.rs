//! CPU kernel of [`ScaledMatmul`]: both operands are dequantized to f32 and multiplied.

use super::ScaledMatmul;
use crate::host::matmul::{Addend, MatmulOperand, matmul};
use crate::quantize::dequantized;
use xtrain_tensor::{CpuKernel, DType, TensorType, View, ViewMut};

impl CpuKernel for ScaledMatmul {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let a = dequantized(inputs[0], inputs[1], self.scaling[0]);
        let b = dequantized(inputs[2], inputs[3], self.scaling[1]);
        let wide = |n: usize| inputs[n].ty.with_dtype(DType::F32);
        let operand = |ty: TensorType, reals| {
            let (rows, cols) = ty.shape.rows_cols();
            MatmulOperand::new(View::new(ty, bytemuck::cast_slice(reals)), rows, cols)
        };
        let addend = match inputs.get(4) {
            Some(bias) => Addend::Bias(*bias),
            None if outputs[0].accumulate => Addend::Previous,
            None => Addend::None,
        };
        matmul(operand(wide(0), &a), operand(wide(2), &b).t(), &mut outputs[0], addend);
    }

    /// Both operands, dequantized to f32, and the result before it is rounded.
    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        let (m, n) = (inputs[0].shape[0], inputs[2].shape[0]);
        let sums = if self.out == DType::F32 { 0 } else { m * n };
        size_of::<f32>() * (inputs[0].numel() + inputs[2].numel() + sums)
    }
}
