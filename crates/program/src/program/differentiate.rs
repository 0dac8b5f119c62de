//! The interface between an op of a model and the backward pass: the op emits its backward ops.

use super::instantiate;
use crate::{
    Code, Instance, Op, OpError, Origin, Parameter, PassOps, Program, Role, Stage, StateKind, TraceError,
    ValueId,
};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_tensor::{DType, TensorType};

/// An op with a backward. Models are traced from such ops.
pub trait Differentiable: Op {
    /// Emits the ops that compute the gradients of the inputs from those of the outputs, and sets them with
    /// [`Backward::set_grad`].
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError>;
}

/// The name of the state of a tied parameter's further uses.
pub(crate) fn tied_name(parameter: &str) -> Arc<str> {
    format!("{parameter} (tied)").into()
}

/// The backward pass as the op of one instance sees it: the instance's operands, their gradients, and methods
/// that emit ops.
pub struct Backward<'a> {
    pub(crate) program: Program,
    /// The index of the parameter of each master and each compute copy.
    pub(crate) parameters: HashMap<ValueId, usize>,
    /// Roots whose gradient is 1.
    pub(crate) losses: Vec<ValueId>,
    /// The gradient of each value that has one so far.
    pub(crate) grads: HashMap<ValueId, ValueId>,
    /// For each value, true if its gradient is needed.
    pub(crate) needs_grad: Vec<bool>,
    pub(crate) ops: &'a dyn PassOps,
    /// True if the gradients of the uses of a tied parameter are kept apart.
    pub(crate) keeps_uses_apart: bool,
    /// The index of the instance whose backward is emitted.
    pub(crate) current: usize,
}

