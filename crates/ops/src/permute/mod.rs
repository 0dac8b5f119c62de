//! Tokens to rows by experts, and back ([`crate::dispatch`] says which).
//!
//! Shape legend: k experts of a token, c rows by experts, d width.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
pub(crate) mod samples;
#[cfg(test)]
mod tests;

use crate::cast::Cast;
use crate::on_gpu::OnGpu;
use crate::tail;
use crate::{float_shaped, matrix};
use std::sync::Arc;
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Cost, Differentiable, Op, OpError, Operand, RaggedOp, Role, Tail};
use xtrain_tensor::{DType, TensorType};

/// `(x_td, sources_c i32, rows_tk i32) -> y_cd`: row c is the token of the copy `sources[c]`; zeros if that
/// is negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Permute {
    /// The tail of y.
    pub tail: Tail,
}

/// `(y_cd, sources_c i32, rows_tk i32[, shared_td]) -> x_td`: the sum of a token's rows in the order of its
/// experts, and of `shared` after them, in f32 (f64), rounded once. A row of -1 adds nothing. No atomics: the
/// result has the same bits in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unpermute;

/// `(gates_tk, sources_c i32, rows_tk i32) -> gates_c`: the gate of the copy that a row holds, or 0
/// for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermuteGates;

/// `(dgates_c, sources_c i32, rows_tk i32) -> dgates_tk`: the gradient of each gate; 0 for a row of -1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpermuteGates;

/// Tokens and experts of a token, from the types of `sources` and `rows`.
pub(crate) fn copies(sources: TensorType, rows: TensorType) -> Result<[usize; 2], OpError> {
    let (tokens, top_k) = matrix("rows", rows)?;
    let is_int = rows.dtype == DType::I32 && sources.dtype == DType::I32;
    OpError::ensure(is_int && sources.shape.len() == 1 && top_k > 0, || {
        format!("sources must be an i32 vector and rows an i32 matrix, not {sources} and {rows}")
    })?;
    Ok([tokens, top_k])
}

/// Checks that `shared`, if it is an input, has the type of the sum that it is added to.
///
/// # Errors
/// If it has another type.
pub(crate) fn ensure_shared(shared: Option<&TensorType>, sum: TensorType) -> Result<(), OpError> {
    match shared {
        Some(shared) if *shared != sum => Err(OpError(format!("shared must be {sum}, not {shared}"))),
        _ => Ok(()),
    }
}

impl Op for Permute {
    fn name(&self) -> &'static str {
        "permute"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("permute", inputs, 3)?;
        let [tokens, _] = copies(inputs[1], inputs[2])?;
        let (_, width) = matrix("x", inputs[0])?;
        float_shaped("x", inputs[0], &[tokens, width])?;
        Ok(vec![TensorType::new(inputs[0].dtype, [inputs[1].numel(), width])])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 0 { Operand::Compute } else { Operand::Full }
    }

    /// A gather from a tensor that is saved.
    fn is_cheap(&self, _: usize) -> bool {
        true
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let read: f64 = inputs.iter().map(|ty| ty.bytes() as f64).sum();
        Cost::of_bytes(read + tail::bytes(outputs[0], outputs[0].shape[0], self.tail))
    }
}

impl RaggedOp for Permute {
    fn tail(&self, _: usize) -> Option<Tail> {
        Some(self.tail)
    }

    fn with_tail(&self, tail: Tail) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Permute { tail }))
    }
}

impl Differentiable for Permute {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let dx = cx.emit(Role::Dgrad, Unpermute, &[dy, cx.input(1), cx.input(2)])?[0];
        cx.set_grad(0, dx)
    }
}

impl Op for Unpermute {
    fn name(&self) -> &'static str {
        "unpermute"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(matches!(inputs.len(), 3 | 4), || {
            format!(
                "unpermute takes y, sources, rows and, if any, shared: 3 or 4 inputs, not {}",
                inputs.len()
            )
        })?;
        let [tokens, _] = copies(inputs[1], inputs[2])?;
        let (_, width) = matrix("y", inputs[0])?;
        float_shaped("y", inputs[0], &[inputs[1].numel(), width])?;
        let out = TensorType::new(inputs[0].dtype, [tokens, width]);
        ensure_shared(inputs.get(3), out)?;
        Ok(vec![out])
    }

    fn operand(&self, input: usize) -> Operand {
        if matches!(input, 1 | 2) { Operand::Full } else { Operand::Compute }
    }

    /// Of y, the rows of all copies.
    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let added = inputs.get(3).map_or(0, |shared| shared.bytes());
        let rows = inputs[0].dtype.bytes(inputs[2].numel() * inputs[0].shape[1]);
        Cost::of_bytes((rows + added + outputs[0].bytes()) as f64)
    }
}

