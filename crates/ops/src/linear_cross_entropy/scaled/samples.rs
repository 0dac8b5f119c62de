//! Samples of [`ScaledLinearCrossEntropy`].

use super::ScaledLinearCrossEntropy;
use crate::linear_cross_entropy::{IGNORED, LinearCrossEntropy, LinearCrossEntropyGrad, Terms};
use crate::quantize::Quantize;
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_program::{Quantization, ScaledGemm};
use xtrain_tensor::{DType, Scaling, TensorType};

impl Sampled for ScaledLinearCrossEntropy {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::ScaledLoss
    }

    fn samples() -> Vec<Sample> {
        let all = |quantization| sample([32, 16, 48], 16, quantization, [true; 3], [true; 2]);
        let mut samples: Vec<Sample> = quantizations().into_iter().map(all).collect();
        let [current, delayed, _, block] = quantizations();
        samples.extend([
            sample([21, 32, 16], 8, current, [true, false, false], [false; 2]),
            sample([32, 32, 16], 100, delayed, [true, false, true], [true; 2]),
            sample([160, 32, 32], 128, block, [true, true, false], [true; 2]),
            sample([16, 32, 32], 128, block, [false, true, true], [true, true]),
            sample([16, 16, 32], 128, block, [true, false, true], [false, true]),
        ]);
        samples
    }

    fn large() -> Sample {
        sample([304, 48, 160], 128, quantizations()[3], [true; 3], [true; 2])
    }

    /// Several chunks of whole tiles, the last one partial; a prompt with an odd number of tokens.
    fn gpu_samples() -> Vec<Sample> {
        let both = |quantization| {
            [
                sample([656, 256, 1040], 256, quantization, [true; 3], [true; 2]),
                sample([77, 128, 512], 64, quantization, [true, false, false], [false; 2]),
            ]
        };
        quantizations().into_iter().flat_map(both).collect()
    }
}

/// A sample with these quantizations of x, of the weight and of dlogits.
fn sample(
    [tokens, width, vocab]: [usize; 3],
    chunk_tokens: usize,
    [x, w, dlogits]: [Quantization; 3],
    in_fp8: [bool; 3],
    [dx, dw]: [bool; 2],
) -> Sample {
    let targets: Vec<i32> =
        (0..tokens).map(|t| if t % 7 == 3 { IGNORED } else { (t * 31 % vocab) as i32 }).collect();
    let [x_td, w_vd, targets_t, inv_targets] = super::super::samples::sample_inputs(width, vocab, &targets);
    let gemms = [[x, w], [dlogits, w], [dlogits, x]];
    let gemms = [0, 1, 2].map(|n| {
        let fast_accumulation = false;
        in_fp8[n].then_some(ScaledGemm { operands: gemms[n], fast_accumulation })
    });
    // The terms are an output of some of them.
    let loss = LinearCrossEntropy {
        chunk_tokens,
        z_loss: 1e-3,
        terms: if [32, 77].contains(&tokens) { Terms::Losses } else { Terms::None },
    };
    let grad = LinearCrossEntropyGrad { loss, dx, dw: dw.then_some(DType::F32) };
    let op = ScaledLinearCrossEntropy { grad, gemms };
    let mut inputs = vec![x_td, targets_t, inv_targets];
    let scale = 1.5 / (width as f64).sqrt();
    for (is_scaled, shape) in
        [(in_fp8[0], [vocab, width]), (in_fp8[1], [width, vocab])].into_iter().take(1 + usize::from(dx))
    {
        if is_scaled {
            let scales = w.scaling.shape(shape[0], shape[1]);
            inputs.push(SampleInput::activation(shape).in_format(w.format));
            inputs
                .push(SampleInput::activation(scales).fill(Fill::Values(vec![scale; scales[0] * scales[1]])));
        } else {
            inputs.push(w_vd.clone());
        }
    }
    // A delayed scale that is not set yet, and one of the size of a gradient's.
    let delayed = op
        .casts()
        .into_iter()
        .zip([0.0, 3e4])
        .filter(|(cast, _)| cast.as_ref().is_some_and(Quantize::is_given));
    inputs.extend(delayed.map(|(_, scale)| SampleInput::activation([1, 1]).fill(Fill::Values(vec![scale]))));
    Sample::plain(op, inputs)
}

/// The quantizations of the recipes, each of inputs, weights and gradients.
pub(super) fn quantizations() -> [[Quantization; 3]; 4] {
    let quantization =
        |format, scaling, pow2_scales, delayed| Quantization { format, scaling, pow2_scales, delayed };
    let [e4m3, e5m2] = [DType::E4M3, DType::E5M2];
    let whole = |delayed| {
        let forward = quantization(e4m3, Scaling::Tensor, false, delayed);
        [forward, forward, quantization(e5m2, Scaling::Tensor, false, delayed)]
    };
    let tiles = quantization(e4m3, Scaling::Tile, true, false);
    [
        whole(false),
        whole(true),
        [quantization(e4m3, Scaling::Row, true, false); 3],
        [tiles, quantization(e4m3, Scaling::Block, true, false), tiles],
    ]
}
