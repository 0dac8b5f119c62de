//! Samples of [`RouterLosses`] and [`RouterLossesGrad`].

use super::{RouterLosses, RouterLossesGrad};
use crate::route::Score;
use crate::samples::{Fill, Sample, SampleInput, Sampled};

const LOSSES: RouterLosses = RouterLosses { score: Score::Softmax, balance_weight: 0.3, z_weight: 0.2 };
const SIGMOID: RouterLosses = RouterLosses { score: Score::Sigmoid, ..LOSSES };

/// Tokens of which every fifth one is padding, each with `top_k` of `experts` experts, the first ones more
/// often.
fn inputs([tokens, top_k, experts]: [usize; 3]) -> [SampleInput; 4] {
    let id = |n: usize| ((n / top_k) * (n / top_k) + n % top_k) % experts;
    let id = |n: usize| if n / top_k % 5 == 3 { -1 } else { id(n) as i32 };
    let ids: Vec<i32> = (0..tokens * top_k).map(id).collect();
    let count = |expert: usize| ids.iter().filter(|id| **id == expert as i32).count() as f64;
    let counts = Fill::Values((0..experts).map(count).collect());
    let live = ids.iter().filter(|id| **id >= 0).count() / top_k;
    [
        SampleInput::activation([tokens, experts]),
        SampleInput::integers([tokens, top_k], ids),
        SampleInput::activation([experts]).fill(counts),
        SampleInput::activation([]).fill(Fill::Values(vec![0.5 / live as f64])),
    ]
}

const SMALL: [(RouterLosses, [usize; 3]); 5] = [
    (LOSSES, [13, 2, 5]),
    (SIGMOID, [7, 3, 40]),
    (RouterLosses { z_weight: 0.0, ..LOSSES }, [3, 1, 1]),
    (RouterLosses { balance_weight: 0.0, ..SIGMOID }, [4, 2, 2]),
    (RouterLosses { balance_weight: 0.0, z_weight: 0.0, ..LOSSES }, [2, 1, 3]),
];
const ON_GPU: [(RouterLosses, [usize; 3]); 3] =
    [(LOSSES, [1500, 8, 128]), (SIGMOID, [70, 4, 160]), (LOSSES, [9, 2, 1024])];

fn forward((losses, shape): (RouterLosses, [usize; 3])) -> Sample {
    Sample::forward(losses, inputs(shape)).loss()
}

fn grad((losses, shape): (RouterLosses, [usize; 3])) -> Sample {
    Sample::plain(RouterLossesGrad(losses), inputs(shape))
}

/// Logits so small that the sum of their sigmoids is 0 in f32.
fn underflowing() -> [SampleInput; 4] {
    let shape @ [tokens, _, experts] = [11, 2, 40];
    let [_, ids, counts, inv_tokens] = inputs(shape);
    let logits = (0..tokens * experts).map(|n| -200.0 - (n % 7) as f64).collect();
    let logits = SampleInput::activation([tokens, experts]).fill(Fill::Values(logits));
    [logits, ids, counts, inv_tokens]
}

impl Sampled for RouterLosses {
    fn samples() -> Vec<Sample> {
        SMALL.map(forward).into()
    }

    fn large() -> Sample {
        forward((LOSSES, [1200, 2, 64]))
    }

    fn gpu_samples() -> Vec<Sample> {
        let underflowing = Sample::forward(SIGMOID, underflowing()).loss();
        ON_GPU.map(forward).into_iter().chain([underflowing]).collect()
    }
}

impl Sampled for RouterLossesGrad {
    fn samples() -> Vec<Sample> {
        SMALL.map(grad).into()
    }

    fn large() -> Sample {
        grad((LOSSES, [1200, 2, 64]))
    }

    fn gpu_samples() -> Vec<Sample> {
        let underflowing = Sample::plain(RouterLossesGrad(SIGMOID), underflowing());
        ON_GPU.map(grad).into_iter().chain([underflowing]).collect()
    }
}
