//! SwiGLU (Shazeer, arXiv 2002.05202): the gated activation of the feed-forward layer, over gate and up in
//! one tensor.
//!
//! A row of the input holds f gate values, then f up values, as one GEMM with the two weights stacked writes
//! them.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::matrix;
use crate::on_gpu::OnGpu;
use xtrain_cuda::{Header, KernelSource};
use xtrain_program::{Backward, Differentiable, Op, OpError, Role};
use xtrain_tensor::TensorType;

/// Device code that the kernels share which compute SwiGLU.
pub(crate) const GATE: Header = Header::new("swiglu/gate.cuh", include_str!("gate.cuh"));

/// `gate_up_t2f -> y_tf`: y = silu(gate) * up, with silu(g) = g / (1 + e^-g).
#[derive(Clone, Copy, Debug)]
pub struct Swiglu;

impl Op for Swiglu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("swiglu", inputs, 1)?;
        let (tokens, width) = halves(inputs[0])?;
        Ok(vec![TensorType::new(inputs[0].dtype, [tokens, width])])
    }

    fn is_cheap(&self, _: usize) -> bool {
        true
    }
}

impl Differentiable for Swiglu {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let dgate_up = cx.emit(Role::Dgrad, SwigluGrad { rematerialise: false }, &[dy, cx.input(0)])?[0];
        cx.set_grad(0, dgate_up)
    }
}

/// `(dy_tf, gate_up_t2f) -> dgate_up_t2f[, y_tf]`, in place of gate_up: with s = 1 / (1 + e^-gate), dgate =
/// dy up s (1 + gate (1 - s)) and dup = dy gate s. With `rematerialise` it also writes the forward's y, in
/// place of dy.
#[derive(Clone, Copy, Debug)]
pub struct SwigluGrad {
    /// True if it also writes the forward's y.
    pub rematerialise: bool,
}

impl Op for SwigluGrad {
    fn name(&self) -> &'static str {
        "swiglu_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("swiglu_grad", inputs, 2)?;
        let (tokens, width) = halves(inputs[1])?;
        let expected = TensorType::new(inputs[1].dtype, [tokens, width]);
        OpError::ensure(inputs[0] == expected, || format!("dy must be {expected}, not {}", inputs[0]))?;
        let mut outputs = vec![inputs[1]];
        outputs.extend(self.rematerialise.then_some(expected));
        Ok(outputs)
    }

    /// In a training step nothing reads gate, up and dy afterwards.
    fn in_place(&self) -> &[(usize, usize)] {
        if self.rematerialise { &[(0, 1), (1, 0)] } else { &[(0, 1)] }
    }
}

/// Tokens and width of the output, from the type of gate and up.
fn halves(gate_up: TensorType) -> Result<(usize, usize), OpError> {
    let (tokens, cols) = matrix("gate_up", gate_up)?;
    OpError::ensure(gate_up.dtype.is_float() && cols > 0 && cols % 2 == 0, || {
        format!("gate_up must be a float matrix with as many gate columns as up columns, not {gate_up}")
    })?;
    Ok((tokens, cols / 2))
}

impl OnGpu for Swiglu {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for SwigluGrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
