//! Samples of [`SumRanks`], [`SumParts`] and [`SumSources`].

use super::{SumParts, SumRanks, SumSources};
use crate::samples::{GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

impl Sampled for SumRanks {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![
            Sample::plain(SumRanks, [SampleInput::activation([3, 5, 7])]),
            Sample::plain(SumRanks, [SampleInput::activation([4, 33]).in_format(DType::BF16)]),
            Sample::plain(SumRanks, [SampleInput::activation([1, 12])]),
            Sample::plain(SumRanks, [SampleInput::activation([8])]),
        ]
    }

    fn large() -> Sample {
        Sample::plain(SumRanks, [SampleInput::activation([4, 300, 161])])
    }

    /// Pieces that start at 16 bytes for both types, for f32 alone, and for neither.
    fn gpu_samples() -> Vec<Sample> {
        let sample = |ranks: usize, elements| {
            Sample::plain(SumRanks, [SampleInput::activation([ranks, elements]).computed()])
        };
        let sizes = [8, 4100, 4099, 1 << 16].map(|elements| sample(5, elements));
        let ranks = [9, 16, 23, 41].map(|ranks| sample(ranks, 2050));
        sizes.into_iter().chain(ranks).collect()
    }
}

impl Sampled for SumParts {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        let f32 = SumParts { out: Some(DType::F32) };
        vec![
            Sample::plain(SumParts { out: None }, [SampleInput::activation([3, 5, 7]).computed()]),
            Sample::plain(
                SumParts { out: None },
                [SampleInput::activation([4, 3, 11]).in_format(DType::BF16)],
            ),
            Sample::plain(f32, [SampleInput::activation([2, 4, 8]).in_format(DType::BF16)]),
        ]
    }

    fn large() -> Sample {
        Sample::plain(SumParts { out: None }, [SampleInput::activation([4, 300, 161]).computed()])
    }

    fn gpu_samples() -> Vec<Sample> {
        let sample = |ranks: usize, tokens, width| {
            let x = SampleInput::activation([ranks, tokens, width]).computed();
            Sample::plain(SumParts { out: None }, [x])
        };
        vec![sample(2, 33, 264), sample(5, 7, 1031), sample(13, 5, 100)]
    }
}

fn of_sources(experts: usize, ranks: usize, rows: usize, width: usize) -> Sample {
    let x = SampleInput::activation([experts * ranks * rows, width]);
    Sample::plain(SumSources { experts, ranks }, [x.computed()])
}

impl Sampled for SumSources {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![of_sources(3, 4, 5, 7), of_sources(5, 1, 2, 8), of_sources(1, 3, 4, 3)]
    }

    fn large() -> Sample {
        of_sources(3, 4, 100, 161)
    }

    fn gpu_samples() -> Vec<Sample> {
        vec![of_sources(5, 4, 41, 100), of_sources(3, 2, 33, 97), of_sources(2, 13, 25, 100)]
    }
}
