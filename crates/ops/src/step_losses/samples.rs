//! Samples of [`RecordLosses`].

use super::RecordLosses;
use crate::samples::{GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

impl Sampled for RecordLosses {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        // The first and the last row, and one that does not exist.
        [0, 2, 3].map(sample).into()
    }

    fn large() -> Sample {
        sample(1)
    }
}

fn sample(micro_step: u32) -> Sample {
    let number = || SampleInput::activation([]).in_format(DType::F32);
    let losses = SampleInput::activation([3, 2]).in_format(DType::F32);
    Sample::plain(RecordLosses, [number(), number(), SampleInput::flag(micro_step), losses])
}
