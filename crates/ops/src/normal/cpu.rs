//! CPU kernel of [`Normal`].

use super::Normal;
use xtrain_tensor::{CpuKernel, Philox, View, ViewMut};

impl CpuKernel for Normal {
    fn run(&self, _: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [y] = outputs else { unreachable!("one output") };
        Philox::new(self.seed, self.step, self.site).fill_normal(self.std, &mut y.fresh::<f32>());
    }
}
