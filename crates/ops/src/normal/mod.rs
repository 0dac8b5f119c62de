//! Normal numbers: what weights begin with.

mod cpu;
mod cuda;

use crate::registry::{MULTIPROCESSORS, OnCard, Registered, Sample};
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError};
use xtrain_tensor::{DType, Shape, TensorType};

/// `() -> y`, f32 of this shape: [`Philox::fill_normal`](xtrain_tensor::Philox::fill_normal) of the stream (`step`, `site`) of `seed`. The
/// same bits on every device.
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

fn sample(shape: &[usize]) -> Sample {
    let op =
        Normal { shape: Shape::new(shape), std: 0.02, seed: 0xFEDC_BA98_7654_3210, step: u32::MAX, site: 7 };
    Sample::plain(op, [])
}

impl Registered for Normal {
    fn samples() -> Vec<Sample> {
        vec![sample(&[3, 11]), sample(&[1]), sample(&[64])]
    }

    fn large() -> Sample {
        sample(&[300, 161])
    }
}

impl OnCard for Normal {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];

    fn busy_samples(multiprocessors: usize) -> Vec<Sample> {
        // Enough words to meet every case of the functions that they go through.
        vec![sample(&[4097 * multiprocessors / MULTIPROCESSORS, 1023])]
    }
}
