//! The sum of a tensor over micro-steps as a binary tree, whose order depends on the number of a micro-step
//! alone.
//!
//! The partial sums are a binary counter: level l holds the sum of 2^l micro-steps. A micro-step is added to
//! the levels from the lowest on, as long as they are taken, and left in the first free one
//! ([`PairwiseAdd`]). The last micro-step is added to all levels that are taken ([`PairwiseTotal`]). If the
//! leaves are sums over ranks ([`SumRanks`](crate::sum_ranks::SumRanks)), whose number is a power of two,
//! that is one tree over all micro-batches of a step, whatever the number of ranks.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, Shape, TensorType};

/// `(x f32 [...], micro_step u32[], levels f32 [L, ...]) -> levels'`, in place.
///
/// `v = x`; for l = 0, 1, ... while bit l of the micro-step's number is set,
/// `v = levels[l] + v`; then `levels[l] = v`. Nothing is stored if l is L.
#[derive(Clone, Copy, Debug)]
pub struct PairwiseAdd;

/// `(x f32 [...], micro_step u32[], levels f32 [L, ...]) -> total f32 [...]`.
///
/// With the bits of the number of the micro-step: `total = x`; for each bit l that is set, from the lowest
/// on, `total = levels[l] + total`.
#[derive(Clone, Copy, Debug)]
pub struct PairwiseTotal;

/// Checks the inputs of both ops.
fn check(op: &str, inputs: &[TensorType]) -> Result<(), OpError> {
    OpError::arity(op, inputs, 3)?;
    let [x, micro_step, levels] = [inputs[0], inputs[1], inputs[2]];
    let is_counter = levels
        .shape
        .split_first()
        .is_some_and(|(&n, rest)| (1..=32).contains(&n) && Shape::new(rest) == x.shape);
    let are_f32 = [x, levels].iter().all(|ty| ty.dtype == DType::F32);
    OpError::ensure(are_f32 && is_counter && micro_step == TensorType::new(DType::U32, []), || {
        format!(
            "{op} takes x f32[...], the number of a micro-step u32[] and 1 to 32 levels f32[L, ...], not {x}, {micro_step} and {levels}"
        )
    })
}

impl Op for PairwiseAdd {
    fn name(&self) -> &'static str {
        "pairwise_add"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        check(self.name(), inputs)?;
        Ok(vec![inputs[2]])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 2)]
    }
}

impl Op for PairwiseTotal {
    fn name(&self) -> &'static str {
        "pairwise_total"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        check(self.name(), inputs)?;
        Ok(vec![inputs[0]])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl OnGpu for PairwiseAdd {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for PairwiseTotal {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
