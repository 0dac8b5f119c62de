//! CPU kernels of [`QkNormRope`] and [`QkNormRopeGrad`].

use super::{QkNormRope, QkNormRopeGrad};
use crate::host::amax::tensor_amax;
use crate::host::math::vectorized;
use crate::host::norm::{norm_grad_row, norm_row};
use crate::host::rows::{for_row_blocks, sum_bytes, sum_over_rows};
use xtrain_tensor::{CpuKernel, Real, TensorType, View, ViewMut, with_real};

impl CpuKernel for QkNormRope {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (t, width) = inputs[0].ty.shape.rows_cols();
        let e = self.head_dim;
        let heads = self.heads + self.kv_heads;
        with_real!(inputs[0].ty.dtype, T => {
            let table = inputs[2].reals::<T>();
            let angles = Angles { positions: inputs[1].ints(), table: &table, head_dim: e };
            let Some(eps) = self.norm else {
                return for_row_blocks(t, [&mut outputs[0]], |rows, [mut y]| {
                    for (token, y) in rows.zip(y.reals::<T>().chunks_exact_mut(width)) {
                        rotate_heads(&mut y[..heads * e], angles.of_token(token));
                    }
                });
            };
            let [y, rstd] = outputs else { unreachable!("two outputs") };
            let weights = Weights { queries: &inputs[3].reals::<T>(), keys: &inputs[4].reals::<T>(), heads: self.heads };
            for_row_blocks(t, [y, rstd], |rows, [mut y, mut rstd]| {
                let x = inputs[0].rows(rows.clone()).reals::<T>();
                let (mut y, mut rstd) = (y.fresh::<T>(), rstd.fresh::<T>());
                let written = y.chunks_exact_mut(width).zip(rstd.chunks_exact_mut(heads));
                for ((token, x), (y, rstd)) in rows.zip(x.chunks_exact(width)).zip(written) {
                    weights.norm_heads(x, T::from_f64(f64::from(eps)), y, rstd);
                    y[heads * e..].copy_from_slice(&x[heads * e..]);
                    rotate_heads(&mut y[..heads * e], angles.of_token(token));
                }
            });
        });
    }
}

impl CpuKernel for QkNormRopeGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (outputs, amax) = outputs.split_at_mut(outputs.len() - usize::from(self.amax));
        let [dqkv, d_weights @ ..] = outputs else { unreachable!("an output") };
        with_real!(inputs[0].ty.dtype, T => self.rotate_back::<T>(inputs, dqkv, d_weights));
        if let [amax] = amax {
            amax.fresh::<f32>()[0] = tensor_amax(dqkv.view());
        }
    }

    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        let (t, _) = inputs[0].shape.rows_cols();
        if self.weights.is_some() { sum_bytes(t, 2 * self.head_dim, inputs[0].dtype) } else { 0 }
    }
}

impl QkNormRopeGrad {
    /// Replaces the gradient of the output by that of the input, and writes those of the weights.
    fn rotate_back<T: Real>(
        &self,
        inputs: &[View<'_>],
        dqkv: &mut ViewMut<'_>,
        d_weights: &mut [ViewMut<'_>],
    ) {
        let (t, width) = inputs[0].ty.shape.rows_cols();
        let e = self.head_dim;
        let heads = self.heads + self.kv_heads;
        let table = inputs[2].reals::<T>();
        let angles = Angles { positions: inputs[1].ints(), table: &table, head_dim: e };
        if self.weights.is_none() {
            return for_row_blocks(t, [dqkv], |rows, [mut dqkv]| {
                for (token, dy) in rows.zip(dqkv.reals::<T>().chunks_exact_mut(width)) {
                    rotate_heads_back(&mut dy[..heads * e], angles.of_token(token));
                }
            });
        }
        let weights =
            Weights { queries: &inputs[5].reals::<T>(), keys: &inputs[6].reals::<T>(), heads: self.heads };
        // The sums of dq_w, then those of dk_w.
        let sums = sum_over_rows(t, 2 * e, [dqkv], |rows, [mut dqkv], partial: &mut [T]| {
            let x = inputs[3].rows(rows.clone()).reals::<T>();
            let rstd = inputs[4].rows(rows.clone()).reals::<T>();
            let read = x.chunks_exact(width).zip(rstd.chunks_exact(heads));
            for ((token, dy), (x, rstd)) in rows.zip(dqkv.reals::<T>().chunks_exact_mut(width)).zip(read) {
                rotate_heads_back(&mut dy[..heads * e], angles.of_token(token));
                weights.grad_heads(x, rstd, dy, partial);
            }
        });
        d_weights.iter_mut().zip(sums.chunks_exact(e)).for_each(|(dw, sum)| dw.store::<T>(sum));
    }
}

/// Weights of the norms of heads.
struct Weights<'a, T> {
    queries: &'a [T],
    keys: &'a [T],
    /// Number of query heads.
    heads: usize,
}

impl<T: Real> Weights<'_, T> {
    /// Writes the normalised heads of a row to `y`, and their 1/rms to `rstd`.
    fn norm_heads(&self, x: &[T], eps: T, y: &mut [T], rstd: &mut [T]) {
        let e = self.queries.len();
        vectorized(
            #[inline(always)]
            || {
                for (head, ((x, y), rstd)) in
                    x.chunks_exact(e).zip(y.chunks_exact_mut(e)).zip(rstd).enumerate()
                {
                    let w = if head < self.heads { self.queries } else { self.keys };
                    *rstd = norm_row(x, w, eps, y);
                }
            },
        );
    }

    /// Replaces dy by dx in the heads of a row, and adds to dw: the gradients of the queries' weight, then of
    /// the keys'.
    fn grad_heads(&self, x: &[T], rstd: &[T], dy: &mut [T], dw: &mut [T]) {
        let e = self.queries.len();
        let (dq_w, dk_w) = dw.split_at_mut(e);
        vectorized(
            #[inline(always)]
            || {
                for (head, ((x, dy), rstd)) in
                    x.chunks_exact(e).zip(dy.chunks_exact_mut(e)).zip(rstd).enumerate()
                {
                    match head < self.heads {
                        true => norm_grad_row(x, *rstd, self.queries, dy, dq_w),
                        false => norm_grad_row(x, *rstd, self.keys, dy, dk_w),
                    }
                }
            },
        );
    }
}

/// Rotation angles of each token.
struct Angles<'a, T> {
    positions: &'a [i32],
    table: &'a [T],
    head_dim: usize,
}

impl<'a, T: Real> Angles<'a, T> {
    /// The cosines and the sines of the token's position.
    fn of_token(&self, token: usize) -> (&'a [T], &'a [T]) {
        let (position, rows) = (self.positions[token], self.table.len() / self.head_dim);
        assert!(
            (0..rows as i64).contains(&position.into()),
            "position {position} of token {token} is outside the rotation table, which has {rows} rows"
        );
        self.table[position as usize * self.head_dim..][..self.head_dim].split_at(self.head_dim / 2)
    }
}

/// Rotates each of several contiguous heads.
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

/// The inverse of [`rotate_heads`].
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
