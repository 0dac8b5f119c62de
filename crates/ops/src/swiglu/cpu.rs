//! CPU kernels of [`Swiglu`] and [`SwigluGrad`].

use super::{Swiglu, SwigluGrad};
use crate::host::math::{exp, vectorized};
use crate::host::rows::for_row_blocks;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

impl CpuKernel for Swiglu {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, f) = outputs[0].ty.shape.rows_cols();
        let [y] = outputs else { unreachable!("one output") };
        with_real!(inputs[0].ty.dtype, T => {
            for_row_blocks(t, [y], |rows, [mut y]| {
                let gate_up = inputs[0].rows(rows).reals::<T>();
                for (y, gate_up) in y.fresh::<T>().chunks_exact_mut(f).zip(gate_up.chunks_exact(2 * f)) {
                    let (gate, up) = gate_up.split_at(f);
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
        let (t, f) = inputs[0].ty.shape.rows_cols();
        match outputs {
            [gate_up, y] => with_real!(inputs[0].ty.dtype, T => {
                for_row_blocks(t, [gate_up, y], |_, [mut gate_up, mut y]| {
                    for (gate_up, y) in gate_up.reals::<T>().chunks_exact_mut(2 * f).zip(y.reals::<T>().chunks_exact_mut(f)) {
                        let (gate, up) = gate_up.split_at_mut(f);
                        grad_row_rematerialising(y, gate, up);
                    }
                });
            }),
            [gate_up] => with_real!(inputs[0].ty.dtype, T => {
                for_row_blocks(t, [gate_up], |rows, [mut gate_up]| {
                    let dy = inputs[0].rows(rows).reals::<T>();
                    for (gate_up, dy) in gate_up.reals::<T>().chunks_exact_mut(2 * f).zip(dy.chunks_exact(f)) {
                        let (gate, up) = gate_up.split_at_mut(f);
                        grad_row(dy, gate, up);
                    }
                });
            }),
            _ => unreachable!("one output or two"),
        }
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

/// Replaces gate and up by their gradients, and dy by y.
fn grad_row_rematerialising<T: Real>(dy: &mut [T], gate: &mut [T], up: &mut [T]) {
    vectorized(
        #[inline(always)]
        || {
            for ((g, u), dy) in gate.iter_mut().zip(up).zip(dy) {
                let s = sigmoid(*g);
                let (dgate, dup) = (*dy * *u * s * (T::ONE + *g * (T::ONE - s)), *dy * (*g * s));
                *dy = *g * s * *u;
                (*g, *u) = (dgate, dup);
            }
        },
    );
}

/// 1 / (1 + e^-x). If e^-x overflows to infinity, the result is 0, the limit.
#[inline(always)]
fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + exp(-x))
}
