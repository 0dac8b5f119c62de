//! Samples of [`Permute`], [`Unpermute`], [`UnpermuteTree`] and the ops of gates.

use super::{Permute, PermuteByTree, PermuteGates, Unpermute, UnpermuteGates, UnpermuteTree};
use crate::dispatch::samples::Routing;
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use crate::tail::TAIL_SOURCE;
use xtrain_program::Tail;
use xtrain_tensor::TensorType;

/// An undefined tail.
const UNDEFINED: Tail = Tail::Undefined { live_rows: 1 };

/// The sources and rows of `tokens` tokens with `top_k` of `experts` experts each, from a multiple of `align`
/// on; the last token has no rows.
pub(crate) fn routing(tokens: usize, top_k: usize, experts: usize, align: usize) -> [SampleInput; 2] {
    let ids = experts_of(tokens, top_k, experts);
    Routing::from_experts(&ids, experts, align, align).sources_and_rows(&ids, top_k)
}

/// A routing with so many rows after the last group.
pub(crate) fn routing_with_tail(
    [tokens, top_k, experts, align]: [usize; 4],
    tail: usize,
) -> [SampleInput; 2] {
    let ids = experts_of(tokens, top_k, experts);
    Routing::from_experts(&ids, experts, align, tail).sources_and_rows(&ids, top_k)
}

/// The rows before the tail, by the sources of rows.
fn first_of_tail(sources: &SampleInput) -> usize {
    let Fill::Values(sources) = &sources.fill else { unreachable!("sources are values") };
    sources.iter().position(|source| *source == f64::from(TAIL_SOURCE)).unwrap_or(sources.len())
}

/// The expert of each copy; None for those of the last token.
fn experts_of(tokens: usize, top_k: usize, experts: usize) -> Vec<Option<usize>> {
    let expert = |copy: usize| (copy / top_k + copy % top_k * 2) % experts;
    let live = (tokens - 1) * top_k;
    (0..tokens * top_k).map(|copy| (copy < live).then(|| expert(copy))).collect()
}

/// The capacity of a routing.
fn capacity([sources, _]: &[SampleInput; 2]) -> usize {
    sources.ty.numel()
}

/// Routings with tails: of some rows, of all rows but the first tile, of none.
const TAILS: [([usize; 4], usize, usize); 4] =
    [([7, 2, 5, 4], 140, 5), ([1, 2, 5, 4], 300, 8), ([70, 3, 2, 1], 1, 9), ([30, 2, 3, 128], 512, 264)];
const SMALL: [([usize; 4], usize); 3] = [([7, 2, 5, 4], 5), ([4, 1, 3, 1], 8), ([2, 3, 7, 2], 1)];
const LARGE: ([usize; 4], usize) = ([700, 2, 5, 16], 40);
const ON_GPU: [([usize; 4], usize); 3] =
    [([300, 4, 9, 128], 520), ([37, 2, 3, 1], 2051), ([9, 1, 2, 4], 4096)];

fn all(
    cases: &[([usize; 4], usize)],
    sample: impl Fn([SampleInput; 2], usize, [usize; 4]) -> Sample,
) -> Vec<Sample> {
    let of = |&(shape, width): &([usize; 4], usize)| {
        let [tokens, top_k, experts, align] = shape;
        sample(routing(tokens, top_k, experts, align), width, shape)
    };
    cases.iter().map(of).collect()
}

fn permute([sources, rows]: [SampleInput; 2], width: usize, [tokens, ..]: [usize; 4]) -> Sample {
    Sample::forward(Permute::default(), [SampleInput::activation([tokens, width]), sources, rows])
}

/// Samples of routings with tails, of which the tokens are `x`.
fn with_undefined_tail(
    op: impl Sampled + Copy,
    further: impl Fn(usize, usize) -> Option<SampleInput>,
) -> Vec<Sample> {
    let of = |(shape, tail, width): ([usize; 4], usize, usize)| {
        let [tokens, top_k, ..] = shape;
        let x = SampleInput::activation([tokens, width]);
        let inputs = [x].into_iter().chain(routing_with_tail(shape, tail)).chain(further(tokens, top_k));
        Sample::plain(op, inputs.collect::<Vec<_>>())
    };
    TAILS.map(of).into()
}

/// Rows by experts whose tail is not read.
fn unpermute_tails(op: impl Sampled + Copy, is_vector: bool) -> Vec<Sample> {
    let of = |(shape, tail, width): ([usize; 4], usize, usize)| {
        let [sources, rows] = routing_with_tail(shape, tail);
        let (capacity, first) = (sources.ty.numel(), first_of_tail(&sources));
        let y = match is_vector {
            true => SampleInput::activation([capacity]),
            false => SampleInput::activation([capacity, width]),
        };
        Sample::plain(op, [y.without(0, first), sources, rows])
    };
    TAILS.map(of).into()
}

fn permute_by_tree(
    [sources, rows]: [SampleInput; 2],
    width: usize,
    [tokens, top_k, experts, _]: [usize; 4],
) -> Sample {
    let tree = UnpermuteTree { experts, groups: UnpermuteTree::groups_of(experts), rounded: true };
    let ids = experts_of(tokens, top_k, experts).into_iter().map(|id| id.map_or(-1, |id| id as i32));
    let ids = SampleInput::integers([tokens, top_k], ids);
    Sample::forward(
        PermuteByTree { tree, tail: Tail::Zeros },
        [SampleInput::activation([tokens, width]), sources, rows, ids],
    )
}

