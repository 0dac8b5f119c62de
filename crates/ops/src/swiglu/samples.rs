//! Samples of [`Swiglu`] and [`SwigluGrad`].

use super::{Swiglu, SwigluGrad};
use crate::samples::{Sample, SampleInput, Sampled};

impl Sampled for Swiglu {
    fn samples() -> Vec<Sample> {
        [[13, 14], [5, 66], [1, 2]]
            .into_iter()
            .map(|shape| Sample::forward(Swiglu, [SampleInput::activation(shape)]))
            .collect()
    }

    fn large() -> Sample {
        Sample::forward(Swiglu, [SampleInput::activation([300, 320])])
    }

    fn gpu_samples() -> Vec<Sample> {
        let sample = |[t, f]: [usize; 2]| Sample::forward(Swiglu, [SampleInput::activation([t, 2 * f])]);
        [[1, 8192], [70, 1024], [37, 3001], [600, 264]].map(sample).into()
    }
}

impl Sampled for SwigluGrad {
    fn samples() -> Vec<Sample> {
        let inputs = || [SampleInput::activation([13, 17]), SampleInput::activation([13, 34])];
        [false, true].map(|rematerialise| Sample::plain(SwigluGrad { rematerialise }, inputs())).into()
    }

    fn large() -> Sample {
        let inputs = [SampleInput::activation([300, 160]), SampleInput::activation([300, 320])];
        Sample::plain(SwigluGrad { rematerialise: true }, inputs)
    }

    fn gpu_samples() -> Vec<Sample> {
        let sample = |([t, f], rematerialise): ([usize; 2], bool)| {
            let inputs = [SampleInput::activation([t, f]), SampleInput::activation([t, 2 * f])];
            Sample::plain(SwigluGrad { rematerialise }, inputs)
        };
        [([1, 8192], false), ([70, 1024], true), ([37, 3001], true), ([600, 264], false)].map(sample).into()
    }
}
