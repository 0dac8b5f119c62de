//! What a trainer sees of an executor.

use crate::error::EngineError;
use crate::part::{Part, ProgramId};
use crate::state::StateEntry;
use crate::timing::{Timed, Timing};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use xtrain_program::{Program, StateKind, ValueId};

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
