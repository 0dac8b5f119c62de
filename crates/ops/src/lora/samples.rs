//! Samples of the adapters of a layer.

use super::{LoraAdd, LoraDgrad, LoraParts, LoraWgrad};
use crate::samples::{Sample, SampleInput, Sampled};
use std::ops::Range;
use xtrain_tensor::DType;

/// One adapter and several, of all columns and of some; tokens, columns of the layer, rank.
fn cases() -> [([usize; 2], LoraParts); 4] {
    let case = |tokens, outputs, rank, columns: &[Range<usize>]| {
        ([tokens, outputs], LoraParts { rank, columns: columns.to_vec() })
    };
    [
        case(13, 10, 3, std::slice::from_ref(&(0..10))),
        case(1, 24, 2, &[8..16, 16..24]),
        case(5, 17, 1, &[0..7, 9..16]),
        case(24, 96, 16, &[0..64, 64..80, 80..96]),
    ]
}

/// As [`cases`], large.
fn large() -> ([usize; 2], LoraParts) {
    ([700, 300], LoraParts { rank: 8, columns: vec![0..160, 200..300] })
}

fn add(([tokens, outputs], parts): ([usize; 2], LoraParts)) -> Sample {
    let inputs = [
        SampleInput::activation([tokens, outputs]),
        SampleInput::activation([tokens, parts.width()]),
        SampleInput::parameter([parts.rows(), parts.rank]),
    ];
    Sample::forward(LoraAdd(parts), inputs)
}

fn dgrad(([tokens, outputs], parts): ([usize; 2], LoraParts)) -> Sample {
    let inputs =
        [SampleInput::activation([tokens, outputs]), SampleInput::parameter([parts.rows(), parts.rank])];
    Sample::plain(LoraDgrad(parts), inputs)
}

fn wgrad(([tokens, outputs], parts): ([usize; 2], LoraParts)) -> Sample {
    let inputs =
        [SampleInput::activation([tokens, outputs]), SampleInput::activation([tokens, parts.width()])];
    Sample::plain(LoraWgrad { parts, out: DType::F32 }, inputs)
}

impl Sampled for LoraAdd {
    fn samples() -> Vec<Sample> {
        cases().map(add).into()
    }

    fn large() -> Sample {
        add(large())
    }
}

impl Sampled for LoraDgrad {
    fn samples() -> Vec<Sample> {
        cases().map(dgrad).into()
    }

    fn large() -> Sample {
        dgrad(large())
    }
}

impl Sampled for LoraWgrad {
    fn samples() -> Vec<Sample> {
        cases().map(wgrad).into()
    }

    fn large() -> Sample {
        wgrad(large())
    }
}
