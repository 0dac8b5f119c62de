//! GELU in its tanh form (Hendrycks & Gimpel, arXiv 1606.08415, section 2): the activation of GPT-2 and
//! Gemma.

mod cpu;
#[cfg(any(test, feature = "samples"))]
mod samples;

use xtrain_program::{Backward, Differentiable, Op, OpError, Role};
use xtrain_tensor::TensorType;

/// `x -> y` of any shape: y = x s(2u), with s the logistic function and u = sqrt(2/pi) (x + 0.044715 x^3);
/// 2 s(2u) = 1 + tanh(u).
#[derive(Clone, Copy, Debug)]
pub struct Gelu;

impl Op for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("gelu", inputs, 1)?;
        OpError::ensure(inputs[0].dtype.is_float(), || format!("x must be floats, not {}", inputs[0]))?;
        Ok(vec![inputs[0]])
    }

    /// The recompute policy `norms` does not save its output.
    fn is_cheap(&self, _: usize) -> bool {
        true
    }
}

impl Differentiable for Gelu {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let dx = cx.emit(Role::Dgrad, GeluGrad, &[dy, cx.input(0)])?[0];
        cx.set_grad(0, dx)
    }
}

/// `(dy, x) -> dx`, in place of dy: dx = dy s (1 + 2 x u' (1 - s)), with s = s(2u) and
/// u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2).
#[derive(Clone, Copy, Debug)]
pub struct GeluGrad;

impl Op for GeluGrad {
    fn name(&self) -> &'static str {
        "gelu_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("gelu_grad", inputs, 2)?;
        OpError::ensure(inputs[0] == inputs[1], || format!("dy is {}, but x is {}", inputs[0], inputs[1]))?;
        Ok(vec![inputs[0]])
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }
}
