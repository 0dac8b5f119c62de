//! Samples of [`Scale`].

use super::Scale;
use crate::samples::{Sample, SampleInput, Sampled};

impl Sampled for Scale {
    fn samples() -> Vec<Sample> {
        [[5, 7], [1, 1], [3, 64]]
            .map(|shape| Sample::forward(Scale(0.7), [SampleInput::activation(shape)]))
            .into()
    }

    fn large() -> Sample {
        Sample::forward(Scale(-1.5), [SampleInput::activation([300, 161])])
    }
}
