//! Samples of [`Dispatch`].

use super::Dispatch;
use crate::groups::Groups;
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use std::ops::Range;
use xtrain_tensor::{Philox, TensorType};

/// A routing: the tokens of each expert, and the rows of the ragged tensors.
pub(crate) struct Routing {
    tokens: Vec<usize>,
    alignment: usize,
    /// Rows after the last group.
    tail: usize,
}

impl Routing {
    pub(crate) fn new(tokens: impl Into<Vec<usize>>, alignment: usize, tail: usize) -> Routing {
        Routing { tokens: tokens.into(), alignment, tail }
    }

    /// No, few and many tokens of each of `experts` experts.
    pub(crate) fn of_many(experts: usize) -> Routing {
        Routing::new(
            (0..experts).map(|expert| [0, 1, 0, 0, 130, 0, 0, 0][expert % 8]).collect::<Vec<_>>(),
            128,
            0,
        )
    }

    /// The routing of copies of tokens to these of `experts` experts; `None` for a copy without a row.
    pub(crate) fn from_experts(
        ids: &[Option<usize>],
        experts: usize,
        alignment: usize,
        tail: usize,
    ) -> Routing {
        let count = |expert: usize| ids.iter().filter(|id| **id == Some(expert)).count();
        Routing::new((0..experts).map(count).collect::<Vec<_>>(), alignment, tail)
    }

    /// The inputs `sources` and `rows` of the ops, for the copies that the routing was made of.
    pub(crate) fn sources_and_rows(&self, ids: &[Option<usize>], top_k: usize) -> [SampleInput; 2] {
        let (mut next, mut sources) = (self.first_rows(), vec![-1; self.rows()]);
        let place = |(copy, id): (usize, &Option<usize>)| {
            let Some(expert) = *id else { return -1 };
            let row = next[expert];
            next[expert] += 1;
            sources[row] = copy as i32;
            row as i32
        };
        let rows: Vec<i32> = ids.iter().enumerate().map(place).collect();
        let sources = SampleInput::integers([sources.len()], sources);
        [sources, SampleInput::integers([ids.len() / top_k, top_k], rows)]
    }

    /// First rows of the groups, and the end of the last one.
    fn first_rows(&self) -> Vec<usize> {
        let aligned = self.tokens.iter().map(|n| n.next_multiple_of(self.alignment));
        let ends = aligned.scan(0, |end, rows| {
            *end += rows;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }

    /// Rows that belong to tokens.
    fn live(&self) -> Vec<Range<usize>> {
        self.first_rows().iter().zip(&self.tokens).map(|(start, n)| *start..start + n).collect()
    }

    /// The attribute of the ops.
    pub(crate) fn groups(&self) -> Groups {
        let live_rows = self.tokens.iter().sum();
        Groups { experts: self.tokens.len(), align: self.alignment, live_rows }
    }

    /// Rows of a ragged tensor.
    pub(crate) fn rows(&self) -> usize {
        self.first_rows()[self.tokens.len()] + self.tail
    }

    /// A ragged tensor of this many columns.
    pub(crate) fn ragged(&self, cols: usize) -> SampleInput {
        SampleInput::activation([self.rows(), cols]).fill(Fill::NormalRows(self.live()))
    }

    /// The input `starts` of the ops.
    pub(crate) fn starts(&self) -> SampleInput {
        let values: Vec<f64> = self.first_rows().into_iter().map(|row| row as f64).collect();
        SampleInput::ids(values.len(), 1).fill(Fill::Values(values))
    }
}

/// Distinct experts of each token, from `seed`; skewed to the first ones.
fn ids(tokens: usize, top_k: usize, experts: usize, seed: u64) -> SampleInput {
    let rng = Philox::new(seed, 0, 0);
    let of_token = |token: usize| {
        let draw = |n: usize| rng.word((token * top_k + n) as u64) as usize;
        let mut drawn = Vec::new();
        for n in 0..top_k {
            // The smaller of two draws.
            let mut id = (draw(n) % experts).min(draw(n) / 65536 % experts);
            while drawn.contains(&id) {
                id = (id + 1) % experts;
            }
            drawn.push(id);
        }
        drawn
    };
    SampleInput::integers([tokens, top_k], (0..tokens).flat_map(of_token).map(|id| id as i32))
}

impl Sampled for Dispatch {
    fn samples() -> Vec<Sample> {
        let sample = |(tokens, top_k, experts, align)| {
            let op = Dispatch { experts, align };
            Sample::plain(op, [ids(tokens, top_k, experts, 3)])
        };
        [(13, 2, 8, 4), (5, 1, 1, 1), (1, 2, 40, 16), (3, 5, 5, 1)].map(sample).into()
    }

    fn large() -> Sample {
        Sample::plain(Dispatch { experts: 64, align: 128 }, [ids(5000, 4, 64, 5)])
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    /// Also tokens without rows, all tokens to one expert, and experts without tokens.
    fn gpu_samples() -> Vec<Sample> {
        let one = SampleInput::integers([700, 1], (0..700).map(|_| 6));
        let padded =
            SampleInput::integers([900, 2], (0..1800).map(|n| if n >= 1500 { -1 } else { n % 2 * 7 }));
        vec![
            Sample::plain(Dispatch { experts: 128, align: 128 }, [ids(2048, 8, 128, 7)]),
            Sample::plain(Dispatch { experts: 8, align: 128 }, [one]),
            Sample::plain(Dispatch { experts: 9, align: 16 }, [padded]),
            Sample::plain(Dispatch { experts: 1000, align: 1 }, [ids(3, 8, 1000, 9)]),
        ]
    }
}
