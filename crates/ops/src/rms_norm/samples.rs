//! Samples of [`RmsNorm`], [`AddRmsNorm`], [`Rms`] and [`RmsNormGrad`].

use super::{AddRmsNorm, Rms, RmsNorm, RmsNormGrad};
use crate::device::PARTS;
use crate::quantize::{CastSource, Given, Layouts, Quantize};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, Scaling, TensorType};

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
        ON_CARD.map(|shape| sample(shape, 1.0)).into_iter().chain(small).collect()
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
        ON_CARD.map(sample).into()
    }
}

impl Sampled for Rms {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        match self.cast {
            Some(_) => GpuTolerance::FusedCast { exact_bf16: false },
            None => GpuTolerance::DEFAULT,
        }
    }

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

    /// And with casts.
    fn gpu_samples() -> Vec<Sample> {
        let plain = ON_CARD.into_iter().zip([true, false].into_iter().cycle());
        let plain = plain.map(|(shape, adds)| rms(shape, adds, true));
        let shapes = [[256, 384], [130, 264]];
        let tiles = |layouts| (Quantize::new(DType::E4M3, Scaling::Tile, false, layouts), None);
        let given = |scale, layouts| {
            let cast = Quantize::new(DType::E4M3, Scaling::Tensor, false, layouts);
            (Quantize { given: Given::Scale, ..cast }, Some(scale))
        };
        let casts = [
            given(30.0, Layouts::Both),
            given(0.0, Layouts::Both),
            given(30.0, Layouts::RowMajor),
            given(30.0, Layouts::Transposed),
            tiles(Layouts::Both),
            tiles(Layouts::RowMajor),
            tiles(Layouts::Transposed),
        ];
        let casting =
            shapes.into_iter().flat_map(|shape| casts.map(|(cast, scale)| casting(shape, cast, scale)));
        plain.chain(casting).collect()
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
        [(false, false), (true, false), (false, true)]
            .map(|(rematerialise, amax)| {
                Sample::plain(RmsNormGrad { out: DType::F32, rematerialise, amax }, inputs())
            })
            .into()
    }

    fn large() -> Sample {
        Sample::plain(
            RmsNormGrad { out: DType::F32, rematerialise: true, amax: false },
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
        for [t, d] in ON_CARD {
            let (x, rstd) = (|| SampleInput::activation([t, d]), SampleInput::activation([t]));
            let mut inputs = vec![x(), x(), rstd, SampleInput::activation([d])];
            let of = |out, rematerialise, amax| RmsNormGrad { out, rematerialise, amax };
            all.push(Sample::plain(of(DType::BF16, true, false), inputs.clone()));
            inputs.push(x());
            all.push(Sample::plain(of(DType::F32, false, false), inputs.clone()));
            all.push(Sample::plain(of(DType::F32, false, true), inputs));
        }
        // More rows than all blocks that sum the columns take at once.
        let x = || SampleInput::activation([8 * PARTS + 100, 5]);
        let inputs = [x(), x(), SampleInput::activation([8 * PARTS + 100]), SampleInput::activation([5])];
        let op = RmsNormGrad { out: DType::F32, rematerialise: true, amax: false };
        all.push(Sample::plain(op, inputs));
        all
    }
}

/// The op with a cast, and the scale where it is one that is given.
fn casting([t, d]: [usize; 2], cast: Quantize, scale: Option<f64>) -> Sample {
    let mut inputs = vec![SampleInput::activation([t, d]); 2];
    inputs.push(SampleInput::parameter([d]));
    inputs.extend(scale.map(|scale| SampleInput::activation([1, 1]).fill(Fill::Values(vec![scale]))));
    let cast = Some(Quantize { source: CastSource::Norm, ..cast });
    Sample::plain(Rms { eps: 1e-5, adds: true, amax: false, cast }, inputs)
}

/// Rows and widths that reach the kernels on a GPU: whole vectors, tails, one row, long rows, rows that no
/// block can keep, more rows than blocks sum.
const ON_CARD: [[usize; 2]; 6] = [[1300, 256], [1, 2048], [7, 8200], [3, 33_000], [601, 1003], [5, 5120]];

/// The op with so much of what it can do.
fn rms([t, d]: [usize; 2], adds: bool, amax: bool) -> Sample {
    let mut inputs = vec![SampleInput::activation([t, d]); 1 + usize::from(adds)];
    inputs.extend(amax.then(|| SampleInput::parameter([d])));
    Sample::plain(Rms { eps: 1e-5, adds, amax, cast: None }, inputs)
}
