//! CPU kernel of [`DelayedScaling`].

use super::{DelayedScaling, OPERANDS};
use xtrain_tensor::formats::scale_to;
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for DelayedScaling {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let Some((max_amax, outputs)) = outputs.split_first_mut() else {
            unreachable!("the first output is always there")
        };
        let halted =
            inputs.get(OPERANDS * self.tensors.len()).is_some_and(|halted| halted.counters()[0] != 0);
        let mut max_bits = 0u32;
        for ((tensor, inputs), outputs) in
            self.tensors.iter().zip(inputs.chunks_exact(OPERANDS)).zip(outputs.chunks_exact_mut(2))
        {
            let amax = inputs[0].reals::<f32>()[0];
            // Magnitudes have the order of their bits, with NaNs above all.
            max_bits = max_bits.max(amax.to_bits() & 0x7FFF_FFFF);
            if halted {
                continue;
            }
            let [history, scale] = outputs else { unreachable!("pairs") };
            if !(amax > 0.0 && amax.is_finite()) {
                let scale = &mut scale.reals::<f32>()[0];
                *scale = if tensor.in_pieces && *scale == 0.0 { 1.0 } else { *scale };
                continue;
            }
            let mut history = history.reals::<f32>();
            history.rotate_right(1);
            history[0] = amax;
            let used_amax = if self.latest { amax } else { history.iter().copied().fold(amax, f32::max) };
            scale.reals::<f32>()[0] = scale_to(self.target(tensor), used_amax, tensor.pow2_scales);
        }
        max_amax.fresh::<f32>()[0] = f32::from_bits(max_bits);
    }
}
