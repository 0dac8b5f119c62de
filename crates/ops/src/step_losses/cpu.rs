//! CPU kernel of [`RecordLosses`].

use super::RecordLosses;
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for RecordLosses {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let losses = [0, 1].map(|n| inputs[n].scalar::<f32>());
        let mut rows = outputs[0].reals::<f32>();
        if let Some(row) = rows.as_chunks_mut::<2>().0.get_mut(inputs[2].counters()[0] as usize) {
            *row = losses;
        }
    }
}
