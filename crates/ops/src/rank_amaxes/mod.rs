//! The amaxes of a step over all ranks. Each rank packs its amaxes into a row ([`RankAmaxes`]). Ranks gather
//! a few amaxes; many, they exchange by pieces, like gradients. [`MaxAmaxes`] takes the maxima.

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

/// `(amaxes f32[k] of each of T tensors) -> amaxes f32[n]`, where n is the sum of all k.
#[derive(Clone, Copy, Debug)]
pub struct RankAmaxes;

impl Op for RankAmaxes {
    fn name(&self) -> &'static str {
        "rank_amaxes"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let length = |ty: &TensorType| match (ty.dtype, &*ty.shape) {
            (DType::F32, &[length]) => Ok(length),
            _ => Err(OpError(format!("rank_amaxes takes amaxes f32[k], not {ty}"))),
        };
        let all = inputs.iter().map(length).sum::<Result<_, _>>()?;
        Ok(vec![TensorType::new(DType::F32, [all])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

/// `amaxes f32[rows * n] or f32[rows, n] -> (amaxes f32[k] of each of T tensors)`: the maxima over the rows,
/// which are those of ranks, or single amaxes if n is 1. NaN where that of a row is NaN.
#[derive(Clone, Debug)]
pub struct MaxAmaxes {
    /// The number of amaxes of each tensor: k. n is their sum.
    pub lengths: Vec<usize>,
}

impl Op for MaxAmaxes {
    fn name(&self) -> &'static str {
        "max_amaxes"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("max_amaxes", inputs, 1)?;
        let (all, numel) = (self.lengths.iter().sum::<usize>(), inputs[0].numel());
        let is_rows = inputs[0].dtype == DType::F32 && numel > 0 && numel.is_multiple_of(all);
        OpError::ensure(is_rows, || format!("max_amaxes takes rows of {all} f32, not {}", inputs[0]))?;
        Ok(self.lengths.iter().map(|&length| TensorType::new(DType::F32, [length])).collect())
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
