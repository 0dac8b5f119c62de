//! Attention of new tokens over a KV cache, for prefill (a chunk of a prompt) and decode (one token).
//!
//! The keys and values of the new tokens are written to the cache at the tokens' positions. Then the query at
//! position p attends to rows 0 to p. Later rows are never read, so a cache needs no clearing and a chunk may
//! be padded: padding tokens have positions after the valid ones, and their rows are overwritten by the
//! tokens that later come to these positions.
//!
//! Columns, scale and rounding are those of [`attention`](crate::attention).

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use crate::{fused_heads, int_vector};
use xtrain_cuda::KernelSource;
use xtrain_program::{Arithmetic, Cost, Op, OpError, Operand, Rebuild};
use xtrain_tensor::TensorType;

/// `(qkv_tc, positions_t, k_cache, v_cache) -> (o_tn, k_cache', v_cache')` with c = (h + 2k) e and n = h e.
/// The caches are `[B, capacity, k e]` and updated in place. Each of the B sequences has t / B new tokens.
///
/// Positions are i32 in 0..capacity. If two tokens of a sequence have the same position, the later one is
/// written.
#[derive(Clone, Copy, Debug)]
pub struct CachedAttention {
    /// h, the query heads: a multiple of k.
    pub heads: usize,
    /// k, the key/value heads.
    pub kv_heads: usize,
    /// e, the width of a head.
    pub head_dim: usize,
    /// The positive factor on the products of queries and keys; `None` is 1 / sqrt(e).
    pub scale: Option<f32>,
}

impl Op for CachedAttention {
    fn name(&self) -> &'static str {
        "cached_attention"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("cached_attention", inputs, 4)?;
        let [qkv, positions, k_cache, v_cache] = [inputs[0], inputs[1], inputs[2], inputs[3]];
        let tokens = fused_heads("qkv", qkv, self.heads, self.kv_heads, self.head_dim)?;
        OpError::ensure(self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads), || {
            format!("{} query heads do not divide among {} key/value heads", self.heads, self.kv_heads)
        })?;
        int_vector("positions", positions, tokens)?;
        let width = self.kv_heads * self.head_dim;
        OpError::ensure(
            matches!(*k_cache.shape, [_, _, w] if w == width) && k_cache.dtype == qkv.dtype,
            || format!("the key cache must be {}[sequences, capacity, {width}], not {k_cache}", qkv.dtype),
        )?;
        OpError::ensure(v_cache == k_cache, || {
            format!("the value cache must be {k_cache}, like the key cache, not {v_cache}")
        })?;
        let sequences = k_cache.shape[0];
        OpError::ensure(sequences > 0 && tokens.is_multiple_of(sequences), || {
            format!("{tokens} tokens cannot be split evenly over the cache's {sequences} sequences")
        })?;
        let output = TensorType::new(qkv.dtype, [tokens, self.heads * self.head_dim]);
        Ok(vec![output, k_cache, v_cache])
    }

    /// Never: the op writes its caches.
    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 1 { Operand::Full } else { Operand::Compute }
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(1, 2), (2, 3)]
    }

    /// Cost with a full cache: how much of it is in use is known only at run time.
    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let (tokens, keys) = (inputs[0].shape[0], inputs[2].shape[1]);
        // Two GEMMs, of the scores and of the values.
        let mnk = [tokens, 2 * self.heads * self.head_dim, keys];
        let gemms = Arithmetic::Gemm { mnk, operands: inputs[0].dtype, scaling: None };
        Cost::of_operands(gemms, inputs, outputs)
    }
}

impl OnGpu for CachedAttention {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
