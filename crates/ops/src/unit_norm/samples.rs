//! Samples of [`UnitSquares`] and [`UnitSquaredNorm`].

use super::{UnitSquaredNorm, UnitSquares};
use crate::grad_norm::cuda::CHUNK;
use crate::samples::{Fill, Sample, SampleInput, Sampled};

/// Gradients of these sizes, each with the elements of its units.
fn gradients(sizes: &[(usize, usize)]) -> (Vec<usize>, Vec<SampleInput>) {
    let gradient = |&(elements, unit)| (unit, SampleInput::activation([elements]));
    sizes.iter().map(gradient).unzip()
}

fn squares(sizes: &[(usize, usize)]) -> Sample {
    let (unit_elements, inputs) = gradients(sizes);
    Sample::plain(UnitSquares { unit_elements }, inputs)
}

fn norm(sizes: &[(usize, usize)]) -> Sample {
    let (unit_elements, inputs) = gradients(sizes);
    Sample::plain(UnitSquaredNorm { unit_elements }, inputs)
}

/// Units that start at 16 bytes and others, of one chunk and of several, and a gradient that is one unit.
const SIZES: [(usize, usize); 5] =
    [(3 * CHUNK + 5, CHUNK + 8), (2 * CHUNK + 100, CHUNK + 3), (4096, 16), (999, 7), (77, 100)];

impl Sampled for UnitSquares {
    fn samples() -> Vec<Sample> {
        let large = SampleInput::activation([35]).fill(Fill::Normal(0.0, 1e30));
        vec![
            squares(&[(35, 7), (1, 1), (50, 64), (33, 32)]),
            Sample::plain(UnitSquares { unit_elements: vec![8] }, [large]),
        ]
    }

    fn large() -> Sample {
        squares(&[(150_000, 4_100), (210_000, 70_000)])
    }

    fn gpu_samples() -> Vec<Sample> {
        vec![squares(&SIZES)]
    }
}

impl Sampled for UnitSquaredNorm {
    fn samples() -> Vec<Sample> {
        vec![norm(&[(35, 7), (1, 1), (50, 64), (33, 32)])]
    }

    fn large() -> Sample {
        norm(&[(150_000, 4_100), (210_000, 70_000)])
    }

    /// More gradients than the last launch has threads, too.
    fn gpu_samples() -> Vec<Sample> {
        let many: Vec<_> = (0..600).map(|n| (1 + n % 5, 2)).collect();
        vec![norm(&SIZES), norm(&many)]
    }
}
