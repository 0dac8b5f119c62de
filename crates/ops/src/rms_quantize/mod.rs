//! The sum of the residual stream and the cast of its norm, in one op: the norm itself is never written. The
//! rewrite `sum_norm_cast` creates it.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use crate::quantize::{CastSource, Quantize};
use crate::rms_norm::Rms;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::TensorType;

/// `(x_td, delta_td, w_d[, scale]) -> (sum_td, rstd_t, casts)`: [`AddRmsNorm`](crate::rms_norm::AddRmsNorm)
/// with the outputs of the cast of y ([`Quantize`]) in place of y.
#[derive(Clone, Copy, Debug)]
pub struct RmsQuantize {
    /// Added to the mean square.
    pub eps: f32,
    /// The cast of y: by tiles, by blocks or with a delayed scale.
    pub cast: Quantize,
}

impl RmsQuantize {
    /// The op that writes the sum and 1/rms.
    fn rms(&self) -> Rms {
        Rms { eps: self.eps, adds: true, amax: false }
    }

    /// The types of the cast's inputs: the sum, 1/rms, and the op's inputs after x and delta.
    fn cast_inputs(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        Ok([self.rms().infer(&inputs[..2])?.as_slice(), &inputs[2..]].concat())
    }
}

impl Op for RmsQuantize {
    fn name(&self) -> &'static str {
        "rms_quantize"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(self.cast.source == CastSource::Norm && self.cast.is_local(), || {
            "rms_quantize casts a norm by tiles, by blocks or with a delayed scale".into()
        })?;
        OpError::arity(self.name(), inputs, self.cast.inputs())?;
        let cast_inputs = self.cast_inputs(inputs)?;
        let casts = self.cast.infer(&cast_inputs)?;
        Ok([&cast_inputs[..2], &casts].concat())
    }

    fn operand(&self, input: usize) -> Operand {
        if input > 1 { Operand::Full } else { Operand::Compute }
    }

    fn accumulates(&self, output: usize) -> bool {
        output == 2 + self.cast.amax()
    }
}

impl OnGpu for RmsQuantize {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
