//! Samples of [`Clip`].

use super::{Clip, SKIPPED};
use crate::samples::{Fill, Sample, SampleInput, Sampled};

impl Sampled for Clip {
    fn samples() -> Vec<Sample> {
        let sample = |max_norm, norm| {
            Sample::plain(
                Clip { max_norm },
                [
                    SampleInput::activation([]).fill(Fill::Values(vec![norm])),
                    SampleInput::activation([]),
                    SampleInput::counters([41]),
                ],
            )
        };
        let with_amax = |[norm, loss, amax]: [f64; 3]| {
            let mut sample = sample(1.0, norm);
            sample.inputs[1].fill = Fill::Values(vec![loss]);
            sample.inputs.push(SampleInput::activation([1]).fill(Fill::Values(vec![amax])));
            sample
        };
        vec![
            sample(1.0, 0.25),
            sample(1.5, 4.0),
            sample(0.0, 9.0),
            with_amax([4.0, 2.5, 7.0]),
            // Only one of the three is not finite.
            with_amax([4.0, 2.5, f64::INFINITY]),
            with_amax([4.0, 2.5, f64::from(SKIPPED)]),
            with_amax([4.0, 2.5, f64::from(SKIPPED.next_down())]),
            with_amax([4.0, f64::NEG_INFINITY, 7.0]),
            with_amax([4.0, f64::NAN, 7.0]),
            with_amax([f64::INFINITY, 2.5, 7.0]),
            // A norm as small as the constant that is added to it.
            sample(1e-6, 1e-6),
        ]
    }

    fn large() -> Sample {
        Clip::samples().swap_remove(0)
    }
}
