//! Root-mean-square normalisation (Zhang & Sennrich, arXiv 1910.07467), alone and fused with the residual
//! addition before it.
//!
//! y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps), computed in f32 (f64) for every element type; rstd
//! is saved for the backward.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

pub(crate) use cpu::norm_from_rstd;
pub(crate) use cuda::{ROW, row_threads};

use crate::on_gpu::OnGpu;
use crate::{float_shaped, matrix};
use std::sync::Arc;
use xtrain_cuda::KernelSource;
use xtrain_program::{
    Backward, Collective, Differentiable, Instance, Op, OpError, Operand, Rebuild, Role, Source, ValueId,
};
use xtrain_tensor::{DType, TensorType};

/// `(x_td, w_d) -> (y_td, rstd_t)`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f32,
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("rms_norm", inputs, 2)?;
        let (rows, cols) = matrix("x", inputs[0])?;
        float_shaped("the norm's weight", inputs[1], &[cols])?;
        Ok(vec![inputs[0], rstd(inputs[0], rows)])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 1 { Operand::Full } else { Operand::Compute }
    }

    /// y is cheap; 1/rms is one number a token and costs as much as y.
    fn is_cheap(&self, output: usize) -> bool {
        output == 0
    }
}

impl Differentiable for RmsNorm {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let (x, rstd, w) = (cx.input(0), cx.output(1), cx.input(1));
        // Of the sum with which an earlier stage of a pipeline ends: the bits are those of `AddRmsNorm`.
        let is_receive =
            |i: &Instance| matches!(i.code.op().collective(), Some((Collective::Receive { .. }, _)));
        let residual = if cx.producer(0).is_some_and(is_receive) { cx.take_grad(0) } else { None };
        let inputs: Vec<ValueId> = [dy, x, rstd, w].into_iter().chain(residual).collect();
        let [dx, dw] = grad(cx, &inputs, 1)?;
        cx.set_grad(0, dx)?;
        cx.set_grad(1, dw)
    }
}

/// `(x_td, delta_td, w_d) -> (sum_td, y_td, rstd_t)`: sum = x + delta, and y is the norm of the rounded sum.
#[derive(Clone, Copy, Debug)]
pub struct AddRmsNorm {
    /// Added to the mean square.
    pub eps: f32,
}

impl Op for AddRmsNorm {
    fn name(&self) -> &'static str {
        "add_rms_norm"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("add_rms_norm", inputs, 3)?;
        let (rows, cols) = matrix("x", inputs[0])?;
        OpError::ensure(inputs[0] == inputs[1], || "x and delta must have one type".into())?;
        float_shaped("the norm's weight", inputs[2], &[cols])?;
        Ok(vec![inputs[0], inputs[0], rstd(inputs[0], rows)])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 2 { Operand::Full } else { Operand::Compute }
    }

    /// y is cheap: it needs only the sum. The sum needs delta, and everything that computes delta.
    fn is_cheap(&self, output: usize) -> bool {
        output == 1
    }

    /// With the sum saved, only the norm is recomputed.
    fn rebuild(&self, saved: &[bool]) -> Rebuild {
        if !saved[0] {
            return Rebuild::Same;
        }
        Rebuild::By {
            op: Arc::new(RmsNorm { eps: self.eps }),
            inputs: vec![Source::Output(0), Source::Input(2)],
            outputs: vec![1, 2],
        }
    }
}

impl Differentiable for AddRmsNorm {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let dx = match (cx.grad(0), cx.grad(1)) {
            (dsum, Some(dy)) => {
                let (sum, rstd, w) = (cx.output(0), cx.output(2), cx.input(2));
                let mut inputs = vec![dy, sum, rstd, w];
                inputs.extend(dsum);
                let [dx, dw] = grad(cx, &inputs, 2)?;
                cx.set_grad(2, dw)?;
                dx
            }
            (Some(dsum), None) => dsum,
            (None, None) => return Ok(()),
        };
        cx.set_grad(0, dx)?;
        cx.set_grad(1, dx)
    }
}

/// `(x_td[, delta_td][, w_d]) -> ([sum_td, ]rstd_t[, amax f32[1]])`: [`RmsNorm`], or [`AddRmsNorm`] if it
/// adds, without y, which a cast computes again.
#[derive(Clone, Copy, Debug)]
pub struct Rms {
    /// Added to the mean square.
    pub eps: f32,
    /// True if it adds delta to x first and writes the sum.
    pub adds: bool,
    /// True if it reads the weight and writes the amax of y.
    pub amax: bool,
}

