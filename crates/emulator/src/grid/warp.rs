//! A warp's turn: its lanes diverge, run to the end of their basic blocks, wait for one another and converge.

use super::barrier::Barriers;
use super::group::{Group, Place, Waits, merge};
use crate::fault::{Fault, FaultKind, Outcome};
use crate::kernel::context::{Context, Launch, PendingCopies, Position, Source};
use crate::kernel::{Action, Code, End, Execute};
use crate::memory::Local;
use crate::registers::{LANES, Registers};
use std::collections::HashSet;

/// A warp of a resident block.
pub(super) struct Warp {
    pub(super) registers: Registers,
    pub(super) local: Local,
    pub(super) copies: Vec<PendingCopies>,
    pub(super) groups: Vec<Group>,
    pub(super) first_thread: u32,
    /// Hashes of its states since memory last changed.
    pub(super) states: HashSet<u64>,
    /// True if a state occurred twice: the warp spins.
    pub(super) spins: bool,
    pub(super) is_listed: bool,
}

impl Warp {
    pub(super) fn new(code: &Code) -> Warp {
        Warp {
            registers: Registers::new(code.slots),
            local: Local::new(LANES * code.local_bytes as usize),
            copies: Vec::new(),
            groups: Vec::new(),
            first_thread: 0,
            states: HashSet::new(),
            spins: false,
            is_listed: false,
        }
    }

    /// Resets the warp for another block and reuses its allocations.
    pub(super) fn emptied(mut self) -> Warp {
        self.registers.forget();
        self.local.forget();
        self.copies.clear();
        self.states.clear();
        Warp { spins: false, is_listed: false, ..self }
    }

    /// True if registers and places equal those of an earlier turn, so the warp loops until memory changes.
    pub(super) fn has_been_here(&mut self) -> bool {
        let groups =
            self.groups.iter().map(|group| u64::from(group.place.0) << 32 | u64::from(group.place.1));
        let state = groups.fold(self.registers.fingerprint(), |sum, place| sum.rotate_left(9) ^ place);
        !self.states.insert(state)
    }

    /// The lanes that have not exited.
    pub(super) fn live(&self) -> u32 {
        self.groups.iter().fold(0, |all, group| all | group.lanes)
    }

    pub(super) fn can_run(&self) -> bool {
        self.groups.iter().any(|group| group.waits == Waits::Nothing)
    }
}

/// A fault and its place in the source.
pub(super) struct Failure {
    pub(super) fault: Box<Fault>,
    pub(super) location: u32,
}

/// A warp's turn.
pub(super) struct Turn<'a> {
    pub(super) launch: &'a Launch<'a>,
    pub(super) block: [u32; 3],
    pub(super) shared: &'a Local,
    pub(super) barriers: &'a mut Barriers,
    /// True if global or shared memory changed.
    pub(super) changed: bool,
    /// True if local memory changed.
    pub(super) changed_local: bool,
    pub(super) steps: u64,
}

