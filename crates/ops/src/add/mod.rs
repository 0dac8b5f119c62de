//! In-place sum of two tensors: the residual stream at the end of a pipeline's stage, and the gradients of a
//! value that is read more than once.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Differentiable, Op, OpError};
use xtrain_tensor::TensorType;

/// `(a, b) -> a + b`, in place of a. Both are floats of one type and shape.
#[derive(Clone, Copy, Debug)]
pub struct Add;

impl Op for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("add", inputs, 2)?;
        OpError::ensure(inputs[0] == inputs[1] && inputs[0].dtype.is_float(), || {
            format!("add takes two float tensors of one type and shape, not {} and {}", inputs[0], inputs[1])
        })?;
        Ok(vec![inputs[0]])
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }
}

impl Differentiable for Add {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        cx.set_grad(0, dy)?;
        cx.set_grad(1, dy)
    }
}

impl OnGpu for Add {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