impl Op for Rms {
    fn name(&self) -> &'static str {
        "rms"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let added = 1 + usize::from(self.adds);
        OpError::arity(self.name(), inputs, added + usize::from(self.amax))?;
        let (rows, cols) = matrix("x", inputs[0])?;
        OpError::ensure(inputs[added - 1] == inputs[0], || "x and delta must have one type".into())?;
        if self.amax {
            float_shaped("the norm's weight", inputs[added], &[cols])?;
        }
        let mut outputs = Vec::new();
        outputs.extend(self.adds.then_some(inputs[0]));
        outputs.push(rstd(inputs[0], rows));
        outputs.extend(self.amax.then_some(TensorType::new(DType::F32, [1])));
        Ok(outputs)
    }

    fn operand(&self, input: usize) -> Operand {
        if input > usize::from(self.adds) { Operand::Full } else { Operand::Compute }
    }
}

/// `(dy_td, x_td, rstd_t, w_d[, dresidual_td]) -> (dx_td, dw_d[, extra])`: with n = x * rstd, dx = rstd *
/// (dy w - n mean(dy w n)) + dresidual and dw = sum over tokens of dy n. dw accumulates.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormGrad {
    /// The element type of dw.
    pub out: DType,
    /// The third output.
    pub extra: ExtraOutput,
}

/// The third output of [`RmsNormGrad`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtraOutput {
    /// No third output.
    None,
    /// The forward's y_td, rematerialised in place of dy.
    Y,
    /// The amax of dx, `f32[1]`.
    Amax,
}

impl Op for RmsNormGrad {
    fn name(&self) -> &'static str {
        "rms_norm_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(matches!(inputs.len(), 4 | 5), || {
            format!("rms_norm_grad takes 4 or 5 inputs, not {}", inputs.len())
        })?;
        let (rows, cols) = matrix("dy", inputs[0])?;
        OpError::ensure(inputs[1] == inputs[0] && inputs.get(4).is_none_or(|r| *r == inputs[0]), || {
            "dy, x and the residual's gradient must have one type".into()
        })?;
        float_shaped("rstd", inputs[2], &[rows])?;
        float_shaped("the norm's weight", inputs[3], &[cols])?;
        let mut outputs = vec![inputs[0], TensorType::new(self.out, [cols])];
        match self.extra {
            ExtraOutput::None => {}
            ExtraOutput::Y => outputs.push(inputs[0]),
            ExtraOutput::Amax => outputs.push(TensorType::new(DType::F32, [1])),
        }
        Ok(outputs)
    }

    /// In a training step nothing reads dy afterwards.
    fn in_place(&self) -> &[(usize, usize)] {
        if self.extra == ExtraOutput::Y { &[(2, 0)] } else { &[] }
    }

    fn operand(&self, input: usize) -> Operand {
        if matches!(input, 2 | 3) { Operand::Full } else { Operand::Compute }
    }

    fn accumulates(&self, output: usize) -> bool {
        output == 1
    }
}

/// The type of 1/rms: a number for each row.
fn rstd(x: TensorType, rows: usize) -> TensorType {
    TensorType::new(x.dtype.compute(), [rows])
}

/// The type of the norm that is computed from `(x_td, rstd_t, w_d)`, or an error about these.
pub(crate) fn norm_from_rstd_type(inputs: &[TensorType]) -> Result<TensorType, OpError> {
    let (rows, cols) = matrix("x", inputs[0])?;
    float_shaped("rstd", inputs[1], &[rows])?;
    float_shaped("the norm's weight", inputs[2], &[cols])?;
    Ok(inputs[0])
}

/// Emits the backward; `weight` is the input of the norm's weight.
fn grad(cx: &mut Backward<'_>, inputs: &[ValueId], weight: usize) -> Result<[ValueId; 2], OpError> {
    let op = RmsNormGrad { out: cx.grad_dtype(weight), extra: ExtraOutput::None };
    let outputs = cx.emit(Role::Dgrad, op, inputs)?;
    Ok([outputs[0], outputs[1]])
}

impl OnGpu for RmsNorm {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for AddRmsNorm {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for Rms {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for RmsNormGrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
