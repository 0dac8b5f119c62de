//! CPU kernels of [`Gelu`] and [`GeluGrad`].

use super::{Gelu, GeluGrad};
use crate::host::math::{exp, vectorized};
use crate::host::rows::for_row_blocks;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

impl CpuKernel for Gelu {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [y] = outputs else { unreachable!("one output") };
        with_real!(inputs[0].ty.dtype, T => {
            for_row_blocks(y.ty.numel(), [y], |elements, [mut y]| {
                let x = inputs[0].slice(elements).reals::<T>();
                forward(&x, &mut y.fresh());
            });
        });
    }
}

fn forward<T: Real>(x: &[T], y: &mut [T]) {
    vectorized(
        #[inline(always)]
        || {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = x * gate(x).0;
            }
        },
    );
}

impl CpuKernel for GeluGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [dx] = outputs else { unreachable!("one output") };
        with_real!(inputs[1].ty.dtype, T => {
            for_row_blocks(dx.ty.numel(), [dx], |elements, [mut dx]| {
                let x = inputs[1].slice(elements).reals::<T>();
                grad(&x, &mut dx.reals());
            });
        });
    }
}

/// Replaces dy by dx.
fn grad<T: Real>(x: &[T], dy: &mut [T]) {
    vectorized(
        #[inline(always)]
        || {
            for (dy, &x) in dy.iter_mut().zip(x) {
                let (s, slope) = gate(x);
                *dy *= s * (T::ONE + x * slope * (T::ONE - s));
            }
        },
    );
}

/// s(2u), and the derivative of 2u.
#[inline(always)]
fn gate<T: Real>(x: T) -> (T, T) {
    let (scale, cubic) = (T::from_f64(2.0 * (2.0 / std::f64::consts::PI).sqrt()), T::from_f64(0.044715));
    let square = x * x;
    let s = T::ONE / (T::ONE + exp(-(scale * x * (T::ONE + cubic * square))));
    (s, scale * (T::ONE + T::from_f64(3.0) * cubic * square))
}
