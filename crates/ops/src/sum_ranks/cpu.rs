//! CPU kernel of [`SumRanks`].

use super::SumRanks;
use crate::host::math::vectorized;
use crate::host::rows::{add_into, for_row_blocks};
use xtrain_tensor::{CpuKernel, Pooled, View, ViewMut};

impl CpuKernel for SumRanks {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [sum] = outputs else { unreachable!("one output") };
        let (ranks, elements) = (inputs[0].ty.shape[0], sum.ty.numel());
        for_row_blocks(elements, [sum], |block, [mut sum]| {
            let of_rank = |r: usize| inputs[0].slice(r * elements + block.start..r * elements + block.end);
            sum.store::<f32>(&tree(&of_rank, 0, ranks, block.len()));
        });
    }
}

/// The sum of `count` ranks from `first` on: that of the largest power of two before the last rank, and that
/// of the others, each a tree again.
fn tree<'a>(
    of_rank: &impl Fn(usize) -> View<'a>,
    first: usize,
    count: usize,
    elements: usize,
) -> Pooled<f32> {
    if count == 1 {
        let mut x = Pooled::take(elements);
        of_rank(first).widen_into::<f32>(&mut x);
        return x;
    }
    let half = count.next_power_of_two() / 2;
    let mut sum = tree(of_rank, first, half, elements);
    let right = tree(of_rank, first + half, count - half, elements);
    vectorized(
        #[inline(always)]
        || add_into(&mut sum, &right),
    );
    sum
}
