//! The tokens of a tensor group, each rank of which has some: gathered before a layer whose outputs are cut,
//! exchanged and added after one whose inputs are cut (sequence parallelism; Korthikanti et al., arXiv
//! 2205.05198, section 4.2.2).

use crate::collective::{AllGather, AllToAll};
use crate::matrix;
use crate::sum_ranks::SumParts;
use xtrain_program::{
    Backward, Collective, Cost, Differentiable, Groups, Op, OpError, Role, TraceError, Tracer, ValueId,
};
use xtrain_tensor::TensorType;

/// `x_td -> x_gd`: the g tokens of all n ranks of a tensor group, in the order of ranks. Each has t of them,
/// g / n rounded up; the last rows of the last ranks may be padding. Its backward sends each rank the
/// gradients of its tokens, and adds those of all ranks ([`SumParts`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherSequence {
    /// The ranks.
    pub groups: Groups,
    /// g: tokens of all ranks.
    pub tokens: usize,
}

impl GatherSequence {
    fn gather(self) -> AllGather {
        AllGather { groups: self.groups, first: 0, rows: self.tokens }
    }

    /// The exchange that sends each rank the rows of its tokens.
    fn exchange(self) -> AllToAll {
        AllToAll { groups: self.groups, first: 0, piece_rows: self.tokens.div_ceil(self.groups.size) }
    }
}

impl Op for GatherSequence {
    fn name(&self) -> &'static str {
        "gather_sequence"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("gather_sequence", inputs, 1)?;
        let ((own, _), all) = (matrix("x", inputs[0])?, self.tokens);
        OpError::ensure(own == all.div_ceil(self.groups.size), || {
            format!("{} ranks of {all} tokens have not {own} each", self.groups.size)
        })?;
        self.gather().infer(inputs)
    }

    fn collective(&self) -> Option<(Collective, Groups)> {
        self.gather().collective()
    }

    /// With norms the tokens of other ranks are gathered again, which takes the memory of a rank's tokens.
    fn is_cheap(&self, _: usize) -> bool {
        true
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        self.gather().cost(inputs, outputs)
    }
}

impl Differentiable for GatherSequence {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dx) = cx.grad(0) else { return Ok(()) };
        let sent = cx.emit(Role::Dgrad, self.exchange(), &[dx])?[0];
        let dx = cx.emit(Role::Dgrad, SumParts { out: Some(cx.grad_dtype(0)) }, &[sent])?[0];
        cx.set_grad(0, dx)
    }
}

/// `parts_gd -> x_td`: the sums over the n ranks of a tensor group of what each has computed for the tokens
/// of all. Each rank gets those of its tokens, t of them, g / n rounded up; padding is zeros.
///
/// # Errors
/// `parts` is no matrix.
pub fn scatter(t: &mut Tracer, groups: Groups, parts: ValueId) -> Result<ValueId, TraceError> {
    let tokens = t.ty(parts).shape[0];
    let sent = t.emit(GatherSequence { groups, tokens }.exchange(), &[parts])?[0];
    Ok(t.apply(SumParts { out: None }, &[sent])?[0])
}
