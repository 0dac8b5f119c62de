//! `wgmma` that lack a `wgmma.fence` (PTX ISA, section 9.7.15): on some path to them there is none, or other
//! instructions read or write their accumulators or their registers of A after the last one.

use super::flow::{Flow, is_asynchronous, registers_of};
use super::slots::Set;
use crate::ptx::{Class, Instruction, Kernel, Operand, Register};
use std::collections::HashSet;

/// The instructions that lack a fence.
pub(super) fn unfenced(kernel: &Kernel, flow: &Flow<'_>) -> HashSet<*const Instruction> {
    let mut found = HashSet::new();
    if !flow.blocks.iter().flat_map(|block| &block.instructions).any(|step| is_asynchronous(step)) {
        return found;
    }
    // Registers that were used since the last fence; the last element stands for a kernel without one.
    let none_yet = Register(kernel.registers.len() as u32);
    let mut used = vec![Set::new(kernel.registers.len() + 1); flow.blocks.len()];
    used[0].insert(none_yet);
    let mut left: Vec<usize> = (0..flow.blocks.len()).collect();
    while let Some(n) = left.pop() {
        let mut set = used[n].clone();
        for &instruction in &flow.blocks[n].instructions {
            if instruction.opcode.starts_with("wgmma.fence") {
                set = Set::new(kernel.registers.len() + 1);
            } else if is_asynchronous(instruction) {
                let mut lacks = set.contains(none_yet);
                let is_number = |Register(n): Register| kernel.registers[n as usize] == Class::B32;
                registers_of(instruction, |r| lacks |= is_number(r) && set.contains(r), |_| {});
                if lacks {
                    found.insert(std::ptr::from_ref(instruction));
                }
            } else if let ("mov", [Operand::Register(to), Operand::Register(from)]) =
                (instruction.parts()[0], &instruction.operands[..])
            {
                // The compiler copies accumulators from one `wgmma` to the next.
                if set.contains(*from) { set.insert(*to) } else { set.remove(*to) }
            } else {
                registers_of(instruction, |register| set.insert(register), |_| {});
                registers_of(instruction, |_| {}, |register| set.insert(register));
            }
        }
        for target in flow.blocks[n].end.targets().map(|target| target as usize) {
            if target < flow.blocks.len() && used[target].add(&set) {
                left.push(target);
            }
        }
    }
    found
}
