//! CPU kernel of [`Add`].

use super::Add;
use crate::host::rows::{add_into, for_row_blocks};
use xtrain_tensor::{CpuKernel, View, ViewMut, with_real};

impl CpuKernel for Add {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        with_real!(inputs[1].ty.dtype, T => {
            let b = inputs[1].reals::<T>();
            let mut sum = outputs[0].reals::<T>();
            for_row_blocks(&mut sum, 1, |first, rows| {
                let b = &b[first..first + rows.len()];
                add_into(rows, b);
            });
        });
    }
}
