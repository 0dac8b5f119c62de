//! CPU kernels of the norms.

use super::{AddRmsNorm, RmsNorm, RmsNormGrad};
use crate::host::math::{Rounding, round_bf16, vectorized};
use crate::host::norm::{norm_grad_row, norm_row};
use crate::host::rows::{add_into, for_row_blocks, sum_over_rows};
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

impl CpuKernel for RmsNorm {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, _) = inputs[0].ty.shape.rows_cols();
        let [y, rstd] = outputs else { unreachable!("two outputs") };
        with_real!(inputs[0].ty.dtype, T => {
            let w = inputs[1].reals::<T>();
            for_row_blocks(t, [y, rstd], |rows, [mut y, mut rstd]| {
                let x = inputs[0].rows(rows).reals::<T>();
                norm(&x, &w, self.eps, &mut y.fresh::<T>(), &mut rstd.fresh::<T>());
            });
        });
    }
}

impl CpuKernel for AddRmsNorm {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, _) = inputs[0].ty.shape.rows_cols();
        let [total, y, rstd] = outputs else { unreachable!("three outputs") };
        // The norm is that of the sum as it is stored.
        let rounding = Rounding::of(total.ty.dtype);
        with_real!(inputs[0].ty.dtype, T => {
            let w = inputs[2].reals::<T>();
            for_row_blocks(t, [total, y, rstd], |rows, [mut total, mut y, mut rstd]| {
                let (x, delta) = (inputs[0].rows(rows.clone()).reals::<T>(), inputs[1].rows(rows).reals::<T>());
                let mut total = total.fresh::<T>();
                add(&x, &delta, rounding, &mut total);
                norm(&total, &w, self.eps, &mut y.fresh::<T>(), &mut rstd.fresh::<T>());
            });
        });
    }
}

fn add<T: Real>(x: &[T], delta: &[T], rounding: Rounding, total: &mut [T]) {
    vectorized(
        #[inline(always)]
        || {
            let sums = total.iter_mut().zip(x.iter().zip(delta));
            match rounding {
                Rounding::None => sums.for_each(|(s, (x, delta))| *s = *x + *delta),
                Rounding::Bf16 => sums.for_each(|(s, (x, delta))| *s = round_bf16(*x + *delta)),
            }
        },
    );
}

fn norm<T: Real>(x: &[T], w: &[T], eps: f32, y: &mut [T], rstd: &mut [T]) {
    let (d, eps) = (w.len(), T::of(f64::from(eps)));
    vectorized(
        #[inline(always)]
        || {
            for ((x, y), rstd) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(rstd) {
                *rstd = norm_row(x, w, eps, y);
            }
        },
    );
}

impl CpuKernel for RmsNormGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, d) = inputs[0].ty.shape.rows_cols();
        let [dx, dw] = outputs else { unreachable!("two outputs") };
        with_real!(inputs[0].ty.dtype, T => {
            let w = inputs[3].reals::<T>();
            let sum = sum_over_rows(t, d, [dx], |rows, [mut dx], dw: &mut [T]| {
                let input = |n: usize| inputs[n].rows(rows.clone()).reals::<T>();
                let (dy, x) = (input(0), input(1));
                let rstd = inputs[2].slice(rows.clone()).reals::<T>();
                let residual = (inputs.len() == 5).then(|| input(4));
                let mut dx = dx.fresh::<T>();
                dx.copy_from_slice(&dy);
                grad(&x, &rstd, &w, residual.as_deref(), &mut dx, dw);
            });
            dw.store::<T>(&sum);
        });
    }
}

/// Replaces dy by dx.
fn grad<T: Real>(x: &[T], rstd: &[T], w: &[T], residual: Option<&[T]>, dy: &mut [T], dw: &mut [T]) {
    let d = w.len();
    vectorized(
        #[inline(always)]
        || {
            for ((x, dy), rstd) in x.chunks_exact(d).zip(dy.chunks_exact_mut(d)).zip(rstd) {
                norm_grad_row(x, *rstd, w, dy, dw);
            }
            if let Some(residual) = residual {
                add_into(dy, residual);
            }
        },
    );
}
