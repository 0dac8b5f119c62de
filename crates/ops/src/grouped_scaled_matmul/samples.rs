//! Samples of [`GroupedScaledMatmul`].

use super::GroupedScaledMatmul;
use crate::dispatch::samples::Routing;
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_program::{LinearGemm, Tail};
use xtrain_tensor::{DType, Scaling, TILE, TensorType};

impl Sampled for GroupedScaledMatmul {
    /// Hopper's tensor cores keep 14 bits of a sum.
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Rounding { f32: 2e-4 }
    }

    /// One expert; experts without tokens; all tokens of one expert; rows after the last group; groups that
    /// begin within tiles of scales.
    fn samples() -> Vec<Sample> {
        use LinearGemm::{Dgrad, Fprop, Wgrad};
        let tensors = [Scaling::Tensor; 2];
        let few = || Routing::new([6, 0, 5], 4, 3);
        vec![
            sample(&Routing::new([13], 1, 0), [5, 7], Fprop, tensors, DType::F32),
            sample(&few(), [3, 9], Fprop, tensors, DType::F32),
            sample(&few(), [6, 9], Dgrad, tensors, DType::F32),
            sample(&few(), [5, 9], Wgrad, tensors, DType::F32),
            sample(&Routing::new([0, 11, 0], 1, 2), [128, 5], Fprop, BLOCKS, DType::F32),
            sample(&Routing::new([1, 0, 3], 4, 4), [128, 7], Dgrad, BLOCKS, DType::F32),
            sample(&Routing::new([130, 0, 77], 1, 3), [3, 5], Wgrad, TILES, DType::F32),
            sample(&Routing::new([0, 0, 0], 4, 4), [2, 3], Wgrad, TILES, DType::F32),
            sample(&Routing::new([130, 0, 77], 1, 300), [3, 5], Wgrad, TILES, DType::F32),
            without_tail(&Routing::new([3, 0, 5], 4, 140), [128, 5], Fprop, BLOCKS, DType::F32),
            without_tail(&Routing::new([0, 0], 4, 140), [5, 3], Dgrad, tensors, DType::F32),
        ]
    }

    fn large() -> Sample {
        let routing = Routing::new([200, 0, 140], 128, 37);
        sample(&routing, [256, 160], LinearGemm::Dgrad, BLOCKS, DType::F32)
    }

    /// Every GEMM with every pair of scalings and formats and both output types, in tiles that are full, that
    /// begin within and between others, and that rows after the last group share; few rows of many experts.
    fn gpu_samples() -> Vec<Sample> {
        let aligned = || Routing::new([128, 0, 200, 1, 64], 128, 300);
        let odd = || Routing::new([100, 1, 0, 63, 65, 129, 2], 1, 70);
        let many = Routing::new((0..70).map(|e| usize::from(e % 20 == 3)).collect::<Vec<_>>(), 1, 0);
        let mut all = Vec::new();
        for gemm in LinearGemm::ALL {
            let tiles = if gemm == LinearGemm::Wgrad { TILES } else { BLOCKS };
            for out in [DType::F32, DType::BF16] {
                all.push(sample(&aligned(), [256, 136], gemm, tiles, out));
                all.push(sample(&aligned(), [144, 80], gemm, [Scaling::Tensor; 2], out));
                all.push(sample(&odd(), [128, 264], gemm, tiles, out));
                all.push(sample(&odd(), [77, 131], gemm, [Scaling::Tensor; 2], out));
            }
            all.push(sample(&many, [24, 33], gemm, [Scaling::Tensor; 2], DType::F32));
            let out = if gemm == LinearGemm::Wgrad { DType::F32 } else { DType::BF16 };
            let sizes = hopper();
            if gemm != LinearGemm::Wgrad {
                all.push(without_tail(&aligned(), [256, 136], gemm, tiles, DType::F32));
                let has_tail = |size: &&(Routing, _)| size.0.tails().len() > 1;
                let tails = sizes.iter().filter(has_tail);
                all.extend(tails.map(|(routing, size)| without_tail(routing, *size, gemm, tiles, out)));
            }
            all.extend(sizes.iter().map(|(routing, size)| sample(routing, *size, gemm, tiles, out)));
            all.extend(
                sizes.iter().map(|(routing, size)| sample(routing, *size, gemm, [Scaling::Tensor; 2], out)),
            );
        }
        all
    }
}

