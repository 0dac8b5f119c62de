//! Fused language-model head and cross-entropy, in chunks of tokens: only the logits of one chunk exist at a
//! time.
//!
//! Gradients are computed in the forward pass, while a chunk's logits exist, so that logits are computed once
//! ([`LinearCrossEntropyGrad`] replaces the op). The objective must therefore be the loss itself, whose
//! gradient is one. In bf16 programs logits are rounded to bf16, and cross-entropy is computed from these in
//! f32.

mod chunks;
mod cost;
mod cpu;
mod cuda;
mod gathered;
mod portions;
#[cfg(any(test, feature = "samples"))]
mod samples;
mod scaled;
#[cfg(test)]
mod tests;

pub use scaled::ScaledLinearCrossEntropy;

use crate::on_gpu::OnGpu;
use crate::{float_shaped, int_vector, matrix};
use cost::Loss;
use std::ops::Range;
use std::sync::Arc;
use xtrain_cuda::{Gemm, KernelSource};
use xtrain_program::{
    Backward, Cost, Differentiable, Gemms, LinearGemm, Op, OpError, OpGemm, Operand, OperandSource, Rebuild,
};
use xtrain_tensor::{DType, TensorType};

/// Target of a token without one.
pub const IGNORED: i32 = -100;

/// `(x_td, w_vd, targets_t, inv_targets) -> (objective, cross_entropy[, terms])`. With logits = x w^T and
/// lse = ln(sum_v e^logit), over the tokens whose target is not [`IGNORED`]:
/// `cross_entropy = inv_targets * sum(lse - logit[target])` and
/// `objective = cross_entropy + inv_targets * z_loss * sum(lse^2)`.
///
/// targets are i32, [`IGNORED`] or in 0..v, which the data loader checks. inv_targets is a float scalar: one
/// over the number of targets in the global batch, so that the outputs, which accumulate over micro-steps,
/// are means over the batch in the end. Outputs are scalars of x's compute type; both are 0 if all targets
/// are ignored. The z-loss is PaLM's (arXiv 2204.02311, section 5).
///
/// terms are `[t, 2]` in the type of the scalars: the terms of each token in the two sums, 0 if its target is
/// ignored. A third column may say whether the target is the likeliest token. They do not accumulate.
#[derive(Clone, Copy, Debug)]
pub struct LinearCrossEntropy {
    /// Maximum number of tokens in a chunk, at least 1. Chunks have equal lengths, up to one token.
    pub chunk_tokens: usize,
    /// Weight of lse^2; 0 turns the z-loss off.
    pub z_loss: f32,
    /// The terms that are an output.
    pub terms: Terms,
}

/// The terms of each token that are an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// None.
    None,
    /// `[t, 2]`: those of the objective and of the cross-entropy.
    Losses,
    /// `[t, 3]`: these, then 1 if the target's logit is the highest and no lower id has the same, else 0.
    LossesAndMatches,
}

impl Terms {
    /// Columns of the terms.
    fn columns(self) -> usize {
        if self == Terms::LossesAndMatches { 3 } else { 2 }
    }

    /// True if they are an output.
    fn are_output(self) -> bool {
        self != Terms::None
    }
}

/// `(x_td, w_vd, targets_t, inv_targets) -> (objective, cross_entropy[, terms][, dx_td][, dw_vd])`: the loss
/// with its gradients.
///
/// With p the softmax of a token's logits, dlogits = inv_targets * (p - onehot(target) + 2 z_loss lse p), or
/// 0 if the target is ignored; in bf16 programs it is rounded to bf16. dx = dlogits w is assigned. dw =
/// dlogits^T x is summed over chunks in f32 and accumulates.
#[derive(Clone, Copy, Debug)]
pub struct LinearCrossEntropyGrad {
    /// The loss.
    pub loss: LinearCrossEntropy,
    /// True if dx is an output.
    pub dx: bool,
    /// Element type of dw, if it is an output.
    pub dw: Option<DType>,
}

impl LinearCrossEntropy {
    /// Checks the attributes.
    fn check(&self) -> Result<(), OpError> {
        OpError::ensure(self.chunk_tokens > 0, || "chunk_tokens must be at least 1".into())?;
        OpError::ensure(self.z_loss >= 0.0 && self.z_loss.is_finite(), || {
            format!("z_loss must be a finite number of at least 0, not {}", self.z_loss)
        })
    }

    /// Checks the inputs and returns t and v.
    fn extents(&self, inputs: &[TensorType]) -> Result<(usize, usize), OpError> {
        let ((tokens, width), (vocab, w_width)) = (matrix("x", inputs[0])?, matrix("the weight", inputs[1])?);
        OpError::ensure(tokens > 0 && width > 0 && vocab > 0, || {
            format!("x {} and the weight {} must not be empty", inputs[0], inputs[1])
        })?;
        OpError::ensure(width == w_width, || {
            format!("x has {width} columns, but the weight {} takes {w_width}", inputs[1])
        })?;
        OpError::ensure(inputs[0].dtype.is_float() && inputs[0].dtype == inputs[1].dtype, || {
            format!("x {} and the weight {} must have one float type", inputs[0], inputs[1])
        })?;
        int_vector("targets", inputs[2], tokens)?;
        float_shaped("inv_targets", inputs[3], &[])?;
        Ok((tokens, vocab))
    }

