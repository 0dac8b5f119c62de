//! Attention of a block of queries of one head, the unit of work of every attention kernel.
//!
//! A block holds all scores of its queries, so the softmax sees whole rows and nothing is rescaled. Keys are given transposed,
//! `[e, n]`, which is the layout that the product runs fastest in.

use crate::host::gemm::{Mat, MatMut, gemm_single};
use crate::host::math::{exp, max, vectorized};
use std::ops::Range;
use xtrain_tensor::{DType, Real, formats};

/// The most queries of a block.
pub(crate) const MAX_ROWS: usize = 64;

/// One head's operands for a block of m queries that sees n keys.
pub(crate) struct Block<'a, T> {
    /// `[m, e]`.
    pub(crate) queries: Mat<'a, T>,
    /// `[e, n]`.
    pub(crate) keys_t: Mat<'a, T>,
    /// `[n, e]`.
    pub(crate) values: Mat<'a, T>,
    /// How probabilities are rounded before they are multiplied.
    pub(crate) rounding: Rounding,
}

/// How probabilities are rounded before they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// Not at all.
    None,
    /// To bf16.
    Bf16,
}

impl Rounding {
    /// What operands of this type ask for.
    pub(crate) fn of(dtype: DType) -> Self {
        if dtype == DType::BF16 { Rounding::Bf16 } else { Rounding::None }
    }
}

impl<T: Real> Block<'_, T> {
    /// Writes the block's outputs to rows of e elements, `out_stride` apart in `out`, and the log-sum-exp of each query's scores to
    /// `lse`. Query i sees the keys in `seen(i)`, at least one. `scores` is room for m * n elements.
    pub(crate) fn attend(
        &self,
        seen: impl Fn(usize) -> Range<usize>,
        scores: &mut [T],
        out: &mut [T],
        out_stride: usize,
        lse: &mut [T],
    ) {
        let (m, e, n) = (self.queries.rows(), self.queries.cols(), self.values.rows());
        let scores = &mut scores[..m * n];
        let product = MatMut::new(scores, m, n);
        gemm_single(scale(e), self.queries, self.keys_t, product, false);
        let mut sums = [T::ZERO; MAX_ROWS];
        for (i, row) in scores.chunks_exact_mut(n).enumerate() {
            let Range { start, end } = seen(i);
            row[..start].fill(T::NEG_INFINITY);
            row[end..].fill(T::NEG_INFINITY);
            let (largest, total) = match self.rounding {
                Rounding::None => exponentials(row, #[inline(always)] |p| p),
                Rounding::Bf16 => exponentials(row, round_bf16),
            };
            sums[i] = total;
            lse[i] = largest + total.ln();
        }
        gemm_single(
            T::ONE,
            Mat::new(scores, m, n),
            self.values,
            MatMut::strided(out, m, e, out_stride),
            false,
        );
        for (row, total) in out.chunks_mut(out_stride).zip(&sums[..m]) {
            let inverse = T::ONE / *total;
            row[..e].iter_mut().for_each(|x| *x *= inverse);
        }
    }
}

/// 1 / sqrt(e).
pub(crate) fn scale<T: Real>(head_dim: usize) -> T {
    T::of(1.0 / (head_dim as f64).sqrt())
}

/// Rounds to bf16 and back.
#[inline(always)]
pub(crate) fn round_bf16<T: Real>(x: T) -> T {
    T::of(f64::from(formats::round_bf16(x.f64() as f32)))
}

/// Replaces every x of a row by round(exp(x - largest)); returns the largest and the sum before rounding.
fn exponentials<T: Real>(row: &mut [T], round: impl Fn(T) -> T) -> (T, T) {
    vectorized(
        #[inline(always)]
        || {
            let largest = max(row);
            // As in `host::math::sum`: interleaved partial sums, in a fixed order.
            let mut lanes = [T::ZERO; 16];
            let mut chunks = row.chunks_exact_mut(16);
            for chunk in &mut chunks {
                for (lane, x) in lanes.iter_mut().zip(chunk) {
                    let p = exp(*x - largest);
                    *lane += p;
                    *x = round(p);
                }
            }
            for (lane, x) in lanes.iter_mut().zip(chunks.into_remainder()) {
                let p = exp(*x - largest);
                *lane += p;
                *x = round(p);
            }
            (largest, lanes.iter().copied().sum())
        },
    )
}

/// The transpose of `rows` rows of `cols` elements, `stride` apart in `from`.
pub(crate) fn transpose<T: Real>(from: &[T], stride: usize, rows: usize, cols: usize, to: &mut [T]) {
    // Sixteen rows at a time: a cache line of each output row.
    for first in (0..rows).step_by(16) {
        let some = 16.min(rows - first);
        for col in 0..cols {
            for (i, x) in to[col * rows + first..][..some].iter_mut().enumerate() {
                *x = from[(first + i) * stride + col];
            }
        }
    }
}
