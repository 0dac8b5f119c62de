//! Samples of [`SwigluSaving`].

use super::SwigluSaving;
use crate::samples::{Sample, SampleInput, Sampled};

impl Sampled for SwigluSaving {
    fn samples() -> Vec<Sample> {
        [[13, 14], [5, 266]].map(|shape| Sample::plain(SwigluSaving, [SampleInput::activation(shape)])).into()
    }

    fn large() -> Sample {
        Sample::plain(SwigluSaving, [SampleInput::activation([300, 512])])
    }

    fn gpu_samples() -> Vec<Sample> {
        let sample = |[t, f]: [usize; 2]| Sample::plain(SwigluSaving, [SampleInput::activation([t, 2 * f])]);
        [[70, 1024], [37, 301]].map(sample).into()
    }
}