    /// Workspace: the terms unless they are an output, and the logits of the longest chunk.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let ((tokens, _), (vocab, _)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
        let logits = TensorType::new(inputs[0].dtype, [self.longest(tokens), vocab]);
        self.terms_workspace(inputs[0]).into_iter().chain([logits]).collect()
    }

    /// The terms, unless they are an output.
    fn terms_workspace(&self, x: TensorType) -> Option<TensorType> {
        (!self.terms.are_output()).then(|| self.terms_type(x))
    }

    /// Type of the terms of the tokens `x`.
    fn terms_type(&self, x: TensorType) -> TensorType {
        TensorType::new(x.dtype.compute(), [x.shape[0], self.terms.columns()])
    }

    /// Number of outputs before the gradients.
    fn outputs(&self) -> usize {
        2 + usize::from(self.terms.are_output())
    }

    /// The ranges of tokens of the chunks: as few as possible, with lengths that differ by one at most.
    fn chunks(&self, tokens: usize) -> impl Iterator<Item = Range<usize>> {
        let n = tokens.div_ceil(self.chunk_tokens);
        (0..n).map(move |i| i * tokens / n..(i + 1) * tokens / n)
    }

    /// Number of tokens in the longest chunk.
    fn longest(&self, tokens: usize) -> usize {
        self.chunks(tokens).map(|chunk| chunk.len()).max().unwrap_or(0)
    }

    /// The lengths of the chunks, each with the number of chunks that have it.
    fn chunk_lengths(&self, tokens: usize) -> [(usize, usize); 2] {
        let n = tokens.div_ceil(self.chunk_tokens).max(1);
        let longer = tokens % n;
        [(tokens / n, n - longer), (tokens / n + 1, longer)]
    }
}

impl Op for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 4)?;
        self.check()?;
        self.extents(inputs)?;
        let scalar = TensorType::new(inputs[0].dtype.compute(), []);
        Ok([scalar, scalar]
            .into_iter()
            .chain(self.terms.are_output().then(|| self.terms_type(inputs[0])))
            .collect())
    }

    fn operand(&self, input: usize) -> Operand {
        if input < 2 { Operand::Compute } else { Operand::Full }
    }

    fn accumulates(&self, output: usize) -> bool {
        output < 2
    }

    /// Never: the outputs accumulate.
    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }

    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        LinearCrossEntropyGrad { loss: *self, dx: false, dw: None }.gemms(inputs)
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        LinearCrossEntropyGrad { loss: *self, dx: false, dw: None }.cost(inputs, outputs)
    }
}

impl Differentiable for LinearCrossEntropy {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let upstream = cx.grad(0).is_some() || cx.grad(1).is_some();
        OpError::ensure(cx.is_root(0) && !cx.is_root(1) && !upstream, || {
            "its gradients are computed in the forward pass, so its objective (output 0) must itself be the loss, \
             and nothing differentiated may be computed from its outputs"
                .into()
        })?;
        let dw = cx.wants(1).then(|| cx.grad_dtype(1));
        let grad = LinearCrossEntropyGrad { loss: *self, dx: cx.wants(0), dw };
        let inputs: Vec<_> = (0..4).map(|n| cx.input(n)).collect();
        let gradients = cx.replace_forward(grad, &inputs)?;
        let wanted = [0, 1].into_iter().filter(|&n| cx.wants(n)).collect::<Vec<_>>();
        wanted.into_iter().zip(gradients).try_for_each(|(n, gradient)| cx.set_grad(n, gradient))
    }
}

impl LinearCrossEntropyGrad {
    /// For each of [`LinearGemm::ALL`], true if it is computed.
    fn computes(&self) -> [bool; 3] {
        [true, self.dx, self.dw.is_some()]
    }
}

impl Op for LinearCrossEntropyGrad {
    fn name(&self) -> &'static str {
        "linear_cross_entropy_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let mut outputs = self.loss.infer(inputs)?;
        outputs.extend(self.dx.then_some(inputs[0]));
        outputs.extend(self.dw.map(|dtype| inputs[1].with_dtype(dtype)));
        Ok(outputs)
    }

    fn operand(&self, input: usize) -> Operand {
        self.loss.operand(input)
    }

    fn accumulates(&self, output: usize) -> bool {
        output < 2 || output >= self.loss.outputs() + usize::from(self.dx)
    }

    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }

    /// GEMMs of x, the weight and dlogits, which is computed inside of the op.
    fn gemms(&self, inputs: &[TensorType]) -> Option<Gemms> {
        let ((tokens, width), (vocab, _)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
        let weight = [OperandSource::Inside, OperandSource::Input(1)];
        let operands = [weight, weight, [OperandSource::Inside; 2]];
        let list = (LinearGemm::ALL.into_iter().zip(operands).zip(self.computes()))
            .filter(|(_, is_computed)| *is_computed)
            .map(|((kind, operands), _)| OpGemm {
                kind,
                operands,
                extents: kind.extents(tokens, vocab, width),
            })
            .collect();
        let grad = *self;
        let in_fp8 = move |gemms| Arc::new(ScaledLinearCrossEntropy { grad, gemms }) as Arc<dyn Op>;
        Some(Gemms { list, in_fp8: Box::new(in_fp8) })
    }

    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        let loss = Loss { grad: *self, x: inputs[0], vocab: inputs[1].shape[0], formats: [None; 3] };
        loss.cost(self.loss.chunk_lengths(inputs[0].shape[0]), |_| Default::default())
    }
}

impl OnGpu for LinearCrossEntropy {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE, chunks::SOURCE];
}

impl OnGpu for LinearCrossEntropyGrad {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE, chunks::SOURCE];
}