/// Sizes of the kernel for Hopper, whose groups are whole tiles of 128 rows: partly filled tiles; odd numbers
/// of row tiles, which clusters share; all rows of one expert; more tiles than blocks; no rows; many experts.
fn hopper() -> Vec<(Routing, [usize; 2])> {
    vec![
        (Routing::new([300, 0, 129, 0, 1, 0, 0, 384], 128, 128), [384, 208]),
        (Routing::new([0, 700, 0], 128, 0), [640, 272]),
        (Routing::new([640], 128, 144), [128, 400]),
        (Routing::new([0, 0, 0], 128, 256), [128, 64]),
        (Routing::new((0..1000).map(|e| usize::from(e % 70 == 3)).collect::<Vec<_>>(), 128, 0), [128, 16]),
        (Routing::of_many(128), [128, 16]),
        (Routing::of_many(160), [128, 80]),
    ]
}

/// Scalings of wgrad under `fp8-block`, and of the other two.
pub(super) const TILES: [Scaling; 2] = [Scaling::Tile; 2];
pub(super) const BLOCKS: [Scaling; 2] = [Scaling::Tile, Scaling::Block];

/// A sample of an expert's outputs and inputs. Gradients of whole tensors are E5M2.
fn sample(
    routing: &Routing,
    size: [usize; 2],
    gemm: LinearGemm,
    scaling: [Scaling; 2],
    out: DType,
) -> Sample {
    let op = GroupedScaledMatmul { gemm, groups: routing.groups(), out, scaling, tail: Tail::Zeros };
    Sample::plain(op, inputs(routing, size, op))
}

/// A sample whose tail is undefined.
fn without_tail(
    routing: &Routing,
    size: [usize; 2],
    gemm: LinearGemm,
    scaling: [Scaling; 2],
    out: DType,
) -> Sample {
    let groups = routing.groups();
    let tail = Tail::Undefined { live_rows: groups.live_rows };
    let op = GroupedScaledMatmul { gemm, groups, out, scaling, tail };
    Sample::plain(op, inputs(routing, size, op))
}

/// The inputs of an op, of which ragged ones have undefined tails.
fn inputs(routing: &Routing, [o, i]: [usize; 2], op: GroupedScaledMatmul) -> Vec<SampleInput> {
    let GroupedScaledMatmul { gemm, groups, scaling, .. } = op;
    let rows = routing.rows();
    let experts = groups.experts;
    let [a, b] = match gemm {
        LinearGemm::Fprop => [[rows, i], [experts * o, i]],
        LinearGemm::Dgrad => [[rows, o], [i, experts * o]],
        LinearGemm::Wgrad => [[o, rows], [i, rows]],
    };
    let is_gradient = gemm != LinearGemm::Fprop && scaling[0] == Scaling::Tensor;
    let format = if is_gradient { DType::E5M2 } else { DType::E4M3 };
    // Scales of similar size. If a few were much larger, their rounding errors would dominate the result.
    let scales = |[rows, cols]: [usize; 2], scaling: Scaling| {
        SampleInput::activation(scaling.shape(rows, cols)).fill(Fill::Normal(1.0, 0.25))
    };
    let operand = |shape: [usize; 2], format| SampleInput::activation(shape).in_format(format);
    let first = routing.first_of_tail();
    // Numbers and scales by rows, or transposed.
    let ragged = |[q, scales]: [SampleInput; 2], scaling: Scaling| match (gemm, scaling) {
        (LinearGemm::Wgrad, Scaling::Tile) => [q.without(1, first), scales.without(0, first.div_ceil(TILE))],
        (LinearGemm::Wgrad, _) => [q.without(1, first), scales],
        (_, Scaling::Tile) => [q.without(0, first), scales.without(1, first)],
        _ => [q.without(0, first), scales],
    };
    let a = ragged([operand(a, format), scales(a, scaling[0])], scaling[0]);
    let b = [operand(b, DType::E4M3), scales(b, scaling[1])];
    let b = if gemm == LinearGemm::Wgrad { ragged(b, scaling[1]) } else { b };
    a.into_iter().chain(b).chain([routing.starts()]).collect()
}
