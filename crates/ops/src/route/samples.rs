//! Samples of [`Route`] and [`RouteGrad`].

use super::{Route, RouteGrad, Router, Score};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::TensorType;

const MIXTRAL: Router = Router {
    chosen: 2,
    score: Score::Softmax,
    biased: false,
    normalise: true,
    scale: 1.0,
    groups: 1,
    chosen_groups: 1,
};
const DEEPSEEK: Router = Router {
    chosen: 3,
    score: Score::Sigmoid,
    biased: true,
    normalise: true,
    scale: 2.5,
    groups: 4,
    chosen_groups: 2,
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

/// Targets of which every third one is that of padding.
fn targets(tokens: usize) -> SampleInput {
    SampleInput::integers([tokens], (0..tokens).map(|n| if n % 3 == 1 { -100 } else { n as i32 }))
}

impl Sampled for Route {
    fn samples() -> Vec<Sample> {
        let sample = |(router, inputs): (Router, Vec<SampleInput>)| Sample::forward(Route(router), inputs);
        [
            (MIXTRAL, vec![logits(13, 8)]),
            (Router { chosen: 1, ..MIXTRAL }, vec![logits(3, 1)]),
            (Router { normalise: false, scale: 0.5, ..MIXTRAL }, vec![logits(5, 8)]),
            (Router { chosen: 8, ..MIXTRAL }, vec![logits(2, 8)]),
            (Router { score: Score::Sigmoid, normalise: false, ..MIXTRAL }, vec![logits(7, 16)]),
            (DEEPSEEK, vec![logits(11, 16), bias(16)]),
            (MIXTRAL, vec![logits(7, 8), targets(7)]),
            (DEEPSEEK, vec![logits(4, 16), bias(16), targets(4)]),
        ]
        .map(sample)
        .into()
    }

    fn large() -> Sample {
        Sample::forward(Route(Router { chosen: 8, ..MIXTRAL }), [SampleInput::activation([1200, 64])])
    }

    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn gpu_samples() -> Vec<Sample> {
        let sample = |(router, inputs): (Router, Vec<SampleInput>)| Sample::forward(Route(router), inputs);
        let any = |tokens, experts| SampleInput::activation([tokens, experts]);
        [
            (Router { chosen: 8, ..MIXTRAL }, vec![any(70, 128)]),
            (Router { chosen: 22, normalise: false, ..MIXTRAL }, vec![any(9, 512)]),
            (Router { chosen: 6, groups: 8, chosen_groups: 3, ..DEEPSEEK }, vec![any(33, 160), bias(160)]),
            (Router { chosen: 1, ..MIXTRAL }, vec![any(5, 1024)]),
            (Router { biased: true, groups: 2, ..MIXTRAL }, vec![any(50, 70), bias(70), targets(50)]),
            (Router { chosen: 7, ..MIXTRAL }, vec![ties(9, 70, 3.0)]),
            (Router { chosen: 3, score: Score::Sigmoid, ..MIXTRAL }, vec![ties(9, 40, f64::NAN)]),
        ]
        .map(sample)
        .into()
    }
}

impl Sampled for RouteGrad {
    fn samples() -> Vec<Sample> {
        let sample = |(router, tokens, experts): (Router, usize, usize)| {
            // Distinct experts of each token.
            let id = |n: usize| (n / router.chosen + n % router.chosen * 3) % experts;
            // The second token is padding.
            let id = |n: usize| if n / router.chosen == 1 { -1 } else { id(n) as i32 };
            let ids = (0..tokens * router.chosen).map(id);
            let ids = SampleInput::integers([tokens, router.chosen], ids);
            let dgates = SampleInput::activation([tokens, router.chosen]);
            Sample::plain(RouteGrad(router), [dgates, SampleInput::activation([tokens, experts]), ids])
        };
        [
            (MIXTRAL, 13, 8),
            (Router { normalise: false, ..MIXTRAL }, 5, 40),
            (DEEPSEEK, 6, 16),
            (Router { normalise: false, ..DEEPSEEK }, 6, 16),
        ]
        .map(sample)
        .into()
    }

    fn large() -> Sample {
        let ids = SampleInput::integers([1200, 1], (0..1200).map(|n| n % 64));
        let router = Router { chosen: 1, ..MIXTRAL };
        let [dgates, logits] = [SampleInput::activation([1200, 1]), SampleInput::activation([1200, 64])];
        Sample::plain(RouteGrad(router), [dgates, logits, ids])
    }
}
