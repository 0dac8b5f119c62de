//! Compiling a kernel of PTX to steps over allocated registers.

mod fences;
mod flow;
mod slots;

use crate::instructions::{Decoder, decode};
use crate::kernel::{Code, End, KernelStep, StepBlock, Symbols, Traced};
use crate::ptx::{Instruction, Kernel, Location, Module, Register, Space, Variable};
use crate::registers::RegisterSlot;
use flow::{Exit, Flow, registers_of};
use slots::{Allocation, allocate};

/// 32-bit registers of a multiprocessor.
const REGISTERS: u32 = 1 << 16;

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

    let flow = Flow::analyse(kernel)?;
    let Allocation { slots, counts } = allocate(kernel, &flow);
    let digits = module.target.trim_start_matches("sm_").trim_end_matches('a');
    let target = digits.parse().map_err(|_| format!("`{}` is not an architecture", module.target))?;
    let unfenced = fences::unfenced(kernel, &flow);
    let decoder = Decoder { kernel, slots: &slots, symbols: &symbols, target, unfenced: &unfenced };
    let mut blocks = Vec::with_capacity(flow.blocks.len());
    for block in &flow.blocks {
        let mut steps = Vec::with_capacity(block.instructions.len());
        for &instruction in &block.instructions {
            let place = || kernel.locations[instruction.location as usize].describe(&module.files);
            let decoded = decode(&decoder, instruction).map_err(|error| format!("{error}, {}", place()));
            let Some(action) = decoded? else { continue };
            let guard = instruction.guard.map(|(register, negated)| decoder.condition(register, negated));
            let traced = traced(module, kernel, instruction, &slots);
            steps.push(KernelStep { guard, action, location: instruction.location, traced });
        }
        let end = match block.end {
            Exit::Go(to) => End::Go(to),
            Exit::Branch { predicate, negated, taken, otherwise } => {
                End::Branch { condition: decoder.condition(predicate, negated), taken, otherwise }
            }
        };
        blocks.push(StepBlock { steps, end, end_location: block.end_location });
    }
    if !blocks.iter().any(|block| block.steps.iter().any(|step| step.traced.is_some())) {
        crate::trace::report_none(&kernel.name, &module.files);
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
        cluster: kernel.cluster,
        max_registers: max_registers(kernel),
        locations: kernel.locations.clone(),
        files: module.files.clone(),
    })
}

/// The instruction's trace, if it is of the line that the settings name.
fn traced(
    module: &Module,
    kernel: &Kernel,
    instruction: &Instruction,
    slots: &[RegisterSlot],
) -> Option<Box<Traced>> {
    let trace = crate::trace::wanted()?;
    let Location { file, line, inlined_at } = kernel.locations[instruction.location as usize];
    let is_line = |(number, line)| {
        line == trace.line && module.files.iter().any(|(of, name)| *of == number && *name == trace.file)
    };
    if !is_line((file, line)) && !inlined_at.is_some_and(is_line) {
        return None;
    }
    let mut results = Vec::new();
    let of = |Register(register): Register| (kernel.registers[register as usize], slots[register as usize]);
    registers_of(instruction, |_| {}, |register| results.push(of(register)));
    Some(Box::new(Traced { opcode: instruction.opcode.clone(), results }))
}

/// Assigns consecutive addresses to variables from `begin` on; returns the end.
fn lay_out<'v>(variables: impl Iterator<Item = &'v Variable>, begin: u64, symbols: &mut Symbols) -> u64 {
    variables.fold(begin, |at, variable| {
        let at = at.next_multiple_of(variable.align);
        symbols.insert(variable.name.clone(), (variable.space, at));
        at + variable.bytes
    })
}

/// The registers of a thread that ptxas may use, and that a launch of the largest block reserves.
fn max_registers(kernel: &Kernel) -> u32 {
    let threads = kernel.max_threads.map_or(1024, |threads| threads.iter().product());
    let fitting = REGISTERS / (threads * kernel.min_blocks).max(1) / 8 * 8;
    kernel.max_registers.unwrap_or(255).min(fitting)
}
