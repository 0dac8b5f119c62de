//! Samples of [`CachedAttention`].

use super::CachedAttention;
use crate::samples::{Fill, Sample, SampleInput, Sampled};

impl Sampled for CachedAttention {
    fn samples() -> Vec<Sample> {
        let op = CachedAttention { heads: 4, kv_heads: 2, head_dim: 3, scale: None };
        let positions = vec![3.0, 4.0, 5.0, 0.0, 1.0, 6.0];
        let inputs = [
            SampleInput::activation([6, 24]),
            SampleInput::ids(6, 7).fill(Fill::Values(positions)),
            SampleInput::activation([2, 7, 6]),
            SampleInput::activation([2, 7, 6]),
        ];
        let scaled = CachedAttention { scale: Some(0.4), ..op };
        vec![Sample::plain(op, inputs.clone()), Sample::plain(scaled, inputs)]
    }

    fn large() -> Sample {
        let positions = (0..40).map(|t| f64::from(t % 20 + 5 * i32::from(t % 20 >= 18))).collect();
        Sample::plain(
            CachedAttention { heads: 8, kv_heads: 2, head_dim: 20, scale: None },
            [
                SampleInput::activation([40, 240]),
                SampleInput::ids(40, 30).fill(Fill::Values(positions)),
                SampleInput::activation([2, 30, 40]),
                SampleInput::activation([2, 30, 40]),
            ],
        )
    }

    /// Then positions that several tokens of a sequence have: the last of them is stored.
    fn gpu_samples() -> Vec<Sample> {
        let sample = |sequences: usize, heads, kv_heads, head_dim, positions: std::ops::Range<usize>| {
            let op = CachedAttention { heads, kv_heads, head_dim, scale: None };
            at_positions(op, sequences, &positions.collect::<Vec<_>>())
        };
        let shared = [20, 21, 22, 22, 21, 23, 24, 24, 25, 25];
        vec![
            sample(1, 8, 2, 128, 700..701),
            sample(1, 12, 2, 128, 4999..5000),
            sample(1, 32, 8, 64, 64..65),
            sample(2, 4, 4, 64, 0..1),
            sample(2, 7, 7, 80, 300..301),
            sample(3, 4, 1, 20, 129..130),
            sample(1, 6, 3, 96, 100..164),
            sample(3, 2, 1, 256, 0..40),
            sample(1, 4, 1, 34, 0..300),
            sample(1, 3, 3, 128, 90..91),
            sample(1, 4, 1, 256, 40..41),
            at_positions(CachedAttention { heads: 4, kv_heads: 2, head_dim: 128, scale: None }, 8, &shared),
        ]
    }
}

/// A sample whose sequences each have tokens at these positions.
fn at_positions(op: CachedAttention, sequences: usize, positions: &[usize]) -> Sample {
    let CachedAttention { heads, kv_heads, head_dim, .. } = op;
    let tokens = sequences * positions.len();
    let capacity = positions.iter().max().map_or(0, |most| most + 6);
    let at = positions.iter().map(|&p| p as f64).cycle().take(tokens).collect();
    let cache = || SampleInput::activation([sequences, capacity, kv_heads * head_dim]);
    let inputs = [
        SampleInput::activation([tokens, (heads + 2 * kv_heads) * head_dim]),
        SampleInput::ids(tokens, 1).fill(Fill::Values(at)),
        cache(),
        cache(),
    ];
    Sample::plain(op, inputs)
}
