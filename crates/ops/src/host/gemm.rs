//! GEMMs of strided f32 and f64 matrices, by the `gemm` crate.
#![allow(unsafe_code, reason = "the crate takes pointers and strides")]

use gemm::Parallelism;
use std::ops::Range;
use xtrain_tensor::Real;

/// A read-only matrix: a slice with a row stride and a column stride.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Real> Mat<'a, T> {
    /// `rows` contiguous rows of `cols` elements.
    pub(crate) fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Mat::strided(data, rows, cols, cols)
    }

    /// `rows` rows of `cols` elements that start `row_stride` elements apart.
    pub(crate) fn strided(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(
            span(rows, cols, row_stride) <= data.len(),
            "matrix {rows}x{cols} (stride {row_stride}) in {} elements",
            data.len()
        );
        Mat { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// The matrix of these columns.
    pub(crate) fn cols_in(self, cols: Range<usize>) -> Self {
        assert!(cols.end <= self.cols, "columns {cols:?} of {}", self.cols);
        let data = if self.rows == 0 { self.data } else { &self.data[cols.start * self.col_stride..] };
        Mat { data, cols: cols.len(), ..self }
    }

    /// The transpose.
    pub(crate) fn t(self) -> Self {
        Mat {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// A writable matrix: rows of contiguous elements, at a stride.
pub(crate) struct MatMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a, T: Real> MatMut<'a, T> {
    /// `rows` contiguous rows of `cols` elements.
    pub(crate) fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        MatMut::strided(data, rows, cols, cols)
    }

    /// `rows` rows of `cols` elements that start `row_stride` elements apart.
    pub(crate) fn strided(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(
            span(rows, cols, row_stride) <= data.len(),
            "matrix {rows}x{cols} (stride {row_stride}) in {} elements",
            data.len()
        );
        MatMut { data, rows, cols, row_stride }
    }
}

/// Number of elements from the first to the last of a strided matrix.
fn span(rows: usize, cols: usize, row_stride: usize) -> usize {
    if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + cols }
}

/// `c = alpha * a * b`, or `c += alpha * a * b` with `accumulate`, on all cores.
pub(crate) fn gemm<T: Real>(alpha: T, a: Mat<'_, T>, b: Mat<'_, T>, c: MatMut<'_, T>, accumulate: bool) {
    run(alpha, a, b, c, accumulate, Parallelism::Rayon(0));
}

/// [`gemm`] on the calling thread only, for callers that are parallel themselves.
pub(crate) fn gemm_single<T: Real>(
    alpha: T,
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    c: MatMut<'_, T>,
    accumulate: bool,
) {
    run(alpha, a, b, c, accumulate, Parallelism::None);
}

fn run<T: Real>(
    alpha: T,
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    c: MatMut<'_, T>,
    accumulate: bool,
    parallelism: Parallelism,
) {
    let (m, n, k) = (c.rows, c.cols, a.cols);
    assert!(a.rows == m && b.rows == k && b.cols == n, "{m}x{n} = {}x{k} * {}x{}", a.rows, b.rows, b.cols);
    let beta = if accumulate { T::ONE } else { T::ZERO };
    let stride = |s: usize| s as isize;
    // SAFETY: the constructors of `Mat` and `MatMut` checked that all elements that these extents and strides
    // address lie in their slices; `c` is borrowed mutably, so it overlaps neither `a` nor `b`; T is f32 or
    // f64, which the crate supports.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.data.as_mut_ptr(),
            1,
            stride(c.row_stride),
            accumulate,
            a.data.as_ptr(),
            stride(a.col_stride),
            stride(a.row_stride),
            b.data.as_ptr(),
            stride(b.col_stride),
            stride(b.row_stride),
            beta,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}
