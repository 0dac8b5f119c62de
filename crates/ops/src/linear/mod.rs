//! A linear layer: its three GEMMs, fprop, dgrad and wgrad, and the gradient of its bias.
//!
//! Weights have Hugging Face's layout, `w_oi`, so y = x w^T, dx = dy w and dw = dy^T x.

mod cpu;
mod cuda;
mod cuda_bias;
mod cuda_row;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::cast::Cast;
use crate::on_gpu::OnGpu;
use crate::scaled_matmul::ScaledMatmul;
use crate::{float_shaped, matrix};
use std::sync::Arc;
use xtrain_cuda::{Gemm, KernelSource};
use xtrain_program::{
    Arithmetic, Backward, Cost, Differentiable, Gemms, LinearGemm, Op, OpError, OpGemm, OperandSource, Role,
    ScaledGemm, ValueId,
};
use xtrain_tensor::{DType, TensorType};

/// `(x_ti, w_oi[, bias_o]) -> y_to`: y = x w^T + bias, summed in f32 (f64) and rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Linear;

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(matches!(inputs.len(), 2 | 3), || {
            format!("linear takes x, the weight and, if any, the bias: 2 or 3 inputs, not {}", inputs.len())
        })?;
        let ((tokens, width), (out, w_in)) = (matrix("x", inputs[0])?, matrix("the weight", inputs[1])?);
        OpError::ensure(width == w_in, || {
            format!("x has {width} columns, but the weight {} takes {w_in}", inputs[1])
        })?;
        OpError::ensure(inputs.iter().all(|t| t.dtype == inputs[0].dtype), || {
            format!("x, the weight and the bias must have one element type, not {}", types_of(inputs))
        })?;
        if let Some(bias) = inputs.get(2) {
            float_shaped("the bias", *bias, &[out])?;
        }
        Ok(vec![TensorType::new(inputs[0].dtype, [tokens, out])])
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        gemm_cost(inputs[0].shape[1], inputs, outputs)
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        let ((tokens, width), (out, _)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
        Some(single_gemm(LinearGemm::Fprop, [tokens, out, width], inputs[0].dtype, inputs.len() > 2))
    }
}

impl Differentiable for Linear {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        match cx.grad(0) {
            Some(dy) => linear_backward(cx, dy),
            None => Ok(()),
        }
    }
}

/// Emits the gradients of x, the weight and, if any, the bias from dy in the type of x.
fn linear_backward(cx: &mut Backward<'_>, dy: ValueId) -> Result<(), OpError> {
    let (x, w) = (cx.input(0), cx.input(1));
    // wgrad comes first: it may be the last op that reads x, so that dx can take x's memory.
    if cx.wants(1) {
        let dw = cx.emit(Role::Wgrad, LinearWgrad { out: cx.grad_dtype(1) }, &[dy, x])?[0];
        cx.set_grad(1, dw)?;
    }
    if cx.input_count() == 3 && cx.wants(2) {
        let dbias = cx.emit(Role::Wgrad, BiasGrad { out: cx.grad_dtype(2) }, &[dy])?[0];
        cx.set_grad(2, dbias)?;
    }
    if cx.wants(0) {
        let dx = cx.emit(Role::Dgrad, LinearDgrad, &[dy, w])?[0];
        cx.set_grad(0, dx)?;
    }
    Ok(())
}

/// `(x_ti, w_oi) -> y_to`: y = x w^T in the compute type of x, which is f32 for bf16: the sums are not
/// rounded. For logits whose order decides, such as those of a router. The backward rounds dy to the type of
/// x for its GEMMs.
#[derive(Clone, Copy, Debug)]
pub struct UnroundedLinear {
    /// True if FP8 recipes may run it on FP8 operands.
    pub in_fp8: bool,
}

impl Op for UnroundedLinear {
    fn name(&self) -> &'static str {
        "unrounded_linear"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 2)?;
        let y = Linear.infer(inputs)?[0];
        Ok(vec![y.with_dtype(y.dtype.compute())])
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        let ((tokens, width), (out, _)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
        let extents = [tokens, out, width];
        self.in_fp8.then(|| single_gemm(LinearGemm::Fprop, extents, inputs[0].dtype.compute(), false))
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        gemm_cost(inputs[0].shape[1], inputs, outputs)
    }
}

