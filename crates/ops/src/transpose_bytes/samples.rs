//! Samples of [`TransposeBytes`] and [`TransposeBlockScales`].

use super::{TransposeBlockScales, TransposeBytes};
use crate::samples::{GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, Scaling, TensorType};

impl Sampled for TransposeBytes {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![sample(DType::E4M3, [13, 7]), sample(DType::E5M2, [1, 19]), sample(DType::E4M3, [32, 48])]
    }

    fn large() -> Sample {
        sample(DType::E5M2, [301, 163])
    }

    /// Several tiles, whose rows are aligned in x, in y, in both, and in neither.
    fn gpu_samples() -> Vec<Sample> {
        let sizes = [[129, 256], [272, 131], [144, 400], [257, 129], [1, 4096], [130, 1]];
        sizes.map(|size| sample(DType::E4M3, size)).into()
    }
}

fn sample(dtype: DType, size: [usize; 2]) -> Sample {
    Sample::plain(TransposeBytes, [SampleInput::activation(size).in_format(dtype)])
}

impl Sampled for TransposeBlockScales {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        [[1, 1], [130, 700], [1000, 129]].map(scales).into()
    }

    fn large() -> Sample {
        scales([20_000, 9000])
    }
}

fn scales([rows, cols]: [usize; 2]) -> Sample {
    let shape = Scaling::Block.shape(rows, cols);
    Sample::plain(TransposeBlockScales { cols }, [SampleInput::activation(shape).in_format(DType::F32)])
}
