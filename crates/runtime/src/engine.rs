//! The interface of an engine.

use crate::error::EngineError;
use crate::part::{Part, ProgramId};
use crate::state::StateEntry;
use crate::timing::{Timed, Timing};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use xtrain_program::{Program, StateKind, ValueId};

/// The outputs of a run, on their way to the host.
pub struct Ticket(pub(crate) Promise);

pub(crate) enum Promise {
    /// The outputs have arrived.
    Arrived(Outputs),
    /// The outputs are being copied; `fetch` numbers the copy.
    Copying { program: ProgramId, fetch: usize },
}

/// The outputs of a program at the time of the fetch.
#[derive(Clone, Debug)]
pub struct Outputs {
    pub(crate) bytes: Vec<u8>,
    /// The place of each output in `bytes`, by name.
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

/// The place of each output if all are concatenated in the program's order.
pub(crate) fn output_places(program: &Program) -> Vec<(Arc<str>, Range<usize>)> {
    let mut end = 0;
    let place = |(name, id): (Arc<str>, ValueId)| {
        let begin = end;
        end += program.ty(id).bytes();
        (name, begin..end)
    };
    program.outputs().map(place).collect()
}

/// An engine: memory for state, which all its programs share by (kind, name), and the means to run them.
///
/// Programs that use the same state must agree on its type. Scratch memory is shared, so nothing transient
/// outlives a `run`. A run of a program with collectives waits for the other ranks, which must run the same
/// parts of the same programs in the same order.
pub trait Engine: Send {
    /// Plans a program and allocates its memory. New state starts as zeros.
    fn load(&mut self, program: Program) -> Result<ProgramId, EngineError>;

    /// Writes the program's input called `name`, for the runs that follow.
    fn write_input(&mut self, program: ProgramId, name: &str, bytes: &[u8]) -> Result<(), EngineError>;

    /// Runs a part of the program, or enqueues it; a later call may return its error.
    fn run(&mut self, program: ProgramId, part: Part) -> Result<(), EngineError>;

    /// Starts a copy of the program's outputs, as the runs before leave them, without waiting.
    fn fetch(&mut self, program: ProgramId) -> Result<Ticket, EngineError>;

    /// True if [`Engine::collect`] would not wait.
    fn is_ready(&self, ticket: &Ticket) -> Result<bool, EngineError>;

    /// The fetched outputs; waits for the copy.
    fn collect(&mut self, ticket: Ticket) -> Result<Outputs, EngineError>;

    /// The program's outputs, as the runs before leave them; waits for the copy.
    fn outputs(&mut self, program: ProgramId) -> Result<Outputs, EngineError> {
        let ticket = self.fetch(program)?;
        self.collect(ticket)
    }

    /// All state values, in the order in which they were first loaded.
    fn state_entries(&self) -> Vec<StateEntry>;

    /// The bytes of a state value.
    fn read_state(&mut self, kind: StateKind, name: &str) -> Result<Vec<u8>, EngineError>;

    /// A part of the bytes of a state value.
    ///
    /// # Panics
    /// If the value has fewer bytes.
    fn read_state_part(
        &mut self,
        kind: StateKind,
        name: &str,
        part: Range<usize>,
    ) -> Result<Vec<u8>, EngineError>;

    /// Reads many state values, each into its slice, at the speed of memory. Checkpoints use it. An entry
    /// with fewer rows than its value reads the first rows.
    ///
    /// # Errors
    /// [`EngineError::Length`] if a slice and its entry differ in length.
    fn copy_state(&mut self, entries: &[StateEntry], targets: &mut [&mut [u8]]) -> Result<(), EngineError>;

    /// Overwrites a state value.
    fn write_state(&mut self, kind: StateKind, name: &str, bytes: &[u8]) -> Result<(), EngineError>;

    /// Bytes that the engine has allocated in all regions, as planned. The buffers of CPU kernels are not
    /// included.
    fn memory_bytes(&self) -> usize;

    /// A loaded program.
    fn program(&self, id: ProgramId) -> &Program;

    /// Sets what is timed from now on.
    fn set_timing(&mut self, timing: Timing) -> Result<(), EngineError>;

    /// The times since the last call, in order of beginning; waits for work in progress.
    fn take_times(&mut self) -> Result<Vec<Timed>, EngineError>;

    /// Free bytes of the device; None if it does not report them.
    fn free_bytes(&self) -> Option<u64>;

    /// Rows of a GEMM that saturate the device: fewer rows take as long. Work that can be divided freely is
    /// divided into pieces of this many rows.
    fn busy_rows(&self) -> usize;

    /// The peak memory bandwidth of the device in bytes a second; None if it is unknown.
    fn memory_bandwidth(&self) -> Option<f64>;

    /// The kernels and algorithms that were chosen by speed, by key. Results depend on them.
    fn choices(&self) -> BTreeMap<String, String>;
}
