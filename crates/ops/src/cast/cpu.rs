//! CPU kernel of [`Cast`].

use super::Cast;
use crate::host::rows::for_row_blocks;
use xtrain_tensor::host::decode;
use xtrain_tensor::{CpuKernel, DType, View, ViewMut};

impl CpuKernel for Cast {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [y] = outputs else { unreachable!("one output") };
        for_row_blocks(inputs[0].ty.numel(), [y], |elements, [mut y]| {
            let x = inputs[0].slice(elements);
            match (x.ty.dtype, self.to) {
                // Only gradient checks compute in f64.
                (_, DType::F64) => y.write::<f64>(&decode(x.ty, x.bytes())),
                (DType::F64, _) => {
                    y.fresh::<f32>().iter_mut().zip(&*x.reals::<f64>()).for_each(|(y, x)| *y = *x as f32);
                }
                (_, DType::F32) => x.widen_into(&mut y.fresh::<f32>()),
                _ => y.write::<f32>(&x.reals::<f32>()),
            }
        });
    }
}
