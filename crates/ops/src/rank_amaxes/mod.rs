//! The amaxes of a step over all ranks. Each rank packs its amaxes into a row ([`RankAmaxes`]), one
//! all-gather gives every rank all rows, and each takes the maxima ([`MaxAmaxes`]).

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

/// The type of an amax.
fn amax() -> TensorType {
    TensorType::new(DType::F32, [1])
}

/// `(amax f32[1] of each of T tensors) -> amaxes f32[1, T]`.
#[derive(Clone, Copy, Debug)]
pub struct RankAmaxes;

impl Op for RankAmaxes {
    fn name(&self) -> &'static str {
        "rank_amaxes"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        match inputs.iter().find(|ty| **ty != amax()) {
            None => Ok(vec![TensorType::new(DType::F32, [1, inputs.len()])]),
            Some(other) => Err(OpError(format!("rank_amaxes takes amaxes f32[1], not {other}"))),
        }
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

/// `amaxes f32[n, T] -> (amax f32[1] of each of T tensors)`: the maximum over n ranks, NaN if that of a rank
/// is NaN.
#[derive(Clone, Copy, Debug)]
pub struct MaxAmaxes;

impl Op for MaxAmaxes {
    fn name(&self) -> &'static str {
        "max_amaxes"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("max_amaxes", inputs, 1)?;
        match (inputs[0].dtype, &*inputs[0].shape) {
            (DType::F32, &[ranks, tensors]) if ranks > 0 => Ok(vec![amax(); tensors]),
            _ => Err(OpError(format!("max_amaxes takes f32[ranks, tensors], not {}", inputs[0]))),
        }
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl OnGpu for RankAmaxes {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for MaxAmaxes {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
