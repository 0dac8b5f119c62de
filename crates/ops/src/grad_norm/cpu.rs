//! CPU kernels of [`GradNorm`] and [`SquaredNorm`]: blocks of fixed size are summed in parallel, and their
//! sums in order.

use super::{GradNorm, SquaredNorm};
use crate::host::math::vectorized;
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

/// Elements of a task.
pub(super) const BLOCK: usize = 64 * 1024;

/// Elements that a task widens at a time, so that widened bf16 stays in the L1 cache.
pub(crate) const PIECE: usize = 4 * 1024;

impl CpuKernel for GradNorm {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let norm = squared_norm(inputs).sqrt();
        with_real!(outputs[0].ty.dtype, T => outputs[0].reals::<T>()[0] = T::from_f64(norm));
    }
}

impl CpuKernel for SquaredNorm {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        outputs[0].write::<f64>(&[squared_norm(inputs)]);
    }
}

/// The sum of squares of all elements.
fn squared_norm(gradients: &[View<'_>]) -> f64 {
    let blocks: Vec<View<'_>> = gradients.iter().flat_map(|grad| grad.chunks(BLOCK)).collect();
    let sums: Vec<f64> = blocks
        .par_iter()
        .map(|block| with_real!(block.ty.dtype, T => block.chunks(PIECE).map(|x| sum_of_squares(&x.reals::<T>())).sum()))
        .collect();
    sums.iter().sum()
}

/// The sum of squares of `x`, in 32 interleaved partial sums, so that it vectorises and its order is fixed.
fn sum_of_squares<T: Real>(x: &[T]) -> f64 {
    let square = |x: T| x.f64() * x.f64();
    vectorized(
        #[inline(always)]
        || {
            let mut lanes = [0.0; 32];
            let (whole, rest) = x.as_chunks::<32>();
            for chunk in whole {
                lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane += square(x));
            }
            lanes.iter().sum::<f64>() + rest.iter().map(|&x| square(x)).sum::<f64>()
        },
    )
}
