//! Programs: lists of values and of op instances.
//!
//! A program holds ops, and the backward of an op extends a program, so the interface between the two is in
//! this module too ([`Differentiable`]).

mod casts;
mod differentiate;
mod instantiate;

pub use casts::{Delayed, MeasuredCast, Quantized, QuantizedRows};
pub(crate) use differentiate::tied_name;
pub use differentiate::{Backward, Differentiable};
pub use instantiate::TraceError;
pub(crate) use instantiate::instantiate;

use crate::{Cost, Lane, Op, Origin, Phase, RowShard, StateKind, Storage, TensorCut, Value, ValueId, When};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_rank::Groups;
use xtrain_tensor::TensorType;

/// A step, or a part of one, as a flat list of op instances over values.
#[derive(Clone, Default)]
pub struct Program {
    /// All values; [`ValueId`] is the index.
    pub values: Vec<Value>,
    /// The instances in execution order.
    pub instances: Vec<Instance>,
    /// The parameters, in the order in which the model declared them.
    pub parameters: Vec<Parameter>,
    /// The tensors with delayed scales.
    pub delayed: Vec<Delayed>,
    /// The casts that [`crate::measure_casts`] measures.
    pub measured: Vec<MeasuredCast>,
    /// Of each chunk of a stage of a pipeline, the micro-batches whose forward may have run when the backward
    /// of the first of them has not: engines then run the forward and the backward of each chunk apart, and
    /// keep what the backward reads of each micro-batch in a slot of its own. Otherwise empty.
    pub slots: Vec<usize>,
}

/// A parameter and the state values that belong to it.
#[derive(Clone)]
pub struct Parameter {
    /// Its name, e.g. `blocks.3.attn.qkv_proj.weight`.
    pub name: Arc<str>,
    /// The master copy.
    pub master: ValueId,
    /// The copy that GEMMs read, if the compute type differs from the master's type.
    pub compute: Option<ValueId>,
    /// The part with which this rank computes, if the ranks of a tensor group share the parameter. What is
    /// traced has the type of the part; state is cut by rows of the whole.
    pub part: Option<TensorCut>,
    /// Its copies in FP8 that are cast from the whole parameter.
    pub quantized: Vec<Quantized>,
    /// The rows of this rank in FP8, if ranks gather FP8 numbers.
    pub quantized_rows: Vec<QuantizedRows>,
    /// Its gradient, after the backward pass.
    pub gradient: Option<ValueId>,
    /// The gradient of its further uses, if it is kept apart until the ranks have added theirs.
    pub tied_gradient: Option<ValueId>,
    /// Its cut, if it is cut among ranks: master, compute copy and gradient are then the rows of this rank.
    pub shard: Option<RowShard>,
    /// The ranks that together have the whole parameter, if no rank has it alone: amaxes of the whole are
    /// their maxima.
    pub amax_groups: Option<Groups>,
    /// The rows of this rank that ranks gather to cast the whole to FP8, if these are not the master's.
    pub cast_from: Option<ValueId>,
    /// The whole tensors that are gathered from all ranks after masters change.
    pub gathered: Vec<Gathered>,
    /// The transposes of some of these.
    pub transposed: Vec<Transposed>,
}

/// A whole tensor, and the rows of it that this rank contributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gathered {
    /// The rows of this rank.
    pub piece: ValueId,
    /// All rows; of a parameter that a tensor group shares, the part with which this rank computes.
    pub whole: ValueId,
    /// The cut of the whole.
    pub cut: RowShard,
}

/// The transpose of a whole tensor.
#[derive(Clone)]
pub struct Transposed {
    /// The op that transposes.
    pub op: Arc<dyn Op>,
    /// The whole tensor.
    pub from: ValueId,
    /// Its transpose.
    pub to: ValueId,
}

/// One application of an op.
#[derive(Clone)]
pub struct Instance {
    /// The op with its attributes.
    pub code: Code,
    /// Its inputs.
    pub inputs: Vec<ValueId>,
    /// Its outputs, in the order of the op's signature.
    pub outputs: Vec<Output>,
    /// Its place in the model and in the step.
    pub origin: Origin,
    /// The lane that it runs in.
    pub lane: Lane,
    /// The micro-steps in which it runs.
    pub when: When,
    /// The chunk of a stage of a pipeline to whose forward or backward it belongs; 0 without several.
    pub chunk: usize,
}

/// The op of an instance. Ops traced by a model can be differentiated; ops emitted by a pass need not be.
#[derive(Clone)]
pub enum Code {
    /// Traced by a model.
    Forward(Arc<dyn Differentiable>),
    /// Emitted by a pass or by the optimizer.
    Plain(Arc<dyn Op>),
    /// An op that leaves tails undefined ([`crate::tails`]).
    WithoutTails {
        /// The op.
        op: Arc<dyn Op>,
        /// The one that writes them.
        written: Box<Code>,
    },
}

impl Code {
    /// The op.
    pub fn op(&self) -> &dyn Op {
        match self {
            Code::Forward(op) => op.as_ref(),
            Code::Plain(op) | Code::WithoutTails { op, .. } => op.as_ref(),
        }
    }
}

/// A value written by an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    /// The value.
    pub value: ValueId,
    /// How it is written.
    pub mode: WriteMode,
}

