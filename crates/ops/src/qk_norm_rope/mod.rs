//! Rotary position embedding (RoPE; Su et al., arXiv 2104.09864, section 3.4) of queries and keys, optionally
//! after an RMSNorm of each head (QK-Norm, as in Qwen3).
//!
//! Columns of `qkv`: h query heads, then k key heads, then k value heads, e columns each. A head is rotated
//! in pairs (j, j + e/2), like Hugging Face's `rotate_half`: with the cosine c_j and sine s_j of the token's
//! position, `y_j = x_j c_j - x_{j+e/2} s_j` and `y_{j+e/2} = x_{j+e/2} c_j + x_j s_j`. With the norm, x is
//! first replaced by x * rstd * w, where rstd = 1 / sqrt(mean(x^2) + eps) over the head. Everything is
//! computed in f32 (f64) and rounded once.
//!
//! Without the norm, forward and backward work in place. With the norm the backward needs the input, so the
//! forward does not.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
mod table;
#[cfg(test)]
mod tests;

pub use table::{RopeScaling, rotation_table};

use crate::on_gpu::OnGpu;
use crate::{float_shaped, fused_heads, int_vector, matrix};
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Differentiable, Op, OpError, Operand, Role};
use xtrain_tensor::{DType, TensorType};

/// `(qkv_tc, positions_t, table_pe[, q_w_e, k_w_e]) -> (qkv'_tc[, rstd_tn])` with c = (h + 2k) e columns and
/// n = h + k heads.
///
/// Each of the p rows of the table holds the e/2 cosines, then the e/2 sines, of one position
/// ([`rotation_table`]). Positions are i32 in 0..p. Value columns are copied. The op has weights if and only
/// if it has a norm.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope {
    /// h, the query heads.
    pub heads: usize,
    /// k, the key/value heads.
    pub kv_heads: usize,
    /// e, the width of a head; even.
    pub head_dim: usize,
    /// Epsilon of the norm; `None` for models without one.
    pub norm: Option<f32>,
}

impl Op for QkNormRope {
    fn name(&self) -> &'static str {
        "qk_norm_rope"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("qk_norm_rope", inputs, if self.norm.is_some() { 5 } else { 3 })?;
        let tokens = fused_heads("qkv", inputs[0], self.heads, self.kv_heads, self.head_dim)?;
        rotation_operands(inputs[1], inputs[2], tokens, self.head_dim)?;
        if self.norm.is_none() {
            return Ok(vec![inputs[0]]);
        }
        float_shaped("the queries' norm weight", inputs[3], &[self.head_dim])?;
        float_shaped("the keys' norm weight", inputs[4], &[self.head_dim])?;
        let rstd = TensorType::new(inputs[0].dtype.compute(), [tokens, self.heads + self.kv_heads]);
        Ok(vec![inputs[0], rstd])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 0 { Operand::Compute } else { Operand::Full }
    }

    fn in_place(&self) -> &[(usize, usize)] {
        if self.norm.is_some() { &[] } else { &[(0, 0)] }
    }

    /// With the norm, not saving the output frees memory, because the backward saves the input anyway.
    /// Without it, recomputing the output would need the input instead.
    fn is_cheap(&self, output: usize) -> bool {
        self.norm.is_some() && output == 0
    }
}

impl Differentiable for QkNormRope {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let QkNormRope { heads, kv_heads, head_dim, .. } = *self;
        let weights = self.norm.map(|_| [cx.grad_dtype(3), cx.grad_dtype(4)]);
        let mut inputs = vec![dy, cx.input(1), cx.input(2)];
        if weights.is_some() {
            inputs.extend([cx.input(0), cx.output(1), cx.input(3), cx.input(4)]);
        }
        let grads = cx.emit(
            Role::Dgrad,
            QkNormRopeGrad { heads, kv_heads, head_dim, weights, amax: false },
            &inputs,
        )?;
        cx.set_grad(0, grads[0])?;
        if weights.is_some() {
            cx.set_grad(3, grads[1])?;
            cx.set_grad(4, grads[2])?;
        }
        Ok(())
    }
}

/// `(dqkv'_tc, positions_t, table_pe[, qkv_tc, rstd_tn, q_w_e, k_w_e]) -> (dqkv_tc[, dq_w_e, dk_w_e])`, dqkv
/// in place of dqkv'.
///
/// The gradients are rotated back. With the norm, for each head with n = x * rstd and its rotated gradient
/// dy: dx = rstd * (dy w - n mean(dy w n)), and dw is the sum of dy n over tokens and heads, which
/// accumulates. With `amax`, the last output is the amax of dqkv, `f32[1]`.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRopeGrad {
    /// h, the query heads.
    pub heads: usize,
    /// k, the key/value heads.
    pub kv_heads: usize,
    /// e, the width of a head; even.
    pub head_dim: usize,
    /// Element types of dq_w and dk_w; `None` without the norm.
    pub weights: Option<[DType; 2]>,
    /// True if the amax of dqkv is an output.
    pub amax: bool,
}

impl Op for QkNormRopeGrad {
    fn name(&self) -> &'static str {
        "qk_norm_rope_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("qk_norm_rope_grad", inputs, if self.weights.is_some() { 7 } else { 3 })?;
        let tokens = fused_heads("the output gradient", inputs[0], self.heads, self.kv_heads, self.head_dim)?;
        rotation_operands(inputs[1], inputs[2], tokens, self.head_dim)?;
        let amax = self.amax.then_some(TensorType::new(DType::F32, [1]));
        let Some([dq_w, dk_w]) = self.weights else {
            return Ok([inputs[0]].into_iter().chain(amax).collect());
        };
        OpError::ensure(inputs[3] == inputs[0], || {
            format!("qkv is {}, but the output gradient is {}", inputs[3], inputs[0])
        })?;
        float_shaped("rstd", inputs[4], &[tokens, self.heads + self.kv_heads])?;
        float_shaped("the queries' norm weight", inputs[5], &[self.head_dim])?;
        float_shaped("the keys' norm weight", inputs[6], &[self.head_dim])?;
        let weight = |dtype| TensorType::new(dtype, [self.head_dim]);
        Ok([inputs[0], weight(dq_w), weight(dk_w)].into_iter().chain(amax).collect())
    }

    fn operand(&self, input: usize) -> Operand {
        if matches!(input, 0 | 3) { Operand::Compute } else { Operand::Full }
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn accumulates(&self, output: usize) -> bool {
        self.weights.is_some() && matches!(output, 1 | 2)
    }
}

/// Checks positions and table for this number of tokens and head width.
fn rotation_operands(
    positions: TensorType,
    table: TensorType,
    tokens: usize,
    head_dim: usize,
) -> Result<(), OpError> {
    OpError::ensure(head_dim.is_multiple_of(2), || {
        format!("heads are rotated in pairs of columns, so their width must be even, not {head_dim}")
    })?;
    int_vector("positions", positions, tokens)?;
    let (_, width) = matrix("the rotation table", table)?;
    OpError::ensure(table.dtype.is_float() && width == head_dim, || {
        format!(
            "the rotation table must be a float matrix of {head_dim} columns (half cosines, half sines), not {table}"
        )
    })
}

impl OnGpu for QkNormRope {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for QkNormRopeGrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
