//! Normal numbers, the initial values of weights.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError};
use xtrain_tensor::{DType, Shape, TensorType};

/// `() -> y`, f32: normal numbers of mean 0, drawn by
/// [`Philox::fill_normal_from`](xtrain_tensor::Philox::fill_normal_from) from the stream (`step`, `site`) of
/// `seed`. Equal to the bit on every device.
#[derive(Clone, Copy, Debug)]
pub struct Normal {
    /// Shape of y.
    pub shape: Shape,
    /// Standard deviation.
    pub std: f32,
    /// Seed of the generator.
    pub seed: u64,
    /// First half of the stream's number.
    pub step: u32,
    /// Second half of the stream's number.
    pub site: u32,
    /// The index of the first element of y in the stream: not 0 if y are later rows of a parameter.
    pub first_element: u64,
    /// Elements that are drawn. The others, padding after the rows of the parameter, are 0.
    pub elements: usize,
}

impl Op for Normal {
    fn name(&self) -> &'static str {
        "normal"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("normal", inputs, 0)?;
        OpError::ensure(self.elements <= self.shape.numel(), || {
            format!("normal draws {} elements of {}", self.elements, self.shape)
        })?;
        Ok(vec![TensorType { dtype: DType::F32, shape: self.shape }])
    }
}

impl OnGpu for Normal {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
