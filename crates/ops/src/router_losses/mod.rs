//! The losses of a mixture's router, of one layer: the balance loss (Switch Transformer, arXiv 2101.03961,
//! section 2.2, with k experts a token) and the router z-loss (ST-MoE, arXiv 2202.08906, section 3.3).
//!
//! Shape legend: e experts, k experts of a token.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::float_shaped;
use crate::on_gpu::OnGpu;
use crate::route::{Score, logits_of};
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Cost, Differentiable, Op, OpError, Operand, Rebuild, Role};
use xtrain_tensor::{DType, TensorType};

/// `(logits_te, ids_tk i32, counts_e, inv_tokens []) -> (objective [], balance [], z [])`. With T the tokens
/// of the micro-batch that are not padding:
///
/// * `balance` = e / T sum_e counts_e P_e, with P_e the mean share of expert e in the scores of a token (its
///   softmax, or its sigmoid over the sum of all plus 1e-20). It is k if all experts have as many tokens.
/// * `z` = mean of logsumexp(logits)^2 over tokens.
/// * `objective` = `balance_weight * balance + z_weight * z`.
///
/// Each is multiplied by `T inv_tokens`, with inv_tokens one over the tokens of the global batch, padding not
/// counted. The outputs accumulate over micro-steps, so that they are means over tokens in the end: those of
/// micro-batches, because counts are of a micro-batch. All are 0 if all tokens are padding, which has ids of
/// -1.
///
/// ids and counts come from [`Route`](crate::route::Route) and [`Dispatch`](crate::dispatch::Dispatch), and
/// there are at most 2^24 copies of tokens. The objective must itself be a loss, whose gradient is 1. counts
/// have no gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterLosses {
    /// The scores whose shares are balanced.
    pub score: Score,
    /// Weight of the balance loss in the objective.
    pub balance_weight: f32,
    /// Weight of the z-loss in the objective.
    pub z_weight: f32,
}

impl RouterLosses {
    /// Checks attributes and inputs.
    fn check(&self, inputs: &[TensorType]) -> Result<(), OpError> {
        let is_weight = |weight: f32| weight >= 0.0 && weight.is_finite();
        OpError::ensure(is_weight(self.balance_weight) && is_weight(self.z_weight), || {
            let RouterLosses { balance_weight, z_weight, .. } = self;
            format!("weights must be finite numbers of at least 0, not {balance_weight} and {z_weight}")
        })?;
        let (tokens, experts) = logits_of(inputs[0])?;
        let is_choice =
            inputs[1].dtype == DType::I32 && matches!(*inputs[1].shape, [t, k] if t == tokens && k > 0);
        OpError::ensure(is_choice, || format!("ids must be i32[{tokens}, k], not {}", inputs[1]))?;
        float_shaped("counts", inputs[2], &[experts])?;
        float_shaped("inv_tokens", inputs[3], &[])?;
        let is_plain = |ty: TensorType| ty.dtype == DType::F32 || ty.dtype == inputs[0].dtype;
        OpError::ensure(is_plain(inputs[2]) && is_plain(inputs[3]), || {
            format!("counts and inv_tokens must be f32, not {} and {}", inputs[2], inputs[3])
        })
    }
}

impl Op for RouterLosses {
    fn name(&self) -> &'static str {
        "router_losses"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 4)?;
        self.check(inputs)?;
        Ok(vec![TensorType::new(inputs[0].dtype, []); 3])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    /// Never: the outputs accumulate.
    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }
}

impl Differentiable for RouterLosses {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let has_upstream = (0..3).any(|n| cx.grad(n).is_some());
        OpError::ensure(cx.is_root(0) && !cx.is_root(1) && !cx.is_root(2) && !has_upstream, || {
            "its objective (output 0) must itself be a loss, and nothing differentiated may be computed from its outputs"
                .into()
        })?;
        let inputs: Vec<_> = (0..4).map(|n| cx.input(n)).collect();
        let dlogits = cx.emit(Role::Dgrad, RouterLossesGrad(*self), &inputs)?[0];
        cx.set_grad(0, dlogits)
    }
}

/// `(logits_te, ids_tk i32, counts_e, inv_tokens []) -> dlogits_te`: the gradient of the objective. With P
/// for the shares of a token, w = P for the softmax and P (1 - sigmoid(logits)) for the sigmoid, and p for
/// the softmax of the logits:
///
/// ```text
/// dlogits_e = inv_tokens (balance_weight e / T w_e (counts_e - counts . P) + 2 z_weight logsumexp p_e)
/// ```
///
/// That of padding is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterLossesGrad(pub RouterLosses);

impl Op for RouterLossesGrad {
    fn name(&self) -> &'static str {
        "router_losses_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 4)?;
        self.0.check(inputs)?;
        Ok(vec![inputs[0]])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_bytes((inputs[0].bytes() + outputs[0].bytes()) as f64)
    }
}

impl OnGpu for RouterLosses {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for RouterLossesGrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
