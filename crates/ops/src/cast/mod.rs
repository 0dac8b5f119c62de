//! Conversion between f64, f32 and bf16.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `x -> y` of the same shape: x in the type `to`, rounded to nearest even if `to` is narrower.
#[derive(Clone, Copy, Debug)]
pub struct Cast {
    /// The type of y: F64, F32 or BF16.
    pub to: DType,
}

impl Op for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("cast", inputs, 1)?;
        let plain = |d| matches!(d, DType::F64 | DType::F32 | DType::BF16);
        OpError::ensure(plain(inputs[0].dtype) && plain(self.to), || {
            format!(
                "cast converts between f64, f32 and bf16, not from {} to {}; narrower formats need a scale: use quantize",
                inputs[0].dtype, self.to
            )
        })?;
        Ok(vec![inputs[0].with_dtype(self.to)])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl OnGpu for Cast {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
