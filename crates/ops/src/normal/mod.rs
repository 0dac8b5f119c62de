//! Normal numbers: what weights begin with.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError};
use xtrain_tensor::{DType, Shape, TensorType};

/// `() -> y`, f32 of this shape: [`Philox::fill_normal`](xtrain_tensor::Philox::fill_normal) of the stream
/// (`step`, `site`) of `seed`. The same bits on every device.
#[derive(Clone, Copy, Debug)]
pub struct Normal {
    /// The extents of y.
    pub shape: Shape,
    /// The standard deviation.
    pub std: f32,
    /// The seed.
    pub seed: u64,
    /// The first half of the stream's name.
    pub step: u32,
    /// The second.
    pub site: u32,
}

impl Op for Normal {
    fn name(&self) -> &'static str {
        "normal"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("normal", inputs, 0)?;
        Ok(vec![TensorType { dtype: DType::F32, shape: self.shape }])
    }
}

impl OnGpu for Normal {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