/// How an instance writes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// Overwrites.
    Assign,
    /// Adds to the value.
    Add,
    /// Overwrites in the first micro-step of an optimizer step and adds in the following ones.
    AddAfterFirst,
}

impl WriteMode {
    /// True if the kernel adds to the value in this micro-step.
    pub fn accumulates(self, first_micro_step: bool) -> bool {
        match self {
            WriteMode::Assign => false,
            WriteMode::Add => true,
            WriteMode::AddAfterFirst => !first_micro_step,
        }
    }
}

impl Program {
    /// The value with this id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// The type of the value with this id.
    pub fn ty(&self, id: ValueId) -> TensorType {
        self.value(id).ty
    }

    /// The ids of all values.
    pub fn ids(&self) -> impl Iterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// Adds a value.
    pub fn add_value(&mut self, ty: TensorType, storage: Storage) -> ValueId {
        self.values.push(Value { ty, storage, boundary: false, repeats: None });
        ValueId(self.values.len() as u32 - 1)
    }

    /// Adds a state value. No other state value has this kind and name.
    pub(crate) fn add_state(&mut self, kind: StateKind, name: &Arc<str>, ty: TensorType) -> ValueId {
        self.add_value(ty, Storage::State { kind, name: name.clone() })
    }

    /// Adds the value `id` of another program.
    pub(crate) fn copy_value(&mut self, other: &Program, id: ValueId) -> ValueId {
        let value = other.value(id);
        self.add_value(value.ty, value.storage.clone())
    }

    /// The input of this name.
    pub fn input(&self, name: &str) -> Option<ValueId> {
        self.ids().find(|&id| matches!(&self.value(id).storage, Storage::Input { name: n } if **n == *name))
    }

    /// The state value of this kind and name.
    pub fn state(&self, kind: StateKind, name: &str) -> Option<ValueId> {
        let matches = |id: &ValueId| match &self.value(*id).storage {
            Storage::State { kind: k, name: n } => *k == kind && **n == *name,
            _ => false,
        };
        self.ids().find(matches)
    }

    /// The output of this name.
    pub fn output(&self, name: &str) -> Option<ValueId> {
        self.ids().find(|&id| matches!(&self.value(id).storage, Storage::Output { name: n } if **n == *name))
    }

    /// The names and ids of all inputs.
    pub fn inputs(&self) -> impl Iterator<Item = (Arc<str>, ValueId)> + '_ {
        self.ids().filter_map(|id| match &self.value(id).storage {
            Storage::Input { name } => Some((name.clone(), id)),
            _ => None,
        })
    }

    /// The names and ids of all outputs.
    pub fn outputs(&self) -> impl Iterator<Item = (Arc<str>, ValueId)> + '_ {
        self.ids().filter_map(|id| match &self.value(id).storage {
            Storage::Output { name } => Some((name.clone(), id)),
            _ => None,
        })
    }

    /// The index of the parameter of each master and each compute copy.
    pub(crate) fn parameters_by_value(&self) -> HashMap<ValueId, usize> {
        let values = |p: &Parameter| [Some(p.master), p.compute];
        let indexed = self.parameters.iter().enumerate();
        indexed.flat_map(|(n, p)| values(p).into_iter().flatten().map(move |v| (v, n))).collect()
    }

    /// True if a parameter is not trained.
    pub fn is_frozen(&self, parameter: &Parameter) -> bool {
        matches!(self.value(parameter.master).storage, Storage::State { kind: StateKind::Frozen, .. })
    }

    /// The number of elements of all parameters.
    pub fn parameter_count(&self) -> usize {
        self.parameters.iter().map(|p| self.whole_type(p).numel()).sum()
    }

    /// The type of a parameter, all rows included if it is cut.
    pub fn whole_type(&self, parameter: &Parameter) -> TensorType {
        let held = self.ty(parameter.master);
        parameter.shard.map_or(held, |cut| cut.whole(held))
    }

    /// The types of an instance's inputs.
    pub fn input_types(&self, instance: &Instance) -> Vec<TensorType> {
        instance.inputs.iter().map(|&v| self.ty(v)).collect()
    }

    /// The types of an instance's outputs.
    pub fn output_types(&self, instance: &Instance) -> Vec<TensorType> {
        instance.outputs.iter().map(|o| self.ty(o.value)).collect()
    }

    /// The work of one run of an instance.
    pub fn cost(&self, instance: &Instance) -> Cost {
        instance.code.op().cost(&self.input_types(instance), &self.output_types(instance))
    }

    /// Floating-point operations of the instances for which `include` returns true.
    pub fn flops(&self, include: impl Fn(&Instance) -> bool) -> f64 {
        self.instances.iter().filter(|i| include(i)).map(|i| self.cost(i).flops()).sum()
    }
}

impl Instance {
    /// The phase in which it runs.
    pub fn phase(&self) -> Phase {
        self.origin.stage.phase()
    }

    /// The state values that it writes.
    pub fn effects(&self, program: &Program) -> impl Iterator<Item = ValueId> {
        let state = |id: &ValueId| matches!(program.value(*id).storage, Storage::State { .. });
        self.outputs.iter().map(|o| o.value).filter(state)
    }
}
