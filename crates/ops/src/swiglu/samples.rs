//! Samples of [`Swiglu`] and [`SwigluGrad`].

use super::{Swiglu, SwigluGrad};
use crate::samples::{Sample, SampleInput, Sampled};
use crate::tail::first_row;
use xtrain_program::Tail;

/// The weights of rows of two experts, and their starts; the last one ends before row `end`.
pub(crate) fn weights_and_starts(rows: usize, end: usize) -> [SampleInput; 2] {
    let starts = [0, end / 2, end].map(|row| row as i32);
    [SampleInput::activation([rows]), SampleInput::integers([3], starts)]
}

/// The operands of [`Swiglu`].
fn inputs(weighted: bool, [t, f]: [usize; 2]) -> Vec<SampleInput> {
    let further = weighted.then(|| weights_and_starts(t, t)).into_iter().flatten();
    [SampleInput::activation([t, 2 * f])].into_iter().chain(further).collect()
}

fn forward(weighted: bool, shape: [usize; 2]) -> Sample {
    Sample::forward(Swiglu { weighted, ..Swiglu::PLAIN }, inputs(weighted, shape))
}

fn grad(rematerialise: bool, weighted: bool, shape: [usize; 2]) -> Sample {
    let dy = SampleInput::activation(shape);
    let inputs: Vec<_> = [dy].into_iter().chain(inputs(weighted, shape)).collect();
    Sample::plain(SwigluGrad { rematerialise, weighted, ..SwigluGrad::PLAIN }, inputs)
}

/// Inputs with undefined tails: activations of these columns, then weights and starts.
pub(crate) fn with_tails<const N: usize>(rows: usize, cols: [usize; N], end: usize) -> Vec<SampleInput> {
    let first = first_row(end);
    let [weights, starts] = weights_and_starts(rows, end);
    let activations = cols.into_iter().map(|cols| SampleInput::activation([rows, cols]).without(0, first));
    activations.chain([weights.without(0, first), starts]).collect()
}

/// Rows, columns and the end of the last group: a tail of some rows, of all but the first tile, of none.
const TAILS: [([usize; 2], usize); 4] = [([140, 7], 5), ([300, 33], 129), ([131, 16], 0), ([256, 8], 256)];
const UNDEFINED: Tail = Tail::Undefined { live_rows: 1 };

impl Sampled for Swiglu {
    fn samples() -> Vec<Sample> {
        let shapes = [[13, 7], [5, 33], [1, 1]];
        let both = |shape| [false, true].map(|weighted| forward(weighted, shape));
        let undefined = |([rows, f], end): ([usize; 2], usize)| {
            Sample::plain(Swiglu { tail: UNDEFINED, ..Swiglu::WEIGHTED }, with_tails(rows, [2 * f], end))
        };
        shapes.into_iter().flat_map(both).chain(TAILS.map(undefined)).collect()
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
        let plain = [[false, false], [true, false], [false, true], [true, true]]
            .map(|[rematerialise, weighted]| grad(rematerialise, weighted, [13, 17]));
        let undefined = |(n, ([rows, f], end)): (usize, ([usize; 2], usize))| {
            let op = SwigluGrad { tail: UNDEFINED, rematerialise: n % 2 == 1, ..SwigluGrad::WEIGHTED };
            Sample::plain(op, with_tails(rows, [f, 2 * f], end))
        };
        plain.into_iter().chain(TAILS.into_iter().enumerate().map(undefined)).collect()
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
