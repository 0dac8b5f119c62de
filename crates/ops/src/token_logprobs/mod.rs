//! The log-probabilities of given tokens, their ranks, and the likeliest tokens, from logits.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::linear_cross_entropy::IGNORED;
use crate::on_gpu::OnGpu;
use crate::{int_vector, matrix};
use xtrain_cuda::KernelSource;
use xtrain_program::{Cost, KernelCost, Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `(logits_tv, targets_t) -> (logprobs_t, ranks_t[, top_ids_tk, top_logprobs_tk])`. With lse = ln(sum_v
/// e^logit), a token's logprob is its logit - lse, in nats. Its rank is the number of tokens before it: those
/// with a higher logit, and those with the same logit and a lower id. So the likeliest token has rank 0.
///
/// Logits are f32 (f64), targets i32: [`IGNORED`] or in 0..v. An ignored target has logprob 0 and rank -1.
/// The top tokens are those of ranks 0 to k - 1, also where the target is ignored; ids and ranks are i32.
#[derive(Clone, Copy, Debug)]
pub struct TokenLogprobs {
    /// k, from 0 to [`TokenLogprobs::MAX_TOP`] and at most v. With 0, the outputs of top tokens are absent.
    pub top: usize,
}

impl TokenLogprobs {
    /// The most top tokens.
    pub const MAX_TOP: usize = 20;
}

impl Op for TokenLogprobs {
    fn name(&self) -> &'static str {
        "token_logprobs"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 2)?;
        let (tokens, vocab) = matrix("logits", inputs[0])?;
        let dtype = inputs[0].dtype;
        OpError::ensure(dtype.is_float() && dtype.compute() == dtype && tokens > 0 && vocab > 0, || {
            format!("logits must be f32 and not empty, not {}", inputs[0])
        })?;
        int_vector("targets", inputs[1], tokens)?;
        let most = Self::MAX_TOP.min(vocab);
        OpError::ensure(self.top <= most, || {
            format!("the top tokens of {vocab} may be at most {most}, not {}", self.top)
        })?;
        let mut outputs = vec![TensorType::new(dtype, [tokens]), TensorType::new(DType::I32, [tokens])];
        if self.top > 0 {
            outputs.extend([DType::I32, dtype].map(|dtype| TensorType::new(dtype, [tokens, self.top])));
        }
        Ok(outputs)
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    /// The logits are read once, and once more for each top token.
    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        let bytes = inputs[0].bytes() as f64;
        Cost { kernels: vec![KernelCost::of_bytes(bytes * (1 + self.top) as f64)], sent_bytes: 0.0 }
    }
}

impl OnGpu for TokenLogprobs {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
