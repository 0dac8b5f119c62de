//! The backward pass: the forward list reversed, every instance emitting its own backward ops.
//!
//! Contracts: an activation's gradient has the activation's type and is assigned; a second one is added to
//! it. A parameter's gradient has the master's type, lives in the state region, and accumulates over
//! micro-steps: its first writer of a step overwrites in the first micro-step and adds in the following ones,
//! later writers always add (tied weights).

use crate::trace::instantiate;
use crate::{
    Code, Differentiable, Instance, Op, OpError, Origin, PassOps, Program, Role, Stage, StateKind, Storage,
    TraceError, ValueId, WriteMode,
};
use std::collections::HashMap;
use std::sync::Arc;
use thiserror::Error;
use xtrain_tensor::{DType, TensorType};

/// A value to differentiate.
#[derive(Clone, Copy, Debug)]
pub struct Root {
    /// E.g. the loss.
    pub value: ValueId,
    /// Its gradient, of the same type. None for a loss, whose gradient is one.
    pub grad: Option<ValueId>,
}

/// Why a program has no backward.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BackwardError {
    /// An op's backward refused its operands.
    #[error("backward of {op} at {site}: {error}")]
    Op {
        /// Block and site.
        site: String,
        /// The op's name.
        op: &'static str,
        /// What is wrong.
        error: OpError,
    },
    /// An op without a backward stands between a root and a value whose gradient is wanted.
    #[error("{op} at {site} has no backward, and a gradient would have to pass it; trace an op that has one")]
    NoBackward {
        /// Block and site.
        site: String,
        /// The op's name.
        op: &'static str,
    },
    /// No root depends on this parameter.
    #[error("parameter `{0}` has no influence on the loss, so it has no gradient")]
    Unreached(Arc<str>),
}

/// Appends the backward of `program` from `roots`. Returns, with the program, the gradients of the values in
/// `wrt` (inputs, for checks); those of the parameters are in [`crate::Parameter::gradient`].
pub fn backward(
    program: Program,
    roots: &[Root],
    wrt: &[ValueId],
    ops: &dyn PassOps,
) -> Result<(Program, Vec<Option<ValueId>>), BackwardError> {
    let requires = influenced(&program, wrt);
    let parameters = program.parameters_by_value();
    let mut cx =
        Backward { program, parameters, roots: Vec::new(), grads: HashMap::new(), requires, ops, current: 0 };
    for root in roots {
        match root.grad {
            Some(grad) => drop(cx.grads.insert(root.value, grad)),
            None => cx.roots.push(root.value),
        }
    }
    for index in (0..cx.program.instances.len()).rev() {
        let instance = &cx.program.instances[index];
        let reached = |o: &crate::Output| cx.grads.contains_key(&o.value) || cx.roots.contains(&o.value);
        if !instance.outputs.iter().any(reached) || !instance.inputs.iter().any(|v| cx.requires[v.0 as usize])
        {
            continue;
        }
        let site = instance.origin.to_string();
        let op: Arc<dyn Differentiable> = match &instance.code {
            Code::Forward(op) => op.clone(),
            Code::Plain(op) => return Err(BackwardError::NoBackward { site, op: op.name() }),
        };
        cx.current = index;
        op.backward(&mut cx).map_err(|error| BackwardError::Op { site, op: op.name(), error })?;
    }
    cx.settle_parameter_gradients()?;
    let wanted = wrt.iter().map(|v| cx.grads.get(v).copied()).collect();
    Ok((cx.program, wanted))
}

/// By value: true if it depends on a parameter or on one of `wrt`.
fn influenced(program: &Program, wrt: &[ValueId]) -> Vec<bool> {
    let mut requires = vec![false; program.values.len()];
    for p in &program.parameters {
        requires[p.master.0 as usize] = true;
        p.compute.into_iter().for_each(|c| requires[c.0 as usize] = true);
    }
    wrt.iter().for_each(|v| requires[v.0 as usize] = true);
    for i in &program.instances {
        if i.inputs.iter().any(|v| requires[v.0 as usize]) {
            i.outputs.iter().for_each(|o| requires[o.value.0 as usize] = true);
        }
    }
    requires
}

