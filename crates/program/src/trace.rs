//! Tracing: model code applies ops, and the tracer records them as a program.

use crate::program::instantiate;
use crate::{
    Code, Differentiable, Op, Origin, Parameter, Program, Role, Stage, StateKind, Storage, TensorCut,
    TraceError, ValueId, WriteMode,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use xtrain_tensor::{HostTensor, TensorType};

/// Builder of a program. It appends one op instance after the other.
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
    /// A tracer that appends instances of this stage and role to `program`.
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

    /// Sets the transformer block of later instances.
    pub fn enter_block(&mut self, block: Option<u32>) {
        self.origin.block = block;
    }

    /// Sets the site of later instances, for example `attn.qkv_proj`.
    pub fn site(&mut self, site: &str) -> &mut Self {
        self.origin.site = site.into();
        self
    }

    /// The parameter called `name`. A further call with this name returns the same parameter (tied weights).
    ///
    /// # Panics
    /// If it has another type.
    pub fn parameter(&mut self, name: &str, ty: TensorType) -> ValueId {
        self.parameter_of(StateKind::Master, name, ty)
    }

    /// As [`Tracer::parameter`], for one that is not trained: it has no gradient, and is held in the type in
    /// which ops read it, without a copy.
    ///
    /// # Panics
    /// If it has another type.
    pub fn frozen(&mut self, name: &str, ty: TensorType) -> ValueId {
        self.parameter_of(StateKind::Frozen, name, ty)
    }

    fn parameter_of(&mut self, kind: StateKind, name: &str, ty: TensorType) -> ValueId {
        let count_before = self.program.values.len();
        let master = self.state(kind, name, ty);
        if master.0 as usize >= count_before {
            let name = name.into();
            self.program.parameters.push(Parameter {
                name,
                master,
                compute: None,
                part: None,
                quantized: Vec::new(),
                quantized_rows: Vec::new(),
                gradient: None,
                tied_gradient: None,
                shard: None,
                amax_groups: None,
                cast_from: None,
                gathered: Vec::new(),
                transposed: Vec::new(),
            });
        }
        master
    }

    /// The part of the parameter called `name` with which a rank of a tensor group computes; `whole` is the
    /// type of the parameter.
    ///
    /// # Panics
    /// If it has another type, or the ranks do not divide it.
    pub fn part(&mut self, name: &str, whole: TensorType, cut: TensorCut) -> ValueId {
        let part = self.parameter(name, cut.part(whole));
        let parameter = self.program.parameters.iter_mut().find(|parameter| parameter.master == part);
        parameter.into_iter().for_each(|parameter| parameter.part = Some(cut.clone()));
        part
    }

    /// The state value of this kind and name.
    ///
    /// # Panics
    /// If it has another type.
    pub fn state(&mut self, kind: StateKind, name: &str, ty: TensorType) -> ValueId {
        self.named(Space::State(kind), name, ty, |name| Storage::State { kind, name })
    }

    /// The input called `name`, which the host writes before each run. A further call returns the same input.
    ///
    /// # Panics
    /// If it has another type.
    pub fn input(&mut self, name: &str, ty: TensorType) -> ValueId {
        self.named(Space::Input, name, ty, |name| Storage::Input { name })
    }

    /// The constant called `name`, of type `ty`. A further call returns the same constant, so the name must
    /// include everything on which the contents depend. `make` runs when an engine loads the program;
    /// planning computes no contents.
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

    /// The value of this name, which is added if it is absent.
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
        let existing = self.program.ty(id);
        assert!(
            existing == ty,
            "the {} `{name}` is {existing} already, so it cannot be {ty}; give the new one another name",
            space.name()
        );
        id
    }

    /// Marks a value as a boundary of recomputation: it is saved even if its block is recomputed.
    pub fn boundary(&mut self, id: ValueId) {
        self.program.values[id.0 as usize].boundary = true;
    }

    /// Turns a transient value into an output that the host reads by `name`. The output accumulates over
    /// micro-steps if its op can accumulate.
    pub fn output(&mut self, name: &str, id: ValueId) {
        self.program.values[id.0 as usize].storage = Storage::Output { name: name.into() };
        for instance in &mut self.program.instances {
            let op = instance.code.op();
            for (k, out) in instance.outputs.iter_mut().enumerate().filter(|(_, out)| out.value == id) {
                out.mode = if op.accumulates(k) { WriteMode::AddAfterFirst } else { WriteMode::Assign };
            }
        }
    }

    /// Applies an op of a model.
    pub fn apply(&mut self, op: impl Differentiable, inputs: &[ValueId]) -> Result<Vec<ValueId>, TraceError> {
        self.push(Code::Forward(Arc::new(op)), inputs, &[])
    }

    /// Applies an op without a backward: of the optimizer, a pass, or generation.
    pub fn emit(&mut self, op: impl Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, TraceError> {
        self.push(Code::Plain(Arc::new(op)), inputs, &[])
    }

    /// Applies an op without a backward, which writes output `k` to the existing value `targets[k]` if that
    /// is `Some`. The types must agree.
    pub fn emit_into(
        &mut self,
        op: impl Op,
        inputs: &[ValueId],
        targets: &[Option<ValueId>],
    ) -> Result<Vec<ValueId>, TraceError> {
        self.push(Code::Plain(Arc::new(op)), inputs, targets)
    }

    /// Applies the op of another instance.
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
