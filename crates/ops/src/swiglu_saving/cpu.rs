//! CPU kernel of [`SwigluSaving`].

use super::SwigluSaving;
use crate::quantize::save;
use crate::swiglu::Swiglu;
use crate::tail;
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for SwigluSaving {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (y, copy) = outputs.split_at_mut(1);
        self.swiglu().run(inputs, y);
        save(inputs[0], copy);
        if self.tail.is_undefined() {
            let written = tail::written_rows(self.tail, inputs[Swiglu::STARTS], y[0].ty.shape[0]);
            copy.iter_mut().enumerate().for_each(|(axis, output)| tail::fill(output, axis, written));
        }
    }
}
