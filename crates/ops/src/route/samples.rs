//! Samples of [`Route`] and [`RouteGrad`].

use super::{Route, RouteGrad, Router, Score};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::TensorType;

const DEEPSEEK: Router = Router {
    top_k: 3,
    score: Score::Sigmoid,
    biased: true,
    normalise: true,
    scale: 2.5,
    groups: 4,
    top_groups: 2,
};

/// Logits of which none are near each other: small changes change no choice.
fn logits(tokens: usize, experts: usize) -> SampleInput {
    let value = |n: usize| {
        let (token, expert) = (n / experts, n % experts);
        // Another order of the experts for each token.
        let place = (expert * (1 + 2 * (token % 4)) + token) % experts;
        3.0 * (place as f64 + 0.1 * ((token + expert) % 3) as f64) / experts as f64 - 1.5
    };
    SampleInput::activation([tokens, experts]).fill(Fill::Values((0..tokens * experts).map(value).collect()))
}

/// Logits of which many are equal, and some are `other`.
fn ties(tokens: usize, experts: usize, other: f64) -> SampleInput {
    let value = |n: usize| if n % 11 == 2 { other } else { (n * n % 5) as f64 };
    SampleInput::activation([tokens, experts]).fill(Fill::Values((0..tokens * experts).map(value).collect()))
}

fn bias(experts: usize) -> SampleInput {
    let values = (0..experts).map(|n| 0.002 * (n * 5 % experts) as f64).collect();
    SampleInput::activation([experts]).fill(Fill::Values(values))
}

/// Every third token is padding.
fn padding(tokens: usize) -> SampleInput {
    SampleInput::integers([tokens], (0..tokens).map(|n| if n % 3 == 1 { -1 } else { 0 }))
}

impl Sampled for Route {
    fn samples() -> Vec<Sample> {
        let sample = |(router, inputs): (Router, Vec<SampleInput>)| Sample::forward(Route(router), inputs);
        [
            (Router::SOFTMAX_TOP2, vec![logits(13, 8)]),
            (Router { top_k: 1, ..Router::SOFTMAX_TOP2 }, vec![logits(3, 1)]),
            (Router { normalise: false, scale: 0.5, ..Router::SOFTMAX_TOP2 }, vec![logits(5, 8)]),
            (Router { top_k: 8, ..Router::SOFTMAX_TOP2 }, vec![logits(2, 8)]),
            (Router { score: Score::Sigmoid, normalise: false, ..Router::SOFTMAX_TOP2 }, vec![logits(7, 16)]),
            (DEEPSEEK, vec![logits(11, 16), bias(16)]),
            (Router::SOFTMAX_TOP2, vec![logits(7, 8), padding(7)]),
            (DEEPSEEK, vec![logits(4, 16), bias(16), padding(4)]),
        ]
        .map(sample)
        .into()
    }

    fn large() -> Sample {
        Sample::forward(
            Route(Router { top_k: 8, ..Router::SOFTMAX_TOP2 }),
            [SampleInput::activation([1200, 64])],
        )
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        let sample = |(router, inputs): (Router, Vec<SampleInput>)| Sample::forward(Route(router), inputs);
        let any = |tokens, experts| SampleInput::activation([tokens, experts]);
        [
            (Router { top_k: 8, ..Router::SOFTMAX_TOP2 }, vec![any(70, 128)]),
            (Router { top_k: 22, normalise: false, ..Router::SOFTMAX_TOP2 }, vec![any(9, 512)]),
            (Router { top_k: 6, groups: 8, top_groups: 3, ..DEEPSEEK }, vec![any(33, 160), bias(160)]),
            (Router { top_k: 1, ..Router::SOFTMAX_TOP2 }, vec![any(5, 1024)]),
            (
                Router { biased: true, groups: 2, ..Router::SOFTMAX_TOP2 },
                vec![any(50, 70), bias(70), padding(50)],
            ),
            (Router { top_k: 7, ..Router::SOFTMAX_TOP2 }, vec![ties(9, 70, 3.0)]),
            (Router { top_k: 3, score: Score::Sigmoid, ..Router::SOFTMAX_TOP2 }, vec![ties(9, 40, f64::NAN)]),
        ]
        .map(sample)
        .into()
    }
}

impl Sampled for RouteGrad {
    fn samples() -> Vec<Sample> {
        let sample = |(router, tokens, experts): (Router, usize, usize)| {
            // Distinct experts of each token.
            let id = |n: usize| (n / router.top_k + n % router.top_k * 3) % experts;
            // The second token is padding.
            let id = |n: usize| if n / router.top_k == 1 { -1 } else { id(n) as i32 };
            let ids = (0..tokens * router.top_k).map(id);
            let ids = SampleInput::integers([tokens, router.top_k], ids);
            let dgates = SampleInput::activation([tokens, router.top_k]);
            Sample::plain(RouteGrad(router), [dgates, SampleInput::activation([tokens, experts]), ids])
        };
        [
            (Router::SOFTMAX_TOP2, 13, 8),
            (Router { normalise: false, ..Router::SOFTMAX_TOP2 }, 5, 40),
            (DEEPSEEK, 6, 16),
            (Router { normalise: false, ..DEEPSEEK }, 6, 16),
        ]
        .map(sample)
        .into()
    }

    fn large() -> Sample {
        let ids = SampleInput::integers([1200, 1], (0..1200).map(|n| n % 64));
        let router = Router { top_k: 1, ..Router::SOFTMAX_TOP2 };
        let [dgates, logits] = [SampleInput::activation([1200, 1]), SampleInput::activation([1200, 64])];
        Sample::plain(RouteGrad(router), [dgates, logits, ids])
    }
}
