//! Matrix GEMMs on the CPU, through the `gemm` crate.
#![allow(unsafe_code, reason = "the crate takes pointers and strides")]

use gemm::Parallelism;
use std::ops::Range;
use xtrain_tensor::Real;

/// A matrix to be read: any strides over a slice.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Real> Mat<'a, T> {
    /// `rows` rows of `cols` elements, one after the other.
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

    /// The number of rows it has.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns it has.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Some of its columns.
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

/// A matrix to be written: rows of contiguous elements.
pub(crate) struct MatMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a, T: Real> MatMut<'a, T> {
    /// `rows` rows of `cols` elements, one after the other.
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

/// The number of elements a strided matrix reaches over.
fn span(rows: usize, cols: usize, row_stride: usize) -> usize {
    if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + cols }
}

/// `c = alpha * a * b`, or `c += alpha * a * b` with `accumulate`, on all cores.
pub(crate) fn gemm<T: Real>(alpha: T, a: Mat<'_, T>, b: Mat<'_, T>, c: MatMut<'_, T>, accumulate: bool) {
    run(alpha, a, b, c, accumulate, Parallelism::Rayon(0));
}

/// The same on the calling thread alone, for callers that are parallel themselves.
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
    let keep = if accumulate { T::ONE } else { T::ZERO };
    let stride = |s: usize| s as isize;
    // SAFETY: `Mat` and `MatMut` checked at construction that every element that these extents and strides
    // address lies in their slices; `c` is borrowed mutably, so it overlaps neither `a` nor `b`; T is f32 or
    // f64, for which the crate has kernels.
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
            keep,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}
