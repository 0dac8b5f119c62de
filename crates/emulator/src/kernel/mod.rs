//! A kernel prepared for execution: basic blocks of steps over allocated registers.

mod flow;
mod slots;

pub(crate) use flow::Flow;
pub(crate) use slots::{Allocation, allocate};

use crate::context::{Condition, Context, Source};
use crate::fault::Outcome;
use crate::instructions::{Decoder, decode};
use crate::ptx::{Kernel, Location, Module, Space, Variable};
use crate::registers::{Slot, SlotCounts};
use std::collections::HashMap;

/// The effect of a step on the active lanes of a warp.
pub(crate) type Execute = Box<dyn Fn(&mut Context<'_>) -> Outcome + Send + Sync>;

/// A step as the scheduler sees it.
pub(crate) enum Action {
    /// Each active lane executes it independently.
    Lanes(Execute),
    /// All lanes of the mask that have not exited execute it together.
    Together(Source<u32>, Execute),
    /// The threads of the block meet.
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

/// A basic block: steps that execute in order, and the successor.
pub(crate) struct Block {
    pub(crate) steps: Vec<Step>,
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
    pub(crate) blocks: Vec<Block>,
    pub(crate) slots: SlotCounts,
    /// Sizes of the parameters, and where each begins.
    pub(crate) parameters: Vec<(u64, u64)>,
    pub(crate) parameter_bytes: u64,
    pub(crate) shared_bytes: u64,
    /// Per thread.
    pub(crate) local_bytes: u64,
    pub(crate) max_threads: Option<[u32; 3]>,
    locations: Vec<Location>,
    files: Vec<(u32, String)>,
}

/// Addresses of variables by name: within their space, or of the device for global ones.
pub(crate) type Symbols = HashMap<String, (Space, u64)>;

/// Assigns consecutive addresses to variables from `begin` on; returns the end.
fn lay_out<'v>(variables: impl Iterator<Item = &'v Variable>, begin: u64, symbols: &mut Symbols) -> u64 {
    variables.fold(begin, |at, variable| {
        let at = at.next_multiple_of(variable.align);
        symbols.insert(variable.name.clone(), (variable.space, at));
        at + variable.bytes
    })
}

impl Code {
    /// Prepares `kernel` of `module`, whose global variables lie where `globals` says.
    ///
    /// # Errors
    /// The first instruction that is not emulated or that the target architecture lacks, by its opcode.
    pub(crate) fn new(module: &Module, kernel: &Kernel, globals: &Symbols) -> Result<Code, String> {
        let mut symbols = globals.clone();
        let of = |space: Space| {
            let all = kernel.variables.iter().chain(&module.variables);
            all.filter(move |variable| variable.space == space)
        };
        let parameter_bytes = lay_out(kernel.parameters.iter(), 0, &mut symbols);
        // Arrays without a size begin where dynamic shared memory does.
        let shared_bytes = lay_out(of(Space::Shared).filter(|v| v.bytes > 0), 0, &mut symbols);
        let dynamic: Vec<_> = of(Space::Shared).filter(|v| v.bytes == 0).collect();
        let align = dynamic.iter().map(|variable| variable.align).max().unwrap_or(1);
        let shared_bytes = shared_bytes.next_multiple_of(align);
        for variable in dynamic {
            symbols.insert(variable.name.clone(), (Space::Shared, shared_bytes));
        }
        let local_bytes = lay_out(of(Space::Local), 0, &mut symbols);

        let flow = Flow::of(kernel)?;
        let Allocation { slots, counts } = allocate(kernel, &flow);
        let digits = module.target.trim_start_matches("sm_").trim_end_matches('a');
        let target = digits.parse().map_err(|_| format!("`{}` is not an architecture", module.target))?;
        let decoder = Decoder { kernel, slots: &slots, symbols: &symbols, target };
        let mut blocks = Vec::with_capacity(flow.blocks.len());
        for block in &flow.blocks {
            let mut steps = Vec::with_capacity(block.instructions.len());
            for &instruction in &block.instructions {
                let Some(action) = decode(&decoder, instruction)? else { continue };
                let guard = instruction.guard.map(|(register, negated)| decoder.condition(register, negated));
                steps.push(Step { guard, action, location: instruction.location });
            }
            let end = match block.end {
                flow::Exit::Go(to) => End::Go(to),
                flow::Exit::Branch { predicate, negated, taken, otherwise } => {
                    End::Branch { condition: decoder.condition(predicate, negated), taken, otherwise }
                }
            };
            blocks.push(Block { steps, end, end_location: block.end_location });
        }
        let parameters = kernel.parameters.iter().map(|p| (symbols[&p.name].1, p.bytes)).collect();
        Ok(Code {
            name: kernel.name.clone(),
            blocks,
            slots: counts,
            parameters,
            parameter_bytes,
            shared_bytes,
            local_bytes,
            max_threads: kernel.max_threads,
            locations: kernel.locations.clone(),
            files: module.files.clone(),
        })
    }

    /// The number of instructions in its text.
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
