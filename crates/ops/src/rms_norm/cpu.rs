//! CPU kernels of the norms.

use super::{AddRmsNorm, ExtraOutput, Rms, RmsNorm, RmsNormGrad};
use crate::host::amax::tensor_amax;
use crate::host::math::{Rounding, round_bf16, vectorized};
use crate::host::norm::{norm_grad_row, norm_row, rstd_of, scale_row};
use crate::host::rows::{add_into, for_row_blocks, sum_bytes, sum_over_rows};
use std::ops::Range;
use xtrain_tensor::{CpuKernel, HostTensor, Real, TensorType, View, ViewMut, with_real};

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
        // The norm is that of the rounded sum.
        let rounding = Rounding::for_operands(total.ty.dtype);
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
    let (d, eps) = (w.len(), T::from_f64(f64::from(eps)));
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
        let (outputs, amax) =
            outputs.split_at_mut(outputs.len() - usize::from(self.extra == ExtraOutput::Amax));
        with_real!(inputs[0].ty.dtype, T => {
            let w = inputs[3].reals::<T>();
            let rest = |rows: Range<usize>, dx: &mut [T], dw: &mut [T]| {
                let input = |n: usize| inputs[n].rows(rows.clone()).reals::<T>();
                let rstd = inputs[2].slice(rows.clone()).reals::<T>();
                let residual = (inputs.len() == 5).then(|| input(4));
                grad(&input(1), &rstd, &w, residual.as_deref(), dx, dw);
            };
            let (dw, sum) = match &mut *outputs {
                [dx, dw, y] => {
                    let sum = sum_over_rows(t, d, [dx, y], |rows, [mut dx, mut y], dw: &mut [T]| {
                        let (mut dx, mut y) = (dx.fresh::<T>(), y.reals::<T>());
                        dx.copy_from_slice(&y);
                        let (x, rstd) = (inputs[1].rows(rows.clone()), inputs[2].slice(rows.clone()));
                        scale_rows(&x.reals::<T>(), &rstd.reals::<T>(), &w, &mut y);
                        rest(rows, &mut dx, dw);
                    });
                    (dw, sum)
                }
                [dx, dw] => {
                    let sum = sum_over_rows(t, d, [dx], |rows, [mut dx], dw: &mut [T]| {
                        let mut dx = dx.fresh::<T>();
                        dx.copy_from_slice(&inputs[0].rows(rows.clone()).reals::<T>());
                        rest(rows, &mut dx, dw);
                    });
                    (dw, sum)
                }
                _ => unreachable!("two outputs or three"),
            };
            dw.store::<T>(&sum);
        });
        if let [amax] = amax {
            amax.fresh::<f32>()[0] = tensor_amax(outputs[0].view());
        }
    }

    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        let (t, d) = inputs[0].shape.rows_cols();
        sum_bytes(t, d, inputs[0].dtype)
    }
}

impl CpuKernel for Rms {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, _) = inputs[0].ty.shape.rows_cols();
        let added = 1 + usize::from(self.adds);
        let (outputs, amax) = outputs.split_at_mut(added);
        let rounding = Rounding::for_operands(inputs[0].ty.dtype);
        with_real!(inputs[0].ty.dtype, T => {
            let eps = T::from_f64(f64::from(self.eps));
            match outputs {
                [total, rstd] => for_row_blocks(t, [total, rstd], |rows, [mut total, mut rstd]| {
                    let (x, delta) = (inputs[0].rows(rows.clone()).reals::<T>(), inputs[1].rows(rows).reals::<T>());
                    let mut total = total.fresh::<T>();
                    add(&x, &delta, rounding, &mut total);
                    root_mean_squares(&total, eps, &mut rstd.fresh::<T>());
                }),
                [rstd] => for_row_blocks(t, [rstd], |rows, [mut rstd]| {
                    root_mean_squares(&inputs[0].rows(rows).reals::<T>(), eps, &mut rstd.fresh::<T>());
                }),
                _ => unreachable!("one output or two"),
            }
        });
        if let [amax] = amax {
            let x = if self.adds { outputs[0].view() } else { inputs[0] };
            let mut y = HostTensor::zeros(x.ty);
            norm_from_rstd(
                x,
                outputs[added - 1].view(),
                inputs[added],
                ViewMut::new(x.ty, y.bytes_mut(), false),
            );
            let y = View::new(x.ty, y.bytes());
            amax.fresh::<f32>()[0] = tensor_amax(y);
        }
    }

    /// y, of which the amax is written.
    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        if self.amax { inputs[0].bytes() } else { 0 }
    }
}

/// Writes 1/rms of every row.
fn root_mean_squares<T: Real>(x: &[T], eps: T, rstd: &mut [T]) {
    let d = x.len() / rstd.len().max(1);
    vectorized(
        #[inline(always)]
        || {
            for (x, rstd) in x.chunks_exact(d.max(1)).zip(rstd) {
                *rstd = rstd_of(x, eps);
            }
        },
    );
}

/// Writes the norm y of x from the rows' 1/rms and the weight.
pub(crate) fn norm_from_rstd(x: View<'_>, rstd: View<'_>, w: View<'_>, mut y: ViewMut<'_>) {
    let (t, _) = x.ty.shape.rows_cols();
    with_real!(x.ty.dtype, T => {
        let w = w.reals::<T>();
        for_row_blocks(t, [&mut y], |rows, [mut y]| {
            let rstd = rstd.slice(rows.clone()).reals::<T>();
            scale_rows(&x.rows(rows).reals::<T>(), &rstd, &w, &mut y.fresh::<T>());
        });
    });
}

/// Writes y from the rows' saved 1/rms.
fn scale_rows<T: Real>(x: &[T], rstd: &[T], w: &[T], y: &mut [T]) {
    let d = w.len();
    vectorized(
        #[inline(always)]
        || {
            for ((x, y), rstd) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(rstd) {
                scale_row(x, *rstd, w, y);
            }
        },
    );
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
