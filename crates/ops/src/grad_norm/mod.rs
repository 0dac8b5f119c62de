//! The global L2 norm of the gradients: what clipping, the step line and the check for non-finite steps start
//! from.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `(g_0, g_1, ...) -> norm []`: the root of the sum of the squares of all elements of all gradients, of any
/// shapes.
///
/// Squares are summed in f64, so none of f32's overflows and the order matters little; it is fixed all the
/// same. The norm is f32, or f64 where the gradients are. One element that is not finite makes it infinite or
/// NaN; so does a norm beyond f32.
#[derive(Clone, Copy, Debug)]
pub struct GradNorm;

impl Op for GradNorm {
    fn name(&self) -> &'static str {
        "grad_norm"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(!inputs.is_empty(), || "grad_norm takes at least one gradient".into())?;
        let dtype = inputs[0].dtype.compute();
        for (n, ty) in inputs.iter().enumerate() {
            let summed = matches!(ty.dtype, DType::F64 | DType::F32 | DType::BF16);
            OpError::ensure(summed && ty.dtype.compute() == dtype, || {
                format!("gradient {n} is {ty}; all must be f64, or all f32 or bf16")
            })?;
        }
        Ok(vec![TensorType::new(dtype, [])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl OnGpu for GradNorm {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
