//! What a trainer sees of an executor.

use thiserror::Error;
use xtrain_program::{Phase, Program, StateKind};
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

/// An executor: memory for state, which all its programs share by (kind, name), and the means to run them.
///
/// Programs that use the same state must agree on its type. Scratch memory is shared, so nothing transient outlives a `run`.
pub trait Engine: Send {
    /// Plans a program and gives it memory; state that is not there yet starts as zeros.
    fn load(&mut self, program: Program) -> Result<ProgramId, EngineError>;

    /// Writes the program's input called `name`.
    fn write_input(&mut self, program: ProgramId, name: &str, bytes: &[u8]) -> Result<(), EngineError>;

    /// Runs the instances of `phase`; `first` says whether this is the first micro-step of an optimizer step.
    fn run(&mut self, program: ProgramId, phase: Phase, first: bool) -> Result<(), EngineError>;

    /// Reads the program's output called `name`.
    fn read_output(&mut self, program: ProgramId, name: &str) -> Result<Vec<u8>, EngineError>;

    /// All state values, in the order in which they were first loaded.
    fn state_entries(&self) -> Vec<StateEntry>;

    /// Reads a state value's bytes.
    fn read_state(&mut self, kind: StateKind, name: &str) -> Result<Vec<u8>, EngineError>;

    /// Overwrites a state value.
    fn write_state(&mut self, kind: StateKind, name: &str, bytes: &[u8]) -> Result<(), EngineError>;

    /// Bytes that the engine holds in all regions: what was planned. What kernels of the CPU work in beside it is not among them.
    fn memory_bytes(&self) -> usize;
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
        device: &'static str,
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
        available_bytes.map_or("the system refuses it".to_owned(), |b| format!("{:.2} GiB are available", gib(b)))
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
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
