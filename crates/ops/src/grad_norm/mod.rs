//! The global L2 norm of the gradients. Clipping scales by it, every step logs it, and a norm that is not
//! finite skips the step. If the gradients are cut among ranks, each rank computes the sum of its squares,
//! and [`StepTotals`](crate::step_totals::StepTotals) adds the sums.

pub(crate) mod cpu;
pub(crate) mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `(g_0, g_1, ...) -> norm []`: the root of the sum of squares over all elements of all gradients, which may
/// have any shapes.
///
/// Squares are summed in f64, so that no square of an f32 number overflows, and in a fixed order. The norm is
/// f32, or f64 for gradients in f64. If an element is not finite, the norm is infinite or NaN; a norm beyond
/// f32's range is infinite.
#[derive(Clone, Copy, Debug)]
pub struct GradNorm;

impl Op for GradNorm {
    fn name(&self) -> &'static str {
        "grad_norm"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![TensorType::new(compute_type("grad_norm", inputs)?, [])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

/// `(g_0, g_1, ...) -> sum f64 []`: the sum of squares of [`GradNorm`], before its root is taken and rounded.
#[derive(Clone, Copy, Debug)]
pub struct SquaredNorm;

impl Op for SquaredNorm {
    fn name(&self) -> &'static str {
        "squared_norm"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        compute_type("squared_norm", inputs)?;
        Ok(vec![TensorType::new(DType::F64, [])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

/// The compute type of all gradients.
///
/// # Errors
/// There is none, or they have different ones.
pub(crate) fn compute_type(op: &str, gradients: &[TensorType]) -> Result<DType, OpError> {
    let Some(first) = gradients.first() else {
        return Err(OpError(format!("{op} takes at least one gradient")));
    };
    let dtype = first.dtype.compute();
    for (n, ty) in gradients.iter().enumerate() {
        let summed = matches!(ty.dtype, DType::F64 | DType::F32 | DType::BF16);
        OpError::ensure(summed && ty.dtype.compute() == dtype, || {
            format!("gradient {n} is {ty}, but gradient 0 is {first}; all must be f64, or all f32 or bf16")
        })?;
    }
    Ok(dtype)
}

impl OnGpu for GradNorm {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for SquaredNorm {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
