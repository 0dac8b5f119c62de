//! SwiGLU (Shazeer, arXiv 2002.05202): the gated activation of the feed-forward layer, over gate and up in
//! one tensor.
//!
//! A row of the input holds f gate values, then f up values, as one GEMM with the two weights stacked writes
//! them. In a mixture of experts each row is also multiplied by the weight that its token gives the expert.
//! Applied here and not after the next linear layer, the weight's gradient needs no output of that layer, so
//! nothing of its size is saved (as in SonicMoE, arXiv 2512.14080).

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
pub(crate) mod samples;
#[cfg(test)]
mod tests;

use crate::matrix;
use crate::on_gpu::OnGpu;
use crate::tail;
use std::sync::Arc;
use xtrain_cuda::{Header, KernelSource};
use xtrain_program::{
    Arithmetic, Backward, Cost, Differentiable, Op, OpError, Operand, RaggedOp, Role, Tail,
};
use xtrain_tensor::{DType, TensorType};

/// Device code that the kernels share which compute SwiGLU.
pub(crate) const GATE: Header = Header::new("swiglu/gate.cuh", include_str!("gate.cuh"));

/// `(gate_up_t2f[, weights_t, starts]) -> y_tf`: y = silu(gate) * up, with silu(g) = g / (1 + e^-g). If it is
/// weighted, rows are those of experts, which begin at `starts` ([`crate::dispatch`]), and y is multiplied by
/// the row's weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swiglu {
    /// True if each row has a weight, in the compute type of gate and up.
    pub weighted: bool,
    /// The tail of y, if rows are those of experts.
    pub tail: Tail,
}

impl Swiglu {
    /// Without weights.
    pub const PLAIN: Swiglu = Swiglu { weighted: false, tail: Tail::Zeros };
    /// Of the rows of experts.
    pub const WEIGHTED: Swiglu = Swiglu { weighted: true, ..Swiglu::PLAIN };
    /// The index of the input `starts`.
    pub(crate) const STARTS: usize = 2;
}

impl Op for Swiglu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("swiglu", inputs, if self.weighted { 3 } else { 1 })?;
        let (tokens, width) = halves(inputs[0])?;
        if self.weighted {
            check_rows(&inputs[1..], inputs[0])?;
        }
        Ok(vec![TensorType::new(inputs[0].dtype, [tokens, width])])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 0 { Operand::Compute } else { Operand::Full }
    }

    fn is_cheap(&self, _: usize) -> bool {
        true
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        tail::cost(Cost::of_operands(Arithmetic::None, inputs, outputs), outputs[0].shape[0], self.tail)
    }
}

impl RaggedOp for Swiglu {
    fn reads_tail(&self, input: usize) -> bool {
        !self.tail.is_undefined() || input == Swiglu::STARTS
    }

    fn tail(&self, _: usize) -> Option<Tail> {
        self.weighted.then_some(self.tail)
    }

    fn with_tail(&self, tail: Tail) -> Option<Arc<dyn Op>> {
        self.weighted.then(|| Arc::new(Swiglu { tail, ..*self }) as Arc<dyn Op>)
    }
}

impl Differentiable for Swiglu {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let grad = SwigluGrad { weighted: self.weighted, ..SwigluGrad::PLAIN };
        let inputs: Vec<_> = [dy].into_iter().chain((0..cx.input_count()).map(|n| cx.input(n))).collect();
        let gradients = cx.emit(Role::Dgrad, grad, &inputs)?;
        gradients.into_iter().enumerate().try_for_each(|(n, gradient)| cx.set_grad(n, gradient))
    }
}

/// `(dy_tf, gate_up_t2f[, weights_t, starts]) -> (dgate_up_t2f[, dweights_t][, y_tf])`, in place of gate_up:
/// with s = 1 / (1 + e^-gate), dgate = dy up s (1 + gate (1 - s)) and dup = dy gate s. With weights, dweight
/// is the sum over the row of dy gate s up, and dy is multiplied by the weight in the others. With
/// `rematerialise` it also writes the forward's y, in place of dy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwigluGrad {
    /// True if it also writes the forward's y.
    pub rematerialise: bool,
    /// True if each row has a weight.
    pub weighted: bool,
    /// The tails of all outputs, if rows are those of experts.
    pub tail: Tail,
}

impl SwigluGrad {
    /// Without weights and without the forward's y.
    pub const PLAIN: SwigluGrad = SwigluGrad { rematerialise: false, weighted: false, tail: Tail::Zeros };
    /// Of the rows of experts.
    pub const WEIGHTED: SwigluGrad = SwigluGrad { weighted: true, ..SwigluGrad::PLAIN };
    /// The index of the input `starts`.
    const STARTS: usize = 3;
}

impl Op for SwigluGrad {
    fn name(&self) -> &'static str {
        "swiglu_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("swiglu_grad", inputs, if self.weighted { 4 } else { 2 })?;
        let (tokens, width) = halves(inputs[1])?;
        let expected = TensorType::new(inputs[1].dtype, [tokens, width]);
        OpError::ensure(inputs[0] == expected, || format!("dy must be {expected}, not {}", inputs[0]))?;
        let mut outputs = vec![inputs[1]];
        if self.weighted {
            check_rows(&inputs[2..], inputs[1])?;
            outputs.push(inputs[2]);
        }
        outputs.extend(self.rematerialise.then_some(expected));
        Ok(outputs)
    }

    fn operand(&self, input: usize) -> Operand {
        if input < 2 { Operand::Compute } else { Operand::Full }
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        tail::cost(Cost::of_operands(Arithmetic::None, inputs, outputs), outputs[0].shape[0], self.tail)
    }

    /// In a training step nothing reads gate, up and dy afterwards.
    fn in_place(&self) -> &[(usize, usize)] {
        match (self.rematerialise, self.weighted) {
            (false, _) => &[(0, 1)],
            (true, false) => &[(0, 1), (1, 0)],
            (true, true) => &[(0, 1), (2, 0)],
        }
    }
}

impl RaggedOp for SwigluGrad {
    fn reads_tail(&self, input: usize) -> bool {
        !self.tail.is_undefined() || input == SwigluGrad::STARTS
    }

    fn tail(&self, _: usize) -> Option<Tail> {
        self.weighted.then_some(self.tail)
    }

    fn with_tail(&self, tail: Tail) -> Option<Arc<dyn Op>> {
        self.weighted.then(|| Arc::new(SwigluGrad { tail, ..*self }) as Arc<dyn Op>)
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

/// Checks the weights of the rows of gate and up, and the starts of experts.
fn check_rows(of_rows: &[TensorType], gate_up: TensorType) -> Result<(), OpError> {
    let (weights, starts) = (of_rows[0], of_rows[1]);
    let expected = TensorType::new(gate_up.dtype.compute(), [gate_up.shape[0]]);
    OpError::ensure(weights == expected, || {
        format!("the weights of rows must be {expected}, not {weights}")
    })?;
    OpError::ensure(starts.dtype == DType::I32 && starts.shape.len() == 1 && starts.numel() > 0, || {
        format!("the starts of experts must be an i32 vector, not {starts}")
    })
}

impl OnGpu for Swiglu {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for SwigluGrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
