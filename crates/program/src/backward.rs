//! The backward pass: it walks the forward list in reverse, and each instance's op emits its backward ops
//! ([`Differentiable::backward`]).
//!
//! Contracts: the gradient of an activation has the activation's type. Its first writer assigns it; further
//! gradients of the same value are added. The gradient of a parameter has the master's type, is state, and
//! accumulates over micro-steps: its first writer in the list overwrites it in the first micro-step of a step
//! and adds in the following ones; further writers (of tied weights) always add, or are kept apart in a sum
//! of their own.

use crate::{
    Backward, Code, Differentiable, OpError, Output, PassOps, Program, StateKind, Storage, ValueId, WriteMode,
};
use std::collections::HashMap;
use std::sync::Arc;
use thiserror::Error;

/// A value to differentiate.
#[derive(Clone, Copy, Debug)]
pub struct Root {
    /// The value, for example the loss.
    pub value: ValueId,
    /// Its gradient, of the same type. `None` for a loss, whose gradient is 1.
    pub grad: Option<ValueId>,
}

/// The error of a program that cannot be differentiated.
#[derive(Clone, Error, PartialEq, Eq)]
pub enum BackwardError {
    /// An op's backward rejected its operands.
    #[error("backward of {op} at {site}: {error}")]
    Op {
        /// Block and site.
        site: String,
        /// The op's name.
        op: &'static str,
        /// The op's error.
        error: OpError,
    },
    /// An op without a backward lies between a root and a value that needs a gradient.
    #[error(
        "{op} at {site} has no backward, but the loss depends on parameters through it; trace an op that has one"
    )]
    NoBackward {
        /// Block and site.
        site: String,
        /// The op's name.
        op: &'static str,
    },
    /// No root depends on this parameter.
    #[error("parameter `{0}` does not influence the loss, so it has no gradient")]
    Unreached(Arc<str>),
}

xtrain_tensor::debug_as_display!(BackwardError);

/// Appends the backward of `program` from `roots`. Returns the program and the gradients of the values in
/// `wrt` (inputs, in gradient checks). The gradients of parameters are in [`crate::Parameter::gradient`].
pub fn backward(
    program: Program,
    roots: &[Root],
    wrt: &[ValueId],
    ops: &dyn PassOps,
) -> Result<(Program, Vec<Option<ValueId>>), BackwardError> {
    differentiate(program, roots, wrt, false, ops)
}

/// As [`backward`], but the gradients of the further uses of a parameter are in
/// [`crate::Parameter::tied_gradient`].
pub fn backward_of_each_use(
    program: Program,
    roots: &[Root],
    wrt: &[ValueId],
    ops: &dyn PassOps,
) -> Result<(Program, Vec<Option<ValueId>>), BackwardError> {
    differentiate(program, roots, wrt, true, ops)
}

fn differentiate(
    program: Program,
    roots: &[Root],
    wrt: &[ValueId],
    keeps_uses_apart: bool,
    ops: &dyn PassOps,
) -> Result<(Program, Vec<Option<ValueId>>), BackwardError> {
    let needs_grad = needing_gradients(&program, wrt);
    let parameters = program.parameters_by_value();
    let (losses, grads) = (Vec::new(), HashMap::new());
    let mut cx =
        Backward { program, parameters, losses, grads, needs_grad, ops, keeps_uses_apart, current: 0 };
    for root in roots {
        match root.grad {
            Some(grad) => drop(cx.grads.insert(root.value, grad)),
            None => cx.losses.push(root.value),
        }
    }
    for index in (0..cx.program.instances.len()).rev() {
        let instance = &cx.program.instances[index];
        let has_grad = |o: &Output| cx.grads.contains_key(&o.value) || cx.losses.contains(&o.value);
        let needs_grad = |v: &ValueId| cx.needs_grad[v.0 as usize];
        if !instance.outputs.iter().any(has_grad) || !instance.inputs.iter().any(needs_grad) {
            continue;
        }
        let site = instance.origin.to_string();
        let op: Arc<dyn Differentiable> = match &instance.code {
            Code::Forward(op) => op.clone(),
            Code::Plain(op) | Code::WithoutTails { op, .. } => {
                return Err(BackwardError::NoBackward { site, op: op.name() });
            }
        };
        cx.current = index;
        op.backward(&mut cx).map_err(|error| BackwardError::Op { site, op: op.name(), error })?;
    }
    set_write_modes(&mut cx.program)?;
    let requested = wrt.iter().map(|v| cx.grads.get(v).copied()).collect();
    Ok((cx.program, requested))
}

/// For each value, true if it depends on a trained parameter or on one of `wrt`.
fn needing_gradients(program: &Program, wrt: &[ValueId]) -> Vec<bool> {
    let mut needs_grad = vec![false; program.values.len()];
    for p in program.parameters.iter().filter(|p| !program.is_frozen(p)) {
        needs_grad[p.master.0 as usize] = true;
        p.compute.into_iter().for_each(|c| needs_grad[c.0 as usize] = true);
    }
    wrt.iter().for_each(|v| needs_grad[v.0 as usize] = true);
    for i in &program.instances {
        if i.inputs.iter().any(|v| needs_grad[v.0 as usize]) {
            i.outputs.iter().for_each(|o| needs_grad[o.value.0 as usize] = true);
        }
    }
    needs_grad
}

/// Sets how each instance writes the gradients of parameters: the first writer starts a step's sum, the
/// others add to it.
fn set_write_modes(program: &mut Program) -> Result<(), BackwardError> {
    let mut is_written = vec![false; program.values.len()];
    for instance in &mut program.instances {
        for o in &mut instance.outputs {
            let value = &program.values[o.value.0 as usize];
            if matches!(value.storage, Storage::State { kind: StateKind::Gradient, .. }) {
                let is_further = std::mem::replace(&mut is_written[o.value.0 as usize], true);
                o.mode = if is_further { WriteMode::Add } else { WriteMode::AddAfterFirst };
            }
        }
    }
    match program.parameters.iter().find(|p| p.gradient.is_none() && !program.is_frozen(p)) {
        Some(p) => Err(BackwardError::Unreached(p.name.clone())),
        None => Ok(()),
    }
}
