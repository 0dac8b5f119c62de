//! Columns of a matrix in the compute type, such as one head of the tokens of a sequence.

use crate::host::gemm::Mat;
use crate::host::math::vectorized;
use std::ops::Range;
use xtrain_tensor::formats::from_bf16;
use xtrain_tensor::real::bf16;
use xtrain_tensor::{Pooled, Real, Reals, View};

/// Some columns of some rows of a matrix: borrowed if they are stored in the compute type, else a widened
/// copy.
pub(crate) struct Columns<'a, T: Real> {
    /// The elements from the first one on.
    reals: Reals<'a, T>,
    rows: usize,
    cols: usize,
    /// Number of elements from one row to the next.
    stride: usize,
}

impl<'a, T: Real> Columns<'a, T> {
    /// The columns `cols` of the rows `rows`, of which there is at least one.
    pub(crate) fn new(matrix: View<'a>, rows: Range<usize>, cols: Range<usize>) -> Self {
        let (_, width) = matrix.ty.shape.rows_cols();
        let (count, wide) = (rows.len(), cols.len());
        if let Some(stored) = matrix.stored::<T>() {
            let reals = &stored[rows.start * width + cols.start..(rows.end - 1) * width + cols.end];
            return Columns { reals: Reals::Stored(reals), rows: count, cols: wide, stride: width };
        }
        let mut reals = Pooled::take(count * wide);
        widen(matrix, rows, cols, &mut reals);
        Columns { reals: Reals::Widened(reals), rows: count, cols: wide, stride: wide }
    }

    /// The elements from the first one on; rows are [`stride`](Columns::stride) elements apart.
    pub(crate) fn reals(&self) -> &[T] {
        &self.reals
    }

    /// Number of elements from one row to the next.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// These rows, with all columns.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Mat<'_, T> {
        self.part(rows, 0..self.cols)
    }

    /// These rows and columns.
    pub(crate) fn part(&self, rows: Range<usize>, cols: Range<usize>) -> Mat<'_, T> {
        assert!(rows.end <= self.rows && cols.end <= self.cols, "{rows:?} x {cols:?}");
        Mat::strided(
            &self.reals[rows.start * self.stride + cols.start..],
            rows.len(),
            cols.len(),
            self.stride,
        )
    }
}

/// Widens columns of rows of a bf16 matrix into contiguous rows of `to`.
pub(crate) fn widen<T: Real>(matrix: View<'_>, rows: Range<usize>, cols: Range<usize>, to: &mut [T]) {
    let (_, width) = matrix.ty.shape.rows_cols();
    let stored = matrix.stored::<bf16>().expect("a type other than the compute type is bf16");
    vectorized(
        #[inline(always)]
        || {
            for (row, to) in rows.clone().zip(to.chunks_exact_mut(cols.len())) {
                let from = &stored[row * width..][cols.clone()];
                to.iter_mut().zip(from).for_each(|(to, from)| *to = T::from_f64(f64::from(from_bf16(*from))));
            }
        },
    );
}

/// Writes the transpose of `from` to `to`.
pub(crate) fn transpose<T: Real>(from: &Columns<'_, T>, to: &mut [T]) {
    const TILE: usize = 16;
    let Columns { reals, rows, cols, stride } = from;
    let (from, rows, cols, stride): (&[T], _, _, _) = (reals, *rows, *cols, *stride);
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
