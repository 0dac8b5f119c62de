//! Samples of [`SwigluSaving`].

use super::SwigluSaving;
use crate::samples::{Sample, SampleInput, Sampled};
use crate::swiglu::samples::{weights_and_starts, with_tails};
use xtrain_program::Tail;

fn sample(weighted: bool, [t, f]: [usize; 2]) -> Sample {
    let further = weighted.then(|| weights_and_starts(t, t)).into_iter().flatten();
    let inputs: Vec<_> = [SampleInput::activation([t, 2 * f])].into_iter().chain(further).collect();
    Sample::plain(SwigluSaving { weighted, tail: Tail::Zeros }, inputs)
}

fn undefined(([rows, f], end): ([usize; 2], usize)) -> Sample {
    let op = SwigluSaving { weighted: true, tail: Tail::Undefined { live_rows: end } };
    Sample::plain(op, with_tails(rows, [2 * f], end))
}

impl Sampled for SwigluSaving {
    fn samples() -> Vec<Sample> {
        vec![sample(false, [13, 7]), sample(true, [5, 133]), undefined(([140, 3], 7))]
    }

    fn large() -> Sample {
        sample(false, [300, 256])
    }

    fn gpu_samples() -> Vec<Sample> {
        let undefined = [([400, 301], 200), ([256, 64], 0)].map(undefined);
        [sample(false, [70, 1024]), sample(true, [37, 301])].into_iter().chain(undefined).collect()
    }
}
