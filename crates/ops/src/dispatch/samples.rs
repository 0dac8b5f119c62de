//! Samples of [`Dispatch`], [`DispatchOwn`] and [`CountExperts`].

use super::{CountExperts, Dispatch, DispatchOwn};
use crate::groups::Groups;
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use crate::tail::{NO_SOURCE, TAIL_SOURCE, first_row};
use std::ops::Range;
use xtrain_program::Tail;
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
        let (mut next, mut sources) = (self.first_rows(), vec![NO_SOURCE; self.rows()]);
        sources[self.first_of_tail()..].fill(TAIL_SOURCE);
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

    /// The first row of the tail, which is empty if that is the number of rows.
    pub(crate) fn first_of_tail(&self) -> usize {
        first_row(self.first_rows()[self.tokens.len()]).min(self.rows())
    }

    /// The tails that a producer may leave: an undefined one only if there is a tail.
    pub(crate) fn tails(&self) -> Vec<Tail> {
        let undefined = Tail::Undefined { live_rows: self.groups().live_rows };
        let has_tail = self.first_of_tail() < self.rows();
        [Tail::Zeros].into_iter().chain(has_tail.then_some(undefined)).collect()
    }

    /// A ragged tensor of this many columns, whose tail is undefined.
    pub(crate) fn ragged(&self, cols: usize) -> SampleInput {
        let ragged = SampleInput::activation([self.rows(), cols]).fill(Fill::NormalRows(self.live()));
        ragged.without(0, self.first_of_tail())
    }

    /// The input `starts` of the ops.
    pub(crate) fn starts(&self) -> SampleInput {
        let values: Vec<f64> = self.first_rows().into_iter().map(|row| row as f64).collect();
        SampleInput::ids(values.len(), 1).fill(Fill::Values(values))
    }
}

/// Distinct experts of each token, from `seed`; skewed to the first ones.
pub(crate) fn distinct_experts(tokens: usize, top_k: usize, experts: usize, seed: u64) -> Vec<usize> {
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
    (0..tokens).flat_map(of_token).collect()
}

/// The input `ids` with [`distinct_experts`].
fn ids(tokens: usize, top_k: usize, experts: usize, seed: u64) -> SampleInput {
    let ids = distinct_experts(tokens, top_k, experts, seed);
    SampleInput::integers([tokens, top_k], ids.into_iter().map(|id| id as i32))
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

/// Experts of tokens, `top_k` a token, of which each third one is padding.
fn padded(tokens: usize, top_k: usize, experts: usize) -> SampleInput {
    let id = |n: usize| if n / top_k % 3 == 1 { -1 } else { (n * n / 5 % experts) as i32 };
    SampleInput::integers([tokens, top_k], (0..tokens * top_k).map(id))
}

impl Sampled for CountExperts {
    fn samples() -> Vec<Sample> {
        let sample = |(tokens, top_k, experts)| {
            Sample::plain(CountExperts { experts }, [padded(tokens, top_k, experts)])
        };
        [(13, 2, 8), (1, 1, 1), (5, 3, 37)].map(sample).into()
    }

    fn large() -> Sample {
        Sample::plain(CountExperts { experts: 64 }, [ids(5000, 4, 64, 5)])
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    /// Also padding alone, and all tokens to one expert.
    fn gpu_samples() -> Vec<Sample> {
        let all = |id| SampleInput::integers([700, 1], (0..700).map(|_| id));
        vec![
            Sample::plain(CountExperts { experts: 128 }, [ids(2048, 8, 128, 7)]),
            Sample::plain(CountExperts { experts: 9 }, [all(-1)]),
            Sample::plain(CountExperts { experts: 33 }, [all(32)]),
        ]
    }
}

/// Ranks with four experts each.
const OWN: DispatchOwn = DispatchOwn { experts: 4, ranks: 2, align: 4, room: None, by_source: false };

fn own(op: DispatchOwn, place: u32, ids: SampleInput) -> Sample {
    Sample::plain(op, [ids, SampleInput::counters([place])])
}

impl Sampled for DispatchOwn {
    fn samples() -> Vec<Sample> {
        let by_source = DispatchOwn { by_source: true, ..OWN };
        vec![
            own(OWN, 0, padded(14, 2, 8)),
            own(DispatchOwn { experts: 5, ranks: 3, align: 1, ..OWN }, 2, ids(9, 4, 15, 3)),
            own(DispatchOwn { room: Some(8), ..OWN }, 1, ids(14, 3, 8, 5)),
            own(by_source, 1, padded(14, 3, 8)),
            own(DispatchOwn { room: Some(12), ..by_source }, 0, ids(26, 2, 8, 7)),
            own(DispatchOwn { ranks: 1, ..by_source }, 0, ids(3, 2, 4, 9)),
        ]
    }

    fn large() -> Sample {
        own(DispatchOwn { experts: 16, ranks: 4, align: 128, ..OWN }, 2, ids(5000, 4, 64, 5))
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    /// Also padding alone, all tokens to one expert, no token for this rank, and rooms that end within and
    /// between the rows of experts.
    fn gpu_samples() -> Vec<Sample> {
        let all = |id| SampleInput::integers([704, 1], (0..704).map(|_| id));
        let many = DispatchOwn { experts: 32, ranks: 4, align: 128, ..OWN };
        let by_source = DispatchOwn { by_source: true, ..many };
        let one = DispatchOwn { align: 128, by_source: true, ..OWN };
        vec![
            own(many, 3, ids(2048, 8, 128, 7)),
            own(by_source, 1, ids(2048, 8, 128, 7)),
            own(by_source, 0, padded(1500, 3, 128)),
            own(DispatchOwn { room: Some(1280), ..many }, 0, ids(2048, 8, 128, 9)),
            own(DispatchOwn { room: Some(1408), ..by_source }, 0, ids(2048, 8, 128, 9)),
            own(DispatchOwn { room: Some(256), ..one }, 1, all(6)),
            own(one, 1, all(5)),
            own(one, 0, all(5)),
            own(one, 1, all(-1)),
            own(DispatchOwn { experts: 100, ranks: 7, align: 1, ..by_source }, 6, ids(21, 8, 700, 9)),
        ]
    }
}
