//! CPU kernels of [`RankAmaxes`] and [`MaxAmaxes`].

use super::{MaxAmaxes, RankAmaxes};
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for RankAmaxes {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let amaxes: Vec<f32> = inputs.iter().map(View::scalar::<f32>).collect();
        outputs[0].write::<f32>(&amaxes);
    }
}

impl CpuKernel for MaxAmaxes {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let amaxes = inputs[0].reals::<f32>();
        let tensors = outputs.len();
        for (n, output) in outputs.iter_mut().enumerate() {
            // Magnitudes have the order of their bits, with NaNs above all.
            let bits = amaxes.iter().skip(n).step_by(tensors).map(|amax| amax.to_bits() & 0x7FFF_FFFF);
            output.write::<f32>(&[f32::from_bits(bits.fold(0, u32::max))]);
        }
    }
}
