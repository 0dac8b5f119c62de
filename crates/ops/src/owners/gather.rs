//! The tokens, and the gates, of all ranks that share experts.

use super::{SelectOwner, SumOwners};
use crate::collective::{AllGather, AllToAll};
use crate::dispatch::ids_of;
use xtrain_program::{
    Backward, Collective, Cost, Differentiable, Groups, Op, OpError, Operand, Role, ValueId,
};
use xtrain_tensor::TensorType;

/// `(x_td, ids_tk i32) -> x_gd`: the tokens of all p ranks that share experts, g = p * t, in the order of
/// ranks.
///
/// Its backward sends each rank the gradients of its tokens, and adds those of the ranks that own an expert
/// of the token, which `ids` name ([`SumOwners`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherTokens(pub Sharing);

/// `(gates_tk, ids_tk i32) -> gates_gk`: the gates of the tokens of all ranks that share experts. Its
/// backward returns the gradient of each gate from the rank that owns its expert ([`SelectOwner`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherGates(pub Sharing);

/// The ranks that share the experts of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// The p ranks that share them.
    pub groups: Groups,
    /// n: experts of a rank.
    pub experts: usize,
}

impl Sharing {
    /// The gather of tensors with a row for each token.
    pub const fn gather(self, tokens: usize) -> AllGather {
        AllGather { groups: self.groups, first: 0, rows: self.groups.size * tokens }
    }

    /// The exchange that sends each rank the rows of its tokens.
    pub const fn exchange(self, tokens: usize) -> AllToAll {
        AllToAll { groups: self.groups, first: 0, piece_rows: tokens }
    }

    /// The output of a gather of `inputs`: a tensor with a row for each token, and ids.
    fn gathered(self, op: &str, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(op, inputs, 2)?;
        let (tokens, _) = ids_of(inputs[1])?;
        OpError::ensure(inputs[0].dtype.is_float() && inputs[0].shape.first() == Some(&tokens), || {
            format!("{op} gathers floats of {tokens} tokens, whose ids are {}, not {}", inputs[1], inputs[0])
        })?;
        self.gather(tokens).infer(&inputs[..1])
    }

    fn collective(self) -> Option<(Collective, Groups)> {
        Some((Collective::AllGather { first: 0 }, self.groups))
    }

    fn cost(self, inputs: &[TensorType]) -> Cost {
        Cost::of_collective(self.groups, inputs[0].bytes())
    }

    /// The tensors of this rank's tokens that all ranks have computed, [p, t, ...].
    fn home(self, cx: &mut Backward<'_>, of_all: ValueId) -> Result<ValueId, OpError> {
        let tokens = cx.ty(of_all).shape[0] / self.groups.size;
        Ok(cx.emit(Role::Dgrad, self.exchange(tokens), &[of_all])?[0])
    }
}

impl Op for GatherTokens {
    fn name(&self) -> &'static str {
        "gather_tokens"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        self.0.gathered(self.name(), inputs)
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 0 { Operand::Compute } else { Operand::Full }
    }

    fn collective(&self) -> Option<(Collective, Groups)> {
        self.0.collective()
    }

    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        self.0.cost(inputs)
    }
}

impl Differentiable for GatherTokens {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dx) = cx.grad(0) else { return Ok(()) };
        let sent = self.0.home(cx, dx)?;
        let sum = SumOwners { experts: self.0.experts, out: Some(cx.grad_dtype(0)), like: false };
        let dx = cx.emit(Role::Dgrad, sum, &[sent, cx.input(1)])?[0];
        cx.set_grad(0, dx)
    }
}

impl Op for GatherGates {
    fn name(&self) -> &'static str {
        "gather_gates"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        self.0.gathered(self.name(), inputs)
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn collective(&self) -> Option<(Collective, Groups)> {
        self.0.collective()
    }

    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        self.0.cost(inputs)
    }
}

impl Differentiable for GatherGates {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dgates) = cx.grad(0) else { return Ok(()) };
        let sent = self.0.home(cx, dgates)?;
        let select = SelectOwner { experts: self.0.experts };
        let dgates = cx.emit(Role::Dgrad, select, &[sent, cx.input(1)])?[0];
        cx.set_grad(0, dgates)
    }
}
