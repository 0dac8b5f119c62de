//! CPU kernel of [`BalanceBias`].

use super::BalanceBias;
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for BalanceBias {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        if inputs[0].counters()[0] != 0 {
            return;
        }
        let sums = inputs[1].reals::<f32>();
        for (bias, &first) in outputs.iter_mut().zip(&self.loads) {
            let loads = &sums[first..][..bias.ty.numel()];
            let experts = loads.len() as f64;
            // Loads are whole numbers, so the sum is exact and no sign depends on rounding.
            let sum: f64 = loads.iter().map(|&load| f64::from(load)).sum();
            let sign = |load: f32| match sum - experts * f64::from(load) {
                less if less > 0.0 => 1.0,
                more if more < 0.0 => -1.0,
                _ => 0.0f32,
            };
            let mean = loads.iter().map(|&load| sign(load)).sum::<f32>() / experts as f32;
            for (bias, &load) in bias.reals::<f32>().iter_mut().zip(loads) {
                *bias += self.rate * (sign(load) - mean);
            }
        }
    }
}
