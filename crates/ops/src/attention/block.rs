//! Attention of a block of queries of one head, the unit of work of the CPU kernels.
//!
//! A block holds all scores of its queries, so that the softmax sees whole rows and nothing is rescaled. Keys
//! are transposed, `[e, n]`, the layout in which the GEMM is fastest.

use crate::host::gemm::{Mat, MatMut, gemm_single};
use crate::host::math::{Rounding, exponentials, max, vectorized};
use std::ops::Range;
use xtrain_tensor::Real;

/// Queries of a block: enough for fast GEMMs, few enough to waste little above the diagonal.
pub(crate) const ROWS: usize = 32;

/// Operands of one head for a block of m <= [`ROWS`] queries and n keys.
pub(crate) struct Block<'a, T> {
    /// `[m, e]`.
    pub(crate) queries: Mat<'a, T>,
    /// `[e, n]`.
    pub(crate) keys_t: Mat<'a, T>,
    /// `[n, e]`.
    pub(crate) values: Mat<'a, T>,
    /// The factor on the products of queries and keys.
    pub(crate) scale: T,
    /// Rounding of the probabilities before they are multiplied with the values.
    pub(crate) rounding: Rounding,
}

impl<T: Real> Block<'_, T> {
    /// Writes the outputs to rows of e elements, `out_stride` apart in `out`, and the log-sum-exp of each
    /// query's scores to `lse`. Query i attends to the keys in `seen(i)`, at least one. `scores` is workspace
    /// of at least m * n elements.
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
        gemm_single(self.scale, self.queries, self.keys_t, product, false);
        for (i, row) in scores.chunks_exact_mut(n).enumerate() {
            let Range { start, end } = seen(i);
            row[..start].fill(T::NEG_INFINITY);
            row[end..].fill(T::NEG_INFINITY);
        }
        let (mut max_scores, mut sums) = ([T::ZERO; ROWS], [T::ZERO; ROWS]);
        vectorized(
            #[inline(always)]
            || {
                for ((row, max_score), sum) in scores.chunks_exact_mut(n).zip(&mut max_scores).zip(&mut sums)
                {
                    *max_score = max(row);
                    *sum = exponentials(row, *max_score, self.rounding);
                }
            },
        );
        for i in 0..m {
            lse[i] = max_scores[i] + sums[i].ln();
        }
        gemm_single(
            T::ONE,
            Mat::new(scores, m, n),
            self.values,
            MatMut::strided(out, m, e, out_stride),
            false,
        );
        vectorized(
            #[inline(always)]
            || {
                for (row, sum) in out.chunks_mut(out_stride).zip(&sums[..m]) {
                    let inverse = T::ONE / *sum;
                    row[..e].iter_mut().for_each(|x| *x *= inverse);
                }
            },
        );
    }
}

/// The factor on scores: `scale`, or 1 / sqrt(e).
pub(crate) fn factor<T: Real>(scale: Option<f32>, head_dim: usize) -> T {
    T::from_f64(scale.map_or_else(|| 1.0 / (head_dim as f64).sqrt(), f64::from))
}

/// The constant of the kernels' sources that sets the factor on scores; `None` if it is 1 / sqrt(e).
pub(crate) fn scale_define(scale: Option<f32>) -> Option<(&'static str, i64)> {
    scale.map(|scale| ("SCALE_BITS", i64::from(scale.to_bits())))
}
