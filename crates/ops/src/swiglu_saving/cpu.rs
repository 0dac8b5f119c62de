//! CPU kernel of [`SwigluSaving`].

use super::SwigluSaving;
use crate::quantize::save;
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for SwigluSaving {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (y, copy) = outputs.split_at_mut(1);
        self.swiglu().run(inputs, y);
        save(inputs[0], copy);
    }
}
