//! Multiplication by a constant.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Differentiable, Op, OpError, Role};
use xtrain_tensor::TensorType;

/// `x -> y`, in place of x, floats of any shape: y = x times a constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale(pub f32);

impl Op for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("scale", inputs, 1)?;
        OpError::ensure(inputs[0].dtype.is_float(), || format!("x must be floats, not {}", inputs[0]))?;
        Ok(vec![inputs[0]])
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn is_cheap(&self, _: usize) -> bool {
        true
    }
}

impl Differentiable for Scale {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let dx = cx.emit(Role::Dgrad, *self, &[dy])?[0];
        cx.set_grad(0, dx)
    }
}

impl OnGpu for Scale {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
