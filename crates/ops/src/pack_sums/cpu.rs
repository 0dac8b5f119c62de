//! CPU kernel of [`PackSums`].

use super::PackSums;
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for PackSums {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let mut sums: Vec<f32> = inputs.iter().flat_map(|sums| sums.reals::<f32>().to_vec()).collect();
        sums.resize(outputs[0].ty.numel(), 0.0);
        outputs[0].store::<f32>(&sums);
    }
}
