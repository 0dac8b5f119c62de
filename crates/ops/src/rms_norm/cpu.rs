//! CPU kernels of the norms.

use super::{AddRmsNorm, RmsNorm, RmsNormGrad};
use crate::host::math::{dot, vectorized};
use crate::host::rows::{for_row_blocks, for_row_blocks2, store, sum_over_rows};
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

impl CpuKernel for RmsNorm {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [y, rstd] = outputs else { unreachable!("two outputs") };
        with_real!(inputs[0].ty.dtype, T => {
            norm::<T>(&inputs[0].reals::<T>(), &inputs[1].reals::<T>(), self.eps, &mut y.reals::<T>(), &mut rstd.reals::<T>());
        });
    }
}

impl CpuKernel for AddRmsNorm {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [total, y, rstd] = outputs else { unreachable!("three outputs") };
        with_real!(inputs[0].ty.dtype, T => {
            let (x, delta, w) = (inputs[0].reals::<T>(), inputs[1].reals::<T>(), inputs[2].reals::<T>());
            for_row_blocks(&mut total.reals::<T>(), 1, |first, rows| {
                let range = first..first + rows.len();
                for ((s, x), delta) in rows.iter_mut().zip(&x[range.clone()]).zip(&delta[range]) {
                    *s = *x + *delta;
                }
            });
            // Opened again, the sum reads as it is stored.
            norm::<T>(&total.reals::<T>(), &w, self.eps, &mut y.reals::<T>(), &mut rstd.reals::<T>());
        });
    }
}

fn norm<T: Real>(x_td: &[T], w_d: &[T], eps: f32, y_td: &mut [T], rstd_t: &mut [T]) {
    let d = w_d.len();
    for_row_blocks2(y_td, d, rstd_t, 1, |first, y, rstd| {
        vectorized(
            #[inline(always)]
            || {
                for (row, (y, rstd)) in y.chunks_exact_mut(d).zip(rstd).enumerate() {
                    let x = &x_td[(first + row) * d..][..d];
                    let mean_square = dot(x, x) / T::of(d as f64);
                    *rstd = T::ONE / (mean_square + T::of(f64::from(eps))).sqrt();
                    for ((y, x), w) in y.iter_mut().zip(x).zip(w_d) {
                        *y = *x * *rstd * *w;
                    }
                }
            },
        );
    });
}

impl CpuKernel for RmsNormGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, d) = inputs[0].ty.shape.rows_cols();
        let [dx, dw] = outputs else { unreachable!("two outputs") };
        with_real!(inputs[0].ty.dtype, T => {
            let (dy, x, rstd, w) =
                (inputs[0].reals::<T>(), inputs[1].reals::<T>(), inputs[2].reals::<T>(), inputs[3].reals::<T>());
            let residual = inputs.get(4).map(|r| r.reals::<T>());
            for_row_blocks(&mut dx.reals::<T>(), d, |first, rows| {
                for (row, dx) in rows.chunks_exact_mut(d).enumerate().map(|(r, dx)| (first + r, dx)) {
                    let (dy, x) = (&dy[row * d..][..d], &x[row * d..][..d]);
                    grad_row(dy, x, rstd[row], &w, residual.as_ref().map(|r| &r[row * d..][..d]), dx);
                }
            });
            let sum = sum_over_rows(t, d, |row, partial: &mut [T]| {
                let (dy, x, rstd) = (&dy[row * d..][..d], &x[row * d..][..d], rstd[row]);
                vectorized(
                    #[inline(always)]
                    || {
                        for ((partial, dy), x) in partial.iter_mut().zip(dy).zip(x) {
                            *partial += *dy * (*x * rstd);
                        }
                    },
                );
            });
            let accumulate = dw.accumulate;
            store(&mut dw.reals::<T>(), &sum, accumulate);
        });
    }
}

fn grad_row<T: Real>(dy: &[T], x: &[T], rstd: T, w: &[T], residual: Option<&[T]>, dx: &mut [T]) {
    let d = w.len();
    vectorized(
        #[inline(always)]
        || {
            // dx holds dy w first, so that the mean is a product of two rows.
            for ((dx, dy), w) in dx.iter_mut().zip(dy).zip(w) {
                *dx = *dy * *w;
            }
            let along = dot(dx, x) * rstd / T::of(d as f64);
            for (dx, x) in dx.iter_mut().zip(x) {
                *dx = rstd * (*dx - *x * rstd * along);
            }
            if let Some(residual) = residual {
                for (dx, r) in dx.iter_mut().zip(residual) {
                    *dx += *r;
                }
            }
        },
    );
}