/// The instance being reversed, as its op's backward sees it, and the means to emit ops.
pub struct Backward<'a> {
    program: Program,
    /// The parameter that a value is the master or the compute copy of.
    parameters: HashMap<ValueId, usize>,
    roots: Vec<ValueId>,
    grads: HashMap<ValueId, ValueId>,
    requires: Vec<bool>,
    ops: &'a dyn PassOps,
    current: usize,
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

    /// True if the n-th output is a loss: its gradient is one, and [`Backward::grad`] returns None.
    pub fn is_root(&self, n: usize) -> bool {
        self.roots.contains(&self.output(n))
    }

    /// True if a gradient of the n-th input is wanted.
    pub fn wants(&self, n: usize) -> bool {
        self.requires[self.input(n).0 as usize]
    }

    /// The element type that the gradient of the n-th input must have: the master's for a parameter, else its
    /// own.
    pub fn grad_dtype(&self, n: usize) -> DType {
        match self.parameters.get(&self.input(n)) {
            Some(&p) => self.program.ty(self.program.parameters[p].master).dtype,
            None => self.ty(self.input(n)).dtype,
        }
    }

    /// Emits an op of the backward; returns its outputs.
    pub fn emit(&mut self, role: Role, op: impl Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        self.emit_code(role, Code::Plain(Arc::new(op)), inputs)
    }

    /// Replaces the forward instance by `op`, for ops that compute gradients during the forward. `op` takes
    /// `inputs`; its first outputs are those of the instance, and the others are returned.
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
        self.requires.resize(self.program.values.len(), false);
        Ok(further)
    }

    /// Sets the gradient of the n-th input. Does nothing if none is wanted.
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
        let sum = match self.grads.get(&input) {
            None => grad,
            Some(&earlier) => self.emit_code(Role::Dgrad, Code::Plain(self.ops.add()), &[earlier, grad])?[0],
        };
        self.grads.insert(input, sum);
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
        self.requires.resize(self.program.values.len(), false);
        Ok(outputs)
    }

    /// Redirects the writer of `grad` to the parameter's gradient.
    fn bind_parameter_gradient(&mut self, parameter: usize, grad: ValueId) -> Result<(), OpError> {
        let (name, ty) = (self.program.parameters[parameter].name.clone(), self.ty(grad));
        let known = self.program.parameters[parameter].gradient;
        let target = known.unwrap_or_else(|| self.program.add_state(StateKind::Gradient, &name, ty));
        self.requires.resize(self.program.values.len(), false);
        self.program.parameters[parameter].gradient = Some(target);
        let writer = self.program.instances.iter_mut().rev().find_map(|i| {
            let k = i.outputs.iter().position(|o| o.value == grad)?;
            Some((i, k))
        });
        let Some((instance, k)) = writer else {
            return Err(OpError(format!(
                "the gradient of parameter `{name}` is not made by an op of its own"
            )));
        };
        let op = instance.code.op();
        OpError::ensure(op.accumulates(k), || {
            format!("output {k} of {} cannot accumulate, as parameter gradients must", op.name())
        })?;
        instance.outputs[k].value = target;
        Ok(())
    }

    fn settle_parameter_gradients(&mut self) -> Result<(), BackwardError> {
        let mut written = vec![false; self.program.values.len()];
        for instance in &mut self.program.instances {
            for o in &mut instance.outputs {
                let value = &self.program.values[o.value.0 as usize];
                if matches!(value.storage, Storage::State { kind: StateKind::Gradient, .. }) {
                    let seen = std::mem::replace(&mut written[o.value.0 as usize], true);
                    o.mode = if seen { WriteMode::Add } else { WriteMode::AddAfterFirst };
                }
            }
        }
        match self.program.parameters.iter().find(|p| p.gradient.is_none()) {
            Some(p) => Err(BackwardError::Unreached(p.name.clone())),
            None => Ok(()),
        }
    }
}
