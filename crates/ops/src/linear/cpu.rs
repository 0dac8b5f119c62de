//! CPU kernels of the linear layer: products by the `gemm` crate, in f32 or f64.

use super::{BiasGrad, Linear, LinearDgrad, LinearWgrad};
use crate::host::gemm::{Mat, MatMut, gemm};
use crate::host::rows::{add_into, for_row_blocks, store, sum_over_rows};
use xtrain_tensor::{CpuKernel, View, ViewMut, with_real};

impl CpuKernel for Linear {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((t, i), (o, _)) = (inputs[0].ty.shape.rows_cols(), inputs[1].ty.shape.rows_cols());
        with_real!(inputs[0].ty.dtype, T => {
            let (x, w) = (inputs[0].reals::<T>(), inputs[1].reals::<T>());
            let mut y = outputs[0].reals::<T>();
            let bias = inputs.get(2).map(|b| b.reals::<T>());
            if let Some(bias) = &bias {
                for_row_blocks(&mut y, o, |_, rows| rows.chunks_mut(o).for_each(|row| row.copy_from_slice(bias)));
            }
            gemm(1.0, Mat::new(&x, t, i), Mat::new(&w, o, i).t(), MatMut::new(&mut y, t, o), bias.is_some());
        });
    }
}

impl CpuKernel for LinearDgrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((t, o), (_, i)) = (inputs[0].ty.shape.rows_cols(), inputs[1].ty.shape.rows_cols());
        with_real!(inputs[0].ty.dtype, T => {
            let (dy, w) = (inputs[0].reals::<T>(), inputs[1].reals::<T>());
            let mut dx = outputs[0].reals::<T>();
            gemm(1.0, Mat::new(&dy, t, o), Mat::new(&w, o, i), MatMut::new(&mut dx, t, i), false);
        });
    }
}

impl CpuKernel for LinearWgrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((t, o), (_, i)) = (inputs[0].ty.shape.rows_cols(), inputs[1].ty.shape.rows_cols());
        with_real!(inputs[0].ty.dtype, T => {
            let (dy, x) = (inputs[0].reals::<T>(), inputs[1].reals::<T>());
            let accumulate = outputs[0].accumulate;
            let mut dw = outputs[0].reals::<T>();
            gemm(1.0, Mat::new(&dy, t, o).t(), Mat::new(&x, t, i), MatMut::new(&mut dw, o, i), accumulate);
        });
    }
}

impl CpuKernel for BiasGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, o) = inputs[0].ty.shape.rows_cols();
        with_real!(inputs[0].ty.dtype, T => {
            let dy = inputs[0].reals::<T>();
            let sum = sum_over_rows(t, o, |row, partial: &mut [T]| add_into(partial, &dy[row * o..][..o]));
            let accumulate = outputs[0].accumulate;
            store(&mut outputs[0].reals::<T>(), &sum, accumulate);
        });
    }
}