fn unpermute(routing: [SampleInput; 2], width: usize, [tokens, top_k, ..]: [usize; 4]) -> Sample {
    let y = SampleInput::activation([capacity(&routing), width]);
    let [sources, rows] = routing;
    let mut inputs = vec![y, sources, rows];
    // With and without what is added.
    inputs.extend((top_k % 2 == 0).then(|| SampleInput::activation([tokens, width])));
    Sample::forward(Unpermute, inputs)
}

fn gates([sources, rows]: [SampleInput; 2], _: usize, [tokens, top_k, ..]: [usize; 4]) -> Sample {
    Sample::forward(PermuteGates, [SampleInput::activation([tokens, top_k]), sources, rows])
}

fn dgates(routing: [SampleInput; 2], _: usize, _: [usize; 4]) -> Sample {
    let dy = SampleInput::activation([capacity(&routing)]);
    let [sources, rows] = routing;
    Sample::plain(UnpermuteGates, [dy, sources, rows])
}

fn large(sample: impl Fn([SampleInput; 2], usize, [usize; 4]) -> Sample) -> Sample {
    all(&[LARGE], sample).remove(0)
}

impl Sampled for Permute {
    fn samples() -> Vec<Sample> {
        let undefined = with_undefined_tail(Permute { tail: UNDEFINED }, |_, _| None);
        all(&SMALL, permute).into_iter().chain(undefined).collect()
    }

    fn large() -> Sample {
        large(permute)
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Rounding { f32: 0.0 }
    }

    fn gpu_samples() -> Vec<Sample> {
        all(&ON_GPU, permute)
    }
}

impl Sampled for PermuteByTree {
    fn samples() -> Vec<Sample> {
        let tree = UnpermuteTree { experts: 4, groups: 4, rounded: true };
        let ids = |tokens: usize, top_k| {
            Some(SampleInput::integers([tokens, top_k], (0..tokens * top_k).map(|n| n as i32 % 4)))
        };
        let undefined = with_undefined_tail(PermuteByTree { tree, tail: UNDEFINED }, ids);
        all(&SMALL, permute_by_tree).into_iter().chain(undefined).collect()
    }

    fn large() -> Sample {
        large(permute_by_tree)
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Rounding { f32: 0.0 }
    }
}

impl Sampled for Unpermute {
    fn samples() -> Vec<Sample> {
        all(&SMALL, unpermute).into_iter().chain(unpermute_tails(Unpermute, false)).collect()
    }

    fn large() -> Sample {
        large(unpermute)
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Rounding { f32: 0.0 }
    }

    fn gpu_samples() -> Vec<Sample> {
        all(&ON_GPU, unpermute)
    }
}

impl Sampled for PermuteGates {
    fn samples() -> Vec<Sample> {
        all(&SMALL, gates)
    }

    fn large() -> Sample {
        large(gates)
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }
}

impl Sampled for UnpermuteGates {
    fn samples() -> Vec<Sample> {
        all(&SMALL, dgates).into_iter().chain(unpermute_tails(UnpermuteGates, true)).collect()
    }

    fn large() -> Sample {
        large(dgates)
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }
}

/// Tokens whose first copies are of one rank's experts, some of one group; the last token has no rows. The
/// first sample is of the whole sum, with or without what is added; the second of a rank's part.
fn trees([tokens, top_k, experts, groups]: [usize; 4], width: usize) -> [Sample; 2] {
    let id = |copy: usize| {
        let (token, k) = (copy / top_k, copy % top_k);
        (token * (token + 1) / 2 + k * (1 + token % 2)) % (2 * experts)
    };
    let live = (tokens - 1) * top_k;
    // The rank's place is 1.
    let own = |copy: usize| id(copy).checked_sub(experts).filter(|_| copy < live);
    let copies = 0..tokens * top_k;
    let locals: Vec<_> = copies.clone().map(own).collect();
    let [sources, rows] = Routing::from_experts(&locals, experts, 4, 140).sources_and_rows(&locals, top_k);
    let ids = SampleInput::integers(
        [tokens, top_k],
        copies.map(|copy| if copy < live { id(copy) as i32 } else { -1 }),
    );
    // Also -0, to which nothing may be added.
    let value = |n: usize| if n % 5 == 3 { -0.0 } else { (n * 37 % 61) as f64 / 8.0 - 3.7 };
    let values = (0..sources.ty.numel() * width).map(value).collect();
    let y = SampleInput::activation([sources.ty.numel(), width]).fill(Fill::Values(values)).computed();
    let y = y.without(0, first_of_tail(&sources));
    let inputs = vec![y, sources, rows, ids];
    let part = UnpermuteTree { experts, groups, rounded: false };
    let shared = (top_k % 2 == 0).then(|| SampleInput::activation([tokens, width]).computed());
    let whole: Vec<_> = inputs.clone().into_iter().chain(shared).collect();
    [Sample::forward(UnpermuteTree { rounded: true, ..part }, whole), Sample::forward(part, inputs)]
}

impl Sampled for UnpermuteTree {
    fn samples() -> Vec<Sample> {
        [([7, 2, 8, 8], 5), ([4, 3, 6, 2], 8), ([3, 1, 5, 1], 1)]
            .into_iter()
            .flat_map(|(shape, width)| trees(shape, width))
            .collect()
    }

    fn large() -> Sample {
        let [whole, _] = trees([700, 2, 8, 4], 40);
        whole
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        [([70, 8, 16, 8], 520), ([37, 6, 12, 4], 2051), ([9, 32, 16, 2], 4096)]
            .into_iter()
            .flat_map(|(shape, width)| trees(shape, width))
            .collect()
    }
}
