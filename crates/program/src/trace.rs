//! Tracing: model code calls ops, and the calls become a program.

use crate::{
    Code, Differentiable, Instance, Lane, Op, OpError, Origin, Output, Parameter, Program, Role, Stage,
    StateKind, Storage, ValueId, WriteMode,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use thiserror::Error;
use xtrain_tensor::{HostTensor, TensorType};

/// The error of an op that refuses its operands.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{site}: {op} cannot take {operands}: {error}")]
pub struct TraceError {
    /// Block and site.
    pub site: String,
    /// The op's name.
    pub op: &'static str,
    /// The operands' types.
    pub operands: String,
    /// What is wrong with them.
    pub error: OpError,
}

/// Builder of a program, one op instance after the other.
pub struct Tracer {
    program: Program,
    origin: Origin,
    names: HashMap<(Space, Arc<str>), ValueId>,
}

/// A set in which names are unique.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Space {
    State(StateKind),
    Constant,
    Input,
}

impl Space {
    const fn name(self) -> &'static str {
        match self {
            Space::State(kind) => kind.name(),
            Space::Constant => "constant",
            Space::Input => "input",
        }
    }
}

impl Default for Tracer {
    fn default() -> Self {
        Tracer::new(Program::default(), Stage::Forward, Role::Forward)
    }
}

impl Tracer {
    /// A tracer that appends to `program` instances of this stage and role.
    pub fn new(program: Program, stage: Stage, role: Role) -> Self {
        let name = |id: ValueId| match &program.value(id).storage {
            Storage::State { kind, name } => Some(((Space::State(*kind), name.clone()), id)),
            Storage::Constant { name, .. } => Some(((Space::Constant, name.clone()), id)),
            Storage::Input { name } => Some(((Space::Input, name.clone()), id)),
            Storage::Output { .. } | Storage::Transient => None,
        };
        let names = program.ids().filter_map(name).collect();
        Tracer { program, origin: Origin { block: None, site: "".into(), role, stage }, names }
    }

    /// The traced program.
    pub fn finish(self) -> Program {
        self.program
    }

