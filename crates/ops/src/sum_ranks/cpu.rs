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
            let mut total = Pooled::take(block.len());
            of_rank(0).widen_into::<f32>(&mut total);
            for r in 1..ranks {
                let x = of_rank(r).reals::<f32>();
                vectorized(
                    #[inline(always)]
                    || add_into(&mut total, &x),
                );
            }
            sum.store::<f32>(&total);
        });
    }
}
