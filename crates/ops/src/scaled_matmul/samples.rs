//! Samples of [`ScaledMatmul`].

use super::{MULTIPLE, ScaledMatmul};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, Scaling, TensorType};

impl Sampled for ScaledMatmul {
    /// FP8 tensor cores accumulate with 14 bits, over 128 products or, with fast accumulation, over all.
    /// Sizes that they do not support are multiplied in bf16, to which the operands are rounded.
    fn tolerance(&self, inputs: &[TensorType]) -> GpuTolerance {
        if !inputs[0].shape[0].is_multiple_of(MULTIPLE) {
            return GpuTolerance::RoundedOperands;
        }
        GpuTolerance::Rounding { f32: if self.fast_accumulation { 7e-4 } else { 2e-4 } }
    }

    fn samples() -> Vec<Sample> {
        let [tensor, row, tile, weight, _] = PAIRS;
        vec![
            sample([32, 48, 16], E4M3, tensor, DType::F32, false, false),
            sample([16, 32, 144], HYBRID, row, DType::F32, false, false),
            sample([48, 16, 272], E4M3, tile, DType::F32, false, false),
            sample([16, 144, 656], E4M3, weight, DType::F32, false, false),
            sample([16, 32, 144], E4M3, tensor, DType::BF16, true, false),
        ]
    }

    fn large() -> Sample {
        sample([304, 272, 160], E4M3, [Scaling::Tensor; 2], DType::F32, false, false)
    }

    /// Every pair of scalings and formats, both output types, with and without a bias, over several tiles in
    /// each direction; one token, and a prompt with an odd number of tokens.
    fn gpu_samples() -> Vec<Sample> {
        let mut all = Vec::new();
        for scaling in PAIRS {
            let is_whole = matches!(scaling[0], Scaling::Tensor | Scaling::Row);
            for out in [DType::F32, DType::BF16] {
                for formats in [E4M3, HYBRID, [DType::E4M3, DType::E5M2]] {
                    all.push(sample([272, 400, 656], formats, scaling, out, false, false));
                }
                all.push(sample([512, 256, 1024], E4M3, scaling, out, false, false));
                for tokens in [1, 77] {
                    all.push(sample([tokens, 256, 384], E4M3, scaling, out, out == DType::BF16, false));
                }
                if out == DType::BF16 {
                    all.push(sample([272, 400, 656], E4M3, scaling, out, true, false));
                }
                if is_whole {
                    all.push(sample([272, 400, 656], E4M3, scaling, out, false, true));
                }
            }
        }
        all
    }
}

/// A sample of these sizes, formats and scalings.
fn sample(
    [m, n, k]: [usize; 3],
    formats: [DType; 2],
    scaling: [Scaling; 2],
    out: DType,
    bias: bool,
    fast_accumulation: bool,
) -> Sample {
    let operand = |rows: usize, format| SampleInput::activation([rows, k]).in_format(format);
    // Scales of similar size. If a few were much larger, their rounding errors would dominate the result.
    let scales = |rows: usize, scaling: Scaling| {
        SampleInput::activation(scaling.shape(rows, k)).fill(Fill::Normal(1.0, 0.25))
    };
    let mut inputs =
        vec![operand(m, formats[0]), scales(m, scaling[0]), operand(n, formats[1]), scales(n, scaling[1])];
    if bias {
        inputs.push(SampleInput::activation([n]).in_format(DType::BF16));
    }
    Sample::plain(ScaledMatmul { out, scaling, fast_accumulation, bias }, inputs)
}

pub(super) const E4M3: [DType; 2] = [DType::E4M3; 2];

pub(super) const HYBRID: [DType; 2] = [DType::E5M2, DType::E4M3];

/// The supported pairs of scalings.
pub(super) const PAIRS: [[Scaling; 2]; 5] = [
    [Scaling::Tensor, Scaling::Tensor],
    [Scaling::Row, Scaling::Row],
    [Scaling::Tile, Scaling::Tile],
    [Scaling::Tile, Scaling::Block],
    [Scaling::Block, Scaling::Tile],
];
