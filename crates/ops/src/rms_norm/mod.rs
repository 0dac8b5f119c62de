//! Root-mean-square normalisation (Zhang & Sennrich, arXiv 1910.07467), alone and fused with the residual
//! addition before it.
//!
//! y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps), computed in f32 (f64) inside whatever the element
//! type; rstd is saved.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

pub(crate) use cpu::scaled;

use crate::on_gpu::OnGpu;
use crate::quantize::{CastSource, Quantize};
use crate::{float_shaped, matrix};
use std::sync::Arc;
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Differentiable, Op, OpError, Operand, Rebuild, Role, Source, ValueId};
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

    /// y. 1/rms is a number a token, and costs as much as y.
    fn is_cheap(&self, output: usize) -> bool {
        output == 0
    }
}

impl Differentiable for RmsNorm {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let (x, rstd, w) = (cx.input(0), cx.output(1), cx.input(1));
        let [dx, dw] = grad(cx, &[dy, x, rstd, w], 1)?;
        cx.set_grad(0, dx)?;
        cx.set_grad(1, dw)
    }
}

/// `(x_td, delta_td, w_d) -> (sum_td, y_td, rstd_t)`: sum = x + delta, and y the norm of the sum as it is
/// stored (rounded).
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
        OpError::ensure(inputs[0] == inputs[1], || "x and what is added to it must have one type".into())?;
        float_shaped("the norm's weight", inputs[2], &[cols])?;
        Ok(vec![inputs[0], inputs[0], rstd(inputs[0], rows)])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 2 { Operand::Full } else { Operand::Compute }
    }

    /// y, from the sum. The sum itself would need what was added, and all that made that.
    fn is_cheap(&self, output: usize) -> bool {
        output == 1
    }

    /// With the sum saved, only the norm runs again.
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

/// `x_td -> rstd_t` or, adding, `(x_td, delta_td) -> (sum_td, rstd_t)`: [`RmsNorm`] or [`AddRmsNorm`] without
/// y, which a cast computes. With `amax` the weight w_d is the last input and the amax of y, `f32[1]`, the
/// last output. With `cast`, for sums and without `amax`, the inputs end with `w_d [, scale of y]` and the
/// outputs with those of the cast of y ([`Quantize`]).
#[derive(Clone, Copy, Debug)]
pub struct Rms {
    /// Added to the mean square.
    pub eps: f32,
    /// True if a second input is added to x first.
    pub adds: bool,
    /// True if it writes the amax of y.
    pub amax: bool,
    /// The cast of y: by tiles, by blocks or with a given scale.
    pub cast: Option<Quantize>,
}

impl Rms {
    /// The types of the cast's inputs: the sum, 1/rms, and the op's inputs after x and delta.
    fn cast_inputs(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (rows, _) = inputs[0].shape.rows_cols();
        [inputs[0], rstd(inputs[0], rows)].into_iter().chain(inputs[2..].iter().copied()).collect()
    }
}

impl Op for Rms {
    fn name(&self) -> &'static str {
        if self.cast.is_some() { "rms_quantize" } else { "rms" }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let own = 1 + usize::from(self.adds);
        let casts =
            |cast: Quantize| cast.source == CastSource::Norm && cast.is_local() && self.adds && !self.amax;
        OpError::ensure(self.cast.is_none_or(casts), || {
            "rms casts a norm where it adds and does not measure, by tiles, by blocks or with a scale that is given".into()
        })?;
        let further = self.cast.map_or(usize::from(self.amax), |cast| cast.inputs() - 2);
        OpError::arity(self.name(), inputs, own + further)?;
        let (rows, cols) = matrix("x", inputs[0])?;
        OpError::ensure(inputs[own - 1] == inputs[0], || {
            "x and what is added to it must have one type".into()
        })?;
        if self.amax {
            float_shaped("the norm's weight", inputs[own], &[cols])?;
        }
        let mut outputs = Vec::new();
        outputs.extend(self.adds.then_some(inputs[0]));
        outputs.push(rstd(inputs[0], rows));
        outputs.extend(self.amax.then_some(TensorType::new(DType::F32, [1])));
        if let Some(cast) = self.cast {
            outputs.extend(cast.infer(&self.cast_inputs(inputs))?);
        }
        Ok(outputs)
    }

    fn operand(&self, input: usize) -> Operand {
        if input > usize::from(self.adds) { Operand::Full } else { Operand::Compute }
    }

    fn accumulates(&self, output: usize) -> bool {
        self.cast.is_some_and(|cast| output == 2 + cast.amax())
    }
}

/// `(dy_td, x_td, rstd_t, w_d[, dresidual_td]) -> (dx_td, dw_d)`: with n = x * rstd, dx = rstd * (dy w - n
/// mean(dy w n)) + dresidual and dw = sum over tokens of dy n. dw accumulates. With `rematerialise` the
/// forward's y_td is the last output, in place of dy; with `amax` the amax of dx, `f32[1]`. It does one of
/// both at most.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormGrad {
    /// The element type of dw.
    pub out: DType,
    /// True if it also writes the forward's y.
    pub rematerialise: bool,
    /// True if it also writes the amax of dx.
    pub amax: bool,
}

impl Op for RmsNormGrad {
    fn name(&self) -> &'static str {
        "rms_norm_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(!(self.amax && self.rematerialise), || {
            "rms_norm_grad measures dx or makes y again".into()
        })?;
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
        outputs.extend(self.rematerialise.then_some(inputs[0]));
        outputs.extend(self.amax.then_some(TensorType::new(DType::F32, [1])));
        Ok(outputs)
    }

    /// dy dies here in a training step.
    fn in_place(&self) -> &[(usize, usize)] {
        if self.rematerialise { &[(2, 0)] } else { &[] }
    }

    fn operand(&self, input: usize) -> Operand {
        if matches!(input, 2 | 3) { Operand::Full } else { Operand::Compute }
    }

    fn accumulates(&self, output: usize) -> bool {
        output == 1
    }
}

/// The type of 1/rms, one a row.
fn rstd(x: TensorType, rows: usize) -> TensorType {
    TensorType::new(x.dtype.compute(), [rows])
}

/// The type of x * rstd * w for `(x_td, rstd_t, w_d)`, or an error about those.
pub(crate) fn scaled_type(inputs: &[TensorType]) -> Result<TensorType, OpError> {
    let (rows, cols) = matrix("x", inputs[0])?;
    float_shaped("rstd", inputs[1], &[rows])?;
    float_shaped("the norm's weight", inputs[2], &[cols])?;
    Ok(inputs[0])
}

/// Emits the backward; `weight` is the input of the norm's weight.
fn grad(cx: &mut Backward<'_>, inputs: &[ValueId], weight: usize) -> Result<[ValueId; 2], OpError> {
    let made = cx.emit(
        Role::Dgrad,
        RmsNormGrad { out: cx.grad_dtype(weight), rematerialise: false, amax: false },
        inputs,
    )?;
    Ok([made[0], made[1]])
}

impl OnGpu for RmsNorm {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for AddRmsNorm {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for Rms {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE, cuda::CAST];
}

impl OnGpu for RmsNormGrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
