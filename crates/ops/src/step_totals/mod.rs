//! Sums over ranks of a few numbers of each, in the order of ranks: the update of a step decides by them.
//!
//! Each rank packs its numbers into 64-bit words ([`RankWords`]), one all-gather gives every rank all words,
//! and each adds them in the same order ([`StepTotals`]). So all ranks clip by the same norm, skip the same
//! steps, report the same loss and end after the same step, to the bit.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// Words of a rank: squared norm, loss, objective, 1 if an amax is not finite, 1 if the rank wishes to stop.
pub const WORDS: usize = 5;

/// `(squared_norm f64[], loss f32[], objective f32[], stop u32[] (, amax f32[1])) -> words f64[1, 5]`.
///
/// The loss and the objective are the rank's terms of those of the step. `amax` is that of the values cast to
/// FP8, if any; `stop` is not 0 if the rank wishes to end the run.
#[derive(Clone, Copy, Debug)]
pub struct RankWords;

impl Op for RankWords {
    fn name(&self) -> &'static str {
        "rank_words"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let number = TensorType::new(DType::F32, []);
        let expected = [
            TensorType::new(DType::F64, []),
            number,
            number,
            TensorType::new(DType::U32, []),
            TensorType::new(DType::F32, [1]),
        ];
        OpError::ensure(inputs.len() >= 4 && expected.starts_with(inputs), || {
            format!(
                "rank_words takes a squared norm f64[], loss and objective f32[], a flag u32[] and, if wanted, an amax f32[1], not {inputs:?}"
            )
        })?;
        Ok(vec![TensorType::new(DType::F64, [1, WORDS])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

/// `words f64[n, 5] -> (grad_norm f32[], loss f32[], objective f32[], amax f32[1], stop u32[])` from the
/// words of n ranks.
///
/// Words are added in f64 in the order of ranks. The norm is the root of the sum of squared norms. The amax
/// is infinite if that of any rank is not finite, and 0 otherwise. `stop` is 1 if any rank wishes to stop.
#[derive(Clone, Copy, Debug)]
pub struct StepTotals {
    /// True if each rank has all gradients instead of a part of them. All squared norms are then equal, and
    /// the norm is the root of the first.
    pub has_whole_gradients: bool,
}

impl Op for StepTotals {
    fn name(&self) -> &'static str {
        "step_totals"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("step_totals", inputs, 1)?;
        let is_words =
            inputs[0].dtype == DType::F64 && matches!(*inputs[0].shape, [ranks, WORDS] if ranks > 0);
        OpError::ensure(is_words, || format!("step_totals takes f64[ranks, {WORDS}], not {}", inputs[0]))?;
        let number = TensorType::new(DType::F32, []);
        Ok(vec![number, number, number, TensorType::new(DType::F32, [1]), TensorType::new(DType::U32, [])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl OnGpu for RankWords {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for StepTotals {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
