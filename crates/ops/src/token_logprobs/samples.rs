//! Samples of [`TokenLogprobs`].

use super::{IGNORED, TokenLogprobs};
use crate::samples::{Fill, Sample, SampleInput, Sampled};

impl Sampled for TokenLogprobs {
    fn samples() -> Vec<Sample> {
        vec![
            sample(11, 0, &[0, 10, 3, IGNORED, 7]),
            sample(37, 5, &[36, IGNORED, 0, 20]),
            sample(1, 1, &[0, 0]),
            sample(20, 20, &[19]),
        ]
    }

    fn large() -> Sample {
        sample(6001, 3, &(0..40).map(|token| token * 149).collect::<Vec<i32>>())
    }

    /// Rows that threads read several times, the last time not fully, and one with fewer tokens than threads.
    fn gpu_samples() -> Vec<Sample> {
        vec![sample(5003, 20, &[0, 5002, IGNORED, 2501]), sample(129, 0, &[128, 0, 5])]
    }
}

/// Logits of which no two are nearly equal, so that every kernel finds the same order; some are equal.
fn sample(vocab: usize, top: usize, targets: &[i32]) -> Sample {
    let steps = vocab.div_ceil(3).max(1);
    let logit = |entry: usize| ((entry * 7919 + entry / vocab) % steps) as f64 * 12.0 / steps as f64 - 6.0;
    let logits: Vec<f64> = (0..targets.len() * vocab).map(|entry| f64::from(logit(entry) as f32)).collect();
    let logits = SampleInput::activation([targets.len(), vocab]).fill(Fill::Values(logits));
    let targets = SampleInput::ids(targets.len(), vocab as i32)
        .fill(Fill::Values(targets.iter().map(|&target| target.into()).collect()));
    Sample::plain(TokenLogprobs { top }, [logits, targets])
}
