//! CPU kernel of [`Scale`].

use super::Scale;
use crate::host::math::vectorized;
use crate::host::rows::for_row_blocks;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

impl CpuKernel for Scale {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [y] = outputs else { unreachable!("one output") };
        with_real!(inputs[0].ty.dtype, T => {
            let factor = T::from_f64(f64::from(self.0));
            for_row_blocks(y.ty.numel(), [y], |_, [mut y]| {
                let mut y = y.reals::<T>();
                vectorized(
                    #[inline(always)]
                    || y.iter_mut().for_each(|y| *y *= factor),
                );
            });
        });
    }
}
