//! Compiling a kernel of PTX to steps over allocated registers.

mod flow;
mod slots;

use crate::instructions::{Decoder, decode};
use crate::kernel::{Block, Code, End, Step, Symbols};
use crate::ptx::{Kernel, Module, Space, Variable};
use flow::{Exit, Flow};
use slots::{Allocation, allocate};

/// Prepares `kernel` of `module`, whose global variables lie where `globals` says.
///
/// # Errors
/// The first instruction that is not emulated or that the target architecture lacks, by its opcode.
pub(crate) fn compile(module: &Module, kernel: &Kernel, globals: &Symbols) -> Result<Code, String> {
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
            Exit::Go(to) => End::Go(to),
            Exit::Branch { predicate, negated, taken, otherwise } => {
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

/// Assigns consecutive addresses to variables from `begin` on; returns the end.
fn lay_out<'v>(variables: impl Iterator<Item = &'v Variable>, begin: u64, symbols: &mut Symbols) -> u64 {
    variables.fold(begin, |at, variable| {
        let at = at.next_multiple_of(variable.align);
        symbols.insert(variable.name.clone(), (variable.space, at));
        at + variable.bytes
    })
}
