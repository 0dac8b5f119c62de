//! The part of a tensor that a rank of a tensor group has: taken from the whole, put into its place, and
//! joined with those of the other ranks.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::matrix;
use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Cost, CutBy, Op, OpError, Operand, TensorCut};
use xtrain_tensor::{DType, Shape, TensorType};

/// `(whole, place u32[1]) -> part`, of one type of whole bytes: the part of the rank with this place, as
/// [`TensorCut`] says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakePart(pub TensorCut);

/// `(part, place u32[1]) -> whole`: the part of the rank with this place, and zeros in those of other ranks.
/// Of a gradient: the sum over the ranks is the gradient of the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacePart(pub TensorCut);

/// `parts [n*r, c] -> whole [r, n*c]`, of one type of whole bytes: the parts of n ranks, one after the other,
/// as columns of one matrix, in the order of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinColumns {
    /// n.
    pub ranks: usize,
}

/// The tensor that an op takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Whole,
    Part,
    /// The parts of all ranks.
    Parts,
}

/// Checks the inputs of either op, of which the first is this one.
fn check(name: &str, cut: &TensorCut, inputs: &[TensorType], side: Side) -> Result<(), OpError> {
    OpError::arity(name, inputs, 2)?;
    let (n, ty) = (cut.groups.size, inputs[0]);
    let of = if side == Side::Whole { "whole" } else { "part" };
    OpError::ensure(ty.dtype.bits().is_multiple_of(8) && matches!(ty.shape.len(), 1 | 2), || {
        format!("the {of} must be a vector or a matrix of whole bytes, not {ty}")
    })?;
    OpError::ensure(inputs[1] == TensorType::new(DType::U32, [1]), || {
        format!("the place must be u32[1], not {}", inputs[1])
    })?;
    let extent = match cut.by {
        CutBy::Rows(_) => ty.shape[0],
        CutBy::Columns => ty.shape[ty.shape.len() - 1],
    };
    let extent = if side == Side::Part { extent * n } else { extent };
    let runs = match &cut.by {
        CutBy::Rows(runs) => runs.clone(),
        CutBy::Columns => vec![extent],
    };
    OpError::ensure(n > 0 && runs.iter().all(|run| run.is_multiple_of(n)), || {
        format!("{n} ranks do not divide {runs:?}")
    })?;
    OpError::ensure(runs.iter().sum::<usize>() == extent, || {
        format!("the {of} {ty} does not have the runs {runs:?} of {n} ranks")
    })
}

impl Op for TakePart {
    fn name(&self) -> &'static str {
        "take_part"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        check("take_part", &self.0, inputs, Side::Whole)?;
        Ok(vec![self.0.part(inputs[0])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    /// It reads a part of the whole.
    fn cost(&self, _: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_bytes(2.0 * outputs[0].bytes() as f64)
    }
}

impl Op for PlacePart {
    fn name(&self) -> &'static str {
        "place_part"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        check("place_part", &self.0, inputs, Side::Part)?;
        Ok(vec![self.0.whole(inputs[0])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl Op for JoinColumns {
    fn name(&self) -> &'static str {
        "join_columns"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("join_columns", inputs, 1)?;
        let ((rows, cols), ty) = (matrix("parts", inputs[0])?, inputs[0]);
        let is_cut = self.ranks > 0 && rows.is_multiple_of(self.ranks) && ty.dtype.bits().is_multiple_of(8);
        OpError::ensure(is_cut, || {
            format!("the parts of {} ranks must be equally many rows of whole bytes, not {ty}", self.ranks)
        })?;
        Ok(vec![TensorType { shape: Shape::new(&[rows / self.ranks, cols * self.ranks]), ..ty }])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl OnGpu for JoinColumns {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for TakePart {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for PlacePart {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
