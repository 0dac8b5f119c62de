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

use crate::clip::SKIPPED;
use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Groups, Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// Words after those of squares and losses: 1 if an amax is not below [`SKIPPED`], 1 if the rank asks to
/// stop.
const FLAGS: usize = 2;

/// `(squares f64[] or f64[U], losses, stop u32[] (, amax f32[1])) -> words f64[1, U + ck + 2]`.
///
/// `losses` are `loss f32[], objective f32[] (, sources f32[S, 2])`, the rank's terms of those of the step,
/// with k = 1 and c = 2 + 2S; or one input f32[k, c], the same terms of each of its k micro-batches.
/// `sources` are the sums of losses of S sources, if any. `amax` is that of the values cast to FP8, if any;
/// `stop` is not 0 if the rank asks to end the run. The words are the squares, k losses, k objectives, k of
/// each number of the sources, and two flags.
#[derive(Clone, Copy, Debug)]
pub struct RankWords;

/// The losses among the inputs of [`RankWords`].
#[derive(Clone, Copy)]
struct Losses {
    micro_batches: usize,
    /// Numbers of a micro-batch.
    columns: usize,
    /// Index of `stop`, the input after them.
    stop: usize,
}

impl RankWords {
    fn losses(inputs: &[TensorType]) -> Losses {
        match (&*inputs[1].shape, inputs.get(3).map(|input| &*input.shape)) {
            (&[micro_batches, columns], _) => Losses { micro_batches, columns, stop: 2 },
            (_, Some(&[sources, 2])) => Losses { micro_batches: 1, columns: 2 + 2 * sources, stop: 4 },
            _ => Losses { micro_batches: 1, columns: 2, stop: 3 },
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
            inputs.get(1)?;
            let Losses { micro_batches, columns, stop } = Self::losses(inputs);
            let (of_losses, rest) = rest.split_at_checked(stop - 1)?;
            let are_losses = match of_losses {
                [table] => table.dtype == DType::F32 && columns >= 2 && columns.is_multiple_of(2),
                [loss, objective, sources @ ..] => {
                    [*loss, *objective] == [number; 2] && sources.iter().all(|s| s.dtype == DType::F32)
                }
                [] => false,
            };
            let is_rest = !rest.is_empty() && after_losses.starts_with(rest);
            (is_vector && are_losses && is_rest).then_some(squares.numel() + columns * micro_batches + FLAGS)
        };
        let words = is_valid().ok_or_else(|| {
            OpError(format!(
                "rank_words takes squares f64[] or f64[U], loss and objective f32[] and, with S sources, their sums f32[S, 2], or all \
                 of these of micro-batches f32[k, 2 + 2S], a flag u32[] and, if wanted, an amax f32[1], not {inputs:?}"
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
    /// The units of the pieces of each gradient, or one unit of all gradients.
    Pieces(Vec<PieceUnits>),
    /// Those of each stage of a pipeline, whose gradients so many ranks have. Words after those of a stage
    /// with fewer are not read.
    OfStages {
        /// Ranks of a stage.
        ranks: usize,
        /// The pieces of each stage, in the order of stages.
        pieces: Vec<Vec<PieceUnits>>,
    },
}

/// The units of a gradient, and their place among the words of all ranks.
#[derive(Clone, Copy)]
struct PlacedUnits {
    units: PieceUnits,
    /// The first rank of the stage.
    first_rank: usize,
    /// Words of a rank before them.
    before: usize,
}

impl PlacedUnits {
    /// The ranks that have the pieces, in the order of its rows.
    fn ranks(self) -> impl Iterator<Item = usize> {
        self.units.ranks().map(move |rank| self.first_rank + rank)
    }
}

impl Squares {
    /// Words of the squares of a rank.
    pub fn words(&self) -> usize {
        let words = |pieces: &Vec<PieceUnits>| pieces.iter().map(|piece| piece.units).sum();
        match self {
            Squares::Whole => 1,
            Squares::Pieces(pieces) => words(pieces),
            Squares::OfStages { pieces, .. } => pieces.iter().map(words).max().unwrap_or(0),
        }
    }

    /// The units of all gradients, in order.
    fn placed(&self) -> Vec<PlacedUnits> {
        let of_stage = |first_rank: usize, pieces: &[PieceUnits]| -> Vec<PlacedUnits> {
            let place = |before: &mut usize, units: &PieceUnits| {
                *before += units.units;
                Some(PlacedUnits { units: *units, first_rank, before: *before - units.units })
            };
            pieces.iter().scan(0, place).collect()
        };
        match self {
            Squares::Whole => Vec::new(),
            Squares::Pieces(pieces) => of_stage(0, pieces),
            Squares::OfStages { ranks, pieces } => {
                let stages = pieces.iter().enumerate();
                stages.flat_map(|(stage, pieces)| of_stage(stage * ranks, pieces)).collect()
            }
        }
    }
}

/// The units of a gradient, of which ranks have pieces. Words of other ranks are not read: they are of the
/// same pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceUnits {
    /// Ranks that have different parts of the gradient, in the order of its rows.
    pub parts: Groups,
    /// Ranks that have a piece of a part each.
    pub shard: Groups,
    /// The place of the first piece in `shard`.
    pub first: usize,
    /// Units of a piece.
    pub units: usize,
}

impl PieceUnits {
    /// A unit that every rank has.
    pub const WHOLE: PieceUnits =
        PieceUnits { parts: Groups::world(1), shard: Groups::world(1), first: 0, units: 1 };

    /// The ranks that have the pieces, in the order of its rows.
    fn ranks(self) -> impl Iterator<Item = usize> {
        let PieceUnits { parts, shard, first, .. } = self;
        let of_part = move |part: usize| {
            let place = move |piece: usize| (first + piece) % shard.size;
            (0..shard.size).map(move |piece| part * parts.stride + place(piece) * shard.stride)
        };
        (0..parts.size).flat_map(of_part)
    }
}

/// `words f64[n, U + ck + 2] -> (grad_norm f32[], loss f32[], objective f32[], amax f32[1], stop u32[]
/// (, sources f32[S, 2]))` from the words of n ranks ([`RankWords`]).
///
/// The norm is the root of the sum of squares. They are added in f64: the units of a gradient in the order of
/// pieces and within them, then the gradients. The losses are those of micro-batches, which are added in f64:
/// the first of each rank, in the order of ranks, then the second of each, and so on. If ranks compute parts
/// of a micro-batch, theirs are added first, in f32, as a binary tree. The amax is
/// [`SKIPPED`] if that of any rank is not below it, and 0 otherwise. `stop` is 1 if any rank asks to stop.
#[derive(Clone, Debug)]
pub struct StepTotals {
    /// The squares.
    pub squares: Squares,
    /// Micro-batches of a rank, each with a loss.
    pub micro_batches: usize,
    /// Number of sources whose losses are summed separately.
    pub sources: usize,
    /// Neighbouring ranks that compute parts of a micro-batch: a power of two, at most [`MAX_PARTS`].
    pub parts: usize,
}

/// The most ranks that compute parts of a micro-batch.
pub const MAX_PARTS: usize = 8;

impl StepTotals {
    /// Numbers of the losses of a micro-batch.
    fn columns(&self) -> usize {
        2 + 2 * self.sources
    }

    /// Words of a rank.
    fn words(&self) -> usize {
        self.squares.words() + self.columns() * self.micro_batches + FLAGS
    }
}

impl Op for StepTotals {
    fn name(&self) -> &'static str {
        "step_totals"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("step_totals", inputs, 1)?;
        OpError::ensure(self.parts.is_power_of_two() && self.parts <= MAX_PARTS, || {
            format!("{} ranks cannot be parts: 1, 2, 4 or {MAX_PARTS} can", self.parts)
        })?;
        let last = self.squares.placed().into_iter().flat_map(PlacedUnits::ranks).max();
        let least = last.map_or(1, |last| last + 1);
        let is_words = inputs[0].dtype == DType::F64
            && matches!(*inputs[0].shape, [ranks, words] if ranks >= least && words == self.words())
            && inputs[0].shape[0].is_multiple_of(self.parts);
        OpError::ensure(is_words, || {
            format!(
                "step_totals takes f64[ranks, {}] of at least {least} ranks, a multiple of {}, not {}",
                self.words(),
                self.parts,
                inputs[0]
            )
        })?;
        let number = TensorType::new(DType::F32, []);
        let amax = TensorType::new(DType::F32, [1]);
        let sources = (self.sources > 0).then(|| TensorType::new(DType::F32, [self.sources, 2]));
        let totals = [number, number, number, amax, TensorType::new(DType::U32, [])];
        Ok(totals.into_iter().chain(sources).collect())
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
