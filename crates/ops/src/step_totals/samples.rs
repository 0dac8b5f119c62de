//! Samples of [`RankWords`] and [`StepTotals`].

use super::{RankWords, StepTotals, WORDS};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

impl Sampled for RankWords {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        let number = |x: f64| SampleInput::activation([]).fill(Fill::Values(vec![x]));
        let words = |stop| {
            vec![number(9.5).in_format(DType::F64), number(2.5), number(2.75), SampleInput::flag(stop)]
        };
        let with_amax = |amax: f64| {
            let amax = SampleInput::activation([1]).fill(Fill::Values(vec![amax]));
            Sample::plain(RankWords, [words(7), vec![amax]].concat())
        };
        vec![
            Sample::plain(RankWords, words(0)),
            with_amax(3.0),
            with_amax(f64::INFINITY),
            with_amax(f64::NAN),
        ]
    }

    fn large() -> Sample {
        RankWords::samples().swap_remove(1)
    }
}

impl Sampled for StepTotals {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![
            words_of(1, false, None),
            words_of(3, false, None),
            words_of(3, true, None),
            words_of(37, false, None),
        ]
    }

    fn large() -> Sample {
        words_of(1000, false, None)
    }

    /// An amax that is not finite.
    fn gpu_samples() -> Vec<Sample> {
        vec![words_of(5, false, Some(2))]
    }
}

/// Words of ranks, of which one may have an amax that is not finite.
fn words_of(ranks: usize, has_whole_gradients: bool, bad_amax: Option<usize>) -> Sample {
    // Squared norms and wishes to stop are not negative.
    let word = |i: usize| match (i / WORDS, i % WORDS) {
        (rank, 0) => 0.1 + rank as f64 * 1.7,
        (rank, 3) => f64::from(u8::from(bad_amax == Some(rank))),
        (rank, 4) => f64::from(u8::from(rank % 3 == 1)),
        (rank, n) => 1.1 * n as f64 - 0.3 * rank as f64,
    };
    let words = Fill::Values((0..ranks * WORDS).map(word).collect());
    let op = StepTotals { has_whole_gradients };
    Sample::plain(op, [SampleInput::activation([ranks, WORDS]).in_format(DType::F64).fill(words)])
}
