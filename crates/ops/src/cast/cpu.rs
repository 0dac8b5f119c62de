//! CPU kernel of [`Cast`].

use super::Cast;
use xtrain_tensor::host::decode;
use xtrain_tensor::{CpuKernel, DType, View, ViewMut};

impl CpuKernel for Cast {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        match (inputs[0].ty.dtype, self.to) {
            (DType::F64, _) | (_, DType::F64) => {
                // Only checks compute in f64.
                let x = decode(inputs[0].ty, inputs[0].bytes());
                match self.to {
                    DType::F64 => outputs[0].reals::<f64>().copy_from_slice(&x),
                    _ => outputs[0].reals::<f32>().iter_mut().zip(&x).for_each(|(y, x)| *y = *x as f32),
                }
            }
            // Views widen on reading and round on writing.
            _ => outputs[0].reals::<f32>().copy_from_slice(&inputs[0].reals::<f32>()),
        }
    }
}
