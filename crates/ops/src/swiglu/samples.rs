//! Samples of [`Swiglu`] and [`SwigluGrad`].

use super::{Swiglu, SwigluGrad};
use crate::samples::{Sample, SampleInput, Sampled};

/// The operands of [`Swiglu`].
fn inputs(weighted: bool, [t, f]: [usize; 2]) -> Vec<SampleInput> {
    let weights = weighted.then(|| SampleInput::activation([t]));
    [SampleInput::activation([t, 2 * f])].into_iter().chain(weights).collect()
}

fn forward(weighted: bool, shape: [usize; 2]) -> Sample {
    Sample::forward(Swiglu { weighted }, inputs(weighted, shape))
}

fn grad(rematerialise: bool, weighted: bool, shape: [usize; 2]) -> Sample {
    let dy = SampleInput::activation(shape);
    let inputs: Vec<_> = [dy].into_iter().chain(inputs(weighted, shape)).collect();
    Sample::plain(SwigluGrad { rematerialise, weighted }, inputs)
}

impl Sampled for Swiglu {
    fn samples() -> Vec<Sample> {
        let shapes = [[13, 7], [5, 33], [1, 1]];
        shapes.into_iter().flat_map(|shape| [false, true].map(|weighted| forward(weighted, shape))).collect()
    }

    fn large() -> Sample {
        forward(true, [300, 160])
    }

    fn gpu_samples() -> Vec<Sample> {
        let plain = [[1, 8192], [70, 1024], [37, 3001], [600, 264]].map(|shape| forward(false, shape));
        let weighted = [[3, 8192], [37, 3001]].map(|shape| forward(true, shape));
        plain.into_iter().chain(weighted).collect()
    }
}

impl Sampled for SwigluGrad {
    fn samples() -> Vec<Sample> {
        [[false, false], [true, false], [false, true], [true, true]]
            .map(|[rematerialise, weighted]| grad(rematerialise, weighted, [13, 17]))
            .into()
    }

    fn large() -> Sample {
        grad(true, true, [300, 160])
    }

    fn gpu_samples() -> Vec<Sample> {
        let plain = [([1, 8192], false), ([70, 1024], true), ([37, 3001], true), ([600, 264], false)];
        let weighted = [([3, 8192], true), ([70, 264], false), ([37, 3001], true), ([9, 301], false)];
        let plain = plain.map(|(shape, rematerialise)| grad(rematerialise, false, shape));
        plain
            .into_iter()
            .chain(weighted.map(|(shape, rematerialise)| grad(rematerialise, true, shape)))
            .collect()
    }
}
