//! The transpose of a matrix of FP8 numbers, and of their scales by blocks. Ranks gather the numbers of a
//! weight once, and transpose them for the GEMMs that read the other layout.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::matrix;
use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, Scaling, Shape, TILE, TensorType};

/// `x [rows, cols] -> y [cols, rows]` of one type whose elements are bytes: E4M3, E5M2, or U8.
#[derive(Clone, Copy, Debug)]
pub struct TransposeBytes;

impl Op for TransposeBytes {
    fn name(&self) -> &'static str {
        "transpose_bytes"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("transpose_bytes", inputs, 1)?;
        let (rows, cols) = matrix("x", inputs[0])?;
        OpError::ensure(inputs[0].dtype.bits() == 8, || {
            format!("x must be a matrix of bytes (e4m3, e5m2 or u8), not {}", inputs[0])
        })?;
        Ok(vec![TensorType { shape: Shape::new(&[cols, rows]), ..inputs[0] }])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

/// `inv_scale -> inv_scale` by blocks ([`Scaling::Block`]), of a matrix and of its transpose. Padding is 0.
#[derive(Clone, Copy, Debug)]
pub struct TransposeBlockScales {
    /// Columns of the matrix.
    pub cols: usize,
}

impl Op for TransposeBlockScales {
    fn name(&self) -> &'static str {
        "transpose_block_scales"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("transpose_block_scales", inputs, 1)?;
        let of = |rows, cols| TensorType::new(DType::F32, Scaling::Block.shape(rows, cols));
        let (down, _) = matrix("the scales", inputs[0])?;
        let rows = down * TILE;
        OpError::ensure(inputs[0] == of(rows, self.cols), || {
            format!("the scales must be {}, not {}", of(rows, self.cols), inputs[0])
        })?;
        Ok(vec![of(self.cols, rows)])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl OnGpu for TransposeBlockScales {
    const SOURCES: &'static [KernelSource] = &[cuda::BLOCK_SCALES];
}

impl OnGpu for TransposeBytes {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
