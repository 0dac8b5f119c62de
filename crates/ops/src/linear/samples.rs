//! Samples of [`Linear`], [`LinearDgrad`], [`LinearWgrad`] and [`BiasGrad`].

use super::{BiasGrad, Linear, LinearDgrad, LinearWgrad, UnroundedLinear};
use crate::samples::{Sample, SampleInput, Sampled};
use xtrain_tensor::DType;

impl Sampled for Linear {
    fn samples() -> Vec<Sample> {
        vec![
            Sample::forward(Linear, [SampleInput::activation([13, 7]), SampleInput::parameter([5, 7])]),
            Sample::forward(
                Linear,
                [
                    SampleInput::activation([3, 17]),
                    SampleInput::parameter([9, 17]),
                    SampleInput::parameter([9]),
                ],
            ),
            // Rows of whole 16-byte vectors in every type, for which a GPU uses another GEMM.
            Sample::forward(
                Linear,
                [
                    SampleInput::activation([24, 32]),
                    SampleInput::parameter([16, 32]),
                    SampleInput::parameter([16]),
                ],
            ),
        ]
    }

    fn large() -> Sample {
        Sample::forward(
            Linear,
            [
                SampleInput::activation([300, 160]),
                SampleInput::parameter([170, 160]),
                SampleInput::parameter([170]),
            ],
        )
    }

    /// One token and two; rows of whole 16-byte vectors and not, short and long, few and many.
    fn gpu_samples() -> Vec<Sample> {
        let sample = |[t, i, o]: [usize; 3]| {
            let [x, w] = [SampleInput::activation([t, i]), SampleInput::parameter([o, i])];
            [
                Sample::forward(Linear, [x.clone(), w.clone()]),
                Sample::forward(Linear, [x, w, SampleInput::parameter([o])]),
            ]
        };
        let shapes = [
            [1, 7, 5],
            [1, 1, 1],
            [1, 40, 3],
            [1, 1536, 2051],
            [1, 8960, 77],
            [1, 1537, 300],
            [1, 264, 9001],
            [2, 264, 33],
        ];
        shapes.into_iter().flat_map(sample).collect()
    }
}

impl Sampled for UnroundedLinear {
    fn samples() -> Vec<Sample> {
        [[13, 7, 5], [24, 32, 16], [1, 24, 3]].map(unrounded).into()
    }

    fn large() -> Sample {
        unrounded([300, 160, 170])
    }

    fn gpu_samples() -> Vec<Sample> {
        [[1, 264, 128], [70, 512, 8], [37, 301, 65]].map(unrounded).into()
    }
}

/// Tokens, inputs and outputs.
fn unrounded([t, i, o]: [usize; 3]) -> Sample {
    Sample::forward(
        UnroundedLinear { in_fp8: false },
        [SampleInput::activation([t, i]), SampleInput::parameter([o, i])],
    )
}

impl Sampled for LinearDgrad {
    fn samples() -> Vec<Sample> {
        [[13, 5, 7], [24, 16, 32]]
            .map(|[t, o, i]| {
                Sample::plain(LinearDgrad, [SampleInput::activation([t, o]), SampleInput::activation([o, i])])
            })
            .into()
    }

    fn large() -> Sample {
        Sample::plain(LinearDgrad, [SampleInput::activation([300, 170]), SampleInput::activation([170, 160])])
    }
}

impl Sampled for LinearWgrad {
    fn samples() -> Vec<Sample> {
        [[13, 5, 7], [24, 16, 32]]
            .map(|[t, o, i]| {
                let inputs = [SampleInput::activation([t, o]), SampleInput::activation([t, i])];
                Sample::plain(LinearWgrad { out: DType::F32 }, inputs)
            })
            .into()
    }

    fn large() -> Sample {
        Sample::plain(
            LinearWgrad { out: DType::F32 },
            [SampleInput::activation([600, 170]), SampleInput::activation([600, 160])],
        )
    }
}

impl Sampled for BiasGrad {
    fn samples() -> Vec<Sample> {
        vec![Sample::plain(BiasGrad { out: DType::F32 }, [SampleInput::activation([131, 5])])]
    }

    fn large() -> Sample {
        Sample::plain(BiasGrad { out: DType::F32 }, [SampleInput::activation([300, 160])])
    }

    /// One token, and more tokens than all blocks of the first launch sum in one iteration of their loop.
    fn gpu_samples() -> Vec<Sample> {
        let sample = |[t, o]: [usize; 2]| {
            [DType::F32, DType::BF16]
                .map(|out| Sample::plain(BiasGrad { out }, [SampleInput::activation([t, o])]))
        };
        [[1, 8192], [2100, 264], [9001, 77]].into_iter().flat_map(sample).collect()
    }
}
