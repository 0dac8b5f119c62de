//! CPU kernels of [`Swiglu`] and [`SwigluGrad`].

use super::{Swiglu, SwigluGrad};
use crate::host::math::{dot, sigmoid, vectorized};
use crate::host::rows::for_row_blocks;
use crate::tail::by_written_rows;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

impl CpuKernel for Swiglu {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        by_written_rows(self.tail, Swiglu::STARTS, inputs, outputs, |inputs, outputs| {
            self.run_rows(inputs, outputs)
        });
    }
}

impl Swiglu {
    fn run_rows(self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, f) = outputs[0].ty.shape.rows_cols();
        let [y] = outputs else { unreachable!("one output") };
        with_real!(inputs[0].ty.dtype, T => {
            for_row_blocks(t, [y], |rows, [mut y]| {
                let weights = self.weighted.then(|| inputs[1].slice(rows.clone()).reals::<T>());
                let gate_up = inputs[0].rows(rows).reals::<T>();
                let mut y = y.fresh::<T>();
                for (n, (y, gate_up)) in y.chunks_exact_mut(f).zip(gate_up.chunks_exact(2 * f)).enumerate() {
                    let (gate, up) = gate_up.split_at(f);
                    forward_row(gate, up, y);
                    if let Some(weights) = &weights {
                        scale(y, weights[n]);
                    }
                }
            });
        });
    }
}

/// Multiplies a row by its weight.
fn scale<T: Real>(row: &mut [T], weight: T) {
    row.iter_mut().for_each(|x| *x *= weight);
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
        by_written_rows(self.tail, SwigluGrad::STARTS, inputs, outputs, |inputs, outputs| {
            self.run_rows(inputs, outputs)
        });
    }
}

impl SwigluGrad {
    fn run_rows(self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, f) = inputs[0].ty.shape.rows_cols();
        if self.weighted {
            return with_real!(inputs[0].ty.dtype, T => weighted_grad::<T>(inputs, outputs));
        }
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

fn weighted_grad<T: Real>(inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
    let (t, f) = inputs[0].ty.shape.rows_cols();
    match outputs {
        [gate_up, dweights, y] => {
            for_row_blocks(t, [gate_up, dweights, y], |rows, [mut gate_up, mut dweights, mut y]| {
                let weights = inputs[2].slice(rows).reals::<T>();
                let (mut gate_up, mut dweights) = (gate_up.reals::<T>(), dweights.fresh::<T>());
                let (mut y, mut dy) = (y.reals::<T>(), vec![T::ZERO; f]);
                let rows = gate_up.chunks_exact_mut(2 * f).zip(y.chunks_exact_mut(f));
                for (((gate_up, y), dweight), &weight) in rows.zip(&mut *dweights).zip(&*weights) {
                    dy.copy_from_slice(y);
                    *dweight = weighted_grad_row(weight, &mut dy, gate_up, y);
                }
            });
        }
        [gate_up, dweights] => {
            for_row_blocks(t, [gate_up, dweights], |rows, [mut gate_up, mut dweights]| {
                let weights = inputs[2].slice(rows.clone()).reals::<T>();
                let (mut gate_up, mut dweights) = (gate_up.reals::<T>(), dweights.fresh::<T>());
                let (mut y, mut dy) = (vec![T::ZERO; f], inputs[0].rows(rows).reals::<T>().to_vec());
                let rows = gate_up.chunks_exact_mut(2 * f).zip(dy.chunks_exact_mut(f));
                for (((gate_up, dy), dweight), &weight) in rows.zip(&mut *dweights).zip(&*weights) {
                    *dweight = weighted_grad_row(weight, dy, gate_up, &mut y);
                }
            });
        }
        _ => unreachable!("two outputs or three"),
    }
}

/// Replaces gate and up by their gradients, multiplies dy by the row's weight, writes y and returns the
/// gradient of the weight.
fn weighted_grad_row<T: Real>(weight: T, dy: &mut [T], gate_up: &mut [T], y: &mut [T]) -> T {
    let (gate, up) = gate_up.split_at_mut(y.len());
    forward_row(gate, up, y);
    let dweight = dot::<T>(dy, y);
    scale(dy, weight);
    scale(y, weight);
    grad_row(dy, gate, up);
    dweight
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
