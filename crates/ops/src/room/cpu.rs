//! CPU kernels of [`RowsNeeded`] and [`CheckRoom`].

use super::{CheckRoom, RowsNeeded, SKIPPED};
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for RowsNeeded {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let rows = inputs[0].ints()[0] as f32;
        let accumulates = outputs[0].accumulate;
        let most = &mut outputs[0].reals::<f32>()[0];
        *most = if accumulates { most.max(rows) } else { rows };
    }
}

impl CpuKernel for CheckRoom {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let overflows = inputs[0].reals::<f32>().iter().any(|&rows| rows > self.room as f32);
        let [halted, blocked] = outputs else { unreachable!("two outputs") };
        let halted = &mut halted.counters()[0];
        *halted = u32::from(*halted != 0 || overflows);
        blocked.fresh::<f32>()[0] = if *halted == 1 { SKIPPED } else { 0.0 };
    }
}
