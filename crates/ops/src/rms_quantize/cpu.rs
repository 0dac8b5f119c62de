//! CPU kernel of [`RmsQuantize`]: the kernels of its two ops.

use super::RmsQuantize;
use xtrain_tensor::{CpuKernel, TensorType, View, ViewMut};

impl CpuKernel for RmsQuantize {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (sum_and_rstd, casts) = outputs.split_at_mut(2);
        self.rms().run(&inputs[..2], sum_and_rstd);
        let cast_inputs = sum_and_rstd.iter().map(|output| output.view()).chain(inputs[2..].iter().copied());
        self.cast.run(&cast_inputs.collect::<Vec<_>>(), casts);
    }

    fn work_bytes(&self, inputs: &[TensorType], threads: usize) -> usize {
        let cast_inputs = self.cast_inputs(inputs).expect("inputs that `infer` accepted");
        self.cast.work_bytes(&cast_inputs, threads)
    }
}
