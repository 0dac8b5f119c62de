//! Samples of [`GradNorm`] and [`SquaredNorm`].

use super::{GradNorm, SquaredNorm};
use crate::samples::{Fill, MULTIPROCESSORS, Sample, SampleInput, Sampled};

impl Sampled for GradNorm {
    fn samples() -> Vec<Sample> {
        let of_size = |size| SampleInput::activation([5, 7]).fill(Fill::Normal(0.0, size));
        vec![
            Sample::plain(GradNorm, [SampleInput::activation([5, 7])]),
            Sample::plain(
                GradNorm,
                [
                    SampleInput::activation([1]),
                    SampleInput::activation([33, 3]),
                    SampleInput::activation([2, 3, 5]),
                ],
            ),
            // Squares of which eight overflow in f32, that overflow, underflow to zero, and lose bits as
            // subnormal numbers.
            Sample::plain(GradNorm, [of_size(1.0).fill(Fill::Values(vec![9e18; 35]))]),
            Sample::plain(GradNorm, [of_size(1e20)]),
            Sample::plain(GradNorm, [of_size(1e-24)]),
            Sample::plain(GradNorm, [of_size(1e-20), of_size(3e-20)]),
        ]
    }

    fn large() -> Sample {
        Sample::plain(GradNorm, [SampleInput::activation([300, 500]), SampleInput::activation([700, 300])])
    }

    /// More gradients than the second launch has threads.
    fn gpu_samples() -> Vec<Sample> {
        let grads: Vec<_> = (0..1500).map(|n| SampleInput::activation([1 + n % 3])).collect();
        vec![Sample::plain(GradNorm, grads)]
    }

    /// Many gradients of very different lengths.
    fn busy_samples(multiprocessors: usize) -> Vec<Sample> {
        let long = 3_000_001 * multiprocessors / MULTIPROCESSORS;
        let lengths = [1, 2, 7, 8, 9, 63, 500, 32_767, 32_768, 32_769, 100_000, long];
        let grads: Vec<_> = (0..50).map(|n| SampleInput::activation([lengths[n % lengths.len()]])).collect();
        vec![Sample::plain(GradNorm, grads)]
    }
}

impl Sampled for SquaredNorm {
    fn samples() -> Vec<Sample> {
        let gradients = [SampleInput::activation([33, 3]), SampleInput::activation([2, 3, 5])];
        let large = SampleInput::activation([35]).fill(Fill::Normal(0.0, 1e30));
        vec![Sample::plain(SquaredNorm, gradients), Sample::plain(SquaredNorm, [large])]
    }

    fn large() -> Sample {
        Sample::plain(SquaredNorm, [SampleInput::activation([300, 500]), SampleInput::activation([700, 300])])
    }
}
