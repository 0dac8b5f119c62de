//! Attention of a block of queries of one head, the unit of work of every attention kernel.
//!
//! A block holds all scores of its queries, so the softmax sees whole rows and nothing is rescaled. Keys are given transposed,
//! `[e, n]`, which is the layout that the product runs fastest in.

use crate::host::gemm::{Mat, MatMut, gemm_single};
use crate::host::math::{exp, max, vectorized};
use std::ops::Range;
use xtrain_tensor::{DType, Real, formats};

/// Queries of a block: enough for the products to run fast, few enough to waste little above the diagonal.
pub(crate) const ROWS: usize = 32;

/// One head's operands for a block of m <= [`ROWS`] queries that sees n keys.
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
        for (i, row) in scores.chunks_exact_mut(n).enumerate() {
            let Range { start, end } = seen(i);
            row[..start].fill(T::NEG_INFINITY);
            row[end..].fill(T::NEG_INFINITY);
        }
        let (mut largest, mut sums) = ([T::ZERO; ROWS], [T::ZERO; ROWS]);
        match self.rounding {
            Rounding::None => exponentials(scores, n, &mut largest, &mut sums, exact),
            Rounding::Bf16 => exponentials(scores, n, &mut largest, &mut sums, round_bf16),
        }
        for i in 0..m {
            lse[i] = largest[i] + sums[i].ln();
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

/// 1 / sqrt(e).
pub(crate) fn scale<T: Real>(head_dim: usize) -> T {
    T::of(1.0 / (head_dim as f64).sqrt())
}

/// What [`Rounding::None`] does.
#[inline(always)]
pub(crate) fn exact<T>(x: T) -> T {
    x
}

/// What [`Rounding::Bf16`] does.
#[inline(always)]
pub(crate) fn round_bf16<T: Real>(x: T) -> T {
    T::of(f64::from(formats::round_bf16(x.f64() as f32)))
}

/// Replaces every x of each row of n by round(exp(x - largest)); gives each row's largest and sum before rounding.
fn exponentials<T: Real>(
    scores: &mut [T],
    n: usize,
    largest: &mut [T],
    sums: &mut [T],
    round: impl Fn(T) -> T,
) {
    vectorized(
        #[inline(always)]
        || {
            for ((row, largest), sum) in scores.chunks_exact_mut(n).zip(largest).zip(sums) {
                *largest = max(row);
                // As in `host::math::sum`: interleaved partial sums, in a fixed order.
                let mut lanes = [T::ZERO; 16];
                let mut chunks = row.chunks_exact_mut(16);
                for chunk in &mut chunks {
                    for (lane, x) in lanes.iter_mut().zip(chunk) {
                        let p = exp(*x - *largest);
                        *lane += p;
                        *x = round(p);
                    }
                }
                for (lane, x) in lanes.iter_mut().zip(chunks.into_remainder()) {
                    let p = exp(*x - *largest);
                    *lane += p;
                    *x = round(p);
                }
                *sum = lanes.iter().copied().sum();
            }
        },
    );
}

/// The transpose of `rows` rows of `cols` elements, `stride` apart in `from`.
pub(crate) fn transpose<T: Real>(from: &[T], stride: usize, rows: usize, cols: usize, to: &mut [T]) {
    const TILE: usize = 16;
    vectorized(
        #[inline(always)]
        || {
            for row in (0..rows).step_by(TILE) {
                for col in (0..cols).step_by(TILE) {
                    let (some_rows, some_cols) = (TILE.min(rows - row), TILE.min(cols - col));
                    let mut tile = [[T::ZERO; TILE]; TILE];
                    for (i, line) in tile.iter_mut().enumerate().take(some_rows) {
                        line[..some_cols].copy_from_slice(&from[(row + i) * stride + col..][..some_cols]);
                    }
                    for j in 0..some_cols {
                        for (i, x) in to[(col + j) * rows + row..][..some_rows].iter_mut().enumerate() {
                            *x = tile[i][j];
                        }
                    }
                }
            }
        },
    );
}
