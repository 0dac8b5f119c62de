//! Samples of [`MuonMomentum`], [`Orthogonalize`] and [`MuonStep`].

use super::{MuonMomentum, MuonStep, Orthogonalize};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, TensorType};

fn number(x: f64) -> SampleInput {
    SampleInput::activation([]).fill(Fill::Values(vec![x]))
}

impl Sampled for MuonMomentum {
    fn samples() -> Vec<Sample> {
        vec![momentum(2, 2, [5, 7], 0), momentum(1, 3, [4, 6], 0), momentum(2, 3, [5, 7], 1)]
    }

    fn large() -> Sample {
        momentum(2, 3, [300, 250], 0)
    }
}

/// n matrices in so many slots.
fn momentum(n: usize, slots: usize, shape: [usize; 2], skip: u32) -> Sample {
    let matrices = (0..2 * n).map(|_| SampleInput::activation(shape));
    let inputs: Vec<_> = [number(0.75), SampleInput::flag(skip)].into_iter().chain(matrices).collect();
    Sample::plain(MuonMomentum::new(0.95, n, slots), inputs)
}

impl Sampled for Orthogonalize {
    /// GEMMs of a GPU round their operands to bf16. Of few rows or columns, one small singular value decides.
    fn tolerance(&self, inputs: &[TensorType]) -> GpuTolerance {
        let cols = inputs[0].shape[inputs[0].shape.len() - 1];
        let is_large = self.parts.iter().all(|rows| rows.min(&cols) >= &64);
        GpuTolerance::Rounding { f32: if is_large { 1e-2 } else { 0.15 } }
    }

    /// A wide, a square and a tall matrix, one row, one column; parts; pieces with padding, from the first
    /// one and from another one on.
    fn samples() -> Vec<Sample> {
        vec![
            orthogonalize(&[5], 0, [1, 5, 9]),
            orthogonalize(&[6], 0, [1, 6, 6]),
            orthogonalize(&[11], 0, [1, 11, 4]),
            orthogonalize(&[1], 0, [1, 1, 8]),
            orthogonalize(&[8], 0, [1, 8, 1]),
            orthogonalize(&[8, 4, 4], 0, [2, 8, 6]),
            orthogonalize(&[7, 3], 0, [3, 4, 5]),
            orthogonalize(&[7, 3, 3], 2, [3, 5, 5]),
        ]
    }

    fn large() -> Sample {
        orthogonalize(&[300, 90], 1, [2, 200, 170])
    }

    /// Parts of 21 shapes.
    fn gpu_samples() -> Vec<Sample> {
        vec![
            orthogonalize(&[64, 64, 128], 0, [1, 256, 128]),
            orthogonalize(&[96, 64, 72], 1, [2, 120, 256]),
            orthogonalize(&[520], 3, [4, 136, 64]),
            orthogonalize(&[65, 130, 200], 0, [1, 395, 100]),
            orthogonalize(&[80, 160, 240], 0, [1, 480, 160]),
            orthogonalize(&[64, 100, 192, 384], 0, [1, 740, 96]),
            orthogonalize(&[70, 140, 210], 2, [3, 144, 70]),
            orthogonalize(&[128, 333], 0, [1, 461, 77]),
        ]
    }
}

/// A matrix of such parts in n pieces of p rows and c columns.
fn orthogonalize(parts: &[usize], first: usize, shape: [usize; 3]) -> Sample {
    Sample::plain(Orthogonalize { parts: parts.to_vec(), first }, [SampleInput::activation(shape)])
}

impl Sampled for MuonStep {
    fn samples() -> Vec<Sample> {
        let none = vec![None];
        let some = || vec![Some(DType::BF16), None, Some(DType::F32)];
        vec![step(none, 1, [5, 7], 0), step(some(), 4, [3, 5], 0), step(some(), 3, [3, 5], 1)]
    }

    fn large() -> Sample {
        step(vec![Some(DType::BF16), None], 2, [300, 250], 0)
    }
}

/// Masters with such copies, and an update of so many slots.
fn step(copies: Vec<Option<DType>>, slots: usize, [rows, cols]: [usize; 2], skip: u32) -> Sample {
    let masters = copies.iter().map(|_| SampleInput::activation([rows, cols]));
    let update = SampleInput::activation([slots, rows, cols]);
    let inputs: Vec<_> = [number(0.02), SampleInput::flag(skip), update].into_iter().chain(masters).collect();
    Sample::plain(MuonStep::new(0.1, copies), inputs)
}
