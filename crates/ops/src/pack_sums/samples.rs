//! Samples of [`PackSums`].

use super::PackSums;
use crate::samples::{GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

impl Sampled for PackSums {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![with_lengths(&[1]), with_lengths(&[2, 5, 2, 5])]
    }

    fn large() -> Sample {
        with_lengths(&[12, 2, 128, 2, 128, 2, 128])
    }

    /// Tensors of several blocks.
    fn gpu_samples() -> Vec<Sample> {
        vec![with_lengths(&[700, 256, 257])]
    }
}

fn with_lengths(lengths: &[usize]) -> Sample {
    let sums = |&length: &usize| SampleInput::activation([length]).in_format(DType::F32);
    Sample::plain(PackSums, lengths.iter().map(sums).collect::<Vec<_>>())
}
