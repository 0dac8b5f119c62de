//! Samples of [`Retile`].

use super::Retile;
use crate::permute::samples::routing;
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, Scaling, TensorType};

/// Tokens of this width with scales that are powers of two. A NaN, if `special`, and numbers that become
/// subnormal.
fn sample([tokens, top_k, experts, align]: [usize; 4], width: usize, special: bool) -> Sample {
    let value = |n: usize| match n % 97 {
        13 if special && n > 500 => f64::NAN,
        17 => -0.0,
        _ => ((n * 7919 % 1013) as f64 - 506.0) * 0.7,
    };
    let values = (0..tokens * width).map(value).collect();
    let q = SampleInput::activation([tokens, width]).in_format(DType::E4M3).fill(Fill::Values(values));
    let shape = Scaling::Tile.shape(tokens, width);
    let scales = (0..shape[0] * shape[1]).map(|n| 2f64.powi((n * 5 % 19) as i32 - 12)).collect();
    let scales = SampleInput::activation(shape).fill(Fill::Values(scales));
    let [sources, rows] = routing(tokens, top_k, experts, align);
    Sample::plain(Retile, [q, scales, sources, rows])
}

impl Sampled for Retile {
    fn samples() -> Vec<Sample> {
        vec![
            sample([7, 2, 5, 4], 5, false),
            sample([40, 3, 3, 16], 144, false),
            sample([2, 1, 2, 1], 130, false),
        ]
    }

    fn large() -> Sample {
        sample([300, 2, 5, 128], 160, false)
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        vec![
            sample([200, 3, 5, 128], 272, true),
            sample([90, 2, 3, 1], 256, false),
            sample([70, 4, 6, 16], 203, true),
            sample([33, 2, 5, 1], 67, false),
        ]
    }
}
