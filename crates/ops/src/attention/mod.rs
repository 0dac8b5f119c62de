//! Causal self-attention with grouped key/value heads and optional document boundaries.
//!
//! Columns of `qkv`: h query heads, then k key heads, then k value heads, e columns each; query heads g h/k
//! to (g+1) h/k - 1 read key/value head g. Rows: B sequences of s tokens. For each query, o = softmax(scale
//! q K^T) V over the keys of its own document up to itself. The softmax is computed in f32 (f64). With bf16
//! operands, probabilities and, in the backward, the gradients of scores are rounded to bf16 before they are
//! multiplied, as tensor cores need.
//!
//! The backward recomputes probabilities from the saved log-sum-exp (Dao et al., "FlashAttention", arXiv
//! 2205.14135, section 3.1 and appendix B.2), so nothing of size s x s is ever stored.

pub(crate) mod block;
mod choice_key;
pub(crate) mod columns;
mod cpu;
mod cuda;
mod flash;
mod grad;
mod hopper;
mod operands;
mod plain;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;
mod timing_operands;

use crate::on_gpu::OnGpu;
use crate::{float_shaped, fused_heads, int_vector};
use xtrain_cuda::KernelSource;
use xtrain_program::{Arithmetic, Backward, Cost, Differentiable, Op, OpError, Operand, Role};
use xtrain_tensor::TensorType;

/// Names of the algorithms for attention on a GPU, as `XTRAIN_PREFER` takes them: the implementations, then
/// the tile sizes of our own kernels.
pub fn algorithms() -> Vec<String> {
    [cuda::CUDNN, hopper::NAME, cuda::OWN, cuda::WHOLE]
        .map(str::to_owned)
        .into_iter()
        .chain(flash::tile_names())
        .collect()
}

/// `(qkv_tc[, doc_start_t]) -> (o_tn, lse_bhs)`, with c = (h + 2k) e and n = h e. lse is the log-sum-exp of a
/// query's scores (natural logarithm), in the compute type.
///
/// `doc_start[t]`, an i32, is the index within its sequence of the first token of t's document, from 0 to t's
/// own index. Without it each sequence is one document.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// s, the tokens of a sequence.
    pub seq_len: usize,
    /// h, the query heads: a multiple of k.
    pub heads: usize,
    /// k, the key/value heads.
    pub kv_heads: usize,
    /// e, the width of a head.
    pub head_dim: usize,
    /// The positive factor on the products of queries and keys; `None` is 1 / sqrt(e).
    pub scale: Option<f32>,
    /// True if gradients must be summed in a fixed order, so that runs give equal bits. The fastest backward
    /// on a GPU may not be deterministic.
    pub deterministic: bool,
}

impl Op for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(matches!(inputs.len(), 1 | 2), || {
            format!("attention takes qkv and, if any, document starts: 1 or 2 inputs, not {}", inputs.len())
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

    /// Two GEMMs over the lower half of the s x s scores.
    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_operands(self.arithmetic(2, inputs[0]), inputs, outputs)
    }
}

impl Attention {
    /// Checks `qkv` and returns its number of tokens.
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

    /// `gemms` GEMMs of size s x s x e for each query head, of which the causal half is counted.
    fn arithmetic(&self, gemms: usize, qkv: TensorType) -> Arithmetic {
        let Attention { seq_len, head_dim, deterministic: in_order, .. } = *self;
        let heads = qkv.shape[0] / seq_len * self.heads;
        Arithmetic::Attention { gemms, heads, seq_len, head_dim, operands: qkv.dtype, in_order }
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

/// `(do_tn, qkv_tc, o_tn, lse_bhs[, doc_start_t]) -> dqkv_tc`: the gradient of all columns of qkv.
///
/// With p = exp(scale q k - lse) and dp = do v: dv = sum of p do, ds = scale p (dp - do o), dq = sum
/// of ds k and dk = sum of ds q. dk and dv also sum over the query heads of their group.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGrad(pub Attention);

impl Op for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(matches!(inputs.len(), 4 | 5), || {
            format!(
                "attention_grad takes do, qkv, o, lse and, if any, document starts: 4 or 5 inputs, not {}",
                inputs.len()
            )
        })?;
        let tokens = self.0.tokens(inputs[1])?;
        let output = self.0.output(inputs[1], tokens);
        OpError::ensure(inputs[0] == output && inputs[2] == output, || {
            format!("o and its gradient must be {output}, not {} and {}", inputs[2], inputs[0])
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

    /// Five GEMMs over the lower half of the s x s scores: the recomputed scores, dp, dv, dq and dk.
    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_operands(self.0.arithmetic(5, inputs[1]), inputs, outputs)
    }
}

impl OnGpu for Attention {
    const SOURCES: &'static [KernelSource] =
        &[plain::SOURCE, flash::FORWARD, flash::WHOLE_FORWARD, hopper::FORWARD];
}

impl OnGpu for AttentionGrad {
    const SOURCES: &'static [KernelSource] = &[
        plain::SOURCE,
        flash::QUERIES,
        flash::KEYS,
        flash::WHOLE_BACKWARD,
        hopper::BACKWARD,
        hopper::AROUND_BACKWARD,
        hopper::DOCUMENTS,
    ];
}
