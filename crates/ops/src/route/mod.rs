//! The choice of experts of a mixture: each token's experts and the weights (gates) of their outputs.
//!
//! Scores are the softmax of the router's logits (Mixtral, arXiv 2401.04088, section 2.1; Qwen3) or their
//! sigmoid (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). As there, a bias may be added to the scores for
//! the choice alone, and a token may choose from its best groups of experts alone.
//!
//! Shape legend: e experts, k experts of a token.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use crate::{int_vector, matrix};
use xtrain_cuda::{Header, KernelSource};
use xtrain_program::{Backward, Cost, Differentiable, Op, OpError, Operand, Rebuild, Role};
use xtrain_tensor::{DType, TensorType};

pub(crate) use cpu::{TINY, score};

/// Device code of the kernels that compute scores.
pub(crate) const SCORE: Header = Header::new("route/score.cuh", include_str!("score.cuh"));

/// The score of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Score {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of the expert's logit.
    Sigmoid,
}

/// The rule by which tokens choose experts, and by which the outputs of these are weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// k: experts of a token.
    pub top_k: usize,
    /// The score.
    pub score: Score,
    /// True if a bias is added to the scores for the choice, not for the gates.
    pub biased: bool,
    /// True if gates are scores divided by the sum of the token's k scores.
    pub normalise: bool,
    /// The factor of all gates.
    pub scale: f32,
    /// Groups of consecutive experts; 1 for no groups.
    pub groups: usize,
    /// Groups from which a token chooses: those whose two best experts have the largest sums of scores, with
    /// the bias. No expert of another group is chosen, as if its score were -inf.
    pub top_groups: usize,
}

/// `(logits_te[, bias_e][, padding_t i32]) -> (gates_tk, ids_tk i32)`: for each token the k experts of the
/// largest scores, best first, and their gates. The bias is there if the router is biased. A token whose
/// `padding` is negative has ids of -1 and gates of 0.
///
/// The order is total: of equal scores, the smaller index comes first, and NaN comes last. So the ids of
/// other tokens are valid and distinct for any logits. CPU and GPU return equal bits. The outputs are saved
/// for the backward, never recomputed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Route(pub Router);

impl Router {
    /// The most experts, for which the GPU kernel has room.
    pub const MAX_EXPERTS: usize = 1024;
    /// The most groups.
    pub const MAX_GROUPS: usize = 32;
    /// Two experts of a token by softmax, with gates that add up to 1, as in Mixtral.
    pub const SOFTMAX_TOP2: Router = Router {
        top_k: 2,
        score: Score::Softmax,
        biased: false,
        normalise: true,
        scale: 1.0,
        groups: 1,
        top_groups: 1,
    };

    /// Checks the rule for so many experts.
    ///
    /// # Errors
    /// More chosen experts than there are, or than the chosen groups have; groups that do not divide them.
    pub fn check(&self, experts: usize) -> Result<(), OpError> {
        let Router { top_k, groups, top_groups, .. } = *self;
        let fail = |message: String| Err(OpError(message));
        if !(1..=Self::MAX_EXPERTS).contains(&experts) {
            return fail(format!("a mixture has 1 to {} experts, not {experts}", Self::MAX_EXPERTS));
        }
        if top_k == 0 {
            return fail("a token must choose at least 1 expert, not 0".into());
        }
        if top_k > experts {
            return fail(format!("a token chooses {top_k} experts, but there are only {experts}"));
        }
        if !(1..=Self::MAX_GROUPS).contains(&groups) || !experts.is_multiple_of(groups) {
            let most = Self::MAX_GROUPS;
            return fail(format!(
                "the number of groups ({groups}) must be 1 to {most} and divide the number of experts ({experts})"
            ));
        }
        if !(1..=groups).contains(&top_groups) {
            return fail(format!("a token must choose from 1 to {groups} groups, not {top_groups}"));
        }
        let reachable = top_groups * (experts / groups);
        if top_k > reachable {
            return fail(format!(
                "{top_groups} of {groups} groups have {reachable} experts, fewer than the {top_k} that a token chooses"
            ));
        }
        Ok(())
    }

    /// True if experts are chosen by their logits, which have the order of their scores.
    fn orders_logits(&self) -> bool {
        self.groups == 1 && !self.biased
    }

    /// The input of [`Route`] that is the padding, if any.
    fn padding(&self) -> usize {
        1 + usize::from(self.biased)
    }
}

impl Op for Route {
    fn name(&self) -> &'static str {
        "route"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let padding = self.0.padding();
        OpError::ensure(inputs.len() == padding || inputs.len() == padding + 1, || {
            let bias = if self.0.biased { ", the bias" } else { "" };
            let most = padding + 1;
            format!(
                "route takes logits{bias} and, if any, padding: {padding} or {most} inputs, not {}",
                inputs.len()
            )
        })?;
        let (tokens, experts) = logits_of(inputs[0])?;
        self.0.check(experts)?;
        if self.0.biased {
            let expected = TensorType::new(inputs[0].dtype, [experts]);
            OpError::ensure(inputs[1] == expected, || {
                format!("the bias must be {expected}, not {}", inputs[1])
            })?;
        }
        if let Some(&ty) = inputs.get(padding) {
            int_vector("padding", ty, tokens)?;
        }
        let shape = [tokens, self.0.top_k];
        Ok(vec![TensorType::new(inputs[0].dtype, shape), TensorType::new(DType::I32, shape)])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }
}

impl Differentiable for Route {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dgates) = cx.grad(0) else { return Ok(()) };
        let inputs = [dgates, cx.input(0), cx.output(1)];
        let dlogits = cx.emit(Role::Dgrad, RouteGrad(self.0), &inputs)?[0];
        cx.set_grad(0, dlogits)
    }
}

/// `(dgates_tk, logits_te, ids_tk i32) -> dlogits_te`. The choice has no gradient, nor has padding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteGrad(pub Router);

impl Op for RouteGrad {
    fn name(&self) -> &'static str {
        "route_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("route_grad", inputs, 3)?;
        let (tokens, experts) = logits_of(inputs[1])?;
        self.0.check(experts)?;
        let expected = TensorType::new(inputs[1].dtype, [tokens, self.0.top_k]);
        OpError::ensure(inputs[0] == expected, || format!("dgates must be {expected}, not {}", inputs[0]))?;
        let expected = expected.with_dtype(DType::I32);
        OpError::ensure(inputs[2] == expected, || format!("ids must be {expected}, not {}", inputs[2]))?;
        Ok(vec![inputs[1]])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_bytes((inputs[1].bytes() + outputs[0].bytes()) as f64)
    }
}

/// Tokens and experts of a router's logits.
pub(crate) fn logits_of(ty: TensorType) -> Result<(usize, usize), OpError> {
    let (tokens, experts) = matrix("logits", ty)?;
    OpError::ensure(matches!(ty.dtype, DType::F32 | DType::F64), || {
        format!("a router's logits must be f32, not {ty}: rounded ones choose other experts")
    })?;
    Ok((tokens, experts))
}

impl OnGpu for Route {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for RouteGrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
