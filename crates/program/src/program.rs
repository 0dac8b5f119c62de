//! Programs: values, op instances, and the facts about each that passes go by.

use crate::measure_casts::MeasuredCast;
use crate::quantize::{Delayed, Quantized};
use crate::{Differentiable, Op};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use xtrain_tensor::{HostTensor, TensorType};

/// A step, or part of one, as a flat list of op instances over values.
#[derive(Clone, Default)]
pub struct Program {
    /// All values; [`ValueId`] is the index.
    pub values: Vec<Value>,
    /// The instances in execution order.
    pub instances: Vec<Instance>,
    /// The parameters in the order in which the model declared them.
    pub parameters: Vec<Parameter>,
    /// The tensors with delayed scales.
    pub delayed: Vec<Delayed>,
    /// The casts that [`crate::measure_casts`] measures.
    pub measured: Vec<MeasuredCast>,
}

/// The index of a value in [`Program::values`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

impl fmt::Debug for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// A tensor of the program.
#[derive(Clone)]
pub struct Value {
    /// Shape and element type.
    pub ty: TensorType,
    /// Where it lives and for how long.
    pub storage: Storage,
    /// A boundary of recomputation: always saved from forward to backward, even if its block is recomputed.
    pub boundary: bool,
    /// For a value that the backward recomputes: the forward value whose bits it repeats.
    pub repeats: Option<ValueId>,
}

/// Where a value lives and for how long.
#[derive(Clone)]
pub enum Storage {
    /// Across steps and programs, found by kind and name.
    State {
        /// Its purpose.
        kind: StateKind,
        /// Unique within its kind: the parameter's name for masters, gradients, moments and compute copies.
        name: Arc<str>,
    },
    /// Fixed at tracing, e.g. a table of rotation angles. Programs share it if name and type agree.
    Constant {
        /// Unique among the constants of a model.
        name: Arc<str>,
        /// Computes the contents: an engine calls it once, a plan never.
        make: Arc<dyn Fn() -> HostTensor + Send + Sync>,
    },
    /// Written by the host before each run.
    Input {
        /// The host finds it by this name.
        name: Arc<str>,
    },
    /// Read by the host after a run.
    Output {
        /// The host finds it by this name.
        name: Arc<str>,
    },
    /// Within one phase of one run, in the planned arena.
    Transient,
}

/// The purpose of a state value; the rows of the memory table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateKind {
    /// A parameter's master copy.
    Master,
    /// A parameter's copy in the type that GEMMs read.
    Compute,
    /// A parameter's gradient, accumulated over micro-steps.
    Gradient,
    /// AdamW's first moment.
    Moment1,
    /// AdamW's second moment.
    Moment2,
    /// Counters of the optimizer: applied updates.
    Counter,
    /// Keys and values of generated tokens.
    Cache,
    /// Amaxes of tensors that are cast to FP8.
    Amax,
    /// Delayed scales of casts to FP8.
    Scale,
    /// Amaxes of earlier steps, the latest first.
    AmaxHistory,
}

impl StateKind {
    /// The kind's name in dumps, checkpoints and tables.
    pub const fn name(self) -> &'static str {
        match self {
            StateKind::Master => "master",
            StateKind::Compute => "compute",
            StateKind::Gradient => "gradient",
            StateKind::Moment1 => "moment1",
            StateKind::Moment2 => "moment2",
            StateKind::Counter => "counter",
            StateKind::Cache => "cache",
            StateKind::Amax => "amax",
            StateKind::Scale => "scale",
            StateKind::AmaxHistory => "amax_history",
        }
    }

    /// True if checkpoints hold it: other state is computed from it, or of no use afterwards.
    pub const fn is_saved(self) -> bool {
        use StateKind::{AmaxHistory, Counter, Master, Moment1, Moment2, Scale};
        matches!(self, Master | Moment1 | Moment2 | Counter | Scale | AmaxHistory)
    }
}

/// A parameter and the state values that belong to it.
#[derive(Clone)]
pub struct Parameter {
    /// Its name, e.g. `blocks.3.attn.qkv_proj.weight`.
    pub name: Arc<str>,
    /// The master copy.
    pub master: ValueId,
    /// The copy that GEMMs read, if the compute type differs from the master's.
    pub compute: Option<ValueId>,
    /// Its copies in FP8.
    pub quantized: Vec<Quantized>,
    /// Its gradient, once the backward pass ran.
    pub gradient: Option<ValueId>,
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
    /// Its lane.
    pub lane: Lane,
}

/// The op of an instance. An op that a model traced can be differentiated; one that a pass emits need not be.
#[derive(Clone)]
pub enum Code {
    /// Traced by a model.
    Forward(Arc<dyn Differentiable>),
    /// Emitted by a pass or by the optimizer.
    Plain(Arc<dyn Op>),
}

