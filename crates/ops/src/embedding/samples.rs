//! Samples of [`Embedding`] and [`EmbeddingGrad`].

use super::{Embedding, EmbeddingGrad};
use crate::samples::{Fill, Sample, SampleInput, Sampled};
use xtrain_tensor::DType;

impl Sampled for Embedding {
    fn samples() -> Vec<Sample> {
        vec![Sample::forward(Embedding, [SampleInput::ids(23, 11), SampleInput::parameter([11, 7])])]
    }

    fn large() -> Sample {
        Sample::forward(Embedding, [SampleInput::ids(1000, 301), SampleInput::parameter([301, 160])])
    }

    fn gpu_samples() -> Vec<Sample> {
        let sample = |(t, v, d): (usize, usize, usize)| {
            let ids = SampleInput::ids(t, v as i32);
            Sample::forward(Embedding, [ids, SampleInput::parameter([v, d])])
        };
        [(1, 5, 8192), (700, 1001, 512), (33, 40, 2051)].map(sample).into()
    }
}

impl Sampled for EmbeddingGrad {
    fn samples() -> Vec<Sample> {
        vec![Sample::plain(
            EmbeddingGrad { vocab_size: 11, out: DType::F32 },
            [SampleInput::ids(23, 11), SampleInput::activation([23, 7])],
        )]
    }

    fn large() -> Sample {
        Sample::plain(
            EmbeddingGrad { vocab_size: 301, out: DType::F32 },
            [SampleInput::ids(1000, 301), SampleInput::activation([1000, 160])],
        )
    }

    /// One token and many, tables whose sort takes several passes, one row that all tokens read, and rows
    /// that span many runs.
    fn gpu_samples() -> Vec<Sample> {
        let sample = |ids: SampleInput, v, d, out| {
            let t = ids.ty.numel();
            Sample::plain(EmbeddingGrad { vocab_size: v, out }, [ids, SampleInput::activation([t, d])])
        };
        // A third of the tokens have id 7; the others are spread over the table.
        let skewed = |t: usize, v: usize| {
            let id = |i: usize| if i % 3 == 1 { 7.0 } else { (i * 7919 % v) as f64 };
            SampleInput::ids(t, v as i32).fill(Fill::Values((0..t).map(id).collect()))
        };
        vec![
            sample(SampleInput::ids(1, 5).fill(Fill::Values(vec![0.0])), 5, 264, DType::F32),
            sample(SampleInput::ids(5000, 1), 1, 96, DType::F32),
            sample(SampleInput::ids(3001, 300_000), 300_000, 8, DType::F32),
            sample(skewed(9000, 4000), 4000, 264, DType::F32),
            sample(skewed(2500, 700), 700, 131, DType::F32),
            sample(skewed(1000, 90), 90, 4104, DType::BF16),
        ]
    }
}
