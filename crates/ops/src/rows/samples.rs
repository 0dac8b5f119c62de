//! Samples of [`JoinRows`] and [`SplitRows`].

use super::{JoinRows, SplitRows};
use crate::samples::{GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

/// So many tensors of this shape and format.
fn join<const N: usize>(op: JoinRows, count: usize, shape: [usize; N], dtype: DType) -> Sample {
    Sample::plain(op, (0..count).map(|_| SampleInput::activation(shape).in_format(dtype)).collect::<Vec<_>>())
}

fn split<const N: usize>(parts: usize, rows: usize, shape: [usize; N], dtype: DType) -> Sample {
    Sample::plain(SplitRows { parts, rows }, [SampleInput::activation(shape).in_format(dtype)])
}

impl Sampled for JoinRows {
    /// Numbers, vectors, padding that is left out, a tensor of which all is; words of each size.
    fn samples() -> Vec<Sample> {
        vec![
            join(JoinRows::Stacked, 4, [], DType::F32),
            join(JoinRows::Stacked, 2, [3, 5], DType::BF16),
            join(JoinRows::Rows(7), 4, [2, 3], DType::E4M3),
            join(JoinRows::Rows(3), 4, [2, 8], DType::F32),
            join(JoinRows::Rows(5), 1, [6], DType::F32),
            join(JoinRows::Lines(3), 2, [6, 5], DType::F32),
            join(JoinRows::Lines(4), 4, [4, 3], DType::BF16),
        ]
    }

    fn large() -> Sample {
        join(JoinRows::Rows(510), 4, [128, 96], DType::BF16)
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        vec![
            join(JoinRows::Stacked, 8, [130, 515], DType::BF16),
            join(JoinRows::Stacked, 3, [77, 1023], DType::F32),
            join(JoinRows::Rows(1029), 8, [129, 33], DType::E5M2),
            join(JoinRows::Lines(12), 4, [96, 260], DType::F32),
        ]
    }
}

impl Sampled for SplitRows {
    /// Vectors, padding after the last row, a tensor of padding alone; words of each size.
    fn samples() -> Vec<Sample> {
        vec![
            split(4, 2, [8, 5], DType::F32),
            split(4, 2, [7, 3], DType::BF16),
            split(4, 2, [3, 8], DType::E4M3),
            split(1, 6, [5], DType::F32),
        ]
    }

    fn large() -> Sample {
        split(4, 128, [510, 96], DType::BF16)
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        vec![
            split(8, 130, [1033, 515], DType::BF16),
            split(3, 77, [231, 1023], DType::F32),
            split(8, 129, [1029, 33], DType::E5M2),
        ]
    }
}
