//! The amaxes of a matrix, apart from its cast: ranks that have rows of one matrix cast them with the amaxes
//! of all rows.

use super::cpu::{Matrix, Regions};
use super::{Layouts, Quantize, is_plain};
use crate::matrix;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{CpuKernel, DType, Scaling, TensorType, View, ViewMut};

/// `x [R, C] -> amax f32[1]`, or with `by_column` `x [R, C] -> amaxes f32[C]`: the magnitude of x, or of each
/// of its columns, with the largest bits; a NaN if there is one. [`Quantize`] takes them as
/// [`super::Given::Amax`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Amaxes {
    /// True for an amax of each column instead of one for the matrix.
    pub by_column: bool,
}

impl Amaxes {
    /// The cast that reduces the same amaxes: columns are rows of the transpose.
    pub(super) fn cast(self) -> Quantize {
        let scaling = if self.by_column { Scaling::Row } else { Scaling::Tensor };
        Quantize::new(DType::E4M3, scaling, true, Layouts::Transposed)
    }
}

impl Op for Amaxes {
    fn name(&self) -> &'static str {
        "amaxes"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("amaxes", inputs, 1)?;
        let (rows, cols) = matrix("the operand of amaxes", inputs[0])?;
        OpError::ensure(rows > 0 && cols > 0 && is_plain(inputs[0].dtype), || {
            format!("amaxes takes f32 or bf16 that is not empty, not {}", inputs[0])
        })?;
        Ok(vec![TensorType::new(DType::F32, [if self.by_column { cols } else { 1 }])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl CpuKernel for Amaxes {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let x = Matrix { view: inputs[0], transposed: true };
        let (rows, cols) = x.extents();
        outputs[0].write::<f32>(&Regions::new(self.cast().scaling, rows, cols).amaxes(&x));
    }
}
