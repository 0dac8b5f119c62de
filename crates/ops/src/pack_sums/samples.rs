//! Samples of [`PackSums`].

use super::PackSums;
use crate::samples::{GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

impl Sampled for PackSums {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![of(&[1]), of(&[2, 5, 2, 5])]
    }

    fn large() -> Sample {
        of(&[12, 2, 128, 2, 128, 2, 128])
    }

    /// Tensors of several blocks.
    fn gpu_samples() -> Vec<Sample> {
        vec![of(&[700, 256, 257])]
    }
}

fn of(lengths: &[usize]) -> Sample {
    let sums = |&length: &usize| SampleInput::activation([length]).in_format(DType::F32);
    Sample::plain(PackSums, lengths.iter().map(sums).collect::<Vec<_>>())
}
