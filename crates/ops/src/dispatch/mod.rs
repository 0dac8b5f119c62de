//! The rows of tokens by their experts: where each copy of a token goes, and what each row holds.
//!
//! A tensor of rows by experts is *ragged*: it has room for a fixed number of rows C, the most that any
//! routing needs. The rows of an expert are contiguous and begin at a multiple of `align`. Rows without a
//! token, between two experts and after the last, are zeros in every ragged tensor: its producer writes them.
//! Kernels read where experts begin; the host never reads it.
//!
//! Shape legend: k experts of a token, e experts, c rows of the capacity.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
pub(crate) mod samples;
#[cfg(test)]
mod tests;

use crate::matrix;
use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Differentiable, Op, OpError, Operand, Rebuild};
use xtrain_tensor::{DType, TensorType};

/// `ids_tk -> (starts i32[e+1], counts f32[e], rows_tk i32, sources_c i32)`: the first row of each expert and
/// the end of the last one, tokens of each expert, the row of each copy of a token, and for each row the copy
/// (token times k, plus its place among the token's experts) that it holds, or -1. Rows of an expert are in
/// the order of tokens.
///
/// A negative id has no row: its entry in `rows` is -1. The outputs are saved for the backward, never
/// recomputed, so no token counts twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// e: the number of experts.
    pub experts: usize,
    /// The multiple at which the rows of an expert begin.
    pub align: usize,
}

impl Dispatch {
    /// C: the rows that any routing of so many copies of tokens fits into. Each expert that has a token
    /// wastes at most `align - 1` rows.
    pub fn capacity(&self, copies: usize) -> usize {
        (copies + self.experts.min(copies) * (self.align - 1)) / self.align * self.align
    }
}

impl Op for Dispatch {
    fn name(&self) -> &'static str {
        "dispatch"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("dispatch", inputs, 1)?;
        matrix("ids", inputs[0])?;
        OpError::ensure(inputs[0].dtype == DType::I32, || format!("ids must be i32, not {}", inputs[0]))?;
        OpError::ensure(self.experts > 0 && self.align > 0, || {
            format!("{} experts, aligned to {}: both must be at least 1", self.experts, self.align)
        })?;
        Ok(vec![
            TensorType::new(DType::I32, [self.experts + 1]),
            TensorType::new(DType::F32, [self.experts]),
            inputs[0],
            TensorType::new(DType::I32, [self.capacity(inputs[0].numel())]),
        ])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }
}

impl Differentiable for Dispatch {
    /// Whole numbers have no gradient.
    fn backward(&self, _: &mut Backward<'_>) -> Result<(), OpError> {
        Ok(())
    }
}

impl OnGpu for Dispatch {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
