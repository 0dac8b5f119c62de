//! CPU kernels of the adapters of a layer.

use super::{LoraAdd, LoraDgrad, LoraParts, LoraWgrad};
use crate::host::gemm::{Mat, MatMut, gemm, gemm_single};
use crate::host::matmul::DEPTH;
use crate::host::rows::for_row_blocks;
use std::ops::Range;
use xtrain_tensor::{CpuKernel, DType, Real, TensorType, View, ViewMut, with_real};

impl LoraParts {
    /// The rows of b of an adapter.
    fn b<'m, T: Real>(&self, b_mr: &'m [T], first: usize, rows: usize) -> Mat<'m, T> {
        Mat::new(&b_mr[first * self.rank..][..rows * self.rank], rows, self.rank)
    }
}

/// The columns of a matrix with rows of `width` elements.
fn columns<T: Real>(x: &[T], width: usize, columns: Range<usize>) -> Mat<'_, T> {
    Mat::new(x, x.len() / width, width).cols_in(columns)
}

/// The bytes of a tensor that is widened as a whole.
fn widened_bytes(ty: TensorType) -> usize {
    if ty.dtype == DType::BF16 { DType::F32.bytes(ty.numel()) } else { 0 }
}

impl CpuKernel for LoraAdd {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ([y], (t, o)) = (outputs, inputs[0].ty.shape.rows_cols()) else { unreachable!("one output") };
        let Self(parts) = self;
        with_real!(inputs[0].ty.dtype, T => {
            let b_mr = inputs[2].reals::<T>();
            for_row_blocks(t, [y], |rows, [mut y]| {
                let h_tn = inputs[1].rows(rows.clone()).reals::<T>();
                let mut y = y.reals::<T>();
                for (h, into, first) in parts.places() {
                    let a = columns(&h_tn, parts.width(), h..h + parts.rank);
                    let b = parts.b(&b_mr, first, into.len()).t();
                    let c = MatMut::strided(&mut y[into.start..], rows.len(), into.len(), o);
                    gemm_single(T::ONE, a, b, c, true);
                }
            });
        });
    }

    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        widened_bytes(inputs[2])
    }
}

impl CpuKernel for LoraDgrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ([dh], (t, o)) = (outputs, inputs[0].ty.shape.rows_cols()) else { unreachable!("one output") };
        let Self(parts) = self;
        with_real!(inputs[0].ty.dtype, T => {
            let b_mr = inputs[1].reals::<T>();
            for_row_blocks(t, [dh], |rows, [mut dh]| {
                let dy_to = inputs[0].rows(rows.clone()).reals::<T>();
                let mut dh = dh.fresh::<T>();
                for (h, from, first) in parts.places() {
                    let b = parts.b(&b_mr, first, from.len());
                    let a = columns(&dy_to, o, from);
                    let c = MatMut::strided(&mut dh[h..], rows.len(), parts.rank, parts.width());
                    gemm_single(T::ONE, a, b, c, false);
                }
            });
        });
    }

    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        widened_bytes(inputs[1])
    }
}

impl CpuKernel for LoraWgrad {
    /// Sums over `DEPTH` tokens at a time, so that the result does not depend on threads.
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ([db], (t, o)) = (outputs, inputs[0].ty.shape.rows_cols()) else { unreachable!("one output") };
        let parts = &self.parts;
        with_real!(inputs[0].ty.dtype, T => {
            let adds = db.accumulate;
            let mut db = if adds { db.reals::<T>() } else { db.fresh::<T>() };
            if t == 0 && !adds {
                db.fill(T::ZERO);
            }
            for tokens in (0..t).step_by(DEPTH).map(|first| first..t.min(first + DEPTH)) {
                let accumulate = adds || tokens.start > 0;
                let dy_to = inputs[0].rows(tokens.clone()).reals::<T>();
                let h_tn = inputs[1].rows(tokens).reals::<T>();
                for (h, from, first) in parts.places() {
                    let (rank, rows) = (parts.rank, from.len());
                    let a = columns(&dy_to, o, from).t();
                    let b = columns(&h_tn, parts.width(), h..h + rank);
                    let c = MatMut::new(&mut db[first * rank..][..rows * rank], rows, rank);
                    gemm(T::ONE, a, b, c, accumulate);
                }
            }
        });
    }
}
