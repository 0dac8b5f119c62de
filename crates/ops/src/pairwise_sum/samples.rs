//! Samples of [`PairwiseAdd`] and [`PairwiseTotal`].

use super::{PairwiseAdd, PairwiseTotal};
use crate::samples::{GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::TensorType;

impl Sampled for PairwiseAdd {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        (0..5).map(|micro_step| Sample::plain(PairwiseAdd, inputs(micro_step, 3, 35))).collect()
    }

    fn large() -> Sample {
        Sample::plain(PairwiseAdd, inputs(3, 3, 48_301))
    }

    /// Levels that start at 16 bytes and others, and a counter without a free level.
    fn gpu_samples() -> Vec<Sample> {
        let cases = [(3, 3, 4100), (1, 2, 4099), (6, 3, 8), (3, 2, 64)];
        cases
            .map(|(step, levels, elements)| Sample::plain(PairwiseAdd, inputs(step, levels, elements)))
            .into()
    }
}

impl Sampled for PairwiseTotal {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        [0, 1, 5, 7].map(|micro_step| Sample::plain(PairwiseTotal, inputs(micro_step, 3, 35))).into()
    }

    fn large() -> Sample {
        Sample::plain(PairwiseTotal, inputs(6, 3, 48_301))
    }

    fn gpu_samples() -> Vec<Sample> {
        let cases = [(5, 3, 4100), (7, 3, 4099), (2, 2, 8)];
        cases
            .map(|(step, levels, elements)| Sample::plain(PairwiseTotal, inputs(step, levels, elements)))
            .into()
    }
}

fn inputs(micro_step: u32, levels: usize, elements: usize) -> Vec<SampleInput> {
    let [x, levels] =
        [SampleInput::activation([1, elements]), SampleInput::activation([levels, 1, elements])];
    vec![x, SampleInput::flag(micro_step), levels]
}
