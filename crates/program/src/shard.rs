//! The pass that spreads a step over ranks. It inserts ops that the caller passes in; model code and recipes
//! contain nothing about ranks.
//!
//! * Gradients (`reduce.rs`): each rank receives its piece of the gradients of all ranks and adds them in a
//!   fixed order; with [`crate::Reduce::Fast`] it receives its piece of their sum.
//! * State (`pieces.rs`): a rank has its rows of masters, moments and reduced gradients alone. What the
//!   forward and the backward read is gathered from all ranks after the update ([`crate::refresh`]).
//! * Replicas (`reduce.rs`): state is cut among the ranks of each replica, and gradients are summed over all.
//! * Experts (`parts.rs`) of which each rank has some alone: their FP8 copies have the scales of all.
//! * Weights (`weights.rs`), with [`crate::Shard::Weights`]: they are gathered for each block instead.
//! * Tensor groups: a rank takes its part of what is gathered, and sends the gradient of its part as that of
//!   the whole, with zeros elsewhere. State knows nothing of parts.
//!
//! With one process and sums of the same world the pass changes nothing.

mod parts;
mod pieces;
mod quantized;
mod reduce;
mod slots;
mod weights;

use crate::pipeline::PipelineOps;
use crate::quantize::QuantizeOps;
use crate::{
    Op, Parallel, ParameterCut, PassOps, Program, Quantization, RowShard, Storage, TENSOR_PLACE, TensorCut,
    TraceError, ValueId,
};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_tensor::{DType, TensorType};

/// The name of the input `u32[]` with the number of the micro-step, which sums for any world read.
pub const MICRO_STEP: &str = "micro_step";

/// The ops that the pass inserts.
pub trait ShardOps: PassOps + QuantizeOps + PipelineOps {
    /// The op that gathers the pieces of a parameter.
    fn all_gather(&self, cut: RowShard) -> Arc<dyn Op>;
    /// The op that sends each piece of a parameter to its rank.
    fn all_to_all(&self, cut: RowShard) -> Arc<dyn Op>;
    /// The op that adds the f32 tensors of all ranks and leaves each rank its piece of the sum, with an
    /// extent of 1 before it `as_summand` of [`ShardOps::sum_ranks`].
    fn reduce_scatter(&self, cut: RowShard, as_summand: bool) -> Arc<dyn Op>;
    /// The op that adds the pieces of all ranks, in f32, as the leaves of a binary tree.
    fn sum_ranks(&self) -> Arc<dyn Op>;
    /// The op that adds the gradient of a micro-step to the partial sums of a binary tree. Its inputs are the
    /// gradient, the number of the micro-step and the partial sums, which it updates in place.
    fn pairwise_add(&self) -> Arc<dyn Op>;
    /// The op that adds the gradient of the last micro-step and all partial sums. Its inputs are those of
    /// [`ShardOps::pairwise_add`].
    fn pairwise_total(&self) -> Arc<dyn Op>;
    /// The op that reduces the amax of a matrix, or of each of its columns.
    fn amaxes(&self, by_column: bool) -> Arc<dyn Op>;
    /// The op that packs amaxes of several tensors into a row, which ranks gather.
    fn rank_amaxes(&self) -> Arc<dyn Op>;
    /// The op that takes the maxima over the rows of all ranks, for so many amaxes of each tensor.
    fn max_amaxes(&self, lengths: Vec<usize>) -> Arc<dyn Op>;
    /// The op that casts some rows of a matrix in the `layouts` (row-major, transposed) that are true. Its
    /// further inputs are the delayed scale, if any, and with `amaxes` those of all rows, of the matrix or of
    /// its columns; a delayed scale that is not 0 takes precedence.
    fn quantize_rows(&self, quantization: Quantization, layouts: [bool; 2], amaxes: bool) -> Arc<dyn Op>;
    /// The op that takes a rank's part of a tensor. Its inputs are the tensor and [`TENSOR_PLACE`].
    fn take_part(&self, cut: &TensorCut) -> Arc<dyn Op>;
    /// The op that puts a rank's part of a tensor into its place, with zeros in those of other ranks. Its
    /// inputs are the part and [`TENSOR_PLACE`].
    fn place_part(&self, cut: &TensorCut) -> Arc<dyn Op>;
    /// The op that transposes a matrix of FP8 numbers.
    fn transpose_bytes(&self) -> Arc<dyn Op>;
    /// The op that transposes the scales by blocks of a matrix of so many columns.
    fn transpose_block_scales(&self, cols: usize) -> Arc<dyn Op>;
}

/// A parameter that the first and the last stage of a pipeline both have, and add the gradients of.
#[derive(Clone, Copy, Debug)]
pub struct Tie<'a> {
    /// Its name.
    pub parameter: &'a str,
    /// The place of the other of both stages in the pipeline.
    pub other: usize,
}

/// Spreads a program over the ranks of `parallel`, given the cut of each parameter by its name. `updates` is
/// true for a step that ends with an update, which needs the gradients of all ranks, and of both stages that
/// have a `tie`.
pub fn apply(
    mut program: Program,
    parallel: &Parallel,
    cuts: &HashMap<String, ParameterCut>,
    tie: Option<Tie<'_>>,
    updates: bool,
    ops: &dyn ShardOps,
) -> Result<Program, TraceError> {
    for parameter in &mut program.parameters {
        let is_cut =
            |cut: &&ParameterCut| cut.parts.size > 1 || (parallel.cuts_state() && cut.shard.groups.size > 1);
        parameter.amax_groups = cuts.get(&*parameter.name).filter(is_cut).map(|_| parallel.shard_groups());
    }
    parts::cast_with_scales_of_all(&mut program, parallel, cuts, ops);
    if parallel.cuts_weights() {
        program = weights::gather(program, parallel, cuts, ops)?;
    } else if parallel.cuts_state() {
        pieces::cut_state(&mut program, parallel.gather, cuts, ops);
    }
    if updates {
        program = reduce::reduce(program, parallel, cuts, tie, ops)?;
    }
    Ok(program)
}

/// The input [`TENSOR_PLACE`].
pub(crate) fn tensor_place(program: &mut Program) -> ValueId {
    let new = |program: &mut Program| {
        let storage = Storage::Input { name: TENSOR_PLACE.into() };
        program.add_value(TensorType::new(DType::U32, [1]), storage)
    };
    program.input(TENSOR_PLACE).unwrap_or_else(|| new(program))
}
