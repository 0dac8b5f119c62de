//! CPU kernels of [`PairwiseAdd`] and [`PairwiseTotal`].

use super::{PairwiseAdd, PairwiseTotal};
use crate::host::math::vectorized;
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, View, ViewMut};

/// Elements of a task.
const BLOCK: usize = 16 * 1024;

impl CpuKernel for PairwiseAdd {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (x, micro_step) = (inputs[0].reals::<f32>(), inputs[1].counters()[0]);
        let elements = x.len();
        let taken = micro_step.trailing_ones() as usize;
        let mut levels = outputs[0].reals::<f32>();
        if taken * elements >= levels.len() {
            return;
        }
        let (lower, rest) = levels.split_at_mut(taken * elements);
        let levels = (0..taken).collect::<Vec<_>>();
        sum(&x, lower, &levels, &mut rest[..elements]);
    }
}

impl CpuKernel for PairwiseTotal {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (x, micro_step) = (inputs[0].reals::<f32>(), inputs[1].counters()[0]);
        let levels = inputs[2].reals::<f32>();
        let count = inputs[2].ty.shape[0];
        let set: Vec<usize> = (0..count).filter(|&level| micro_step >> level & 1 == 1).collect();
        sum(&x, &levels, &set, &mut outputs[0].fresh::<f32>());
    }
}

/// `to = x`, then `to = levels[l] + to` for each l in `set`.
fn sum(x: &[f32], levels: &[f32], set: &[usize], to: &mut [f32]) {
    to.par_chunks_mut(BLOCK).enumerate().for_each(|(block, to)| {
        let range = block * BLOCK..block * BLOCK + to.len();
        to.copy_from_slice(&x[range.clone()]);
        for level in set {
            let level = &levels[level * x.len()..][range.clone()];
            vectorized(
                #[inline(always)]
                || to.iter_mut().zip(level).for_each(|(sum, partial)| *sum = *partial + *sum),
            );
        }
    });
}