impl Code {
    /// The op.
    pub fn op(&self) -> &dyn Op {
        match self {
            Code::Forward(op) => op.as_ref(),
            Code::Plain(op) => op.as_ref(),
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
    /// True if the kernel adds, in the first micro-step or in a later one.
    pub fn accumulates(self, first_micro_step: bool) -> bool {
        match self {
            WriteMode::Assign => false,
            WriteMode::Add => true,
            WriteMode::AddAfterFirst => !first_micro_step,
        }
    }
}

/// The origin of an instance: names in dumps, traces and recipes consist of it, and passes go by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The transformer block, if it is in one.
    pub block: Option<u32>,
    /// The place within the block or model, e.g. `attn.qkv_proj`.
    pub site: Arc<str>,
    /// Its part there, for names. Passes go by the stage.
    pub role: Role,
    /// Its stage of the step.
    pub stage: Stage,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(block) = self.block {
            write!(f, "blocks.{block}.")?;
        }
        write!(f, "{}", self.site)
    }
}

/// A stage of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Before the gradients of activations are known. Its outputs may be saved for the backward, or
    /// recomputed there.
    Forward,
    /// From the loss back.
    Backward,
    /// Once after the last micro-step.
    Update,
}

impl Stage {
    /// The phase that includes it.
    pub const fn phase(self) -> Phase {
        match self {
            Stage::Forward | Stage::Backward => Phase::Micro,
            Stage::Update => Phase::Update,
        }
    }
}

/// The part of an instance at its site, whatever the stage: casts belong to all stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Forward; for a linear, its fprop GEMM.
    Forward,
    /// Forward and the gradients of its inputs in one: a loss.
    ForwardGrad,
    /// Gradients with respect to activations.
    Dgrad,
    /// Gradients with respect to parameters only.
    Wgrad,
    /// A forward op run again in the backward.
    Recompute,
    /// A cast that a pass inserted.
    Precision,
    /// Gradient norm, clip, AdamW.
    Update,
}

impl Role {
    /// The role's name in dumps and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Forward => "fprop",
            Role::ForwardGrad => "fprop+grad",
            Role::Dgrad => "dgrad",
            Role::Wgrad => "wgrad",
            Role::Recompute => "recompute",
            Role::Precision => "precision",
            Role::Update => "update",
        }
    }
}

/// A queue of instances, which run in list order. Lanes wait for each other only at data dependencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Collectives.
    Communication,
    /// Copies to and from the host.
    Copy,
}

impl Lane {
    /// The number of lanes.
    pub const COUNT: usize = 3;
}

/// A part of an optimizer step that runs as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Forward and backward of one micro-batch; evaluation and generation have this phase only.
    Micro,
    /// Once after the last micro-step.
    Update,
}

impl Program {
    /// The value of `id`.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// The type of `id`.
    pub fn ty(&self, id: ValueId) -> TensorType {
        self.value(id).ty
    }

    /// All value ids.
    pub fn ids(&self) -> impl Iterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// Adds a value.
    pub fn add_value(&mut self, ty: TensorType, storage: Storage) -> ValueId {
        self.values.push(Value { ty, storage, boundary: false, repeats: None });
        ValueId(self.values.len() as u32 - 1)
    }

    /// Adds a state value; its kind and name must be new.
    pub(crate) fn add_state(&mut self, kind: StateKind, name: &Arc<str>, ty: TensorType) -> ValueId {
        self.add_value(ty, Storage::State { kind, name: name.clone() })
    }

    /// Adds the state value that `id` is in `other`.
    pub(crate) fn copy_state(&mut self, other: &Program, id: ValueId) -> ValueId {
        let value = other.value(id);
        self.add_value(value.ty, value.storage.clone())
    }

    /// The input of this name.
    pub fn input(&self, name: &str) -> Option<ValueId> {
        self.ids().find(|&id| matches!(&self.value(id).storage, Storage::Input { name: n } if **n == *name))
    }

    /// The state value of this kind and name.
    pub fn state(&self, kind: StateKind, name: &str) -> Option<ValueId> {
        let is_it = |id: &ValueId| match &self.value(*id).storage {
            Storage::State { kind: k, name: n } => *k == kind && **n == *name,
            _ => false,
        };
        self.ids().find(is_it)
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

    /// The number of elements of all parameters.
    pub fn parameter_count(&self) -> usize {
        self.parameters.iter().map(|p| self.ty(p.master).numel()).sum()
    }

    /// The types of an instance's inputs.
    pub fn input_types(&self, instance: &Instance) -> Vec<TensorType> {
        instance.inputs.iter().map(|&v| self.ty(v)).collect()
    }

    /// The types of an instance's outputs.
    pub fn output_types(&self, instance: &Instance) -> Vec<TensorType> {
        instance.outputs.iter().map(|o| self.ty(o.value)).collect()
    }

    /// Floating-point operations of the instances that `include` accepts.
    pub fn flops(&self, include: impl Fn(&Instance) -> bool) -> f64 {
        let cost = |i: &Instance| i.code.op().cost(&self.input_types(i), &self.output_types(i)).flops();
        self.instances.iter().filter(|i| include(i)).map(cost).sum()
    }
}

impl Instance {
    /// The phase that it runs in.
    pub fn phase(&self) -> Phase {
        self.origin.stage.phase()
    }

    /// The state values that it writes: its effects.
    pub fn effects(&self, program: &Program) -> impl Iterator<Item = ValueId> {
        let state = |id: &ValueId| matches!(program.value(*id).storage, Storage::State { .. });
        self.outputs.iter().map(|o| o.value).filter(state)
    }
}
