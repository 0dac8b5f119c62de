//! CPU kernels of [`QkNormRope`] and [`QkNormRopeGrad`].

use super::{QkNormRope, QkNormRopeGrad};
use crate::host::math::{sum, vectorized};
use crate::host::rows::{add_into, for_row_blocks, for_row_blocks2, store};
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

/// Tokens whose contributions to the weights' gradients are summed before the blocks' sums are added, in order.
const GRAD_BLOCK: usize = 64;

impl CpuKernel for QkNormRope {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (_, width) = inputs[0].ty.shape.rows_cols();
        let e = self.head_dim;
        let heads = self.heads + self.kv_heads;
        with_real!(inputs[0].ty.dtype, T => {
            let table = inputs[2].reals::<T>();
            let angles = Angles { positions: inputs[1].ints(), table: &table, head_dim: e };
            let Some(eps) = self.norm else {
                return for_row_blocks(&mut outputs[0].reals::<T>(), width, |first, rows| {
                    for (row, y) in rows.chunks_exact_mut(width).enumerate() {
                        rotate_heads(&mut y[..heads * e], angles.of(first + row));
                    }
                });
            };
            let [y, rstd] = outputs else { unreachable!("two outputs") };
            let (x, q_w, k_w) = (inputs[0].reals::<T>(), inputs[3].reals::<T>(), inputs[4].reals::<T>());
            let weight = |head: usize| if head < self.heads { &*q_w } else { &*k_w };
            for_row_blocks2(&mut y.reals::<T>(), width, &mut rstd.reals::<T>(), heads, |first, y, rstd| {
                let rows = y.chunks_exact_mut(width).zip(rstd.chunks_exact_mut(heads)).enumerate();
                for (token, (y, rstd)) in rows.map(|(row, outputs)| (first + row, outputs)) {
                    y.copy_from_slice(&x[token * width..][..width]);
                    for (head, (y, rstd)) in y.chunks_exact_mut(e).zip(rstd).enumerate() {
                        *rstd = norm_head(y, weight(head), T::of(f64::from(eps)));
                    }
                    rotate_heads(&mut y[..heads * e], angles.of(token));
                }
            });
        });
    }
}

impl CpuKernel for QkNormRopeGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (_, width) = inputs[0].ty.shape.rows_cols();
        let e = self.head_dim;
        let heads = self.heads + self.kv_heads;
        with_real!(inputs[0].ty.dtype, T => {
            let table = inputs[2].reals::<T>();
            let angles = Angles { positions: inputs[1].ints(), table: &table, head_dim: e };
            let [dqkv, d_weights @ ..] = outputs else { unreachable!("an output") };
            if self.weights.is_none() {
                return for_row_blocks(&mut dqkv.reals::<T>(), width, |first, rows| {
                    for (row, dy) in rows.chunks_exact_mut(width).enumerate() {
                        rotate_heads_back(&mut dy[..heads * e], angles.of(first + row));
                    }
                });
            }
            let (x, rstd) = (inputs[3].reals::<T>(), inputs[4].reals::<T>());
            let (q_w, k_w) = (inputs[5].reals::<T>(), inputs[6].reals::<T>());
            // A block's sums: dq_w, then dk_w.
            let partials: Vec<Vec<T>> = dqkv.reals::<T>().par_chunks_mut(GRAD_BLOCK * width).enumerate().map(|(b, rows)| {
                let mut partial = vec![T::ZERO; 2 * e];
                let (dq_w, dk_w) = partial.split_at_mut(e);
                for (row, dy) in rows.chunks_exact_mut(width).enumerate() {
                    let token = b * GRAD_BLOCK + row;
                    rotate_heads_back(&mut dy[..heads * e], angles.of(token));
                    for (head, dy) in dy.chunks_exact_mut(e).enumerate().take(heads) {
                        let x = &x[token * width + head * e..][..e];
                        let (w, dw) = if head < self.heads { (&*q_w, &mut *dq_w) } else { (&*k_w, &mut *dk_w) };
                        norm_head_grad(x, rstd[token * heads + head], w, dy, dw);
                    }
                }
                partial
            }).collect();
            let mut total = vec![T::ZERO; 2 * e];
            partials.iter().for_each(|partial| add_into(&mut total, partial));
            for (d_weight, total) in d_weights.iter_mut().zip(total.chunks_exact(e)) {
                let accumulate = d_weight.accumulate;
                store(&mut d_weight.reals::<T>(), total, accumulate);
            }
        });
    }
}

/// Cosines and sines by token.
struct Angles<'a, T> {
    positions: &'a [i32],
    table: &'a [T],
    head_dim: usize,
}

impl<'a, T: Real> Angles<'a, T> {
    /// The cosines and the sines of the token's position.
    fn of(&self, token: usize) -> (&'a [T], &'a [T]) {
        let (position, rows) = (self.positions[token], self.table.len() / self.head_dim);
        assert!(
            (0..rows as i64).contains(&position.into()),
            "position {position} of token {token} is outside the rotation table, which has {rows} rows"
        );
        self.table[position as usize * self.head_dim..][..self.head_dim].split_at(self.head_dim / 2)
    }
}

/// Rotates each of some heads that lie one after the other.
fn rotate_heads<T: Real>(heads: &mut [T], (cos, sin): (&[T], &[T])) {
    let half = cos.len();
    vectorized(
        #[inline(always)]
        || {
            for head in heads.chunks_exact_mut(2 * half) {
                let (a, b) = head.split_at_mut(half);
                for j in 0..half {
                    (a[j], b[j]) = (a[j] * cos[j] - b[j] * sin[j], b[j] * cos[j] + a[j] * sin[j]);
                }
            }
        },
    );
}

/// Undoes [`rotate_heads`]: the transposed rotation.
fn rotate_heads_back<T: Real>(heads: &mut [T], (cos, sin): (&[T], &[T])) {
    let half = cos.len();
    vectorized(
        #[inline(always)]
        || {
            for head in heads.chunks_exact_mut(2 * half) {
                let (a, b) = head.split_at_mut(half);
                for j in 0..half {
                    (a[j], b[j]) = (a[j] * cos[j] + b[j] * sin[j], b[j] * cos[j] - a[j] * sin[j]);
                }
            }
        },
    );
}

/// Replaces a head by its norm; returns 1/rms.
fn norm_head<T: Real>(x: &mut [T], w: &[T], eps: T) -> T {
    let e = x.len();
    vectorized(
        #[inline(always)]
        || {
            let rstd = T::ONE / (sum(e, |i| x[i] * x[i]) / T::of(e as f64) + eps).sqrt();
            for i in 0..e {
                x[i] = x[i] * rstd * w[i];
            }
            rstd
        },
    )
}

/// Replaces a head's dy by dx and adds its part of the weight's gradient to `dw`.
fn norm_head_grad<T: Real>(x: &[T], rstd: T, w: &[T], dy: &mut [T], dw: &mut [T]) {
    let e = x.len();
    vectorized(
        #[inline(always)]
        || {
            let along = sum(e, |i| dy[i] * w[i] * (x[i] * rstd)) / T::of(e as f64);
            for i in 0..e {
                let n = x[i] * rstd;
                dw[i] += dy[i] * n;
                dy[i] = rstd * (dy[i] * w[i] - n * along);
            }
        },
    );
}
