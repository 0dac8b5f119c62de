//! Samples of [`RankWords`] and [`StepTotals`].

use super::{FLAGS, PieceUnits, RankWords, SKIPPED, Squares, StepTotals};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_program::Groups;
use xtrain_tensor::{DType, TensorType};

impl Sampled for RankWords {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        let number = |x: f64| SampleInput::activation([]).fill(Fill::Values(vec![x]));
        let words = |stop| {
            vec![number(9.5).in_format(DType::F64), number(2.5), number(2.75), SampleInput::flag(stop)]
        };
        let with_amax = |amax: f64| {
            let amax = SampleInput::activation([1]).fill(Fill::Values(vec![amax]));
            Sample::plain(RankWords, [words(7), vec![amax]].concat())
        };
        let of_sources = || {
            let mut inputs = words(1);
            inputs.insert(3, SampleInput::activation([3, 2]).in_format(DType::F32));
            Sample::plain(RankWords, inputs)
        };
        vec![
            Sample::plain(RankWords, words(0)),
            of_sources(),
            with_amax(3.0),
            with_amax(f64::INFINITY),
            with_amax(f64::from(SKIPPED)),
            with_amax(f64::NAN),
            of_units(3, 2, 0),
            of_units(3, 4, 2),
        ]
    }

    fn large() -> Sample {
        of_units(700, 300, 5)
    }
}

/// The words of so many units, micro-batches and sources.
fn of_units(units: usize, micro_batches: usize, sources: usize) -> Sample {
    let squares = SampleInput::activation([units]).in_format(DType::F64);
    let losses = SampleInput::activation([micro_batches, 2 + 2 * sources]).in_format(DType::F32);
    let amax = SampleInput::activation([1]).fill(Fill::Values(vec![3.0]));
    Sample::plain(RankWords, [squares, losses, SampleInput::flag(1), amax])
}

/// Gradients that so many ranks have pieces of, with the rank of the first piece and the units of a piece.
pub(super) fn pieces(ranks: usize, gradients: &[(usize, usize)]) -> Squares {
    let shard = Groups::world(ranks);
    let units = |&(first, units): &(usize, usize)| PieceUnits { shard, first, units, ..PieceUnits::WHOLE };
    Squares::Pieces(gradients.iter().map(units).collect())
}

impl Sampled for StepTotals {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        // Two ranks with parts of experts, which two others have too, and three pieces of each part.
        let parts = Groups::world(2);
        let shared = PieceUnits { parts, units: 2, ..PieceUnits::WHOLE };
        let cut = PieceUnits { parts, shard: Groups { size: 3, stride: 2 }, first: 1, units: 3 };
        let of_parts = |units: &[PieceUnits]| Squares::Pieces(units.to_vec());
        vec![
            words_of(1, Squares::Whole, [1, 0], None),
            words_of(3, pieces(3, &[(0, 1)]), [1, 3], None),
            words_of(3, Squares::Whole, [4, 0], None),
            words_of(4, pieces(4, &[(0, 3), (2, 1), (3, 5)]), [2, 2], None),
            words_of(6, pieces(3, &[(0, 3), (2, 1), (1, 5)]), [2, 2], None),
            words_of(37, pieces(37, &[(0, 1)]), [1, 0], None),
            words_in_parts(8, 4, Squares::Whole, [3, 2], None),
            words_in_parts(6, 2, Squares::Whole, [1, 1], None),
            words_of(4, of_parts(&[PieceUnits::WHOLE, shared]), [2, 1], None),
            words_of(
                6,
                Squares::OfStages {
                    ranks: 2,
                    pieces: vec![
                        vec![PieceUnits { shard: Groups::world(2), first: 1, units: 2, ..PieceUnits::WHOLE }],
                        vec![
                            PieceUnits { units: 3, ..PieceUnits::WHOLE },
                            PieceUnits { parts, ..PieceUnits::WHOLE },
                        ],
                        Vec::new(),
                    ],
                },
                [2, 1],
                None,
            ),
            words_of(
                12,
                of_parts(&[cut, PieceUnits { units: 4, ..PieceUnits::WHOLE }, shared]),
                [1, 2],
                None,
            ),
        ]
    }

    fn large() -> Sample {
        let units: Vec<_> = (0..400).map(|n| (n % 8, 1 + n % 3)).collect();
        words_of(8, pieces(8, &units), [5, 150], None)
    }

    /// An amax that is not finite.
    fn gpu_samples() -> Vec<Sample> {
        let in_parts = words_in_parts(16, 8, pieces(16, &[(3, 2)]), [2, 3], Some(6));
        vec![words_of(5, Squares::Whole, [1, 0], Some(2)), in_parts]
    }
}

/// Words of ranks with so many micro-batches and sources, of which one may have an amax that is not finite.
fn words_of(
    ranks: usize,
    squares: Squares,
    [micro_batches, sources]: [usize; 2],
    bad_amax: Option<usize>,
) -> Sample {
    words_in_parts(ranks, 1, squares, [micro_batches, sources], bad_amax)
}

/// As [`words_of`], of ranks of which so many compute parts of a micro-batch.
fn words_in_parts(
    ranks: usize,
    parts: usize,
    squares: Squares,
    [micro_batches, sources]: [usize; 2],
    bad_amax: Option<usize>,
) -> Sample {
    let op = StepTotals { squares, micro_batches, sources, parts };
    let (words, flags) = (op.words(), op.words() - FLAGS);
    // Squares and requests to stop are not negative.
    let word = |i: usize| match (i / words, i % words) {
        (rank, n) if n == flags => f64::from(u8::from(bad_amax == Some(rank))),
        (rank, n) if n > flags => f64::from(u8::from(rank % 3 == 1)),
        (rank, n) if n >= op.squares.words() => 1.1 * n as f64 - 0.3 * rank as f64,
        (rank, n) => 0.1 + rank as f64 * 1.7 + n as f64 / 7.0,
    };
    let all = Fill::Values((0..ranks * words).map(word).collect());
    Sample::plain(op, [SampleInput::activation([ranks, words]).in_format(DType::F64).fill(all)])
}
