//! A kernel prepared for execution: basic blocks of steps over allocated registers.

pub(crate) mod cluster;
pub(crate) mod context;
mod mbarrier;

use crate::fault::Outcome;
use crate::ptx::{Class, Location, Space};
use crate::registers::{RegisterSlot, SlotCounts};
use cluster::Awaited;
use context::{Condition, Source, WarpContext};
use std::collections::HashMap;

/// The effect of a step on the active lanes of a warp.
pub(crate) type Execute = Box<dyn Fn(&mut WarpContext<'_>) -> Outcome + Send + Sync>;

/// Checks whether active lanes may go on, and returns what they wait for if not. It may remove lanes that
/// wait for something else from the active ones.
pub(crate) type Poll = Box<dyn Fn(&mut WarpContext<'_>) -> Outcome<Option<Awaited>> + Send + Sync>;

/// A step as the scheduler sees it.
pub(crate) enum Action {
    /// Each active lane executes it independently.
    Lanes(Execute),
    /// As `Lanes`, and warps that wait for it may run next.
    Signal(Execute),
    /// Active lanes wait for asynchronous work or other blocks. The predicate, if any, becomes true if it has
    /// come, and false if lanes give up.
    Wait(Poll, Option<RegisterSlot>),
    /// All lanes of the mask that have not exited execute it together.
    Together(Source<u32>, Execute),
    /// The threads of the block meet at a barrier.
    Barrier(Barrier),
}

/// `bar` (PTX ISA, section 9.7.13.1).
pub(crate) struct Barrier {
    pub(crate) number: Source<u32>,
    /// The number of threads that meet; None means all threads of the block.
    pub(crate) threads: Option<Source<u32>>,
    /// True if arriving threads wait (`sync`, `red`).
    pub(crate) waits: bool,
    pub(crate) reduction: Option<Reduction>,
}

/// The reduction of `bar.red` over a predicate of all threads.
pub(crate) struct Reduction {
    pub(crate) kind: ReductionKind,
    pub(crate) predicate: Condition,
    pub(crate) target: Target,
}

/// The target of a reduction.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    Predicate(RegisterSlot),
    Number(RegisterSlot),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReductionKind {
    And,
    Or,
    Count,
}

/// An instruction.
pub(crate) struct KernelStep {
    /// The predicate under which it runs.
    pub(crate) guard: Option<Condition>,
    pub(crate) action: Action,
    pub(crate) location: u32,
    /// The results to print after it.
    pub(crate) traced: Option<Box<Traced>>,
}

/// An instruction whose results are printed.
pub(crate) struct Traced {
    pub(crate) opcode: String,
    pub(crate) results: Vec<(Class, RegisterSlot)>,
}

/// A basic block: steps that execute in order, and the successor.
pub(crate) struct StepBlock {
    pub(crate) steps: Vec<KernelStep>,
    pub(crate) end: End,
    pub(crate) end_location: u32,
}

/// The successor of a basic block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Go(u32),
    /// Lanes in which the condition holds go to `taken`.
    Branch {
        condition: Condition,
        taken: u32,
        otherwise: u32,
    },
}

/// A kernel.
pub(crate) struct Code {
    pub(crate) name: String,
    /// Basic blocks. The index after the last one is the kernel's end.
    pub(crate) blocks: Vec<StepBlock>,
    pub(crate) slots: SlotCounts,
    /// Size and offset of each parameter.
    pub(crate) parameters: Vec<(u64, u64)>,
    pub(crate) parameter_bytes: u64,
    pub(crate) shared_bytes: u64,
    /// Bytes of local memory per thread.
    pub(crate) local_bytes: u64,
    pub(crate) max_threads: Option<[u32; 3]>,
    /// Blocks per cluster, if the kernel fixes them.
    pub(crate) cluster: Option<[u32; 3]>,
    /// Maximum registers of a thread, for `setmaxnreg`.
    pub(crate) max_registers: u32,
    pub(crate) locations: Vec<Location>,
    pub(crate) files: Vec<(u32, String)>,
}

/// Addresses of variables by name: offsets within their space, or device addresses for global variables.
pub(crate) type Symbols = HashMap<String, (Space, u64)>;

impl Code {
    /// Number of instructions in the kernel's text.
    pub(crate) fn instructions(&self) -> usize {
        self.blocks.iter().map(|block| block.steps.len() + 1).sum()
    }

    /// File and line of a location, and of the call into which it was inlined.
    pub(crate) fn describe(&self, location: u32) -> String {
        self.locations[location as usize].describe(&self.files)
    }
}
