//! Samples of [`Attention`] and [`AttentionGrad`].

use super::{Attention, AttentionGrad};
use crate::samples::{Fill, Sample, SampleInput, Sampled};

impl Sampled for Attention {
    fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    fn samples() -> Vec<Sample> {
        let op = |seq_len, heads, kv_heads, head_dim| Attention {
            seq_len,
            heads,
            kv_heads,
            head_dim,
            scale: None,
            deterministic: true,
        };
        vec![
            Sample::forward(op(5, 4, 2, 3), [SampleInput::activation([10, 24])]),
            Sample::forward(op(21, 2, 1, 2), [SampleInput::activation([42, 8]), sample_documents()]),
            Sample::forward(op(1, 3, 3, 5), [SampleInput::activation([2, 45])]),
            Sample::forward(
                Attention { scale: Some(0.4), ..op(5, 4, 2, 3) },
                [SampleInput::activation([10, 24])],
            ),
        ]
    }

    fn large() -> Sample {
        let op =
            Attention { seq_len: 150, heads: 4, kv_heads: 2, head_dim: 20, scale: None, deterministic: true };
        Sample::forward(op, [SampleInput::activation([300, 160])])
    }

    fn gpu_samples() -> Vec<Sample> {
        let sample = |(b, seq_len, heads, kv_heads, head_dim, documents)| {
            let op = Attention { seq_len, heads, kv_heads, head_dim, scale: None, deterministic: true };
            let mut inputs = vec![SampleInput::activation([b * seq_len, (heads + 2 * kv_heads) * head_dim])];
            inputs.extend(bool::then(documents, || doubling_documents(b, seq_len)));
            Sample::forward(op, inputs)
        };
        let scaled = Attention {
            seq_len: 150,
            heads: 2,
            kv_heads: 1,
            head_dim: 64,
            scale: Some(0.25),
            deterministic: true,
        };
        let scaled = Sample::forward(scaled, [SampleInput::activation([300, 256])]);
        // Several tiles of queries and of keys in the kernel for Hopper.
        let long = [(2, 390, 3, 1, 64, false), (1, 400, 2, 2, 128, false)].map(sample);
        GPU_SHAPES.into_iter().map(sample).chain([scaled]).chain(long).collect()
    }
}

impl Sampled for AttentionGrad {
    fn is_deterministic(&self) -> bool {
        self.0.deterministic
    }

    fn samples() -> Vec<Sample> {
        let op = AttentionGrad(Attention {
            seq_len: 21,
            heads: 4,
            kv_heads: 2,
            head_dim: 6,
            scale: None,
            deterministic: true,
        });
        let inputs = [
            SampleInput::activation([42, 24]),
            SampleInput::activation([42, 48]),
            SampleInput::activation([42, 24]),
            SampleInput::activation([2, 4, 21]).fill(Fill::Normal(3.0, 0.3)),
        ];
        vec![
            Sample::plain(op, inputs.clone()),
            Sample::plain(AttentionGrad(Attention { scale: Some(0.3), ..op.0 }), inputs.clone()),
            Sample::plain(op, inputs.into_iter().chain([sample_documents()]).collect::<Vec<_>>()),
        ]
    }

    fn large() -> Sample {
        let op = AttentionGrad(Attention {
            seq_len: 150,
            heads: 4,
            kv_heads: 2,
            head_dim: 20,
            scale: None,
            deterministic: true,
        });
        Sample::plain(
            op,
            [
                SampleInput::activation([300, 80]),
                SampleInput::activation([300, 160]),
                SampleInput::activation([300, 80]),
                SampleInput::activation([2, 4, 150]).fill(Fill::Normal(3.0, 0.3)),
            ],
        )
    }

    fn gpu_samples() -> Vec<Sample> {
        let scaled_sample = |deterministic, scale, (b, seq_len, heads, kv_heads, head_dim, documents)| {
            let (tokens, width) = (b * seq_len, heads * head_dim);
            let mut inputs = vec![
                SampleInput::activation([tokens, width]),
                // Scores stay below about 2. lse does not come from these scores, so nothing bounds the
                // probabilities, and the bf16 rounding of large ones would exceed the tolerance.
                SampleInput::activation([tokens, width + 2 * kv_heads * head_dim])
                    .fill(Fill::Normal(0.0, 0.7)),
                SampleInput::activation([tokens, width]),
                SampleInput::activation([b, heads, seq_len]).fill(Fill::Normal(6.0, 0.3)),
            ];
            inputs.extend(bool::then(documents, || doubling_documents(b, seq_len)));
            Sample::plain(
                AttentionGrad(Attention { seq_len, heads, kv_heads, head_dim, scale, deterministic }),
                inputs,
            )
        };
        let sample = |deterministic, shape| scaled_sample(deterministic, None, shape);
        let scaled = scaled_sample(true, Some(0.25), (2, 150, 2, 1, 64, false));
        // Pairs of tiles of keys for Hopper, and one tile that is alone.
        let paired = sample(true, (2, 600, 4, 2, 64, false));
        // Without a fixed order only for shapes without documents, for which cuDNN may be used.
        let in_any_order = GPU_SHAPES.into_iter().filter(|shape| !shape.5).map(|shape| sample(false, shape));
        GPU_SHAPES
            .into_iter()
            .map(|shape| sample(true, shape))
            .chain(in_any_order)
            .chain([scaled, paired])
            .collect()
    }
}

/// Document starts of two sequences of 21 tokens, with three documents and one.
fn sample_documents() -> SampleInput {
    let starts = (0..21).map(|t| if t < 3 { 0.0 } else { f64::from(3 + 16 * i32::from(t > 18)) });
    SampleInput::ids(42, 1).fill(Fill::Values(starts.chain([0.0; 21]).collect()))
}

/// Shapes for GPUs: B, s, h, k, e, and true if there are documents.
const GPU_SHAPES: [(usize, usize, usize, usize, usize, bool); 16] = [
    (2, 200, 4, 4, 32, false),
    (1, 333, 4, 2, 64, true),
    (2, 128, 4, 1, 64, false),
    (1, 257, 2, 1, 128, true),
    (1, 100, 2, 2, 256, false),
    (3, 70, 3, 1, 96, true),
    (2, 300, 4, 2, 32, true),
    (1, 150, 2, 2, 48, false),
    (2, 40, 2, 1, 16, true),
    (1, 513, 1, 1, 80, false),
    // Short enough for whole sequences in a block: up to 128, 256 and 512 tokens.
    (2, 100, 2, 2, 32, true),
    (1, 400, 1, 1, 32, false),
    (2, 90, 2, 2, 64, true),
    (1, 200, 2, 2, 64, false),
    (1, 120, 2, 2, 128, true),
    (1, 250, 2, 1, 128, false),
];

/// Starts of documents of 1, 2, 4, ... tokens.
fn doubling_documents(sequences: usize, seq_len: usize) -> SampleInput {
    let start = |t: usize| (1usize << (t + 1).ilog2()) - 1;
    let starts: Vec<f64> = (0..sequences * seq_len).map(|t| start(t % seq_len) as f64).collect();
    SampleInput::ids(starts.len(), 1).fill(Fill::Values(starts))
}
