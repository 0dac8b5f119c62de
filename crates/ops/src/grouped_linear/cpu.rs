//! CPU kernels of the linear layers of experts: a GEMM for each expert, several experts at a time.

use super::{GroupedDgrad, GroupedLinear, GroupedWgrad, STARTS};
use crate::host::groups::{for_each_gradient, for_each_group};
use crate::host::matmul::{Addend, MatmulOperand, matmul_of_group};
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for GroupedLinear {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((_, i), (_, o)) = (inputs[0].ty.shape.rows_cols(), outputs[0].ty.shape.rows_cols());
        for_each_group(inputs[STARTS], &mut outputs[0], self.tail, |e, rows, y_co| {
            let x_ci = MatmulOperand::new(inputs[0].rows(rows.clone()), rows.len(), i);
            let w_oi = MatmulOperand::new(inputs[1].rows(e * o..(e + 1) * o), o, i);
            matmul_of_group(x_ci, w_oi.t(), y_co, Addend::None);
        });
    }
}

impl CpuKernel for GroupedDgrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((_, o), (_, i)) = (inputs[0].ty.shape.rows_cols(), outputs[0].ty.shape.rows_cols());
        for_each_group(inputs[STARTS], &mut outputs[0], self.tail, |e, rows, dx_ci| {
            let dy_co = MatmulOperand::new(inputs[0].rows(rows.clone()), rows.len(), o);
            let w_oi = MatmulOperand::new(inputs[1].rows(e * o..(e + 1) * o), o, i);
            matmul_of_group(dy_co, w_oi, dx_ci, Addend::None);
        });
    }
}

impl CpuKernel for GroupedWgrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((_, o), (_, i)) = (inputs[0].ty.shape.rows_cols(), inputs[1].ty.shape.rows_cols());
        for_each_gradient(inputs[STARTS].ints(), &mut outputs[0], |rows, dw_oi, addend| {
            let dy_co = MatmulOperand::new(inputs[0].rows(rows.clone()), rows.len(), o);
            let x_ci = MatmulOperand::new(inputs[1].rows(rows.clone()), rows.len(), i);
            matmul_of_group(dy_co.t(), x_ci, dw_oi, addend);
        });
    }
}
