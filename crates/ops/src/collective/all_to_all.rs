//! All-to-all.

use super::{check_pieces, row};
use xtrain_program::{Collective, Cost, Groups, Op, OpError, Operand};
use xtrain_tensor::{Shape, TensorType};

/// `x [rows, ...] -> y [n, piece_rows, ...]` of one type, any, for n ranks: x is cut into n pieces of
/// `piece_rows` rows, with zeros after its last row, and each is sent to its rank, the first one to the rank
/// `first`. `y[r]` is the piece that rank r sent.
///
/// With [`SumRanks`](crate::sum_ranks::SumRanks) after it, it is a reduce-scatter whose sums have a fixed
/// order and are f32 whatever is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllToAll {
    /// The ranks that take part.
    pub groups: Groups,
    /// The rank of the first piece.
    pub first: usize,
    /// Rows of a piece. All pieces have at least the rows of x.
    pub piece_rows: usize,
}

impl Op for AllToAll {
    fn name(&self) -> &'static str {
        "all_to_all"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("all_to_all", inputs, 1)?;
        let row = row("all_to_all", inputs[0])?;
        OpError::ensure(row.len() < 3, || {
            format!("the pieces of {} have no further extent for the ranks", inputs[0])
        })?;
        check_pieces(self.groups, self.first, self.piece_rows, inputs[0].shape[0])?;
        let shape = Shape::new(&[&[self.groups.size, self.piece_rows], &*row].concat());
        Ok(vec![TensorType { shape, ..inputs[0] }])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn collective(&self) -> Option<(Collective, Groups)> {
        Some((Collective::AllToAll { first: self.first }, self.groups))
    }

    fn cost(&self, _: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_collective(self.groups, outputs[0].bytes() / self.groups.size)
    }
}