    /// The program so far.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> TensorType {
        self.program.ty(id)
    }

    /// Enters transformer block `block`: later instances belong to it.
    pub fn enter_block(&mut self, block: Option<u32>) {
        self.origin.block = block;
    }

    /// Sets the site of later instances, e.g. `attn.qkv_proj`.
    pub fn at(&mut self, site: &str) -> &mut Self {
        self.origin.site = site.into();
        self
    }

    /// The parameter called `name`; a second call with the same name is the same parameter (tied weights).
    ///
    /// # Panics
    /// If it has another type.
    pub fn parameter(&mut self, name: &str, ty: TensorType) -> ValueId {
        let known = self.program.values.len();
        let master = self.state(StateKind::Master, name, ty);
        if master.0 as usize >= known {
            let name = name.into();
            self.program.parameters.push(Parameter {
                name,
                master,
                compute: None,
                quantized: Vec::new(),
                gradient: None,
            });
        }
        master
    }

    /// The state value of this kind and name.
    ///
    /// # Panics
    /// If it has another type.
    pub fn state(&mut self, kind: StateKind, name: &str, ty: TensorType) -> ValueId {
        self.named(Space::State(kind), name, ty, |name| Storage::State { kind, name })
    }

    /// The input called `name`, which the host writes before each run; a second call is the same input.
    ///
    /// # Panics
    /// If it has another type.
    pub fn input(&mut self, name: &str, ty: TensorType) -> ValueId {
        self.named(Space::Input, name, ty, |name| Storage::Input { name })
    }

    /// The constant called `name`, of type `ty`; a second call is the same constant, so the name includes
    /// everything that its contents depend on. `make` runs when an engine loads the program, so that a plan
    /// costs no table.
    ///
    /// # Panics
    /// If it has another type.
    pub fn constant(
        &mut self,
        name: &str,
        ty: TensorType,
        make: impl Fn() -> HostTensor + Send + Sync + 'static,
    ) -> ValueId {
        self.named(Space::Constant, name, ty, |name| Storage::Constant { name, make: Arc::new(make) })
    }

    /// The value of this name, added if it is not there.
    fn named(
        &mut self,
        space: Space,
        name: &str,
        ty: TensorType,
        storage: impl FnOnce(Arc<str>) -> Storage,
    ) -> ValueId {
        let name: Arc<str> = name.into();
        let id = match self.names.entry((space, name.clone())) {
            Entry::Occupied(found) => *found.get(),
            Entry::Vacant(place) => *place.insert(self.program.add_value(ty, storage(name.clone()))),
        };
        let held = self.program.ty(id);
        assert!(
            held == ty,
            "the {} `{name}` is {held} already, so it cannot be {ty}; it needs a name of its own",
            space.name()
        );
        id
    }

    /// Marks a value as a boundary of recomputation: saved even if its block is recomputed.
    pub fn boundary(&mut self, id: ValueId) {
        self.program.values[id.0 as usize].boundary = true;
    }

    /// Turns a transient value into an output that the host reads under `name`. It accumulates over
    /// micro-steps if its op can.
    pub fn output(&mut self, name: &str, id: ValueId) {
        self.program.values[id.0 as usize].storage = Storage::Output { name: name.into() };
        for instance in &mut self.program.instances {
            let op = instance.code.op();
            for (k, out) in instance.outputs.iter_mut().enumerate().filter(|(_, out)| out.value == id) {
                out.mode = if op.accumulates(k) { WriteMode::AddAfterFirst } else { WriteMode::Assign };
            }
        }
    }

    /// Applies an op of the model.
    pub fn apply(&mut self, op: impl Differentiable, inputs: &[ValueId]) -> Result<Vec<ValueId>, TraceError> {
        self.push(Code::Forward(Arc::new(op)), inputs, &[])
    }

    /// Applies an op without a backward: of the optimizer, of a pass, of generation.
    pub fn emit(&mut self, op: impl Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, TraceError> {
        self.push(Code::Plain(Arc::new(op)), inputs, &[])
    }

    /// Like [`Tracer::emit`], writing to existing values; the types must agree.
    pub fn emit_into(
        &mut self,
        op: impl Op,
        inputs: &[ValueId],
        targets: &[Option<ValueId>],
    ) -> Result<Vec<ValueId>, TraceError> {
        self.push(Code::Plain(Arc::new(op)), inputs, targets)
    }

    /// Applies an op that is already shared.
    pub fn apply_code(&mut self, code: Code, inputs: &[ValueId]) -> Result<Vec<ValueId>, TraceError> {
        self.push(code, inputs, &[])
    }

    fn push(
        &mut self,
        code: Code,
        inputs: &[ValueId],
        targets: &[Option<ValueId>],
    ) -> Result<Vec<ValueId>, TraceError> {
        let instance = instantiate(&mut self.program, code, inputs, targets, self.origin.clone())?;
        let outputs = instance.outputs.iter().map(|o| o.value).collect();
        self.program.instances.push(instance);
        Ok(outputs)
    }
}

/// An instance with fresh output values, except where `targets` names the value to write.
pub(crate) fn instantiate(
    program: &mut Program,
    code: Code,
    inputs: &[ValueId],
    targets: &[Option<ValueId>],
    origin: Origin,
) -> Result<Instance, TraceError> {
    let types: Vec<TensorType> = inputs.iter().map(|&v| program.ty(v)).collect();
    let fail = |error| TraceError {
        site: origin.to_string(),
        op: code.op().name(),
        operands: types.iter().map(TensorType::to_string).collect::<Vec<_>>().join(", "),
        error,
    };
    let made = code.op().infer(&types).map_err(fail)?;
    let mut outputs = Vec::with_capacity(made.len());
    for (k, &ty) in made.iter().enumerate() {
        let value = match targets.get(k).copied().flatten() {
            Some(target) if program.ty(target) == ty => target,
            Some(target) => {
                return Err(fail(OpError(format!(
                    "output {k} is {ty}, but it is to be written to {}",
                    program.ty(target)
                ))));
            }
            None => program.add_value(ty, Storage::Transient),
        };
        outputs.push(Output { value, mode: WriteMode::Assign });
    }
    Ok(Instance { code, inputs: inputs.to_vec(), outputs, origin, lane: Lane::Compute })
}
