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
        [(0, 0), (2, 0), (3, 0), (1, 3)].map(|(micro_step, sources)| sample(micro_step, sources)).into()
    }

    fn large() -> Sample {
        sample(1, 40)
    }
}

fn sample(micro_step: u32, sources: usize) -> Sample {
    let number = || SampleInput::activation([]).in_format(DType::F32);
    let losses = SampleInput::activation([3, 2 + 2 * sources]).in_format(DType::F32);
    let mut inputs = vec![number(), number(), SampleInput::flag(micro_step), losses];
    inputs.extend((sources > 0).then(|| SampleInput::activation([sources, 2]).in_format(DType::F32)));
    Sample::plain(RecordLosses, inputs)
}
