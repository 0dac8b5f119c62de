//! Samples of [`RankAmaxes`] and [`MaxAmaxes`].

use super::{MaxAmaxes, RankAmaxes};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

impl Sampled for RankAmaxes {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![packed(vec![1]), packed(vec![1, 7, 1, 3, 1])]
    }

    fn large() -> Sample {
        packed((0..60).map(|n| [1, 5, 64][n % 3]).collect())
    }

    /// Tensors that several blocks copy.
    fn gpu_samples() -> Vec<Sample> {
        vec![packed(vec![1, 700, 256, 257, 1])]
    }
}

fn packed(lengths: Vec<usize>) -> Sample {
    let amaxes = |(n, length): (usize, usize)| {
        let values = (0..length).map(|i| 0.5 * n as f64 + i as f64).collect();
        SampleInput::activation([length]).in_format(DType::F32).fill(Fill::Values(values))
    };
    Sample::plain(RankAmaxes, lengths.into_iter().enumerate().map(amaxes).collect::<Vec<_>>())
}

impl Sampled for MaxAmaxes {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![rows(1, vec![1; 3]), rows(3, vec![1, 4, 1])]
    }

    fn large() -> Sample {
        rows(8, vec![100, 1, 199])
    }

    /// Tensors of several blocks, and amaxes that are not finite.
    fn gpu_samples() -> Vec<Sample> {
        let special = [1.0, f64::INFINITY, 0.0, f64::NAN, 2.0, 3.0, 0.0, 4.0];
        vec![rows(2, vec![700, 1, 256, 257]), of_values(2, vec![1, 3], special.to_vec())]
    }
}

fn rows(ranks: usize, lengths: Vec<usize>) -> Sample {
    let all = lengths.iter().sum::<usize>();
    of_values(ranks, lengths, (0..ranks * all).map(|i| (i * 37 % 101) as f64).collect())
}

fn of_values(ranks: usize, lengths: Vec<usize>, values: Vec<f64>) -> Sample {
    let amaxes = SampleInput::activation([ranks, lengths.iter().sum()]).in_format(DType::F32);
    Sample::plain(MaxAmaxes { lengths }, [amaxes.fill(Fill::Values(values))])
}
