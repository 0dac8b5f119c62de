//! A kernel, ready to be executed: blocks of steps over allocated registers.

pub(crate) mod context;

use crate::fault::Outcome;
use crate::ptx::{Location, Space};
use crate::registers::{Slot, SlotCounts};
use context::{Condition, Context, Source};
use std::collections::HashMap;

/// What a step does to the active lanes of a warp.
pub(crate) type Execute = Box<dyn Fn(&mut Context<'_>) -> Outcome + Send + Sync>;

/// What a step is, for the scheduler.
pub(crate) enum Action {
    /// Every active lane does it by itself.
    Lanes(Execute),
    /// All lanes that the operand names, which do not include those that have exited, do it together.
    Together(Source<u32>, Execute),
    /// The threads of the block meet.
    Barrier(Barrier),
}

/// `bar` (PTX ISA, section 9.7.13.1).
pub(crate) struct Barrier {
    pub(crate) number: Source<u32>,
    /// How many threads meet; all of the block's where there is no number.
    pub(crate) threads: Option<Source<u32>>,
    /// Whether those who arrive wait.
    pub(crate) waits: bool,
    pub(crate) reduction: Option<Reduction>,
}

/// What `bar.red` computes of a predicate of all threads.
pub(crate) struct Reduction {
    pub(crate) kind: ReductionKind,
    pub(crate) predicate: Condition,
    pub(crate) target: Target,
}

/// Where a reduction's result goes.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    Predicate(Slot),
    Number(Slot),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReductionKind {
    And,
    Or,
    Count,
}

/// An instruction.
pub(crate) struct Step {
    /// The predicate under which it runs.
    pub(crate) guard: Option<Condition>,
    pub(crate) action: Action,
    pub(crate) location: u32,
}

/// Steps that are executed one after the other, and where execution goes on.
pub(crate) struct Block {
    pub(crate) steps: Vec<Step>,
    pub(crate) end: End,
    pub(crate) end_location: u32,
}

/// Where execution goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Go(u32),
    /// To `taken` where the condition holds.
    Branch {
        condition: Condition,
        taken: u32,
        otherwise: u32,
    },
}

/// A kernel.
pub(crate) struct Code {
    pub(crate) name: String,
    /// The block after the last one is the kernel's end.
    pub(crate) blocks: Vec<Block>,
    pub(crate) slots: SlotCounts,
    /// Sizes of the parameters, and where each begins.
    pub(crate) parameters: Vec<(u64, u64)>,
    pub(crate) parameter_bytes: u64,
    pub(crate) shared_bytes: u64,
    /// Per thread.
    pub(crate) local_bytes: u64,
    pub(crate) max_threads: Option<[u32; 3]>,
    pub(crate) locations: Vec<Location>,
    pub(crate) files: Vec<(u32, String)>,
}

/// Addresses of variables by name: within their space, or of the device for global ones.
pub(crate) type Symbols = HashMap<String, (Space, u64)>;

impl Code {
    /// How many instructions its text has.
    pub(crate) fn instructions(&self) -> usize {
        self.blocks.iter().map(|block| block.steps.len() + 1).sum()
    }

    /// File and line of a location, and of the call into which it was inlined.
    pub(crate) fn describe(&self, location: u32) -> String {
        let Location { file, line, inlined_at } = self.locations[location as usize];
        let name = |file| self.files.iter().find(|(number, _)| *number == file).map_or("?", |(_, name)| name);
        let place = format!("{}:{line}", name(file));
        match inlined_at {
            Some((at_file, at_line)) => format!("{place} (inlined at {}:{at_line})", name(at_file)),
            None => place,
        }
    }
}
