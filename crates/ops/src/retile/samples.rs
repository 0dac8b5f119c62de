//! Samples of [`Retile`].

use super::Retile;
use crate::permute::samples::routing_with_tail;
use crate::quantize::Layouts;
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_program::Tail;
use xtrain_tensor::{DType, Scaling, TensorType};

/// Tokens and rows by experts of a sample.
#[derive(Clone, Copy)]
struct Case {
    /// Tokens, experts of a token, experts, and the multiple at which their rows begin.
    routing: [usize; 4],
    width: usize,
    /// Ranks whose scales follow each other.
    ranks: usize,
    layouts: Layouts,
    /// True if one of the numbers is a NaN.
    special: bool,
    /// Rows after the last group, if their tail is undefined.
    undefined: Option<usize>,
}

impl Case {
    const fn new(routing: [usize; 4], width: usize) -> Self {
        Case { routing, width, ranks: 1, layouts: Layouts::Both, special: false, undefined: None }
    }

    fn sources_and_rows(&self) -> [SampleInput; 2] {
        let [.., align] = self.routing;
        routing_with_tail(self.routing, self.undefined.unwrap_or(align))
    }

    fn tail(&self) -> Tail {
        self.undefined.map_or(Tail::Zeros, |_| Tail::Undefined { live_rows: 1 })
    }

    fn numbers(&self, format: DType) -> SampleInput {
        let ([tokens, ..], width) = (self.routing, self.width);
        let value = |n: usize| match n % 97 {
            13 if self.special && n > 500 => f64::NAN,
            17 => -0.0,
            _ => ((n * 7919 % 1013) as f64 - 506.0) * 0.7,
        };
        let values = (0..tokens * width).map(value).collect();
        SampleInput::activation([tokens, width]).in_format(format).fill(Fill::Values(values))
    }

    /// With scales of tiles that are powers of two, by which some numbers become subnormal.
    fn in_tiles(&self) -> Sample {
        let [tokens, ..] = self.routing;
        let [tiles, of_rank] = Scaling::Tile.shape(tokens / self.ranks, self.width);
        let shape = [self.ranks * tiles, of_rank];
        let scales = (0..shape[0] * shape[1]).map(|n| 2f64.powi((n * 5 % 19) as i32 - 12)).collect();
        let scales = SampleInput::activation(shape).fill(Fill::Values(scales));
        let [sources, rows] = self.sources_and_rows();
        let op = Retile { scaling: Scaling::Tile, layouts: self.layouts, tail: self.tail() };
        Sample::plain(op, [self.numbers(DType::E4M3), sources, rows, scales])
    }

    /// With one scale for the tensor.
    fn unscaled(&self, format: DType) -> Sample {
        let [sources, rows] = self.sources_and_rows();
        let op = Retile { scaling: Scaling::Tensor, layouts: self.layouts, tail: self.tail() };
        Sample::plain(op, [self.numbers(format), sources, rows])
    }
}

impl Sampled for Retile {
    fn samples() -> Vec<Sample> {
        let small = Case::new([7, 2, 5, 4], 5);
        vec![
            small.in_tiles(),
            Case { ranks: 4, ..Case::new([40, 3, 3, 16], 144) }.in_tiles(),
            Case { layouts: Layouts::Transposed, ..Case::new([2, 1, 2, 1], 130) }.in_tiles(),
            Case { layouts: Layouts::RowMajor, ..small }.in_tiles(),
            Case { undefined: Some(300), ..small }.in_tiles(),
            Case { undefined: Some(140), ..small }.unscaled(DType::E5M2),
            small.unscaled(DType::E5M2),
            Case { layouts: Layouts::Transposed, ..small }.unscaled(DType::E4M3),
        ]
    }

    fn large() -> Sample {
        Case::new([300, 2, 5, 128], 160).in_tiles()
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        let cases = [
            Case { ranks: 2, special: true, ..Case::new([200, 3, 5, 128], 272) },
            Case { ranks: 3, ..Case::new([90, 2, 3, 1], 256) },
            Case { special: true, ..Case::new([70, 4, 6, 16], 203) },
            Case::new([33, 2, 5, 1], 67),
        ];
        let one_layout = [Layouts::RowMajor, Layouts::Transposed];
        let mut all: Vec<Sample> = cases.iter().map(Case::in_tiles).collect();
        all.extend(one_layout.map(|layouts| Case { layouts, ..cases[0] }.in_tiles()));
        all.extend(cases.iter().map(|case| case.unscaled(DType::E4M3)));
        all.extend(one_layout.map(|layouts| Case { layouts, ..cases[2] }.unscaled(DType::E5M2)));
        // The last one has no token.
        for routing in [[200, 3, 5, 128], [70, 4, 6, 16], [1, 2, 3, 128]] {
            let case = Case { undefined: Some(512), ..Case::new(routing, 272) };
            let one = one_layout.map(|layouts| Case { layouts, ..case }.in_tiles());
            all.extend([case.in_tiles(), case.unscaled(DType::E4M3)].into_iter().chain(one));
        }
        all
    }
}
