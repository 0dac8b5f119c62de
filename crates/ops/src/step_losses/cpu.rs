//! CPU kernel of [`RecordLosses`].

use super::RecordLosses;
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for RecordLosses {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let mut losses: Vec<f32> = [0, 1].map(|n| inputs[n].scalar::<f32>()).into();
        losses.extend(inputs.get(4).into_iter().flat_map(|sources| sources.reals::<f32>().to_vec()));
        let mut rows = outputs[0].reals::<f32>();
        if let Some(row) = rows.chunks_mut(losses.len()).nth(inputs[2].counters()[0] as usize) {
            row.copy_from_slice(&losses);
        }
    }
}
