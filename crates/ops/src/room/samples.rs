//! Samples of [`RowsNeeded`] and [`CheckRoom`].

use super::{CheckRoom, RowsNeeded};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

impl Sampled for RowsNeeded {
    fn samples() -> Vec<Sample> {
        [0, 7, 1 << 24].map(|rows| Sample::plain(RowsNeeded, [SampleInput::integers([1], [rows])])).into()
    }

    fn large() -> Sample {
        RowsNeeded::samples().swap_remove(1)
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }
}

/// Blocks of which the n-th needs `n % 7` rows, and the last one `last`.
fn check(room: usize, blocks: usize, last: f64, halted: u32) -> Sample {
    let rows = (1..blocks).map(|n| (n % 7) as f64).chain([last]).collect();
    let rows = SampleInput::activation([blocks]).in_format(DType::F32).fill(Fill::Values(rows));
    Sample::plain(CheckRoom { room }, [rows, SampleInput::counters([halted])])
}

impl Sampled for CheckRoom {
    fn samples() -> Vec<Sample> {
        vec![check(6, 1, 6.0, 0), check(8, 40, 8.0, 0)]
    }

    fn large() -> Sample {
        check(1000, 70, 1000.0, 0)
    }

    /// Rows that do not fit, and a step after such a step.
    fn gpu_samples() -> Vec<Sample> {
        vec![check(6, 1, 7.0, 0), check(8, 40, 9.0, 0), check(8, 40, 8.0, 1)]
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }
}