impl RaggedOp for Unpermute {
    /// Of y it reads the rows of copies.
    fn reads_tail(&self, input: usize) -> bool {
        input != 0
    }
}

impl Differentiable for Unpermute {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dx) = cx.grad(0) else { return Ok(()) };
        if cx.wants(0) {
            let dy = cx.emit(Role::Dgrad, Permute::default(), &[dx, cx.input(1), cx.input(2)])?[0];
            cx.set_grad(0, dy)?;
        }
        match cx.input_count() {
            4 => cx.set_grad(3, dx),
            _ => Ok(()),
        }
    }
}

impl Op for PermuteGates {
    fn name(&self) -> &'static str {
        "permute_gates"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("permute_gates", inputs, 3)?;
        float_shaped("gates", inputs[0], &copies(inputs[1], inputs[2])?)?;
        Ok(vec![TensorType::new(inputs[0].dtype, [inputs[1].numel()])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn is_cheap(&self, _: usize) -> bool {
        true
    }
}

impl Differentiable for PermuteGates {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let dgates = cx.emit(Role::Dgrad, UnpermuteGates, &[dy, cx.input(1), cx.input(2)])?[0];
        cx.set_grad(0, dgates)
    }
}

impl Op for UnpermuteGates {
    fn name(&self) -> &'static str {
        "unpermute_gates"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("unpermute_gates", inputs, 3)?;
        let shape = copies(inputs[1], inputs[2])?;
        float_shaped("dgates", inputs[0], &[inputs[1].numel()])?;
        Ok(vec![TensorType::new(inputs[0].dtype, shape)])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl RaggedOp for UnpermuteGates {
    fn reads_tail(&self, input: usize) -> bool {
        input != 0
    }
}

/// `(y_cd, sources_c i32, rows_tk i32, ids_tk i32[, shared_td]) -> x_td`: the sum of a token's rows as a
/// binary tree over groups of consecutive experts, in f32 (f64). A leaf is the sum of the rows of a group in
/// the order of k. A group without a row of the token is left out, and not added as 0; a token without rows
/// has `shared` alone, or zeros.
///
/// On p ranks with `groups` groups each, [`SumOwners`](crate::owners::SumOwners) adds the sums of ranks as
/// the upper levels of the tree. So the result has equal bits for any p that leaves a rank whole groups: the
/// groups of all experts are [`UnpermuteTree::groups_of`]. Only a row's place in `rows` says that it is this
/// rank's, so `ids` are those of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpermuteTree {
    /// Experts of a rank.
    pub experts: usize,
    /// Groups of the experts of a rank: 1, 2, 4 or 8.
    pub groups: usize,
    /// True if the sum is rounded to the type of y, and `shared` may be added: one rank has all experts.
    /// Otherwise the sum is of the compute type of y: f32, or f64 for f64.
    pub rounded: bool,
}

impl UnpermuteTree {
    /// The most groups.
    pub const MAX_GROUPS: usize = 8;
    /// The most experts of a token: lanes of a warp of the GPU kernel.
    const MAX_TOP_K: usize = 32;

    /// The groups of all experts, whatever the number of ranks: the largest power of two up to 8 that divides
    /// their number.
    pub fn groups_of(experts: usize) -> usize {
        1 << experts.trailing_zeros().min(Self::MAX_GROUPS.ilog2())
    }

