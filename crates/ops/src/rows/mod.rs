//! Tensors that are joined by rows, and cut into rows again: those of the ranks of a tensor group for which
//! one process computes ([`xtrain_program::fold`]).

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{Shape, TensorType};

/// `x_0 .. x_n -> y`, of one type of whole bytes, any: the tensors one after the other, or their lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinRows {
    /// `[...] -> [n, ...]`.
    Stacked,
    /// `[p, ...] -> [rows, ...]`: without the padding after so many rows, at most n * p.
    Rows(usize),
    /// `[p, ...] -> [n * p, ...]`: each tensor has so many lines of equally many rows. The first line of all
    /// tensors, then the second of all, and so on.
    Lines(usize),
}

/// `x [r, ...] -> y_0 .. y_n [p, ...]`, of one type of whole bytes, any: p rows each, with zeros after the
/// last of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitRows {
    /// n: tensors.
    pub parts: usize,
    /// p: rows of each. The tensors have at least the rows of x.
    pub rows: usize,
}

/// Checks that a tensor ends with a whole byte.
fn whole_bytes(op: &str, ty: TensorType) -> Result<(), OpError> {
    OpError::ensure(ty.dtype.bits().is_multiple_of(8), || format!("{op} moves whole bytes, not {ty}"))
}

impl Op for JoinRows {
    fn name(&self) -> &'static str {
        "join_rows"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let Some(&first) = inputs.first() else {
            return Err(OpError("join_rows takes at least one tensor".into()));
        };
        whole_bytes("join_rows", first)?;
        if let Some(other) = inputs.iter().find(|ty| **ty != first) {
            return Err(OpError(format!("join_rows takes tensors of one type, not {first} and {other}")));
        }
        let shape = match (self, first.shape.split_first()) {
            (JoinRows::Stacked, _) => [&[inputs.len()], &first.shape[..]].concat(),
            (&JoinRows::Rows(rows), Some((&each, row))) if rows <= inputs.len() * each => {
                [&[rows], row].concat()
            }
            (&JoinRows::Lines(lines), Some((&each, row))) if lines > 0 && each.is_multiple_of(lines) => {
                [&[inputs.len() * each], row].concat()
            }
            (JoinRows::Lines(lines), _) => {
                return Err(OpError(format!("{first} does not have {lines} lines of equally many rows")));
            }
            (JoinRows::Rows(rows), _) => {
                return Err(OpError(format!("{} tensors {first} do not have {rows} rows", inputs.len())));
            }
        };
        Ok(vec![TensorType { shape: Shape::new(&shape), ..first }])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl Op for SplitRows {
    fn name(&self) -> &'static str {
        "split_rows"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("split_rows", inputs, 1)?;
        whole_bytes("split_rows", inputs[0])?;
        let SplitRows { parts, rows } = *self;
        match inputs[0].shape.split_first() {
            Some((&held, row)) if held <= parts * rows => {
                let part = TensorType { shape: Shape::new(&[&[rows], row].concat()), ..inputs[0] };
                Ok(vec![part; parts])
            }
            _ => Err(OpError(format!("{} does not fit into {parts} tensors of {rows} rows", inputs[0]))),
        }
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl OnGpu for JoinRows {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for SplitRows {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
