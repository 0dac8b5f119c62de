//! The sum of two tensors of one type, in place of the first: how gradients of a value used twice come
//! together.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError};
use xtrain_tensor::TensorType;

/// `a + b`, both of the same type.
#[derive(Clone, Copy, Debug)]
pub struct Add;

impl Op for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("add", inputs, 2)?;
        OpError::ensure(inputs[0] == inputs[1] && inputs[0].dtype.is_float(), || {
            "both operands must be floats of one type".into()
        })?;
        Ok(vec![inputs[0]])
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }
}

impl OnGpu for Add {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
