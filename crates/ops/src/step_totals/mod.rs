//! Sums over ranks of a few numbers of each, in a fixed order: the update of a step decides by them.
//!
//! Each rank packs its numbers into 64-bit words ([`RankWords`]), one all-gather gives every rank all words,
//! and each adds them in the same order ([`StepTotals`]). So all ranks clip by the same norm, skip the same
//! steps, report the same loss and end after the same step, to the bit.
//!
//! If the result must not depend on the number of ranks, a rank has words for the losses of each of its
//! micro-batches and for the squares of each of its units ([`UnitSquares`](crate::unit_norm::UnitSquares)).

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

/// Words after those of squares and losses: 1 if an amax is not finite, 1 if the rank wishes to stop.
const FLAGS: usize = 2;

/// `(squares f64[] or f64[U], losses, stop u32[] (, amax f32[1])) -> words f64[1, U + 2k + 2]`.
///
/// `losses` are `loss f32[], objective f32[]`, the rank's terms of those of the step, with k = 1; or one
/// input f32[k, 2], both terms of each of its k micro-batches. `amax` is that of the values cast to FP8, if
/// any; `stop` is not 0 if the rank wishes to end the run. The words are the squares, k losses, k objectives
/// and two flags.
#[derive(Clone, Copy, Debug)]
pub struct RankWords;

impl RankWords {
    /// The number of micro-batches whose losses are given, and the index of `stop` among the inputs.
    fn losses(inputs: &[TensorType]) -> (usize, usize) {
        match *inputs[1].shape {
            [micro_batches, 2] => (micro_batches, 2),
            _ => (1, 3),
        }
    }
}

impl Op for RankWords {
    fn name(&self) -> &'static str {
        "rank_words"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let number = TensorType::new(DType::F32, []);
        let after_losses = [TensorType::new(DType::U32, []), TensorType::new(DType::F32, [1])];
        let is_valid = || -> Option<usize> {
            let (squares, rest) = inputs.split_first()?;
            let is_vector = squares.dtype == DType::F64 && squares.shape.len() <= 1;
            let (losses, stop) = Self::losses(inputs.get(..2)?);
            let (of_losses, rest) = rest.split_at_checked(stop - 1)?;
            let are_losses =
                of_losses == [number; 2] || of_losses == [TensorType::new(DType::F32, [losses, 2])];
            let is_rest = !rest.is_empty() && after_losses.starts_with(rest);
            (is_vector && are_losses && is_rest).then_some(squares.numel() + 2 * losses + FLAGS)
        };
        let words = is_valid().ok_or_else(|| {
            OpError(format!(
                "rank_words takes squares f64[] or f64[U], loss and objective f32[] or both of micro-batches f32[k, 2], a flag u32[] \
                 and, if wanted, an amax f32[1], not {inputs:?}"
            ))
        })?;
        Ok(vec![TensorType::new(DType::F64, [1, words])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

/// The squares among the words of a rank.
#[derive(Clone, Debug)]
pub enum Squares {
    /// One word: the squared norm of all gradients, which every rank has.
    Whole,
    /// The units of a piece of each gradient, or one unit of all gradients.
    Pieces(Vec<PieceUnits>),
}

/// The units of the pieces of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceUnits {
    /// The rank of the first piece.
    pub first: usize,
    /// Units of a piece.
    pub units: usize,
}

/// `words f64[n, U + 2k + 2] -> (grad_norm f32[], loss f32[], objective f32[], amax f32[1], stop u32[])` from
/// the words of n ranks ([`RankWords`]).
///
/// The norm is the root of the sum of squares. They are added in f64: the units of a gradient in the order of
/// pieces and within them, then the gradients. The losses are those of micro-batches, which are added in f64:
/// the first of each rank, in the order of ranks, then the second of each, and so on. The amax is infinite if
/// that of any rank is not finite, and 0 otherwise. `stop` is 1 if any rank wishes to stop.
#[derive(Clone, Debug)]
pub struct StepTotals {
    /// The squares.
    pub squares: Squares,
    /// Micro-batches of a rank, each with a loss.
    pub micro_batches: usize,
}

impl StepTotals {
    /// Words of the squares of a rank.
    fn square_words(&self) -> usize {
        match &self.squares {
            Squares::Whole => 1,
            Squares::Pieces(pieces) => pieces.iter().map(|piece| piece.units).sum(),
        }
    }

    /// Words of a rank.
    fn words(&self) -> usize {
        self.square_words() + 2 * self.micro_batches + FLAGS
    }
}

impl Op for StepTotals {
    fn name(&self) -> &'static str {
        "step_totals"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("step_totals", inputs, 1)?;
        let is_words = inputs[0].dtype == DType::F64
            && matches!(*inputs[0].shape, [ranks, words] if ranks > 0 && words == self.words());
        OpError::ensure(is_words, || {
            format!("step_totals takes f64[ranks, {}], not {}", self.words(), inputs[0])
        })?;
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
