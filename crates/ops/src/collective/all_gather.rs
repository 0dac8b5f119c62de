//! All-gather.

use super::{check_pieces, row};
use xtrain_program::{Collective, Cost, Groups, Op, OpError, Operand};
use xtrain_tensor::{Shape, TensorType};

/// `piece [p, ...] -> y [rows, ...]` of one type, any: the pieces of all ranks, one after the other from that
/// of the rank `first` on, without the padding after `rows` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllGather {
    /// The ranks that take part.
    pub groups: Groups,
    /// The rank of the first piece.
    pub first: usize,
    /// Rows of y, at most those of all pieces.
    pub rows: usize,
}

impl Op for AllGather {
    fn name(&self) -> &'static str {
        "all_gather"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("all_gather", inputs, 1)?;
        let row = row("all_gather", inputs[0])?;
        check_pieces(self.groups, self.first, inputs[0].shape[0], self.rows)?;
        let shape = Shape::new(&[&[self.rows], &*row].concat());
        Ok(vec![TensorType { shape, ..inputs[0] }])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn collective(&self) -> Option<(Collective, Groups)> {
        Some((Collective::AllGather { first: self.first }, self.groups))
    }

    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        Cost::of_collective(self.groups, inputs[0].bytes())
    }
}
