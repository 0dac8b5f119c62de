//! Samples of [`BalanceBias`].

use super::BalanceBias;
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

/// Layers with these numbers of experts, each with two other sums before its loads.
fn sample(skip: u32, experts: &[usize]) -> Sample {
    let (mut sums, mut loads) = (Vec::new(), Vec::new());
    for &experts in experts {
        sums.extend([0.5, -3.0]);
        loads.push(sums.len());
        sums.extend((0..experts).map(|n| (n * n * 7 % 23) as f64));
    }
    sums.resize(sums.len().next_multiple_of(2), 0.0);
    let sums = SampleInput::activation([sums.len() / 2, 2]).in_format(DType::F32).fill(Fill::Values(sums));
    let biases = experts.iter().map(|&experts| SampleInput::activation([experts]).in_format(DType::F32));
    let inputs: Vec<_> = [SampleInput::flag(skip), sums].into_iter().chain(biases).collect();
    Sample::plain(BalanceBias::new(0.01, loads), inputs)
}

impl Sampled for BalanceBias {
    fn samples() -> Vec<Sample> {
        vec![sample(0, &[5, 8, 1]), sample(1, &[8])]
    }

    fn large() -> Sample {
        sample(0, &[128; 30])
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        vec![sample(0, &[160, 33, 1024])]
    }
}