impl Differentiable for UnroundedLinear {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let to = cx.ty(cx.input(0)).dtype;
        let dy = if cx.ty(dy).dtype == to { dy } else { cx.emit(Role::Dgrad, Cast { to }, &[dy])?[0] };
        linear_backward(cx, dy)
    }
}

/// `(dy_to, w_oi) -> dx_ti`: dx = dy w.
#[derive(Clone, Copy, Debug)]
pub struct LinearDgrad;

impl Op for LinearDgrad {
    fn name(&self) -> &'static str {
        "linear_dgrad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("linear_dgrad", inputs, 2)?;
        let ((tokens, out), (w_out, width)) = (matrix("dy", inputs[0])?, matrix("the weight", inputs[1])?);
        OpError::ensure(out == w_out, || {
            format!("dy has {out} columns, but the weight {} has {w_out} outputs", inputs[1])
        })?;
        Ok(vec![TensorType::new(inputs[0].dtype, [tokens, width])])
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        let ((tokens, out), (_, width)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
        Some(single_gemm(LinearGemm::Dgrad, [tokens, out, width], inputs[0].dtype, false))
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        gemm_cost(inputs[0].shape[1], inputs, outputs)
    }
}

/// `(dy_to, x_ti) -> dw_oi`: dw = dy^T x. The output accumulates.
#[derive(Clone, Copy, Debug)]
pub struct LinearWgrad {
    /// Element type of the gradient.
    pub out: DType,
}

impl Op for LinearWgrad {
    fn name(&self) -> &'static str {
        "linear_wgrad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("linear_wgrad", inputs, 2)?;
        let ((tokens, out), (x_tokens, width)) = (matrix("dy", inputs[0])?, matrix("x", inputs[1])?);
        OpError::ensure(tokens == x_tokens, || format!("dy has {tokens} rows, x has {x_tokens}"))?;
        Ok(vec![TensorType::new(self.out, [out, width])])
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        let ((tokens, out), (_, width)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
        Some(single_gemm(LinearGemm::Wgrad, [tokens, out, width], self.out, false))
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        gemm_cost(inputs[0].shape[0], inputs, outputs)
    }
}

/// `dy_to -> dbias_o`: the sum of dy over tokens. The output accumulates.
#[derive(Clone, Copy, Debug)]
pub struct BiasGrad {
    /// Element type of the gradient.
    pub out: DType,
}

impl Op for BiasGrad {
    fn name(&self) -> &'static str {
        "bias_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("bias_grad", inputs, 1)?;
        let (_, out) = matrix("dy", inputs[0])?;
        Ok(vec![TensorType::new(self.out, [out])])
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }
}

/// The element types of the operands, for messages.
fn types_of(inputs: &[TensorType]) -> String {
    inputs.iter().map(|input| input.dtype.name()).collect::<Vec<_>>().join(", ")
}

/// The GEMM of an op that is a single one, of a layer with these numbers of tokens, outputs and inputs.
fn single_gemm(kind: LinearGemm, [tokens, outputs, inputs]: [usize; 3], out: DType, bias: bool) -> Gemms {
    let operands = [OperandSource::Input(0), OperandSource::Input(1)];
    let gemm = OpGemm { kind, operands, extents: kind.extents(tokens, outputs, inputs) };
    let in_fp8 = move |formats: [Option<ScaledGemm>; 3]| -> Arc<dyn Op> {
        let Some(format) = formats[kind as usize] else { unreachable!("the op has one GEMM") };
        Arc::new(ScaledMatmul::new(format, out, bias))
    };
    Gemms { list: vec![gemm], in_fp8: Box::new(in_fp8) }
}

/// Cost of a GEMM whose sums have `k` products.
fn gemm_cost(k: usize, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
    let (m, n) = outputs[0].shape.rows_cols();
    let gemm = Arithmetic::Gemm { mnk: [m, n, k], operands: inputs[0].dtype, scaling: None };
    Cost::of_operands(gemm, inputs, outputs)
}

impl OnGpu for Linear {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE, cuda_row::SOURCE];
}

impl OnGpu for UnroundedLinear {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE];
}

impl OnGpu for LinearDgrad {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE];
}

impl OnGpu for LinearWgrad {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE];
}

impl OnGpu for BiasGrad {
    const SOURCES: &'static [KernelSource] = &[cuda_bias::SOURCE];
}
