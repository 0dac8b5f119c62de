//! Samples of [`RmsNorm`], [`AddRmsNorm`], [`Rms`] and [`RmsNormGrad`].

use super::{AddRmsNorm, ExtraOutput, Rms, RmsNorm, RmsNormGrad};
use crate::device::PARTS;
use crate::samples::{Fill, Sample, SampleInput, Sampled};
use xtrain_tensor::DType;

impl Sampled for RmsNorm {
    fn samples() -> Vec<Sample> {
        vec![Sample::forward(
            RmsNorm { eps: 1e-5 },
            [SampleInput::activation([13, 7]), SampleInput::parameter([7])],
        )]
    }

    fn large() -> Sample {
        Sample::forward(
            RmsNorm { eps: 1e-5 },
            [SampleInput::activation([300, 160]), SampleInput::parameter([160])],
        )
    }

    /// Then rows whose mean squares are as small as epsilon, with whole vectors and with tails.
    fn gpu_samples() -> Vec<Sample> {
        let sample = |[t, d]: [usize; 2], std| {
            let x = SampleInput::activation([t, d]).fill(Fill::Normal(0.0, std));
            Sample::forward(RmsNorm { eps: 1e-5 }, [x, SampleInput::parameter([d])])
        };
        let small = [[13, 256], [13, 7]].map(|shape| sample(shape, 3e-3));
        GPU_SHAPES.map(|shape| sample(shape, 1.0)).into_iter().chain(small).collect()
    }
}

impl Sampled for AddRmsNorm {
    fn samples() -> Vec<Sample> {
        vec![
            Sample::forward(
                AddRmsNorm { eps: 1e-5 },
                [
                    SampleInput::activation([5, 33]),
                    SampleInput::activation([5, 33]),
                    SampleInput::parameter([33]),
                ],
            )
            .roots(2),
        ]
    }

    fn large() -> Sample {
        Sample::forward(
            AddRmsNorm { eps: 1e-5 },
            [
                SampleInput::activation([300, 160]),
                SampleInput::activation([300, 160]),
                SampleInput::parameter([160]),
            ],
        )
    }

    fn gpu_samples() -> Vec<Sample> {
        let sample = |[t, d]: [usize; 2]| {
            let x = || SampleInput::activation([t, d]);
            Sample::forward(AddRmsNorm { eps: 1e-5 }, [x(), x(), SampleInput::parameter([d])])
        };
        GPU_SHAPES.map(sample).into()
    }
}

impl Sampled for Rms {
    fn samples() -> Vec<Sample> {
        let mut all = Vec::new();
        for (adds, amax) in [(false, false), (false, true), (true, false), (true, true)] {
            all.push(rms([5, 33], adds, amax));
        }
        all
    }

    fn large() -> Sample {
        rms([300, 160], true, true)
    }

    fn gpu_samples() -> Vec<Sample> {
        let samples = GPU_SHAPES.into_iter().zip([true, false].into_iter().cycle());
        samples.map(|(shape, adds)| rms(shape, adds, true)).collect()
    }
}

impl Sampled for RmsNormGrad {
    fn samples() -> Vec<Sample> {
        let inputs = || {
            [
                SampleInput::activation([13, 7]),
                SampleInput::activation([13, 7]),
                SampleInput::activation([13]),
                SampleInput::activation([7]),
                SampleInput::activation([13, 7]),
            ]
        };
        [ExtraOutput::None, ExtraOutput::Y, ExtraOutput::Amax]
            .map(|extra| Sample::plain(RmsNormGrad { out: DType::F32, extra }, inputs()))
            .into()
    }

    fn large() -> Sample {
        Sample::plain(
            RmsNormGrad { out: DType::F32, extra: ExtraOutput::Y },
            [
                SampleInput::activation([300, 160]),
                SampleInput::activation([300, 160]),
                SampleInput::activation([300]),
                SampleInput::activation([160]),
                SampleInput::activation([300, 160]),
            ],
        )
    }

    fn gpu_samples() -> Vec<Sample> {
        let mut all = Vec::new();
        let op = |out, extra| RmsNormGrad { out, extra };
        for [t, d] in GPU_SHAPES {
            let (x, rstd) = (|| SampleInput::activation([t, d]), SampleInput::activation([t]));
            let mut inputs = vec![x(), x(), rstd, SampleInput::activation([d])];
            all.push(Sample::plain(op(DType::BF16, ExtraOutput::Y), inputs.clone()));
            inputs.push(x());
            all.push(Sample::plain(op(DType::F32, ExtraOutput::None), inputs.clone()));
            all.push(Sample::plain(op(DType::F32, ExtraOutput::Amax), inputs));
        }
        // More rows than all blocks that sum the columns take at once.
        let x = || SampleInput::activation([8 * PARTS + 100, 5]);
        let inputs = [x(), x(), SampleInput::activation([8 * PARTS + 100]), SampleInput::activation([5])];
        all.push(Sample::plain(op(DType::F32, ExtraOutput::Y), inputs));
        all
    }
}

/// Rows and widths for the paths of the GPU kernels: whole vectors, tails, one row, long rows, rows that no
/// block holds, more rows than blocks that sum.
const GPU_SHAPES: [[usize; 2]; 6] = [[1300, 256], [1, 2048], [7, 8200], [3, 33_000], [601, 1003], [5, 5120]];

/// The op with or without the addition and the amax.
fn rms([t, d]: [usize; 2], adds: bool, amax: bool) -> Sample {
    let mut inputs = vec![SampleInput::activation([t, d]); 1 + usize::from(adds)];
    inputs.extend(amax.then(|| SampleInput::parameter([d])));
    Sample::plain(Rms { eps: 1e-5, adds, amax }, inputs)
}
