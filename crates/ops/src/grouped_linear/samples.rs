//! Samples of [`GroupedLinear`], [`GroupedDgrad`] and [`GroupedWgrad`].

use super::{GroupedDgrad, GroupedLinear, GroupedWgrad};
use crate::dispatch::samples::Routing;
use crate::samples::{Sample, SampleInput, Sampled};
use xtrain_program::Tail;
use xtrain_tensor::DType;

impl Routing {
    fn linear(&self, outputs: usize, inputs: usize, tail: Tail) -> Sample {
        let groups = self.groups();
        let w = SampleInput::parameter([groups.experts * outputs, inputs]);
        let (op, inputs) = (GroupedLinear { groups, tail }, [self.ragged(inputs), w, self.starts()]);
        if tail.is_undefined() { Sample::plain(op, inputs) } else { Sample::forward(op, inputs) }
    }

    fn dgrad(&self, outputs: usize, inputs: usize, tail: Tail) -> Sample {
        let groups = self.groups();
        let w = SampleInput::activation([groups.experts * outputs, inputs]);
        Sample::plain(GroupedDgrad { groups, tail }, [self.ragged(outputs), w, self.starts()])
    }

    fn wgrad(&self, out: DType, outputs: usize, inputs: usize) -> Sample {
        let op = GroupedWgrad { groups: self.groups(), out };
        Sample::plain(op, [self.ragged(outputs), self.ragged(inputs), self.starts()])
    }
}

/// Samples of sizes, with zeros in the tail and, where there is a tail, with an undefined one.
fn with_tails(
    sizes: impl IntoIterator<Item = (Routing, [usize; 2])>,
    sample: impl Fn(&Routing, [usize; 2], Tail) -> Sample,
) -> Vec<Sample> {
    let of_size = |(routing, size): (Routing, [usize; 2])| {
        let tails = routing.tails().into_iter();
        tails.map(|tail| sample(&routing, size, tail)).collect::<Vec<_>>()
    };
    sizes.into_iter().flat_map(of_size).collect()
}

/// Routings with outputs and inputs of an expert: one expert; experts without tokens; all tokens of one
/// expert; rows after the last group, also more than a tile.
fn small() -> Vec<(Routing, [usize; 2])> {
    vec![
        (Routing::new([13], 1, 0), [5, 7]),
        (Routing::new([6, 0, 5], 4, 3), [3, 9]),
        (Routing::new([0, 11, 0], 1, 2), [9, 3]),
        (Routing::new([1, 0, 3, 2, 0, 0, 4, 1], 4, 4), [3, 5]),
        (Routing::new([1, 2, 0, 1, 0, 1, 3, 0], 1, 0), [5, 2]),
        // No token at all.
        (Routing::new([0, 0, 0], 4, 4), [2, 3]),
        (Routing::new([0, 0], 1, 130), [3, 2]),
        (Routing::new([6, 0, 5], 4, 140), [3, 5]),
        // Rows of whole 16-byte vectors in every type.
        (Routing::new([7, 2, 0], 8, 8), [16, 8]),
    ]
}

fn large() -> (Routing, [usize; 2]) {
    (Routing::new([200, 0, 140], 128, 37), [170, 160])
}

/// Tiles of 64 rows that are full, that begin within and between others, and that rows after the last group
/// share; few rows for each of many experts.
fn gpu() -> Vec<(Routing, [usize; 2])> {
    vec![
        (Routing::new([128, 0, 200, 1, 0, 64, 77, 128], 128, 300), [136, 72]),
        (Routing::new([100, 1, 0, 63, 65, 64, 129, 2], 1, 70), [77, 131]),
        (Routing::new([0, 0, 333], 4, 0), [65, 264]),
        (Routing::new([257], 1, 1), [129, 40]),
        (Routing::new((0..160).map(|e| usize::from(e % 20 == 3)).collect::<Vec<_>>(), 1, 0), [24, 33]),
    ]
}

/// Sizes of the kernel for Hopper, whose groups are whole tiles of 128 rows and whose rows are whole 16-byte
/// vectors: tiles of each width, and partly filled ones; odd numbers of row tiles, which clusters share; more
/// tiles than blocks; no rows; many experts; long sums in each GEMM, with a last tile that is not full, also
/// if it is the only one of its row.
fn hopper() -> Vec<(Routing, [usize; 2])> {
    vec![
        (Routing::new([300, 0, 129, 0, 1, 0, 0, 384], 128, 128), [384, 200]),
        (Routing::new([0, 700, 0], 128, 0), [520, 264]),
        (Routing::new([640], 128, 130), [128, 136]),
        (Routing::new([256, 128, 5], 256, 8), [8, 72]),
        (Routing::new([0, 0, 0], 128, 256), [64, 64]),
        (Routing::new((0..1000).map(|e| usize::from(e % 70 == 3)).collect::<Vec<_>>(), 128, 0), [16, 24]),
        (Routing::new([130], 128, 0), [200, 4104]),
        (Routing::new([130], 128, 0), [4104, 200]),
        (Routing::new([4100], 128, 0), [24, 200]),
        (Routing::new([4100], 128, 0), [24, 72]),
        (Routing::of_many(128), [24, 16]),
        (Routing::of_many(160), [16, 72]),
    ]
}

impl Sampled for GroupedLinear {
    fn samples() -> Vec<Sample> {
        with_tails(small(), |routing, [o, i], tail| routing.linear(o, i, tail))
    }

    fn large() -> Sample {
        let (routing, [o, i]) = large();
        routing.linear(o, i, Tail::Zeros)
    }

    fn gpu_samples() -> Vec<Sample> {
        with_tails(gpu().into_iter().chain(hopper()), |routing, [o, i], tail| routing.linear(o, i, tail))
    }
}

impl Sampled for GroupedDgrad {
    fn samples() -> Vec<Sample> {
        with_tails(small(), |routing, [o, i], tail| routing.dgrad(o, i, tail))
    }

    fn large() -> Sample {
        let (routing, [o, i]) = large();
        routing.dgrad(o, i, Tail::Zeros)
    }

    fn gpu_samples() -> Vec<Sample> {
        with_tails(gpu().into_iter().chain(hopper()), |routing, [o, i], tail| routing.dgrad(o, i, tail))
    }
}

impl Sampled for GroupedWgrad {
    fn samples() -> Vec<Sample> {
        small().into_iter().map(|(routing, [o, i])| routing.wgrad(DType::F32, o, i)).collect()
    }

    fn large() -> Sample {
        let (routing, [o, i]) = large();
        routing.wgrad(DType::F32, o, i)
    }

    fn gpu_samples() -> Vec<Sample> {
        let outs = [DType::F32, DType::BF16].into_iter().cycle();
        let sizes = gpu().into_iter().zip(outs).chain(hopper().into_iter().map(|size| (size, DType::F32)));
        sizes.map(|((routing, [o, i]), out)| routing.wgrad(out, o, i)).collect()
    }
}
