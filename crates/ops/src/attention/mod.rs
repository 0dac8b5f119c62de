//! Causal self-attention over the sequences of a batch, with grouped key/value heads and optional document boundaries.
//!
//! Columns of `qkv`: h query heads, then k key heads, then k value heads, e columns each; query heads g h/k to (g+1) h/k - 1 read
//! key/value head g. Rows: B sequences of s tokens. For every query, o = softmax(q K^T / sqrt(e)) V over the keys it may see:
//! those of its own document up to itself. The softmax is computed in f32 (f64), row by row of a block of queries (module `block`).
//! With bf16 operands probabilities, and the scores' gradients in the backward, are rounded to bf16 before they are multiplied,
//! as on tensor cores.
//!
//! The backward makes the probabilities again from the saved log-sum-exp (Dao et al., "FlashAttention", arXiv 2205.14135,
//! section 3.1 and appendix B.2), so nothing of size s x s is ever stored.

pub(crate) mod block;
mod choice_key;
pub(crate) mod columns;
mod cpu;
mod cuda;
mod flash;
mod grad;
mod operands;
mod plain;
mod rehearsal;
#[cfg(test)]
mod tests;

use crate::registry::{Fill, OnCard, Registered, Sample, SampleInput};
use crate::{float_shaped, fused_heads, int_vector};
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Cost, Differentiable, Op, OpError, Operand, Role};
use xtrain_tensor::TensorType;

/// The ways to compute attention on a card, by the names that `XTRAIN_PREFER` takes: whose kernels, and, of our own, in which tiles.
pub fn ways() -> Vec<String> {
    [cuda::CUDNN, cuda::OWN, cuda::WHOLE].map(str::to_owned).into_iter().chain(flash::tile_names()).collect()
}

/// `(qkv_tc[, doc_start_t]) -> (o_tn, lse_bhs)`: c = (h + 2k) e columns, n = h e; lse is the natural logarithm of the sum of the
/// exponentials of a query's scores, in the compute type.
///
/// `doc_start[t]` is the index within its sequence of the first token of t's document, from 0 to t's own index; without it a
/// sequence is one document.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// s.
    pub seq_len: usize,
    /// h, a multiple of k.
    pub heads: usize,
    /// k.
    pub kv_heads: usize,
    /// e.
    pub head_dim: usize,
    /// Whether gradients must be added in one order, so that every run gives the same bits: on a card the fastest backward may not.
    pub deterministic: bool,
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(matches!(inputs.len(), 1 | 2), || {
            format!("attention takes 1 or 2 inputs, not {}", inputs.len())
        })?;
        let tokens = self.tokens(inputs[0])?;
        if let Some(doc_start) = inputs.get(1) {
            int_vector("document starts", *doc_start, tokens)?;
        }
        Ok(vec![self.output(inputs[0], tokens), self.lse(inputs[0], tokens)])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 0 { Operand::Compute } else { Operand::Full }
    }

    /// Two products of the lower half of the s x s scores.
    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        self.products(2.0, inputs[0].shape[0])
    }
}

impl Attention {
    /// Checks `qkv` and returns its tokens.
    fn tokens(&self, qkv: TensorType) -> Result<usize, OpError> {
        let tokens = fused_heads("qkv", qkv, self.heads, self.kv_heads, self.head_dim)?;
        OpError::ensure(self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads), || {
            format!("{} query heads do not divide among {} key/value heads", self.heads, self.kv_heads)
        })?;
        OpError::ensure(self.seq_len > 0 && tokens.is_multiple_of(self.seq_len), || {
            format!("{tokens} tokens are not whole sequences of {}", self.seq_len)
        })?;
        Ok(tokens)
    }

    fn output(&self, qkv: TensorType, tokens: usize) -> TensorType {
        TensorType::new(qkv.dtype, [tokens, self.heads * self.head_dim])
    }

    fn lse(&self, qkv: TensorType, tokens: usize) -> TensorType {
        TensorType::new(qkv.dtype.compute(), [tokens / self.seq_len, self.heads, self.seq_len])
    }

    /// The cost of `n` products of size s x s x e for each query head, of which only the causal half is counted.
    fn products(&self, n: f64, tokens: usize) -> Cost {
        let width = (self.heads * self.head_dim) as f64;
        Cost { flops: n * tokens as f64 * width * self.seq_len as f64 }
    }
}

impl Differentiable for Attention {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(d_o) = cx.grad(0) else { return Ok(()) };
        let mut inputs = vec![d_o, cx.input(0), cx.output(0), cx.output(1)];
        inputs.extend((cx.input_count() == 2).then(|| cx.input(1)));
        let dqkv = cx.emit(Role::Dgrad, AttentionGrad(*self), &inputs)?[0];
        cx.set_grad(0, dqkv)
    }
}

/// `(do_tn, qkv_tc, o_tn, lse_bhs[, doc_start_t]) -> dqkv_tc`, all of its columns.
///
/// With p = exp(q k / sqrt(e) - lse) and dp = do v: dv = sum of p do, ds = p (dp - do o) / sqrt(e), dq = sum of ds k and
/// dk = sum of ds q, where dk and dv sum over the query heads of the group too.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGrad(pub Attention);

