//! Samples of [`Gelu`] and [`GeluGrad`].

use super::{Gelu, GeluGrad};
use crate::samples::{Sample, SampleInput, Sampled};

impl Sampled for Gelu {
    fn samples() -> Vec<Sample> {
        vec![Sample::forward(Gelu, [SampleInput::activation([13, 7])])]
    }

    fn large() -> Sample {
        Sample::forward(Gelu, [SampleInput::activation([300, 160])])
    }
}

impl Sampled for GeluGrad {
    fn samples() -> Vec<Sample> {
        vec![Sample::plain(GeluGrad, [SampleInput::activation([13, 7]), SampleInput::activation([13, 7])])]
    }

    fn large() -> Sample {
        Sample::plain(GeluGrad, [SampleInput::activation([300, 160]), SampleInput::activation([300, 160])])
    }
}
