//! CPU kernel of [`Add`].

use super::Add;
use crate::host::math::vectorized;
use crate::host::rows::{add_into, for_row_blocks};
use xtrain_tensor::{CpuKernel, View, ViewMut, with_real};

impl CpuKernel for Add {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [sum] = outputs else { unreachable!("one output") };
        with_real!(inputs[1].ty.dtype, T => {
            for_row_blocks(inputs[1].ty.numel(), [sum], |elements, [mut sum]| {
                let b = inputs[1].slice(elements).reals::<T>();
                let mut sum = sum.reals::<T>();
                vectorized(
                    #[inline(always)]
                    || add_into(&mut sum, &b),
                );
            });
        });
    }
}
