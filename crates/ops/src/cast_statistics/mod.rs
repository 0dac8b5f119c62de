//! The error of a cast to FP8: the tensor's range, the numbers that underflowed or saturated, and the L2 norm
//! of the difference.
//!
//! It reads the tensor and the outputs of [`Quantize`](crate::quantize::Quantize), so it measures the very
//! cast that a GEMM reads.

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
use xtrain_tensor::{DType, Scaling, TensorType};

/// `(x [R, C], q, inv_scale) -> (counts u32[4], sizes f32[3])`, where q is [R, C], or [C, R] if it is
/// `transposed`, with the scales of `scaling`.
///
/// The counts are the elements of x that are not zero; those of them that are zero in q (underflowed); those
/// that exceed the largest number of the format by half a step or more (saturated); and those that are not
/// finite, which nothing else includes. The sizes are the amax of x and the L2 norms of x and of x - q *
/// inv_scale, whose squares are summed in f64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CastStatistics {
    /// The elements of q that share a scale.
    pub scaling: Scaling,
    /// True if q is the transpose.
    pub transposed: bool,
}

impl Op for CastStatistics {
    fn name(&self) -> &'static str {
        "cast_statistics"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("cast_statistics", inputs, 3)?;
        let (rows, cols) = matrix("the tensor that was cast", inputs[0])?;
        let (high, wide) = if self.transposed { (cols, rows) } else { (rows, cols) };
        let is_cast =
            matches!(inputs[1].dtype, DType::E4M3 | DType::E5M2) && *inputs[1].shape == [high, wide];
        OpError::ensure(matches!(inputs[0].dtype, DType::F32 | DType::BF16) && is_cast, || {
            format!(
                "a cast of f32 or bf16 [{rows}, {cols}] is e4m3 or e5m2 [{high}, {wide}], not {} of {}",
                inputs[1], inputs[0]
            )
        })?;
        let scales = TensorType::new(DType::F32, self.scaling.shape(high, wide));
        OpError::ensure(inputs[2] == scales, || {
            format!("the scales of {} must be {scales}, not {}", inputs[1], inputs[2])
        })?;
        Ok(vec![TensorType::new(DType::U32, [4]), TensorType::new(DType::F32, [3])])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 0 { Operand::Compute } else { Operand::Full }
    }
}

impl OnGpu for CastStatistics {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
