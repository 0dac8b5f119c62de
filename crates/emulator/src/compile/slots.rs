//! Allocation of registers to slots. Registers whose live ranges do not overlap share a slot, so that a
//! warp's registers fit into the CPU's cache.
//!
//! Lanes may stand at different places of a kernel. Each follows the control flow by itself and writes only
//! its own values, so the liveness of registers in straight execution holds for every lane.

use super::flow::{Exit, Flow, is_asynchronous, registers_of};
use crate::ptx::{Class, Kernel, Register};
use crate::registers::{RegisterSlot, SlotCounts};

/// The slot of each register of a kernel.
pub(crate) struct Allocation {
    pub(crate) slots: Vec<RegisterSlot>,
    pub(crate) counts: SlotCounts,
}

/// A set of registers.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Set(Vec<u64>);

impl Set {
    pub(super) fn new(count: usize) -> Set {
        Set(vec![0; count.div_ceil(64)])
    }

    pub(super) fn insert(&mut self, Register(n): Register) {
        self.0[n as usize / 64] |= 1 << (n % 64);
    }

    pub(super) fn remove(&mut self, Register(n): Register) {
        self.0[n as usize / 64] &= !(1 << (n % 64));
    }

    /// Adds the elements of another set; true if some are new.
    pub(super) fn add(&mut self, other: &Set) -> bool {
        let before = self.clone();
        self.0.iter_mut().zip(&other.0).for_each(|(word, other)| *word |= other);
        *self != before
    }

    pub(super) fn contains(&self, Register(n): Register) -> bool {
        self.0[n as usize / 64] >> (n % 64) & 1 != 0
    }

    fn elements(&self) -> impl Iterator<Item = usize> + '_ {
        let bits = |word: u64| (0..64).filter(move |bit| word >> bit & 1 != 0);
        self.0.iter().enumerate().flat_map(move |(n, &word)| bits(word).map(move |bit| 64 * n + bit))
    }
}

/// A linear scan (Poletto & Sarkar, TOPLAS 1999) over the intervals in which registers are live.
pub(crate) fn allocate(kernel: &Kernel, flow: &Flow<'_>) -> Allocation {
    let intervals = intervals(kernel, flow);
    let mut order: Vec<usize> = (0..intervals.len()).filter(|&n| intervals[n].is_some()).collect();
    order.sort_by_key(|&n| intervals[n]);
    let (mut slots, mut counts) = (vec![RegisterSlot(0); intervals.len()], SlotCounts::default());
    // Slots in use with the end of their interval, and those given back, by class.
    let mut busy: [Vec<(usize, RegisterSlot)>; 4] = Default::default();
    let mut free: [Vec<RegisterSlot>; 4] = Default::default();
    for n in order {
        let Some((start, end)) = intervals[n] else { continue };
        let class = kernel.registers[n];
        let (busy, free) = (&mut busy[class as usize], &mut free[class as usize]);
        busy.retain(|&(until, slot)| {
            let is_busy = until >= start;
            if !is_busy {
                free.push(slot);
            }
            is_busy
        });
        let slot = free.pop().unwrap_or_else(|| {
            let count = counts.count_mut(class);
            *count += 1;
            RegisterSlot(*count as u16 - 1)
        });
        busy.push((end, slot));
        slots[n] = slot;
    }
    Allocation { slots, counts }
}

/// The live range of each register, from the first to the last instruction at which it has a value that is
/// still read.
fn intervals(kernel: &Kernel, flow: &Flow<'_>) -> Vec<Option<(usize, usize)>> {
    let count = kernel.registers.len();
    let (live_in, live_out) = liveness(count, flow);
    let mut intervals: Vec<Option<(usize, usize)>> = vec![None; count];
    let mut extend = |register: usize, at: usize| {
        let interval = intervals[register].get_or_insert((at, at));
        *interval = (interval.0.min(at), interval.1.max(at));
    };
    let (mut at, mut pinned) = (0, Vec::new());
    for (n, block) in flow.blocks.iter().enumerate() {
        live_in[n].elements().for_each(|register| extend(register, at));
        for instruction in &block.instructions {
            // A result gets another slot than an operand, because an instruction may write some lanes before
            // it reads others.
            let mut see = |register: Register| extend(register.0 as usize, at);
            let mut all = Vec::new();
            registers_of(instruction, &mut see, |register| all.push(register));
            if is_asynchronous(instruction) {
                // Its registers are in use until the kernel waits for it, so nothing else gets their slots.
                let is_number = |Register(n): Register| kernel.registers[n as usize] == Class::B32;
                registers_of(instruction, |r| pinned.extend(is_number(r).then_some(r)), |_| {});
            }
            all.into_iter().for_each(|register| extend(register.0 as usize, at));
            at += 1;
        }
        if let Exit::Branch { predicate, .. } = block.end {
            extend(predicate.0 as usize, at);
        }
        live_out[n].elements().for_each(|register| extend(register, at));
        at += 1;
    }
    for Register(register) in pinned {
        intervals[register as usize] = Some((0, at));
    }
    intervals
}

/// Liveness: the registers that are live at the start and at the end of each block.
fn liveness(count: usize, flow: &Flow<'_>) -> (Vec<Set>, Vec<Set>) {
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    for block in &flow.blocks {
        let (mut read, mut written) = (Set::new(count), Set::new(count));
        let see = |register: Register, read: &mut Set, written: &Set| {
            if !written.contains(register) {
                read.insert(register);
            }
        };
        for instruction in &block.instructions {
            let mut results = Vec::new();
            registers_of(instruction, |r| see(r, &mut read, &written), |r| results.push(r));
            results.into_iter().for_each(|register| written.insert(register));
        }
        if let Exit::Branch { predicate, .. } = block.end {
            see(predicate, &mut read, &written);
        }
        reads.push(read);
        writes.push(written);
    }
    let mut live_in = reads;
    let mut live_out = vec![Set::new(count); flow.blocks.len()];
    let mut has_changed = true;
    while has_changed {
        has_changed = false;
        for n in (0..flow.blocks.len()).rev() {
            for target in flow.blocks[n].end.targets().filter(|&t| (t as usize) < flow.blocks.len()) {
                for word in 0..live_out[n].0.len() {
                    let passed_on = live_in[target as usize].0[word];
                    let new = passed_on & !live_out[n].0[word];
                    if new != 0 {
                        live_out[n].0[word] |= new;
                        let before = live_in[n].0[word];
                        live_in[n].0[word] |= new & !writes[n].0[word];
                        has_changed |= live_in[n].0[word] != before;
                    }
                }
            }
        }
    }
    (live_in, live_out)
}