    /// Experts of a group.
    fn of_group(&self) -> usize {
        self.experts / self.groups
    }
}

impl Op for UnpermuteTree {
    fn name(&self) -> &'static str {
        "unpermute_tree"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let UnpermuteTree { experts, groups, rounded } = *self;
        let most = if rounded { 5 } else { 4 };
        OpError::ensure((4..=most).contains(&inputs.len()), || {
            let shared = if rounded { " and, if any, shared" } else { "" };
            format!(
                "unpermute_tree takes y, sources, rows, ids{shared}: up to {most} inputs, not {}",
                inputs.len()
            )
        })?;
        OpError::ensure(groups.is_power_of_two() && groups <= Self::MAX_GROUPS && experts > 0, || {
            format!("the experts of a rank must be 1, 2, 4 or 8 groups, not {groups} of {experts} experts")
        })?;
        OpError::ensure(experts.is_multiple_of(groups), || {
            format!("{groups} groups must divide the {experts} experts of a rank")
        })?;
        let [tokens, top_k] = copies(inputs[1], inputs[2])?;
        let (_, width) = matrix("y", inputs[0])?;
        float_shaped("y", inputs[0], &[inputs[1].numel(), width])?;
        ensure_ids(inputs[2], inputs[3])?;
        OpError::ensure(top_k <= Self::MAX_TOP_K, || {
            format!("a token must have at most {} experts, not {top_k}", Self::MAX_TOP_K)
        })?;
        let dtype = inputs[0].dtype;
        let out = TensorType::new(if rounded { dtype } else { dtype.compute() }, [tokens, width]);
        ensure_shared(inputs.get(4), out)?;
        Ok(vec![out])
    }

    fn operand(&self, input: usize) -> Operand {
        if matches!(input, 1..=3) { Operand::Full } else { Operand::Compute }
    }

    /// Of y, the rows of all copies.
    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let added = inputs.get(4).map_or(0, |shared| shared.bytes());
        let rows = inputs[0].dtype.bytes(inputs[2].numel().min(inputs[1].numel()) * inputs[0].shape[1]);
        Cost::of_bytes((rows + added + outputs[0].bytes()) as f64)
    }
}

impl RaggedOp for UnpermuteTree {
    fn reads_tail(&self, input: usize) -> bool {
        input != 0
    }
}

/// `(x_td, sources_c i32, rows_tk i32, ids_tk i32) -> y_cd`: [`Permute`] whose backward adds the gradients of
/// a token's rows by this tree. Without `rounded` these sums are not rounded to the type of x: other ranks
/// have the rest of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermuteByTree {
    /// The sum in the backward.
    pub tree: UnpermuteTree,
    /// The tail of y.
    pub tail: Tail,
}

impl PermuteByTree {
    fn permute(&self) -> Permute {
        Permute { tail: self.tail }
    }
}

impl Op for PermuteByTree {
    fn name(&self) -> &'static str {
        "permute_by_tree"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("permute_by_tree", inputs, 4)?;
        ensure_ids(inputs[2], inputs[3])?;
        self.permute().infer(&inputs[..3])
    }

    fn operand(&self, input: usize) -> Operand {
        self.permute().operand(input)
    }

    fn is_cheap(&self, output: usize) -> bool {
        self.permute().is_cheap(output)
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        self.permute().cost(&inputs[..3], outputs)
    }
}

impl RaggedOp for PermuteByTree {
    fn tail(&self, _: usize) -> Option<Tail> {
        Some(self.tail)
    }

    fn with_tail(&self, tail: Tail) -> Option<Arc<dyn Op>> {
        Some(Arc::new(PermuteByTree { tail, ..*self }))
    }
}

impl Differentiable for PermuteByTree {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let inputs = [dy, cx.input(1), cx.input(2), cx.input(3)];
        let dx = cx.emit(Role::Dgrad, self.tree, &inputs)?[0];
        if self.tree.rounded { cx.set_grad(0, dx) } else { cx.set_unrounded_grad(0, dx) }
    }
}

impl OnGpu for PermuteByTree {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

/// Checks that `ids` names the expert of each copy in `rows`.
fn ensure_ids(rows: TensorType, ids: TensorType) -> Result<(), OpError> {
    OpError::ensure(ids == rows, || format!("ids must be {rows}, not {ids}"))
}

impl Differentiable for UnpermuteTree {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dx) = cx.grad(0) else { return Ok(()) };
        if cx.wants(0) {
            let to = cx.ty(cx.input(0)).dtype;
            let rounded =
                if cx.ty(dx).dtype == to { dx } else { cx.emit(Role::Dgrad, Cast { to }, &[dx])?[0] };
            let dy = cx.emit(Role::Dgrad, Permute::default(), &[rounded, cx.input(1), cx.input(2)])?[0];
            cx.set_grad(0, dy)?;
        }
        match cx.input_count() {
            5 => cx.set_grad(4, dx),
            _ => Ok(()),
        }
    }
}

impl OnGpu for UnpermuteTree {
    const SOURCES: &'static [KernelSource] = &[cuda::TREE_SOURCE];
}

impl OnGpu for Permute {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for Unpermute {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for PermuteGates {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for UnpermuteGates {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
