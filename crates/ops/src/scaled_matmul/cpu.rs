//! The CPU kernel of [`ScaledMatmul`]: the GEMM of the numbers that both operands represent.

use super::ScaledMatmul;
use crate::host::matmul::{MatmulOperand, Onto, matmul};
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
        let onto = match inputs.get(4) {
            Some(bias) => Onto::Bias(*bias),
            None if outputs[0].accumulate => Onto::Held,
            None => Onto::Nothing,
        };
        matmul(operand(wide(0), &a), operand(wide(2), &b).t(), &mut outputs[0], onto);
    }

    /// Both operands in f32.
    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        size_of::<f32>() * (inputs[0].numel() + inputs[2].numel())
    }
}
