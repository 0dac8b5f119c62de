//! CPU kernels of [`UnitSquares`] and [`UnitSquaredNorm`]: units are summed in parallel, and their sums in
//! order.

use super::{UnitSquaredNorm, UnitSquares};
use crate::grad_norm::cpu::PIECE;
use crate::host::math::vectorized;
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

impl CpuKernel for UnitSquares {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        outputs[0].write::<f64>(&sums(inputs, &self.unit_elements).concat());
    }
}

impl CpuKernel for UnitSquaredNorm {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let sums = sums(inputs, &self.unit_elements);
        outputs[0].write::<f64>(&[sums.iter().map(|of_units| of_units.iter().sum::<f64>()).sum()]);
    }
}

/// The sum of squares of each unit, by gradient.
fn sums(gradients: &[View<'_>], unit_elements: &[usize]) -> Vec<Vec<f64>> {
    let of_gradient = |(grad, unit): (&View<'_>, &usize)| {
        let units: Vec<View<'_>> = grad.chunks(*unit).collect();
        units.par_iter().map(sum_of_unit).collect()
    };
    gradients.par_iter().zip(unit_elements).map(of_gradient).collect()
}

fn sum_of_unit(unit: &View<'_>) -> f64 {
    let pieces = unit.chunks(PIECE);
    with_real!(unit.ty.dtype, T => pieces.map(|x| sum_of_squares(&x.reals::<T>())).sum())
}

/// The sum of squares of `x`, element i in partial sum i % 32, so that zeros at the end do not change it.
fn sum_of_squares<T: Real>(x: &[T]) -> f64 {
    vectorized(
        #[inline(always)]
        || {
            let mut lanes = [0.0; 32];
            for chunk in x.chunks(32) {
                lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane += x.f64() * x.f64());
            }
            lanes.iter().sum()
        },
    )
}
