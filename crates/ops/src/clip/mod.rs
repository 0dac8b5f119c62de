//! Gradient clipping by the global norm, and the flag that skips a step with a loss or gradient that is not
//! finite. Both are computed on the device, so that the host reads nothing.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::float_shaped;
use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// The least amax with which a step is skipped. It is finite, so that a step that is skipped for another
/// reason than its numbers has no number that is not.
pub const SKIPPED: f32 = f32::MAX;

/// `(norm [], loss [], applied u32[1] (, amax f32[1])) -> (applied' u32[1], coefficient [], skip u32[])`.
///
/// If norm and loss are finite and, if given, the amax of the values cast to FP8 is below [`SKIPPED`]:
/// applied' = applied + 1, coefficient = min(1, max_norm / (norm + 1e-6)), skip = 0. Otherwise the step must
/// change nothing: applied' = applied, coefficient = 0, skip = 1.
///
/// `applied` counts the updates so far (AdamW's t) and is updated in place. The coefficient has the compute
/// type of the norm. Source: Pascanu et al., "On the difficulty of training recurrent neural networks" (arXiv
/// 1211.5063), section 3.2, with the 1e-6 that PyTorch adds.
#[derive(Clone, Copy, Debug)]
pub struct Clip {
    /// Maximum global L2 norm; gradients with a larger one are scaled down to it. 0 turns clipping off.
    pub max_norm: f64,
}

impl Op for Clip {
    fn name(&self) -> &'static str {
        "clip"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(matches!(inputs.len(), 3 | 4), || {
            format!(
                "clip takes norm, loss, applied and, if wanted, amax: 3 or 4 inputs, not {}",
                inputs.len()
            )
        })?;
        OpError::ensure(self.max_norm >= 0.0 && self.max_norm.is_finite(), || {
            format!("the maximum gradient norm must be finite and at least 0, not {}", self.max_norm)
        })?;
        float_shaped("the norm", inputs[0], &[])?;
        float_shaped("the loss", inputs[1], &[])?;
        OpError::ensure(inputs[2] == TensorType::new(DType::U32, [1]), || {
            format!("the count of applied updates must be u32[1], not {}", inputs[2])
        })?;
        if let Some(amax) = inputs.get(3) {
            float_shaped("the amax", *amax, &[1])?;
        }
        let coefficient = TensorType::new(inputs[0].dtype.compute(), []);
        Ok(vec![inputs[2], coefficient, TensorType::new(DType::U32, [])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 2)]
    }
}

impl OnGpu for Clip {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