impl Backward<'_> {
    /// The n-th input of the instance.
    pub fn input(&self, n: usize) -> ValueId {
        self.instance().inputs[n]
    }

    /// The n-th output of the instance.
    pub fn output(&self, n: usize) -> ValueId {
        self.instance().outputs[n].value
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> TensorType {
        self.program.ty(id)
    }

    /// The number of inputs of the instance.
    pub fn input_count(&self) -> usize {
        self.instance().inputs.len()
    }

    /// The gradient of the n-th output, if a root depends on it.
    pub fn grad(&self, n: usize) -> Option<ValueId> {
        self.grads.get(&self.output(n)).copied()
    }

    /// True if the n-th output is a loss: its gradient is 1, and [`Backward::grad`] returns `None`.
    pub fn is_root(&self, n: usize) -> bool {
        self.losses.contains(&self.output(n))
    }

    /// True if the gradient of the n-th input is needed.
    pub fn wants(&self, n: usize) -> bool {
        self.needs_grad[self.input(n).0 as usize]
    }

    /// The element type of the gradient of the n-th input: the master's for a parameter, else the input's
    /// own.
    pub fn grad_dtype(&self, n: usize) -> DType {
        match self.parameters.get(&self.input(n)) {
            Some(&p) => self.program.ty(self.program.parameters[p].master).dtype,
            None => self.ty(self.input(n)).dtype,
        }
    }

    /// Emits an op of the backward and returns its outputs.
    pub fn emit(&mut self, role: Role, op: impl Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        self.emit_code(role, Code::Plain(Arc::new(op)), inputs)
    }

    /// Replaces the forward instance with `op`, which computes gradients during the forward. The first
    /// outputs of `op` are those of the instance; the others are returned.
    pub fn replace_forward(&mut self, op: impl Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let old = self.instance().clone();
        let targets: Vec<_> = old.outputs.iter().map(|o| Some(o.value)).collect();
        let code = Code::Plain(Arc::new(op));
        let origin = Origin { role: Role::ForwardGrad, ..old.origin };
        let mut new = instantiate(&mut self.program, code, inputs, &targets, origin).map_err(|e| e.error)?;
        for (n, o) in new.outputs.iter_mut().zip(&old.outputs) {
            n.mode = o.mode;
        }
        let further = new.outputs[old.outputs.len()..].iter().map(|o| o.value).collect();
        self.program.instances[self.current] = new;
        self.needs_grad.resize(self.program.values.len(), false);
        Ok(further)
    }

    /// Takes the gradient that the n-th input, an activation, has of the instances after this one. What this
    /// one then sets contains it.
    pub fn take_grad(&mut self, n: usize) -> Option<ValueId> {
        let input = self.input(n);
        self.grads.remove(&input)
    }

    /// Sets the gradient of the n-th input, or adds to it. Does nothing if the gradient is not needed.
    pub fn set_grad(&mut self, n: usize, grad: ValueId) -> Result<(), OpError> {
        if !self.wants(n) {
            return Ok(());
        }
        let input = self.input(n);
        let expected = self.ty(input).with_dtype(self.grad_dtype(n));
        OpError::ensure(self.ty(grad) == expected, || {
            format!("gradient of input {n} is {}, expected {expected}", self.ty(grad))
        })?;
        if let Some(&p) = self.parameters.get(&input) {
            return self.bind_parameter_gradient(p, grad);
        }
        self.add_grad(input, grad)
    }

    /// As [`Backward::set_grad`], for a gradient of an activation in its compute type: a sum whose other
    /// summands are on other ranks, so that it is not rounded yet.
    pub fn set_unrounded_grad(&mut self, n: usize, grad: ValueId) -> Result<(), OpError> {
        let input = self.input(n);
        let expected = self.ty(input).with_dtype(self.ty(input).dtype.compute());
        OpError::ensure(self.ty(grad) == expected && !self.parameters.contains_key(&input), || {
            format!(
                "unrounded gradient of input {n} is {}, expected {expected} of an activation",
                self.ty(grad)
            )
        })?;
        if self.wants(n) { self.add_grad(input, grad) } else { Ok(()) }
    }

    /// The instance that computes the n-th input; None for a parameter, another state or an input of the
    /// program.
    pub fn producer(&self, n: usize) -> Option<&Instance> {
        let computes = |i: &&Instance| i.outputs.iter().any(|o| o.value == self.input(n));
        self.program.instances[..self.current].iter().rev().find(computes)
    }

    /// Sets the gradient of the tensor that this rank passes to the collective which computes the n-th input,
    /// or adds to it. The gradient has been exchanged between ranks already, so the collective has no
    /// backward. It may have another float type than the tensor.
    pub fn set_exchanged_grad(&mut self, n: usize, grad: ValueId) -> Result<(), OpError> {
        let is_collective = |i: &&Instance| i.code.op().collective().is_some();
        let sent = self.producer(n).filter(is_collective).map(|i| i.inputs[0]);
        let sent = sent.ok_or_else(|| OpError(format!("input {n} must be the output of a collective")))?;
        let (ty, expected) = (self.ty(grad), self.ty(sent));
        OpError::ensure(
            ty.shape == expected.shape && ty.dtype.compute() == expected.dtype.compute(),
            || format!("gradient of what ranks exchange for input {n} is {ty}, expected {expected}"),
        )?;
        if self.needs_grad[sent.0 as usize] { self.add_grad(sent, grad) } else { Ok(()) }
    }

    fn add_grad(&mut self, value: ValueId, grad: ValueId) -> Result<(), OpError> {
        let sum = match self.grads.get(&value) {
            None => grad,
            Some(&earlier) => self.emit_code(Role::Dgrad, Code::Plain(self.ops.add()), &[earlier, grad])?[0],
        };
        self.grads.insert(value, sum);
        Ok(())
    }

    fn instance(&self) -> &Instance {
        &self.program.instances[self.current]
    }

    fn emit_code(&mut self, role: Role, code: Code, inputs: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let origin = Origin { role, stage: Stage::Backward, ..self.instance().origin.clone() };
        let instance =
            instantiate(&mut self.program, code, inputs, &[], origin).map_err(|e: TraceError| e.error)?;
        let outputs = instance.outputs.iter().map(|o| o.value).collect();
        self.program.instances.push(instance);
        self.needs_grad.resize(self.program.values.len(), false);
        Ok(outputs)
    }

    /// Makes the instance that writes `grad` write the parameter's gradient instead.
    fn bind_parameter_gradient(&mut self, parameter: usize, grad: ValueId) -> Result<(), OpError> {
        let (name, ty) = (self.program.parameters[parameter].name.clone(), self.ty(grad));
        let Parameter { gradient, tied_gradient, .. } = self.program.parameters[parameter];
        let is_further = gradient.is_some() && self.keeps_uses_apart;
        let (existing, name) = match is_further {
            true => (tied_gradient, tied_name(&name)),
            false => (gradient, name),
        };
        let target = existing.unwrap_or_else(|| self.program.add_state(StateKind::Gradient, &name, ty));
        self.needs_grad.resize(self.program.values.len(), false);
        let Parameter { gradient, tied_gradient, .. } = &mut self.program.parameters[parameter];
        *if is_further { tied_gradient } else { gradient } = Some(target);
        let writer = self.program.instances.iter_mut().rev().find_map(|i| {
            let k = i.outputs.iter().position(|o| o.value == grad)?;
            Some((i, k))
        });
        let Some((instance, k)) = writer else {
            return Err(OpError(format!("no op of its own computes the gradient of parameter `{name}`")));
        };
        let op = instance.code.op();
        OpError::ensure(op.accumulates(k), || {
            format!("output {k} of {} cannot accumulate, as parameter gradients must", op.name())
        })?;
        instance.outputs[k].value = target;
        Ok(())
    }
}
