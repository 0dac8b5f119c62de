//! CPU kernels of [`JoinRows`] and [`SplitRows`].

use super::{JoinRows, SplitRows};
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for JoinRows {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let mut rest = outputs[0].bytes();
        if let JoinRows::Lines(lines) = *self {
            for (line, to) in rest.chunks_mut(rest.len() / lines).enumerate() {
                for (x, to) in inputs.iter().zip(to.chunks_mut(to.len() / inputs.len())) {
                    to.copy_from_slice(&x.bytes()[line * to.len()..][..to.len()]);
                }
            }
            return;
        }
        for x in inputs {
            let (to, after) = rest.split_at_mut(x.bytes().len().min(rest.len()));
            to.copy_from_slice(&x.bytes()[..to.len()]);
            rest = after;
        }
    }
}

impl CpuKernel for SplitRows {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let mut rest = inputs[0].bytes();
        for y in outputs {
            let (held, padding) = {
                let bytes = y.bytes();
                let held = rest.len().min(bytes.len());
                bytes.split_at_mut(held)
            };
            let (from, after) = rest.split_at(held.len());
            held.copy_from_slice(from);
            padding.fill(0);
            rest = after;
        }
    }
}
