//! CPU kernels of the linear layers of experts: a GEMM for each expert, several experts at a time.

use super::{GroupedDgrad, GroupedLinear, GroupedWgrad, START};
use crate::host::matmul::{Addend, MatmulOperand, matmul_of_group};
use rayon::prelude::*;
use std::ops::Range;
use xtrain_tensor::{CpuKernel, TensorType, View, ViewMut};

impl CpuKernel for GroupedLinear {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((_, i), (_, o)) = (inputs[0].ty.shape.rows_cols(), outputs[0].ty.shape.rows_cols());
        for_each_group(inputs[START].ints(), &mut outputs[0], |e, rows, y_co| {
            let x_ci = MatmulOperand::new(inputs[0].rows(rows.clone()), rows.len(), i);
            let w_oi = MatmulOperand::new(inputs[1].rows(e * o..(e + 1) * o), o, i);
            matmul_of_group(x_ci, w_oi.t(), y_co, Addend::None);
        });
    }
}

impl CpuKernel for GroupedDgrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((_, o), (_, i)) = (inputs[0].ty.shape.rows_cols(), outputs[0].ty.shape.rows_cols());
        for_each_group(inputs[START].ints(), &mut outputs[0], |e, rows, dx_ci| {
            let dy_co = MatmulOperand::new(inputs[0].rows(rows.clone()), rows.len(), o);
            let w_oi = MatmulOperand::new(inputs[1].rows(e * o..(e + 1) * o), o, i);
            matmul_of_group(dy_co, w_oi, dx_ci, Addend::None);
        });
    }
}

impl CpuKernel for GroupedWgrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ((_, o), (_, i)) = (inputs[0].ty.shape.rows_cols(), inputs[1].ty.shape.rows_cols());
        let groups: Vec<_> = groups(inputs[START].ints()).zip(outputs[0].chunks((o * i).max(1))).collect();
        groups.into_par_iter().for_each(|(rows, mut dw_oi)| {
            let addend = if dw_oi.accumulate { Addend::Previous } else { Addend::None };
            if rows.is_empty() && dw_oi.accumulate {
                return;
            }
            let dy_co = MatmulOperand::new(inputs[0].rows(rows.clone()), rows.len(), o);
            let x_ci = MatmulOperand::new(inputs[1].rows(rows.clone()), rows.len(), i);
            matmul_of_group(dy_co.t(), x_ci, &mut dw_oi, addend);
        });
    }
}

/// Runs `f(expert, rows, their part of y)` for each expert with rows, and writes zeros after the last group.
fn for_each_group(
    start: &[i32],
    y: &mut ViewMut<'_>,
    f: impl Fn(usize, Range<usize>, &mut ViewMut<'_>) + Sync,
) {
    let (dtype, (_, cols)) = (y.ty.dtype, y.ty.shape.rows_cols());
    let mut rest = y.bytes();
    let mut parts = Vec::with_capacity(start.len() - 1);
    for (e, rows) in groups(start).enumerate().filter(|(_, rows)| !rows.is_empty()) {
        let (part, after) = rest.split_at_mut(dtype.bytes(rows.len() * cols));
        parts.push((e, rows, part));
        rest = after;
    }
    rest.fill(0);
    parts.into_par_iter().for_each(|(e, rows, part)| {
        let ty = TensorType::new(dtype, [rows.len(), cols]);
        f(e, rows, &mut ViewMut::new(ty, part, false));
    });
}

/// The rows of each expert.
fn groups(start: &[i32]) -> impl Iterator<Item = Range<usize>> {
    start.windows(2).map(|pair| pair[0] as usize..pair[1] as usize)
}