impl Turn<'_> {
    /// Runs `warp` for about `budget` steps, or until it waits. The lanes furthest ahead run first if `ahead`
    /// is set, else those furthest back.
    pub(super) fn run(&mut self, warp: &mut Warp, budget: u64, ahead: bool) -> Result<(), Failure> {
        let Warp { registers, local, copies, groups, first_thread, .. } = warp;
        let mut cx = Context {
            launch: self.launch,
            registers,
            active: 0,
            position: Position { block: self.block, first_thread: *first_thread },
            shared: self.shared,
            local,
            copies,
            changed: false,
            changed_local: false,
        };
        while self.steps < budget && self.barriers.complete.is_empty() {
            merge(groups);
            let is_ready = |group: &Group| group.waits == Waits::Nothing;
            let index =
                if ahead { groups.iter().rposition(is_ready) } else { groups.iter().position(is_ready) };
            let Some(index) = index else { break };
            let group = groups.swap_remove(index);
            self.run_block(&mut cx, group, groups)?;
        }
        merge(groups);
        (self.changed, self.changed_local) = (cx.changed, cx.changed_local);
        Ok(())
    }

    /// Runs a group to the end of its basic block and returns it, or the groups into which it splits, to
    /// `groups`.
    fn run_block(
        &mut self,
        cx: &mut Context<'_>,
        mut group: Group,
        groups: &mut Vec<Group>,
    ) -> Result<(), Failure> {
        let Some(block) = self.launch.code.blocks.get(group.place.0 as usize) else {
            // End of the kernel: these lanes exit. Waiting lanes may have waited only for these.
            for other in groups.iter_mut().filter(|other| matches!(other.waits, Waits::Warp(_))) {
                other.waits = Waits::Nothing;
            }
            return Ok(());
        };
        let first = group.place.1 as usize;
        for (n, step) in block.steps.iter().enumerate().skip(first) {
            let at = |fault| Failure { fault, location: step.location };
            self.steps += 1;
            cx.active = group.lanes;
            if let Some(guard) = step.guard {
                cx.active = cx.decided(guard).map_err(at)?;
                if cx.active == 0 {
                    continue;
                }
            }
            match &step.action {
                Action::Lanes(execute) => execute(cx).map_err(at)?,
                Action::Together(members, execute) => {
                    let place = (group.place.0, n as u32);
                    if together(cx, *members, execute, place, &mut group, groups).map_err(at)? {
                        return Ok(());
                    }
                }
                Action::Barrier(barrier) => {
                    let place = (group.place.0, n as u32);
                    let waits = self.barriers.arrive(cx, barrier, place).map_err(at)?;
                    let Some(number) = waits else { continue };
                    if cx.active != group.lanes {
                        groups.push(Group {
                            place: (place.0, place.1 + 1),
                            lanes: group.lanes & !cx.active,
                            ..group
                        });
                    }
                    groups.push(Group { place, lanes: cx.active, waits: Waits::Barrier(number) });
                    return Ok(());
                }
            }
        }
        let at = |fault| Failure { fault, location: block.end_location };
        self.steps += 1;
        cx.active = group.lanes;
        match block.end {
            End::Go(to) => group.place = (to, 0),
            End::Branch { condition, taken, otherwise } => {
                let goes = cx.decided(condition).map_err(at)?;
                let stays = group.lanes & !goes;
                group.place = (if goes != 0 { taken } else { otherwise }, 0);
                group.lanes = if goes != 0 { goes } else { stays };
                if goes != 0 && stays != 0 {
                    groups.push(Group { place: (otherwise, 0), lanes: stays, waits: Waits::Nothing });
                }
            }
        }
        groups.push(group);
        Ok(())
    }
}

/// Executes a warp-wide instruction in those lanes of a group that have the same mask, once all lanes of the
/// mask are there. Returns true if the group waits or has moved on; its lanes are then among `groups`.
fn together(
    cx: &mut Context<'_>,
    members: Source<u32>,
    execute: &Execute,
    place: Place,
    group: &mut Group,
    groups: &mut Vec<Group>,
) -> Outcome<bool> {
    // Lanes with a different mask execute it separately.
    let (mask, others) = match members {
        Source::Constant(mask) => (mask, 0),
        members => {
            let members = cx.value(members)?;
            let mask = members[cx.active.trailing_zeros() as usize];
            let differs = |lane: usize| u32::from(members[lane] != mask) << lane;
            (mask, (0..LANES).map(differs).sum())
        }
    };
    if cx.active & others != 0 {
        cx.active &= !others;
        groups.push(Group { place, lanes: group.lanes & !cx.active, ..*group });
        group.lanes = cx.active;
    }
    let live = groups.iter().fold(group.lanes, |all, group| all | group.lanes);
    let needed = mask & live;
    let unnamed = cx.active & !needed;
    if unnamed != 0 {
        let problem = format!("the mask {mask:#x} does not contain the lane itself");
        return Err(Fault::new(unnamed.trailing_zeros(), FaultKind::Synchronisation, problem));
    }
    if cx.active == needed {
        execute(cx)?;
        return Ok(false);
    }
    // Lanes that already wait here with this mask.
    let waits = Waits::Warp(mask);
    let is_here = |other: &Group| other.place == place && other.waits == waits;
    let here = groups.iter().filter(|other| is_here(other)).fold(cx.active, |all, other| all | other.lanes);
    let next = (place.0, place.1 + 1);
    if cx.active != group.lanes {
        groups.push(Group { place: next, lanes: group.lanes & !cx.active, ..*group });
    }
    groups.retain(|other| !is_here(other));
    if here & needed == needed {
        cx.active = needed;
        execute(cx)?;
        groups.push(Group { place: next, lanes: here, waits: Waits::Nothing });
    } else {
        groups.push(Group { place, lanes: here, waits });
    }
    Ok(true)
}
