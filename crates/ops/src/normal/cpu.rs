//! CPU kernel of [`Normal`].

use super::Normal;
use xtrain_tensor::{CpuKernel, Philox, View, ViewMut};

impl CpuKernel for Normal {
    fn run(&self, _: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [y] = outputs else { unreachable!("one output") };
        let rng = Philox::new(self.seed, self.step, self.site);
        let mut y = y.fresh::<f32>();
        let (drawn, padding) = y.split_at_mut(self.elements);
        rng.fill_normal_from(self.first_element, self.std, drawn);
        padding.fill(0.0);
    }
}
