//! Samples of [`TakePart`], [`PlacePart`] and [`JoinColumns`].

use super::{JoinColumns, PlacePart, TakePart};
use crate::samples::{GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_program::{CutBy, Groups, TensorCut};
use xtrain_tensor::{DType, TensorType};

/// A whole of this shape and format, cut among so many ranks.
struct CutTensor {
    shape: [usize; 2],
    dtype: DType,
    cut: TensorCut,
    place: u32,
}

fn cut(shape: [usize; 2], dtype: DType, ranks: usize, place: u32, by: CutBy) -> CutTensor {
    CutTensor { shape, dtype, cut: TensorCut { groups: Groups::world(ranks), by }, place }
}

impl CutTensor {
    fn take(self) -> Sample {
        let whole = SampleInput::activation(self.shape).in_format(self.dtype);
        Sample::plain(TakePart(self.cut), [whole, SampleInput::counters([self.place])])
    }

    fn put(self) -> Sample {
        let mut shape = self.shape;
        shape[usize::from(self.cut.by == CutBy::Columns)] /= self.cut.groups.size;
        let part = SampleInput::activation(shape).in_format(self.dtype);
        Sample::plain(PlacePart(self.cut), [part, SampleInput::counters([self.place])])
    }
}

/// Queries, keys and values; a column; columns; words of each size.
fn small() -> [CutTensor; 6] {
    let rows = |runs: &[usize]| CutBy::Rows(runs.to_vec());
    [
        cut([24, 5], DType::F32, 4, 2, rows(&[16, 4, 4])),
        cut([12, 1], DType::F32, 3, 0, rows(&[6, 6])),
        cut([7, 6], DType::BF16, 2, 1, CutBy::Columns),
        cut([5, 64], DType::F32, 2, 0, CutBy::Columns),
        cut([9, 15], DType::E4M3, 5, 4, CutBy::Columns),
        cut([6, 3], DType::BF16, 3, 1, rows(&[6])),
    ]
}

/// Lines that several blocks share, of 16 bytes and of fewer.
fn large() -> [CutTensor; 5] {
    let rows = |runs: &[usize]| CutBy::Rows(runs.to_vec());
    [
        cut([96, 264], DType::BF16, 4, 3, rows(&[64, 16, 16])),
        cut([130, 512], DType::F32, 8, 5, CutBy::Columns),
        cut([131, 1026], DType::BF16, 2, 1, CutBy::Columns),
        cut([40, 33], DType::E5M2, 2, 0, rows(&[20, 20])),
        cut([77, 1023], DType::F32, 3, 2, CutBy::Columns),
    ]
}

impl Sampled for TakePart {
    fn samples() -> Vec<Sample> {
        small().map(CutTensor::take).into()
    }

    fn large() -> Sample {
        cut([300, 320], DType::F32, 2, 1, CutBy::Columns).take()
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        large().map(CutTensor::take).into()
    }
}

impl Sampled for PlacePart {
    fn samples() -> Vec<Sample> {
        small().map(CutTensor::put).into()
    }

    fn large() -> Sample {
        cut([300, 320], DType::F32, 2, 1, CutBy::Columns).put()
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        large().map(CutTensor::put).into()
    }
}

/// The parts of so many ranks, together of this shape and format.
fn join(ranks: usize, shape: [usize; 2], dtype: DType) -> Sample {
    Sample::plain(JoinColumns { ranks }, [SampleInput::activation(shape).in_format(dtype)])
}

impl Sampled for JoinColumns {
    fn samples() -> Vec<Sample> {
        let small = [(2, [6, 5], DType::F32), (3, [3, 1], DType::BF16), (4, [20, 32], DType::E4M3)];
        small.map(|(ranks, shape, dtype)| join(ranks, shape, dtype)).into()
    }

    fn large() -> Sample {
        join(2, [600, 160], DType::F32)
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    /// Lines that several blocks share, in words of each size.
    fn gpu_samples() -> Vec<Sample> {
        let large =
            [(8, [1040, 512], DType::F32), (2, [262, 513], DType::BF16), (3, [231, 1023], DType::E5M2)];
        large.map(|(ranks, shape, dtype)| join(ranks, shape, dtype)).into()
    }
}
