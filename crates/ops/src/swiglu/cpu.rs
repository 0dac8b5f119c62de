//! CPU kernels of [`Swiglu`] and [`SwigluGrad`].

use super::{Swiglu, SwigluGrad};
use crate::host::math::{exp, vectorized};
use crate::host::rows::for_row_blocks;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

impl CpuKernel for Swiglu {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (_, f) = outputs[0].ty.shape.rows_cols();
        with_real!(inputs[0].ty.dtype, T => {
            let gate_up = inputs[0].reals::<T>();
            for_row_blocks(&mut outputs[0].reals::<T>(), f, |first, rows| {
                for (row, y) in rows.chunks_exact_mut(f).enumerate() {
                    let (gate, up) = gate_up[(first + row) * 2 * f..][..2 * f].split_at(f);
                    forward_row(gate, up, y);
                }
            });
        });
    }
}

fn forward_row<T: Real>(gate: &[T], up: &[T], y: &mut [T]) {
    vectorized(
        #[inline(always)]
        || {
            for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
                *y = g * sigmoid(g) * u;
            }
        },
    );
}

impl CpuKernel for SwigluGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (_, f) = inputs[0].ty.shape.rows_cols();
        with_real!(inputs[0].ty.dtype, T => {
            let dy = inputs[0].reals::<T>();
            for_row_blocks(&mut outputs[0].reals::<T>(), 2 * f, |first, rows| {
                for (row, gate_up) in rows.chunks_exact_mut(2 * f).enumerate() {
                    let (gate, up) = gate_up.split_at_mut(f);
                    grad_row(&dy[(first + row) * f..][..f], gate, up);
                }
            });
        });
    }
}

/// Replaces gate and up by their gradients.
fn grad_row<T: Real>(dy: &[T], gate: &mut [T], up: &mut [T]) {
    vectorized(
        #[inline(always)]
        || {
            for ((g, u), &dy) in gate.iter_mut().zip(up).zip(dy) {
                let s = sigmoid(*g);
                let (dgate, dup) = (dy * *u * s * (T::ONE + *g * (T::ONE - s)), dy * (*g * s));
                (*g, *u) = (dgate, dup);
            }
        },
    );
}

/// 1 / (1 + e^-x). e^-x may overflow to infinity, which gives the limit, 0.
#[inline(always)]
fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + exp(-x))
}
