//! What a trainer sees of an executor.

use crate::timing::{Timed, Timing};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;
use xtrain_cuda::CudaError;
use xtrain_program::{Phase, Program, StateKind, Storage, Value, ValueId};
use xtrain_tensor::TensorType;

/// A program that an engine has loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramId(pub(crate) usize);

/// A state value that an engine holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateEntry {
    /// What it is for.
    pub kind: StateKind,
    /// Its name within the kind.
    pub name: String,
    /// Shape and element type.
    pub ty: TensorType,
}

/// What of a program is run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// All of it: an optimizer step with a single micro-step, or a program without an update.
    Whole,
    /// The first of several micro-steps.
    First,
    /// A micro-step after the first.
    Next,
    /// The update after the last micro-step.
    Update,
}

impl Part {
    /// Whether the instances of `phase` are among it.
    pub fn includes(self, phase: Phase) -> bool {
        match self {
            Part::Whole => true,
            Part::First | Part::Next => phase == Phase::Micro,
            Part::Update => phase == Phase::Update,
        }
    }

    /// Whether what accumulates over micro-steps begins anew.
    pub fn is_first(self) -> bool {
        matches!(self, Part::Whole | Part::First)
    }
}

/// Outputs of a program, on their way to the host.
pub struct Ticket(pub(crate) Promise);

pub(crate) enum Promise {
    /// They are here.
    Arrived(Outputs),
    /// They are being copied; the number of the fetch.
    Copying { program: ProgramId, fetch: usize },
}

/// The outputs of a program as they were when they were fetched.
#[derive(Clone, Debug)]
pub struct Outputs {
    pub(crate) bytes: Vec<u8>,
    /// By name.
    pub(crate) places: Arc<Vec<(Arc<str>, Range<usize>)>>,
}

impl Outputs {
    /// The bytes of the output called `name`.
    pub fn get(&self, name: &str) -> Result<&[u8], EngineError> {
        let place = self.places.iter().find(|(n, _)| **n == *name).map(|(_, place)| place.clone());
        let unknown = || EngineError::Unknown { what: "output", name: name.into() };
        Ok(&self.bytes[place.ok_or_else(unknown)?])
    }
}

/// By what state and constants are found.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StateKey {
    State(StateKind, Arc<str>),
    Constant(Arc<str>),
}

/// The key of a value that lasts.
pub(crate) fn state_key(value: &Value) -> Option<StateKey> {
    match &value.storage {
        Storage::State { kind, name } => Some(StateKey::State(*kind, name.clone())),
        Storage::Constant { name, .. } => Some(StateKey::Constant(name.clone())),
        Storage::Input { .. } | Storage::Output { .. } | Storage::Transient => None,
    }
}

impl StateKey {
    /// An error where a value that is `held` is asked for as another type.
    pub(crate) fn agrees(&self, held: TensorType, asked: TensorType) -> Result<(), EngineError> {
        if held == asked {
            return Ok(());
        }
        let (what, name) = match self {
            StateKey::State(kind, name) => (kind.name(), name),
            StateKey::Constant(name) => ("constant", name),
        };
        Err(EngineError::Conflict { what, name: name.to_string(), held: held.into(), asked: asked.into() })
    }

    /// What an engine tells of a state value of this type; nothing of constants.
    pub(crate) fn entry(&self, ty: TensorType) -> Option<StateEntry> {
        match self {
            StateKey::State(kind, name) => Some(StateEntry { kind: *kind, name: name.to_string(), ty }),
            StateKey::Constant(_) => None,
        }
    }
}

/// Where each output lies when all of them stand one behind the other in the program's order.
pub(crate) fn output_places(program: &Program) -> Vec<(Arc<str>, Range<usize>)> {
    let mut end = 0;
    let place = |(name, id): (Arc<str>, ValueId)| {
        let begin = end;
        end += program.ty(id).bytes();
        (name, begin..end)
    };
    program.outputs().map(place).collect()
}

/// An executor: memory for state, which all its programs share by (kind, name), and the means to run them.
///
/// Programs that use the same state must agree on its type. Scratch memory is shared, so nothing transient outlives a `run`.
pub trait Engine: Send {
    /// Plans a program and gives it memory; state that is not there yet starts as zeros.
    fn load(&mut self, program: Program) -> Result<ProgramId, EngineError>;

    /// Writes the program's input called `name`, for the runs that follow.
    fn write_input(&mut self, program: ProgramId, name: &str, bytes: &[u8]) -> Result<(), EngineError>;

    /// Runs a part of the program, or puts it in line to be run: what goes wrong in it may be told by a later call.
    fn run(&mut self, program: ProgramId, part: Part) -> Result<(), EngineError>;

    /// Has the program's outputs copied as the runs before leave them, without waiting.
    fn fetch(&mut self, program: ProgramId) -> Result<Ticket, EngineError>;

    /// Whether they are there, so that [`Engine::collect`] does not wait.
    fn is_ready(&self, ticket: &Ticket) -> Result<bool, EngineError>;

    /// The fetched outputs, waited for.
    fn collect(&mut self, ticket: Ticket) -> Result<Outputs, EngineError>;

    /// The program's outputs as the runs before leave them, waited for.
    fn outputs(&mut self, program: ProgramId) -> Result<Outputs, EngineError> {
        let ticket = self.fetch(program)?;
        self.collect(ticket)
    }

