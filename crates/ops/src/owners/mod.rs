//! The exchanges of expert parallelism: the gathers before [`crate::dispatch::DispatchOwn`], and the combine
//! step, in which a rank's tokens get the results of the ranks that own their experts.
//!
//! A rank owns n experts, those from `rank * n` on. What a rank sends for a token without an expert there is
//! never read: it may be anything, even NaN, and need not be sent.
//!
//! Shape legend: p ranks, k experts of a token.

mod cpu;
mod cuda;
mod gather;
#[cfg(test)]
mod layer_tests;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

pub use gather::{GatherGates, GatherTokens, Sharing};

use crate::dispatch::ids_of;
use crate::on_gpu::OnGpu;
use crate::permute::ensure_shared;
use crate::sum_ranks::gather_gradient;
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Cost, Differentiable, Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// The most ranks whose parts [`SumOwners`] adds: bits of a token's owners in its GPU kernel.
const MAX_RANKS: usize = 64;

/// `(x_ptd, ids_tk i32[, shared_td]) -> sum_td`: the sum over the ranks that own an expert of the token, then
/// `shared`, in f32 (f64), rounded once.
///
/// It is a binary tree over the ranks as in [`SumRanks`](crate::sum_ranks::SumRanks), in which a rank without
/// an expert of the token is left out, and not added as 0. A token without experts, whose ids are negative,
/// has `shared` alone, or zeros.
///
/// x must be the output of [`AllToAll`](crate::collective::AllToAll), to which each rank has passed its part
/// for the tokens of all ranks. The gradient of that part is the gathered gradient of the sums.
///
/// It adds the parts of up to 64 ranks. The sum of the trees of
/// [`UnpermuteTree`](crate::permute::UnpermuteTree) has equal bits for numbers of ranks that divide the
/// groups of all experts ([`groups_of`](crate::permute::UnpermuteTree::groups_of)), so for at most 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumOwners {
    /// n: experts of a rank.
    pub experts: usize,
    /// Element type of the sum and of `shared`; None for that of `shared` if it is an input, else that of x.
    pub out: Option<DType>,
    /// True if `shared` is not added: it only gives the sum its type.
    pub like: bool,
}

impl SumOwners {
    /// The number of the input `shared`.
    const SHARED: usize = 2;
}

/// `(x_ptk, ids_tk i32) -> y_tk`: of each copy of a token, what the rank that owns its expert has sent; 0 for
/// a negative id. It returns gate gradients to the token's rank: one rank has computed each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectOwner {
    /// n: experts of a rank.
    pub experts: usize,
}

/// Ranks, tokens and columns of x, whose tokens have these ids.
fn extents(experts: usize, x: TensorType, ids: TensorType) -> Result<[usize; 3], OpError> {
    OpError::ensure(experts > 0, || "a rank must own at least 1 expert, not 0".into())?;
    let (tokens, _) = ids_of(ids)?;
    match *x.shape {
        [ranks, of, width] if of == tokens && (1..=MAX_RANKS).contains(&ranks) => Ok([ranks, tokens, width]),
        _ => Err(OpError(format!(
            "x must be what 1 to {MAX_RANKS} ranks have sent for {tokens} tokens, [ranks, {tokens}, width], not {x}"
        ))),
    }
}

impl Op for SumOwners {
    fn name(&self) -> &'static str {
        "sum_owners"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(matches!(inputs.len(), 2 | 3), || {
            let found = inputs.len();
            format!("sum_owners takes x, ids and, if any, shared: 2 or 3 inputs, not {found}")
        })?;
        let [_, tokens, width] = extents(self.experts, inputs[0], inputs[1])?;
        let dtype = self.out.unwrap_or(inputs.get(2).unwrap_or(&inputs[0]).dtype);
        // The sum is of x's compute type.
        let is_float = |dtype: DType| matches!(dtype, DType::F32 | DType::BF16 | DType::F64);
        let is_summed = is_float(dtype) && dtype.compute() == inputs[0].dtype.compute();
        OpError::ensure(is_float(inputs[0].dtype) && is_summed, || {
            format!("x must be f32 or bf16 for a sum in {dtype}, not {}", inputs[0])
        })?;
        let out = TensorType::new(dtype, [tokens, width]);
        ensure_shared(inputs.get(2), out)?;
        Ok(vec![out])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 1 { Operand::Full } else { Operand::Compute }
    }

    /// As if all ranks owned experts of all tokens, up to as many as a token has experts.
    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let (ranks, top_k) = (inputs[0].shape[0], inputs[1].shape[1]);
        let read = inputs[0].bytes() / ranks.max(1) * ranks.min(top_k);
        let others = inputs[1..].iter().chain(outputs).map(|ty| ty.bytes()).sum::<usize>();
        Cost::of_bytes((read + others) as f64)
    }
}

impl Differentiable for SumOwners {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dsum) = cx.grad(0) else { return Ok(()) };
        if cx.wants(0) {
            gather_gradient(cx, dsum)?;
        }
        match cx.input_count() > Self::SHARED && !self.like {
            true => cx.set_grad(Self::SHARED, dsum),
            false => Ok(()),
        }
    }
}

impl Op for SelectOwner {
    fn name(&self) -> &'static str {
        "select_owner"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("select_owner", inputs, 2)?;
        let [_, tokens, width] = extents(self.experts, inputs[0], inputs[1])?;
        OpError::ensure(inputs[0].dtype.is_float() && inputs[1].shape[1] == width, || {
            format!("x must be floats of the copies in ids {}, not {}", inputs[1], inputs[0])
        })?;
        Ok(vec![TensorType::new(inputs[0].dtype, [tokens, width])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    /// Of x, one element of each copy.
    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_bytes((inputs[1].bytes() + 2 * outputs[0].bytes()) as f64)
    }
}

impl OnGpu for SumOwners {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for SelectOwner {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
