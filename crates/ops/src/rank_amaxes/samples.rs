//! Samples of [`RankAmaxes`] and [`MaxAmaxes`].

use super::{MaxAmaxes, RankAmaxes};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

impl Sampled for RankAmaxes {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![packed(1), packed(5)]
    }

    fn large() -> Sample {
        packed(300)
    }
}

fn packed(tensors: usize) -> Sample {
    let amax =
        |n| SampleInput::activation([1]).in_format(DType::F32).fill(Fill::Values(vec![0.5 * n as f64]));
    Sample::plain(RankAmaxes, (0..tensors).map(amax).collect::<Vec<_>>())
}

impl Sampled for MaxAmaxes {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![rows(1, 3), rows(3, 5)]
    }

    fn large() -> Sample {
        rows(8, 300)
    }

    /// Amaxes that are not finite.
    fn gpu_samples() -> Vec<Sample> {
        let special = [1.0, f64::INFINITY, 0.0, f64::NAN, 2.0, 3.0, 0.0, 4.0];
        vec![of_values(2, 4, special.to_vec())]
    }
}

fn rows(ranks: usize, tensors: usize) -> Sample {
    of_values(ranks, tensors, (0..ranks * tensors).map(|i| (i * 37 % 101) as f64).collect())
}

fn of_values(ranks: usize, tensors: usize, values: Vec<f64>) -> Sample {
    let amaxes = SampleInput::activation([ranks, tensors]).in_format(DType::F32);
    Sample::plain(MaxAmaxes, [amaxes.fill(Fill::Values(values))])
}
