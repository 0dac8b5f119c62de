//! Inverted dropout (Srivastava et al., JMLR 15, 2014) with a counter-based mask.
//!
//! The mask is a pure function of (seed, step, site, token, column). It is not saved: the backward draws it
//! again. It depends neither on how the global batch is split into micro-batches nor on threads or ranks.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::matrix;
use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Differentiable, Op, OpError, Operand, Role};
use xtrain_tensor::{DType, TensorType};

/// `(x_td, rng_4) -> y_td`, in place: element (t, j) is x / (1 - p) where
/// `Philox::new(seed, step, site).uniform((first_token + t) * d + j) >= p`, else 0.
///
/// rng is `u32[4]`: seed (low word, high word), step, and first_token, the index of the micro-batch's first
/// token within the global batch of the optimizer step. The backward is the same op, applied to dy.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    /// Probability of setting an element to zero, at least 0 and below 1. 0 is the identity.
    pub p: f32,
    /// Number of this dropout in the model: sites draw independent masks.
    pub site: u32,
}

impl Op for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure((0.0..1.0).contains(&self.p), || {
            format!("dropout's p must be at least 0 and below 1, not {}", self.p)
        })?;
        OpError::arity("dropout", inputs, 2)?;
        matrix("x", inputs[0])?;
        OpError::ensure(inputs[0].dtype.is_float(), || format!("x must be floats, not {}", inputs[0]))?;
        OpError::ensure(inputs[1] == TensorType::new(DType::U32, [4]), || {
            format!("rng must be u32[4] (seed low, seed high, step, first token), not {}", inputs[1])
        })?;
        Ok(vec![inputs[0]])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 1 { Operand::Full } else { Operand::Compute }
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn is_cheap(&self, _: usize) -> bool {
        true
    }
}

impl Differentiable for Dropout {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let dx = cx.emit(Role::Dgrad, *self, &[dy, cx.input(1)])?[0];
        cx.set_grad(0, dx)
    }
}

impl OnGpu for Dropout {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