impl Op for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(matches!(inputs.len(), 4 | 5), || {
            format!("attention_grad takes 4 or 5 inputs, not {}", inputs.len())
        })?;
        let tokens = self.0.tokens(inputs[1])?;
        let output = self.0.output(inputs[1], tokens);
        OpError::ensure(inputs[0] == output && inputs[2] == output, || {
            format!("the output and its gradient must be {output}, not {} and {}", inputs[2], inputs[0])
        })?;
        float_shaped("the log-sum-exp", inputs[3], &self.0.lse(inputs[1], tokens).shape)?;
        if let Some(doc_start) = inputs.get(4) {
            int_vector("document starts", *doc_start, tokens)?;
        }
        Ok(vec![inputs[1]])
    }

    fn operand(&self, input: usize) -> Operand {
        if input < 3 { Operand::Compute } else { Operand::Full }
    }

    /// Five products of the lower half of the s x s scores: the scores once more, and those of dp, dv, dq and dk.
    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        self.0.products(5.0, inputs[0].shape[0])
    }
}

/// Two sequences of 21 tokens, of three documents and of one.
fn sample_documents() -> SampleInput {
    let starts = (0..21).map(|t| if t < 3 { 0.0 } else { f64::from(3 + 16 * i32::from(t > 18)) });
    SampleInput::ids(42, 1).fill(Fill::Values(starts.chain([0.0; 21]).collect()))
}

impl Registered for Attention {
    fn samples() -> Vec<Sample> {
        let of = |seq_len, heads, kv_heads, head_dim| Attention {
            seq_len,
            heads,
            kv_heads,
            head_dim,
            deterministic: true,
        };
        vec![
            Sample::forward(of(5, 4, 2, 3), [SampleInput::activation([10, 24])]),
            Sample::forward(of(21, 2, 1, 2), [SampleInput::activation([42, 8]), sample_documents()]),
            Sample::forward(of(1, 3, 3, 5), [SampleInput::activation([2, 45])]),
        ]
    }

    fn large() -> Sample {
        let op = Attention { seq_len: 150, heads: 4, kv_heads: 2, head_dim: 20, deterministic: true };
        Sample::forward(op, [SampleInput::activation([300, 160])])
    }
}

impl Registered for AttentionGrad {
    fn samples() -> Vec<Sample> {
        let op =
            AttentionGrad(Attention { seq_len: 21, heads: 4, kv_heads: 2, head_dim: 6, deterministic: true });
        let inputs = [
            SampleInput::activation([42, 24]),
            SampleInput::activation([42, 48]),
            SampleInput::activation([42, 24]),
            SampleInput::activation([2, 4, 21]).fill(Fill::Normal(3.0, 0.3)),
        ];
        vec![
            Sample::plain(op, inputs.clone()),
            Sample::plain(op, inputs.into_iter().chain([sample_documents()]).collect::<Vec<_>>()),
        ]
    }

    fn large() -> Sample {
        let op = AttentionGrad(Attention {
            seq_len: 150,
            heads: 4,
            kv_heads: 2,
            head_dim: 20,
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
}

/// Shapes of models: B, s, h, k, e, and whether documents are told apart.
const ON_CARD: [(usize, usize, usize, usize, usize, bool); 16] = [
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
    // Whole sequences in a block: of up to 128, 256 and 512 tokens.
    (2, 100, 2, 2, 32, true),
    (1, 400, 1, 1, 32, false),
    (2, 90, 2, 2, 64, true),
    (1, 200, 2, 2, 64, false),
    (1, 120, 2, 2, 128, true),
    (1, 250, 2, 1, 128, false),
];

/// Documents of very different lengths: 1, 2, 4, .. tokens.
fn doubling_documents(sequences: usize, seq_len: usize) -> SampleInput {
    let start = |t: usize| (1usize << (t + 1).ilog2()) - 1;
    let starts: Vec<f64> = (0..sequences * seq_len).map(|t| start(t % seq_len) as f64).collect();
    SampleInput::ids(starts.len(), 1).fill(Fill::Values(starts))
}

impl OnCard for Attention {
    const SOURCES: &'static [KernelSource] = &[plain::SOURCE, flash::FORWARD, flash::WHOLE_FORWARD];

    fn card_samples() -> Vec<Sample> {
        let sample = |(b, seq_len, heads, kv_heads, head_dim, documents)| {
            let op = Attention { seq_len, heads, kv_heads, head_dim, deterministic: true };
            let mut inputs = vec![SampleInput::activation([b * seq_len, (heads + 2 * kv_heads) * head_dim])];
            inputs.extend(bool::then(documents, || doubling_documents(b, seq_len)));
            Sample::forward(op, inputs)
        };
        ON_CARD.into_iter().map(sample).collect()
    }
}

impl OnCard for AttentionGrad {
    const SOURCES: &'static [KernelSource] =
        &[plain::SOURCE, flash::QUERIES, flash::KEYS, flash::WHOLE_BACKWARD];

    fn card_samples() -> Vec<Sample> {
        let sample = |deterministic, (b, seq_len, heads, kv_heads, head_dim, documents)| {
            let (tokens, width) = (b * seq_len, heads * head_dim);
            let mut inputs = vec![
                SampleInput::activation([tokens, width]),
                // Scores below some 2, since no softmax bounds what is made up here: of a large product of a large probability and a
                // large gradient a bf16 rounding is more than a bar allows.
                SampleInput::activation([tokens, width + 2 * kv_heads * head_dim])
                    .fill(Fill::Normal(0.0, 0.7)),
                SampleInput::activation([tokens, width]),
                SampleInput::activation([b, heads, seq_len]).fill(Fill::Normal(6.0, 0.3)),
            ];
            inputs.extend(bool::then(documents, || doubling_documents(b, seq_len)));
            Sample::plain(
                AttentionGrad(Attention { seq_len, heads, kv_heads, head_dim, deterministic }),
                inputs,
            )
        };
        // In any order where cuDNN may sum so: it knows no documents.
        let in_any_order = ON_CARD.into_iter().filter(|shape| !shape.5).map(|shape| sample(false, shape));
        ON_CARD.into_iter().map(|shape| sample(true, shape)).chain(in_any_order).collect()
    }
}
