//! Reduce-scatter.

use super::{check_pieces, row};
use xtrain_program::{Collective, Cost, Groups, Op, OpError, Operand};
use xtrain_tensor::{DType, Shape, TensorType};

/// `x f32 [rows, ...] -> y f32 [piece_rows, ...]`, or `[1, piece_rows, ...]` for
/// [`SumRanks`](crate::sum_ranks::SumRanks): the sum of the x of all ranks is cut into n pieces of
/// `piece_rows` rows, with zeros after its last row, the first of which belongs to the rank `first`. y is the
/// piece of this rank.
///
/// The communicator chooses the order of the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReduceScatter {
    /// The ranks that take part.
    pub groups: Groups,
    /// The rank of the first piece.
    pub first: usize,
    /// Rows of a piece. All pieces have at least the rows of x.
    pub piece_rows: usize,
    /// True if y has an extent of 1 before its rows.
    pub as_summand: bool,
}

impl Op for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce_scatter"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("reduce_scatter", inputs, 1)?;
        let row = row("reduce_scatter", inputs[0])?;
        OpError::ensure(inputs[0].dtype == DType::F32, || {
            format!("reduce_scatter adds tensors of f32, not {}", inputs[0])
        })?;
        OpError::ensure(!self.as_summand || row.len() < 3, || {
            format!("a piece of {} has no further extent", inputs[0])
        })?;
        check_pieces(self.groups, self.first, self.piece_rows, inputs[0].shape[0])?;
        let summand: &[usize] = if self.as_summand { &[1] } else { &[] };
        let shape = Shape::new(&[summand, &[self.piece_rows], &*row].concat());
        Ok(vec![TensorType { shape, ..inputs[0] }])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn collective(&self) -> Option<(Collective, Groups)> {
        Some((Collective::ReduceScatter { first: self.first }, self.groups))
    }

    /// As many bytes as in a ring: each rank sends a piece to the next one, n - 1 times.
    fn cost(&self, _: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_collective(self.groups, outputs[0].bytes())
    }
}
