//! Samples of [`SwigluSaving`].

use super::SwigluSaving;
use crate::samples::{Sample, SampleInput, Sampled};

fn sample(weighted: bool, [t, f]: [usize; 2]) -> Sample {
    let weights = weighted.then(|| SampleInput::activation([t]));
    let inputs: Vec<_> = [SampleInput::activation([t, 2 * f])].into_iter().chain(weights).collect();
    Sample::plain(SwigluSaving { weighted }, inputs)
}

impl Sampled for SwigluSaving {
    fn samples() -> Vec<Sample> {
        vec![sample(false, [13, 7]), sample(true, [5, 133])]
    }

    fn large() -> Sample {
        sample(false, [300, 256])
    }

    fn gpu_samples() -> Vec<Sample> {
        vec![sample(false, [70, 1024]), sample(true, [37, 301])]
    }
}
