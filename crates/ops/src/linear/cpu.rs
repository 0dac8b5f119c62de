//! CPU kernels of a linear layer: GEMMs of operands in their stored type, summed in f32 or f64.

use super::{BiasGrad, Linear, LinearDgrad, LinearWgrad, UnroundedLinear};
use crate::host::matmul::{Addend, MatmulOperand, matmul};
use crate::host::rows::{add_into, sum_bytes, sum_over_rows};
use xtrain_tensor::{CpuKernel, TensorType, View, ViewMut, with_real};

impl CpuKernel for Linear {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((t, i), (o, _)) = (inputs[0].ty.shape.rows_cols(), inputs[1].ty.shape.rows_cols());
        let (x_ti, w_oi) = (MatmulOperand::new(inputs[0], t, i), MatmulOperand::new(inputs[1], o, i));
        let addend = inputs.get(2).map_or(Addend::None, |bias| Addend::Bias(*bias));
        matmul(x_ti, w_oi.t(), &mut outputs[0], addend);
    }
}

impl CpuKernel for UnroundedLinear {
    /// As [`Linear`], into an output of another type.
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        Linear.run(inputs, outputs);
    }
}

impl CpuKernel for LinearDgrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((t, o), (_, i)) = (inputs[0].ty.shape.rows_cols(), inputs[1].ty.shape.rows_cols());
        let (dy_to, w_oi) = (MatmulOperand::new(inputs[0], t, o), MatmulOperand::new(inputs[1], o, i));
        matmul(dy_to, w_oi, &mut outputs[0], Addend::None);
    }
}

impl CpuKernel for LinearWgrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((t, o), (_, i)) = (inputs[0].ty.shape.rows_cols(), inputs[1].ty.shape.rows_cols());
        let (dy_to, x_ti) = (MatmulOperand::new(inputs[0], t, o), MatmulOperand::new(inputs[1], t, i));
        let addend = if outputs[0].accumulate { Addend::Previous } else { Addend::None };
        matmul(dy_to.t(), x_ti, &mut outputs[0], addend);
    }
}

impl CpuKernel for BiasGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, o) = inputs[0].ty.shape.rows_cols();
        with_real!(inputs[0].ty.dtype, T => {
            let sum = sum_over_rows(t, o, [], |rows, [], partial: &mut [T]| {
                inputs[0].rows(rows).reals::<T>().chunks_exact(o).for_each(|dy| add_into(partial, dy));
            });
            outputs[0].store::<T>(&sum);
        });
    }

    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        let (t, o) = inputs[0].shape.rows_cols();
        sum_bytes(t, o, inputs[0].dtype)
    }
}
