//! Samples of [`Add`].

use super::Add;
use crate::samples::{Sample, SampleInput, Sampled};

impl Sampled for Add {
    fn samples() -> Vec<Sample> {
        vec![Sample::plain(Add, [SampleInput::activation([5, 7]), SampleInput::activation([5, 7])])]
    }

    fn large() -> Sample {
        Sample::plain(Add, [SampleInput::activation([300, 160]), SampleInput::activation([300, 160])])
    }
}
