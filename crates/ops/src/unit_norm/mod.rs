//! The global L2 norm of the gradients in an order that does not depend on how they are cut among ranks.
//!
//! A gradient consists of units, of which each rank has whole ones. The squares of a unit are summed by
//! themselves, then the sums of a gradient's units in their order, then those of the gradients. Zeros at the
//! end of a unit do not change its sum, so a piece with padding has the sums of the gradient.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::grad_norm::compute_type;
use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `(g_0, g_1, ...) -> sums f64 [U]`: the sum of squares of each unit of each gradient, in order. The units
/// of a gradient have equally many elements; the last one may have fewer.
#[derive(Clone, Debug)]
pub struct UnitSquares {
    /// Elements of a unit of each gradient, at least 1.
    pub unit_elements: Vec<usize>,
}

/// `(g_0, g_1, ...) -> sum f64 []`: the sum of all squares, in the order of units ([`UnitSquares`]).
#[derive(Clone, Debug)]
pub struct UnitSquaredNorm {
    /// Elements of a unit of each gradient, at least 1.
    pub unit_elements: Vec<usize>,
}

/// The number of units of each gradient.
///
/// # Errors
/// The gradients are not all f64, or all f32 or bf16, or a unit has no elements.
fn counts(op: &str, gradients: &[TensorType], unit_elements: &[usize]) -> Result<Vec<usize>, OpError> {
    compute_type(op, gradients)?;
    let has_one_each = unit_elements.len() == gradients.len() && !unit_elements.contains(&0);
    OpError::ensure(has_one_each, || {
        format!(
            "{op} of {} gradients needs the size of a unit of each, not {unit_elements:?}",
            gradients.len()
        )
    })?;
    Ok(gradients.iter().zip(unit_elements).map(|(grad, unit)| grad.numel().div_ceil(*unit)).collect())
}

impl Op for UnitSquares {
    fn name(&self) -> &'static str {
        "unit_squares"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let units = counts(self.name(), inputs, &self.unit_elements)?.into_iter().sum::<usize>();
        Ok(vec![TensorType::new(DType::F64, [units])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl Op for UnitSquaredNorm {
    fn name(&self) -> &'static str {
        "unit_squared_norm"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        counts(self.name(), inputs, &self.unit_elements)?;
        Ok(vec![TensorType::new(DType::F64, [])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl OnGpu for UnitSquares {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for UnitSquaredNorm {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
