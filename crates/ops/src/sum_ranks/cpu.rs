//! CPU kernels of [`SumRanks`], [`SumParts`] and [`SumSources`].

use super::{SumParts, SumRanks, SumSources};
use crate::host::rows::for_row_blocks;
use crate::host::tree;
use xtrain_tensor::{CpuKernel, Pooled, View, ViewMut};

impl CpuKernel for SumRanks {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        sum_of(inputs[0], inputs[0].ty.shape[0], &mut outputs[0]);
    }
}

impl CpuKernel for SumParts {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        sum_of(inputs[0], inputs[0].ty.shape[0], &mut outputs[0]);
    }
}

impl CpuKernel for SumSources {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let of_expert = outputs[0].ty.numel() / self.experts;
        if of_expert == 0 {
            return;
        }
        for (x, mut sum) in inputs[0].chunks(self.ranks * of_expert).zip(outputs[0].chunks(of_expert)) {
            sum_of(x, self.ranks, &mut sum);
        }
    }
}

/// The sum of the tensors of all ranks, one after the other in x.
fn sum_of(x: View<'_>, ranks: usize, sum: &mut ViewMut<'_>) {
    let elements = sum.ty.numel();
    for_row_blocks(elements, [sum], |block, [mut sum]| {
        let of_rank = |rank: usize| {
            let mut values = Pooled::take(block.len());
            let first = rank * elements;
            x.slice(first + block.start..first + block.end).widen_into::<f32>(&mut values);
            Some(values)
        };
        let all = tree::sum(&of_rank, 0, ranks).unwrap_or_else(|| unreachable!("at least one rank"));
        sum.store::<f32>(&all);
    });
}
