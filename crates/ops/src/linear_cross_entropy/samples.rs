//! Samples of [`LinearCrossEntropy`] and [`LinearCrossEntropyGrad`].

use super::{IGNORED, LinearCrossEntropy, LinearCrossEntropyGrad, Terms};
use crate::samples::{Fill, Sample, SampleInput, Sampled};
use xtrain_tensor::DType;

impl Sampled for LinearCrossEntropy {
    fn samples() -> Vec<Sample> {
        let sample = |chunk_tokens, z_loss, inputs: [SampleInput; 4]| {
            Sample::forward(LinearCrossEntropy { chunk_tokens, z_loss, terms: Terms::None }, inputs).loss()
        };
        vec![
            sample(100, 0.0, sample_inputs(5, 11, &[0, 10, 3, 3, 7])),
            sample(4, 0.1, sample_inputs(9, 17, &[16, IGNORED, 0, 5, 5, IGNORED, IGNORED, 2, 8, 1, 11])),
            sample(1, 1e-4, sample_inputs(3, 5, &[4, 0, IGNORED])),
            sample(2, 0.1, sample_inputs(3, 5, &[IGNORED; 3])),
            Sample::forward(
                LinearCrossEntropy { chunk_tokens: 3, z_loss: 0.1, terms: Terms::Losses },
                sample_inputs(9, 17, &[16, IGNORED, 0, 5, 2]),
            )
            .loss(),
            matches(11, 3),
        ]
    }

    fn large() -> Sample {
        Sample::forward(
            LinearCrossEntropy { chunk_tokens: 64, z_loss: 1e-2, terms: Terms::None },
            large_inputs(),
        )
        .loss()
    }

    /// More tokens than the launch that sums them has threads; the last token of each thread is ignored.
    fn gpu_samples() -> Vec<Sample> {
        let targets: Vec<i32> = (0..3000).map(|t| if t < 1924 { t % 5 } else { IGNORED }).collect();
        let op = LinearCrossEntropy { chunk_tokens: 1024, z_loss: 0.1, terms: Terms::None };
        vec![Sample::forward(op, sample_inputs(3, 5, &targets)).loss(), matches(5003, 4)]
    }
}

impl Sampled for LinearCrossEntropyGrad {
    fn samples() -> Vec<Sample> {
        let sample_with = |terms, dx, dw, targets: [i32; 9]| {
            let loss = LinearCrossEntropy { chunk_tokens: 4, z_loss: 1e-2, terms };
            Sample::plain(LinearCrossEntropyGrad { loss, dx, dw }, sample_inputs(9, 17, &targets))
        };
        let most = [16, IGNORED, 0, 5, 5, IGNORED, 2, 8, 1];
        let sample = |dx, dw| sample_with(Terms::None, dx, dw, most);
        // So few that a GPU gathers their rows.
        let mut few = [IGNORED; 9];
        (few[2], few[7]) = (5, 16);
        // Rows so wide that the GPU kernel loops over them several times, the last time not fully.
        let wide = LinearCrossEntropyGrad {
            loss: LinearCrossEntropy { chunk_tokens: 2, z_loss: 1e-3, terms: Terms::None },
            dx: true,
            dw: Some(DType::F32),
        };
        let mut wide_inputs = sample_inputs(8, 20_011, &[20_010, 0, IGNORED, 16_384, 20_007]);
        // With the usual standard deviation, some of so many logits would be too large.
        wide_inputs[1].fill = Fill::Normal(0.0, 0.15);
        vec![
            sample(true, Some(DType::F32)),
            sample(true, None),
            sample(false, Some(DType::F32)),
            sample_with(Terms::Losses, true, Some(DType::F32), few),
            sample_with(Terms::Losses, false, Some(DType::F32), most),
            Sample::plain(wide, wide_inputs),
        ]
    }

    fn large() -> Sample {
        let loss = LinearCrossEntropy { chunk_tokens: 64, z_loss: 1e-2, terms: Terms::None };
        Sample::plain(LinearCrossEntropyGrad { loss, dx: true, dw: Some(DType::F32) }, large_inputs())
    }
}

/// A loss with matches. Logits are values of the weight, exact in every type, so that the highest one is the
/// same for all kernels, and in bf16 many are equal. The targets are the first and the last of the highest
/// logits, another one, none, and the vocabulary's ends.
fn matches(vocab: usize, chunk_tokens: usize) -> Sample {
    let logits: Vec<f64> = (0..vocab).map(|id| (id * 7 % 10) as f64 / 4.0 - 1.0).collect();
    let highest = |id: &usize| logits[*id] == 1.25;
    let ids = || (0..vocab).filter(highest).map(|id| id as i32);
    let targets =
        [ids().next().unwrap_or(0), ids().next_back().unwrap_or(0), 1, IGNORED, 0, vocab as i32 - 1];
    let mut inputs = sample_inputs(1, vocab, &targets);
    inputs[0].fill = Fill::Values(vec![1.0; targets.len()]);
    inputs[1].fill = Fill::Values(logits);
    let op = LinearCrossEntropy { chunk_tokens, z_loss: 0.1, terms: Terms::LossesAndMatches };
    Sample::forward(op, inputs).loss()
}

fn large_inputs() -> [SampleInput; 4] {
    let targets: Vec<i32> = (0..150).map(|t| if t % 7 == 3 { IGNORED } else { t * 4 }).collect();
    sample_inputs(96, 600, &targets)
}

/// Inputs with these targets.
pub(super) fn sample_inputs(width: usize, vocab: usize, targets: &[i32]) -> [SampleInput; 4] {
    let count = targets.iter().filter(|&&t| t != IGNORED).count();
    let targets_t = SampleInput::ids(targets.len(), vocab as i32)
        .fill(Fill::Values(targets.iter().map(|&t| t.into()).collect()));
    [
        SampleInput::activation([targets.len(), width]),
        // Logits of the size of a model's, for any width: the bf16 rounding of larger ones would exceed the
        // tolerance.
        SampleInput::parameter([vocab, width]).fill(Fill::Normal(0.0, 1.5 / (width as f32).sqrt())),
        targets_t,
        SampleInput::activation([]).fill(Fill::Values(vec![1.0 / count.max(1) as f64])),
    ]
}
