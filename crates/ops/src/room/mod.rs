//! A room for the rows of experts that may be too small: the rows that a step needs, and the flag that stops
//! all updates from a step on whose rows do not fit.
//!
//! [`DispatchOwn`](crate::dispatch::DispatchOwn) leaves out rows that do not fit, so what such a step
//! computes is not applied. Nor are the steps after it that are in flight, since their results build on it.
//! The host then loads a program with more room, clears the flag, and repeats them.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::clip::SKIPPED;
use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Differentiable, Op, OpError, Operand, Rebuild};
use xtrain_tensor::{DType, TensorType};

/// `needed i32[1] -> rows f32[1]`: the rows that a block needs. The output accumulates as a maximum: over
/// micro-steps it is that of the micro-batch with the most. Rows are at most 2^24, so the number is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsNeeded;

/// `(rows f32[n], halted u32[1]) -> (halted' u32[1], blocked f32[1])`: halted' is 1 if halted is not 0 or if
/// any of the n blocks needs more than `room` rows, else 0; it is computed in place. `blocked` is
/// [`SKIPPED`] if halted' is 1, else 0: as an amax it makes [`Clip`](crate::clip::Clip) skip the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckRoom {
    /// The rows of a ragged tensor.
    pub room: usize,
}

impl Op for RowsNeeded {
    fn name(&self) -> &'static str {
        "rows_needed"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("rows_needed", inputs, 1)?;
        OpError::ensure(inputs[0] == TensorType::new(DType::I32, [1]), || {
            format!("the number of rows must be i32[1], not {}", inputs[0])
        })?;
        Ok(vec![TensorType::new(DType::F32, [1])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    /// Never: the output accumulates.
    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }
}

impl Differentiable for RowsNeeded {
    /// Whole numbers have no gradient.
    fn backward(&self, _: &mut Backward<'_>) -> Result<(), OpError> {
        Ok(())
    }
}

impl Op for CheckRoom {
    fn name(&self) -> &'static str {
        "check_room"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("check_room", inputs, 2)?;
        let is_rows = inputs[0].dtype == DType::F32 && inputs[0].shape.len() == 1;
        OpError::ensure(is_rows, || format!("rows must be f32[n], not {}", inputs[0]))?;
        OpError::ensure(inputs[1] == TensorType::new(DType::U32, [1]), || {
            format!("the flag must be u32[1], not {}", inputs[1])
        })?;
        Ok(vec![inputs[1], TensorType::new(DType::F32, [1])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 1)]
    }
}

impl OnGpu for RowsNeeded {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for CheckRoom {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
