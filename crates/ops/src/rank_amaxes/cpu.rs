//! CPU kernels of [`RankAmaxes`] and [`MaxAmaxes`].

use super::{MaxAmaxes, RankAmaxes};
use crate::host::amax::magnitude;
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for RankAmaxes {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let amaxes: Vec<f32> = inputs.iter().flat_map(|amaxes| amaxes.reals::<f32>().to_vec()).collect();
        outputs[0].write::<f32>(&amaxes);
    }
}

impl CpuKernel for MaxAmaxes {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let amaxes = inputs[0].reals::<f32>();
        let all: usize = self.lengths.iter().sum();
        let most_of = |n: usize| {
            let bits = amaxes.iter().skip(n).step_by(all).map(|&amax| magnitude(amax));
            f32::from_bits(bits.fold(0, u32::max))
        };
        let mut first = 0;
        for output in outputs {
            let end = first + output.ty.numel();
            output.write::<f32>(&(first..end).map(most_of).collect::<Vec<_>>());
            first = end;
        }
    }
}
