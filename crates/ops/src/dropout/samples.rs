//! Samples of [`Dropout`].

use super::Dropout;
use crate::samples::{Fill, Sample, SampleInput, Sampled};

impl Sampled for Dropout {
    fn samples() -> Vec<Sample> {
        let sample = |p, site, shape: [usize; 2], rng| {
            Sample::forward(Dropout { p, site }, [SampleInput::activation(shape), SampleInput::counters(rng)])
        };
        vec![
            sample(0.5, 3, [13, 7], [1, 2, 3, 4]),
            sample(0.1, 0, [5, 33], [u32::MAX, 0, 100_000, u32::MAX]),
            sample(0.0, 1, [3, 5], [0; 4]),
        ]
    }

    fn large() -> Sample {
        Sample::forward(
            Dropout { p: 0.3, site: 2 },
            [SampleInput::activation([300, 160]), SampleInput::counters([1, 2, 3, 4])],
        )
    }

    /// Every alignment of the first element to blocks of four random words, and partial vectors at the end;
    /// then infinities and NaNs, which are dropped like other values.
    fn gpu_samples() -> Vec<Sample> {
        let sample = |first_token, shape: [usize; 2]| {
            let rng = SampleInput::counters([5, 6, 7, first_token]);
            Sample::forward(Dropout { p: 0.2, site: 9 }, [SampleInput::activation(shape), rng])
        };
        let mut not_finite = sample(2, [7, 9]);
        let values = [1.0, f64::INFINITY, f64::NAN].into_iter().cycle().take(7 * 9).collect();
        not_finite.inputs[0].fill = Fill::Values(values);
        vec![
            sample(0, [1, 1]),
            sample(1, [501, 1001]),
            sample(2, [33, 4097]),
            sample(3, [257, 2049]),
            sample(1, [64, 8192]),
            not_finite,
        ]
    }
}
