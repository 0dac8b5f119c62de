//! The control flow of a kernel: basic blocks, and the registers that instructions read and write.

use crate::ptx::{Instruction, Kernel, Operand, Register, Statement};
use std::collections::HashMap;

/// A sequence of instructions that ends with a branch or before a label.
pub(crate) struct BasicBlock<'k> {
    pub(crate) instructions: Vec<&'k Instruction>,
    pub(crate) end: Exit,
    /// Source line of the branch.
    pub(crate) end_location: u32,
}

/// The exit of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Go(u32),
    Branch { predicate: Register, negated: bool, taken: u32, otherwise: u32 },
}

/// The basic blocks of a kernel in the order of its text. The index after the last one is the kernel's end.
pub(crate) struct Flow<'k> {
    pub(crate) blocks: Vec<BasicBlock<'k>>,
}

impl<'k> Flow<'k> {
    pub(crate) fn analyse(kernel: &'k Kernel) -> Result<Flow<'k>, String> {
        // Branches name labels until all blocks are known.
        let mut labels: HashMap<u32, u32> = HashMap::new();
        let mut open = Vec::new();
        let mut cut: Vec<(Vec<&Instruction>, Option<&Instruction>)> = Vec::new();
        for statement in &kernel.body {
            match statement {
                Statement::Label(label) => {
                    if !open.is_empty() {
                        cut.push((std::mem::take(&mut open), None));
                    }
                    labels.insert(*label, cut.len() as u32);
                }
                Statement::Instruction(instruction) => match instruction.parts()[0] {
                    "bra" | "ret" | "exit" => cut.push((std::mem::take(&mut open), Some(instruction))),
                    _ => open.push(instruction),
                },
            }
        }
        if !open.is_empty() {
            cut.push((open, None));
        }
        let end = cut.len() as u32;
        let mut blocks = Vec::with_capacity(cut.len());
        for (number, (instructions, last)) in cut.into_iter().enumerate() {
            let next = number as u32 + 1;
            let taken = match last.map(|last| (last, &last.operands[..])) {
                None => next,
                Some((_, [Operand::Label(label)])) => *labels
                    .get(label)
                    .ok_or_else(|| format!("{}: a branch to an undefined label", kernel.name))?,
                Some((_, [])) => end,
                Some((last, _)) => return Err(format!("{}: `{}` with operands", kernel.name, last.opcode)),
            };
            let exit = match last.and_then(|last| last.guard) {
                Some((predicate, negated)) => Exit::Branch { predicate, negated, taken, otherwise: next },
                None => Exit::Go(taken),
            };
            let end_location = last.or(instructions.last().copied()).map_or(0, |last| last.location);
            blocks.push(BasicBlock { instructions, end: exit, end_location });
        }
        Ok(Flow { blocks })
    }
}

impl Exit {
    /// The possible successors.
    pub(crate) fn targets(self) -> impl Iterator<Item = u32> {
        match self {
            Exit::Go(to) => [Some(to), None],
            Exit::Branch { taken, otherwise, .. } => [Some(taken), Some(otherwise)],
        }
        .into_iter()
        .flatten()
    }
}

/// True if the first operand is the destination.
fn has_result(instruction: &Instruction) -> bool {
    match instruction.parts()[..] {
        ["bar", "red", ..] => true,
        ["mbarrier", kind, ..] => ["arrive", "test_wait", "try_wait"].contains(&kind),
        ["wgmma", kind, ..] => kind == "mma_async",
        [first, ..] => ![
            "st",
            "red",
            "cp",
            "membar",
            "fence",
            "prefetch",
            "bar",
            "barrier",
            "setmaxnreg",
            "stmatrix",
            "griddepcontrol",
        ]
        .contains(&first),
        [] => false,
    }
}

/// True if the instruction reads and writes registers until the kernel waits for it.
pub(crate) fn is_asynchronous(instruction: &Instruction) -> bool {
    instruction.opcode.starts_with("wgmma.mma_async")
}

fn visit(operand: &Operand, see: &mut impl FnMut(Register)) {
    match operand {
        Operand::Register(register) | Operand::Not(register) => see(*register),
        Operand::Address(base, _) => visit(base, see),
        Operand::Vector(parts) => parts.iter().for_each(|part| visit(part, see)),
        Operand::Box(base, coordinates) => {
            visit(base, see);
            coordinates.iter().for_each(|coordinate| visit(coordinate, see));
        }
        Operand::Pair(first, second) => {
            visit(first, see);
            visit(second, see);
        }
        _ => {}
    }
}

/// Calls `read` and `write` with the registers of an instruction. A predicated instruction keeps the values
/// of other lanes, so it also reads its destination, and an asynchronous one may add to it.
pub(crate) fn registers_of(
    instruction: &Instruction,
    mut read: impl FnMut(Register),
    mut write: impl FnMut(Register),
) {
    if let Some((predicate, _)) = instruction.guard {
        read(predicate);
    }
    let results = usize::from(has_result(instruction)).min(instruction.operands.len());
    let (results, sources) = instruction.operands.split_at(results);
    sources.iter().for_each(|operand| visit(operand, &mut read));
    for result in results {
        if instruction.guard.is_some() || is_asynchronous(instruction) {
            visit(result, &mut read);
        }
        visit(result, &mut write);
    }
}