    /// All state values, in the order in which they were first loaded.
    fn state_entries(&self) -> Vec<StateEntry>;

    /// Reads a state value's bytes.
    fn read_state(&mut self, kind: StateKind, name: &str) -> Result<Vec<u8>, EngineError>;

    /// Reads many state values, each into the slice beside it: what a checkpoint takes, as fast as memory allows.
    ///
    /// # Errors
    /// [`EngineError::Length`] where a slice has another length than its value.
    fn copy_state(&mut self, entries: &[StateEntry], targets: &mut [&mut [u8]]) -> Result<(), EngineError>;

    /// Overwrites a state value.
    fn write_state(&mut self, kind: StateKind, name: &str, bytes: &[u8]) -> Result<(), EngineError>;

    /// Bytes that the engine holds in all regions: what was planned. What kernels of the CPU work in beside it is not among them.
    fn memory_bytes(&self) -> usize;

    /// A loaded program.
    fn program(&self, id: ProgramId) -> &Program;

    /// Sets what is timed from now on.
    fn set_timing(&mut self, timing: Timing) -> Result<(), EngineError>;

    /// What was timed since this was asked last, in the order in which it began; what is under way is waited for.
    fn take_times(&mut self) -> Result<Vec<Timed>, EngineError>;

    /// Bytes that the processor has left, where it tells.
    fn free_bytes(&self) -> Option<u64>;

    /// Rows of a matrix product that keep the processor busy: fewer take as long. What may be cut at will is cut into so many.
    fn busy_rows(&self) -> usize;

    /// Bytes a second that the processor's memory can move at most, where that is known.
    fn memory_bandwidth(&self) -> Option<f64>;

    /// Which of several kernels or algorithms were chosen by their speed, by what each is for: where results depend on it.
    fn choices(&self) -> BTreeMap<String, String>;
}

/// An error unless `bytes` are as many as the value called `name` has.
pub(crate) fn ensure_length(name: &str, ty: TensorType, bytes: &[u8]) -> Result<(), EngineError> {
    if bytes.len() == ty.bytes() {
        return Ok(());
    }
    let (expected, found) = (ty.bytes(), bytes.len());
    Err(EngineError::Length { name: name.into(), ty: ty.into(), expected, found })
}

/// What can go wrong between a trainer and an engine.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EngineError {
    /// An op without a kernel for this device.
    #[error("the op `{op}` (at {site}) has no kernel for {device}")]
    NoKernel {
        /// The op's name.
        op: &'static str,
        /// Block and site.
        site: String,
        /// The device.
        device: String,
    },
    /// An input, output or state value that is not there.
    #[error("there is no {what} called `{name}`")]
    Unknown {
        /// Input, output, or the kind of state.
        what: &'static str,
        /// The name asked for.
        name: String,
    },
    /// Bytes of the wrong length.
    #[error("`{name}` is {ty}, {expected} bytes, but {found} bytes were given")]
    Length {
        /// The name.
        name: String,
        /// Its type.
        ty: Box<TensorType>,
        /// Its length.
        expected: usize,
        /// The given length.
        found: usize,
    },
    /// Two programs that disagree on a state value.
    #[error("{what} `{name}` is {held} in the programs loaded before, but {asked} in this one")]
    Conflict {
        /// The kind of state.
        what: &'static str,
        /// The name.
        name: String,
        /// The type that it has.
        held: Box<TensorType>,
        /// The type asked for.
        asked: Box<TensorType>,
    },
    /// More memory than there is. What would need less, only the caller knows.
    #[error(
        "the model and what it is to compute need {:.2} GiB of memory, but {}",
        gib(*needed_bytes as u64),
        refusal_reason(*needed_bytes as u64, *available_bytes)
    )]
    Memory {
        /// What the engine would then hold.
        needed_bytes: usize,
        /// What it may hold, where the system tells.
        available_bytes: Option<u64>,
    },
    /// A value that is not finite, found where the run checks every op.
    #[error("{op} at {site} ({role}) made a non-finite value in its output {output} ({ty})")]
    NonFinite {
        /// The op's name.
        op: &'static str,
        /// Block and site.
        site: String,
        /// fprop, dgrad, ...
        role: &'static str,
        /// Which output.
        output: usize,
        /// The output's type.
        ty: Box<TensorType>,
    },
    /// A card, its driver or a library that failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Why memory is not to be had. Limits of the process are not among what the system calls available.
fn refusal_reason(needed_bytes: u64, available_bytes: Option<u64>) -> String {
    match available_bytes {
        None => "the system refuses it".to_owned(),
        Some(bytes) if bytes < needed_bytes => format!("{:.2} GiB are available", gib(bytes)),
        Some(bytes) => format!(
            "the system refuses it although {:.2} GiB seem to be available: a limit of this process (ulimit -v) may be lower",
            gib(bytes)
        ),
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_does_not_say_that_more_is_available_than_is_needed() {
        let said = |needed: usize, available_bytes| {
            EngineError::Memory { needed_bytes: needed << 30, available_bytes }.to_string()
        };
        assert!(said(3, Some(2 << 30)).ends_with("3.00 GiB of memory, but 2.00 GiB are available"));
        assert!(said(3, Some(22 << 30)).contains("but the system refuses it although 22.00 GiB seem"));
        assert!(said(3, None).ends_with("but the system refuses it"));
    }
}
