//! A warp's turn: its lanes diverge, run to the end of their basic blocks, wait for one another and converge.

use super::barrier::Barriers;
use super::group::{LaneGroup, Place, Waits, merge};
use crate::fault::{FaultKind, Outcome, ThreadFault};
use crate::instructions::advance_wgmma;
use crate::kernel::cluster::{Awaited, Cluster, ClusterEvent};
use crate::kernel::context::{Asynchronous, CommitGroups, Launch, Position, Source, WarpContext};
use crate::kernel::{Action, Code, End, Execute, Poll};
use crate::memory::Local;
use crate::races::Races;
use crate::random::Random;
use crate::registers::{LANES, RegisterSlot, Registers, lanes_of};
use crate::trace;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

/// One in this many checks of an mbarrier fails although the phase may end soon, as a real wait may time out.
const CHECKS_THAT_FAIL: usize = 4;

/// A warp of a resident block.
pub(super) struct Warp {
    pub(super) registers: Registers,
    pub(super) local: Local,
    pub(super) asynchronous: Asynchronous,
    pub(super) groups: Vec<LaneGroup>,
    /// Rank of the block in its cluster.
    pub(super) rank: u32,
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
            asynchronous: Asynchronous::default(),
            groups: Vec::new(),
            rank: 0,
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
        self.states.clear();
        Warp { asynchronous: Asynchronous::default(), spins: false, is_listed: false, ..self }
    }

    /// True if registers and groups equal those of an earlier turn, so the warp loops until memory changes. A
    /// group that has begun to wait is another one.
    pub(super) fn has_been_here(&mut self) -> bool {
        let mut state = DefaultHasher::new();
        self.registers.fingerprint().hash(&mut state);
        self.groups.hash(&mut state);
        !self.states.insert(state.finish())
    }

    /// The lanes that have not exited.
    pub(super) fn live(&self) -> u32 {
        self.groups.iter().fold(0, |all, group| all | group.lanes)
    }

    /// The first thread of the warp, with lanes that wait at a barrier of the block.
    pub(super) fn waiting_at(&self, barrier: usize) -> impl Iterator<Item = (u32, u32)> + '_ {
        let waiting = self.groups.iter().filter(move |group| group.waits == Waits::Barrier(barrier));
        waiting.map(|group| (self.first_thread, group.lanes))
    }

    pub(super) fn can_run(&self) -> bool {
        self.groups.iter().any(|group| group.waits == Waits::Nothing)
    }

    /// Lets lanes check again that wait for an event.
    pub(super) fn wake(&mut self, event: ClusterEvent) {
        if event == ClusterEvent::Cluster {
            self.asynchronous.arrived_now = 0;
        }
        self.release(None, |awaited, rank| match (awaited, event) {
            (Awaited::Mbarrier(at, _), ClusterEvent::Mbarrier(of)) => at == of,
            (Awaited::Cluster, ClusterEvent::Cluster) | (Awaited::Launch, ClusterEvent::Launch) => true,
            (Awaited::Registers, ClusterEvent::Registers(of)) => rank == of,
            _ => false,
        });
    }

    /// Lets lanes go on that wait for a phase, as if they had waited too long; true if there are some.
    pub(super) fn give_up(&mut self, code: &Code) -> bool {
        self.release(Some(code), |awaited, _| matches!(awaited, Awaited::Mbarrier(..)))
    }

    /// Lets lanes check again, or go on with a predicate that is false.
    fn release(&mut self, gives_up: Option<&Code>, goes: impl Fn(Awaited, u32) -> bool) -> bool {
        let mut some = false;
        for group in &mut self.groups {
            let Waits::Event(awaited) = group.waits else { continue };
            if !goes(awaited, self.rank) {
                continue;
            }
            (group.waits, some) = (Waits::Nothing, true);
            let step =
                gives_up.map(|code| &code.blocks[group.place.0 as usize].steps[group.place.1 as usize]);
            if let Some(Action::Wait(_, Some(done))) = step.map(|step| &step.action) {
                self.registers.write_predicate(*done, 0, 0, group.lanes);
                group.place.1 += 1;
            }
        }
        merge(&mut self.groups);
        some
    }
}

/// A fault and its place in the source.
pub(super) struct WarpFailure {
    pub(super) fault: Box<ThreadFault>,
    pub(super) location: u32,
}

impl WarpFailure {
    /// A fault of a step at this place, unless the fault names another one.
    fn new(fault: Box<ThreadFault>, location: u32) -> WarpFailure {
        WarpFailure { location: fault.location.unwrap_or(location), fault }
    }

    /// Adds to the use of an uninitialised value what may not have been waited for.
    fn explained(mut self, cx: &WarpContext<'_>) -> WarpFailure {
        if self.fault.kind != FaultKind::Uninitialised {
            return self;
        }
        if let Some(wgmma) = cx.asynchronous.wgmma.all().next() {
            let place = cx.launch.code.describe(wgmma.location);
            self.fault.problem += &format!("; the warp has not waited for its `wgmma` of {place}");
        } else if cx.launch.may_wait.get() {
            self.fault.problem +=
                "; the launch before this one, for which `griddepcontrol.wait` waits, has not ended";
        }
        self
    }
}

/// A warp's turn.
pub(super) struct Turn<'a> {
    pub(super) launch: &'a Launch<'a>,
    pub(super) block: [u32; 3],
    pub(super) shared: &'a [Local],
    pub(super) barriers: &'a mut Barriers,
    pub(super) races: Option<&'a mut Races>,
    /// True if global or shared memory changed.
    pub(super) changed: bool,
    /// True if local memory changed.
    pub(super) changed_local: bool,
    /// True if the turn ends after a signal to other warps.
    pub(super) has_signalled: bool,
    pub(super) steps: u64,
}

impl Turn<'_> {
    /// Runs `warp` for about `budget` steps, or until it waits. The lanes furthest ahead run first if `ahead`
    /// is set, else those furthest back.
    pub(super) fn run(
        &mut self,
        warp: &mut Warp,
        cluster: &mut Cluster,
        random: &mut Random,
        [budget, ahead]: [u64; 2],
    ) -> Result<(), WarpFailure> {
        let Warp { registers, local, asynchronous, groups, rank, first_thread, .. } = warp;
        let mut cx = WarpContext {
            launch: self.launch,
            registers,
            active: 0,
            position: Position { block: self.block, first_thread: *first_thread, rank: *rank },
            shared: self.shared,
            cluster,
            local,
            asynchronous,
            random,
            races: self.races.take(),
            changed: false,
            changed_local: false,
        };
        while cx.asynchronous.wgmma.all().next().is_some() && cx.random.below(2) == 0 {
            cx.active = u32::MAX;
            advance_wgmma(&mut cx).map_err(|fault| WarpFailure::new(fault, 0))?;
        }
        while self.steps < budget && !self.has_signalled && self.barriers.complete.is_empty() {
            merge(groups);
            let is_ready = |group: &LaneGroup| group.waits == Waits::Nothing;
            let index =
                if ahead != 0 { groups.iter().rposition(is_ready) } else { groups.iter().position(is_ready) };
            let Some(index) = index else { break };
            let group = groups.swap_remove(index);
            self.run_block(&mut cx, group, groups).map_err(|failure| failure.explained(&cx))?;
        }
        merge(groups);
        (self.changed, self.changed_local) = (cx.changed, cx.changed_local);
        Ok(())
    }

    /// Runs a group to the end of its basic block and returns it, or the groups into which it splits, to
    /// `groups`.
    fn run_block(
        &mut self,
        cx: &mut WarpContext<'_>,
        mut group: LaneGroup,
        groups: &mut Vec<LaneGroup>,
    ) -> Result<(), WarpFailure> {
        let Some(block) = self.launch.code.blocks.get(group.place.0 as usize) else {
            // End of the kernel: these lanes exit. Waiting lanes may have waited only for these.
            for other in groups.iter_mut().filter(|other| matches!(other.waits, Waits::Warp(_))) {
                other.waits = Waits::Nothing;
            }
            check_exit(cx, group.lanes)?;
            cx.cluster.live_threads -= group.lanes.count_ones();
            cx.cluster.settle_barrier();
            return Ok(());
        };
        let first = group.place.1 as usize;
        for (n, step) in block.steps.iter().enumerate().skip(first) {
            let at = |fault| WarpFailure::new(fault, step.location);
            let (here, next) = ((group.place.0, n as u32), (group.place.0, n as u32 + 1));
            self.steps += 1;
            cx.active = group.lanes;
            cx.observe(|races, _| races.location = step.location);
            if let Some(guard) = step.guard {
                cx.active = cx.decided(guard).map_err(at)?;
                if cx.active == 0 {
                    continue;
                }
            }
            match &step.action {
                Action::Lanes(execute) => execute(cx).map_err(at)?,
                Action::Together(members, execute) => {
                    if together(cx, *members, execute, here, &mut group, groups).map_err(at)? {
                        return Ok(());
                    }
                }
                Action::Barrier(barrier) => {
                    let waits = self.barriers.arrive(cx, barrier, here).map_err(at)?;
                    let Some(number) = waits else { continue };
                    if cx.active != group.lanes {
                        groups.push(LaneGroup { place: next, lanes: group.lanes & !cx.active, ..group });
                    }
                    groups.push(LaneGroup { place: here, lanes: cx.active, waits: Waits::Barrier(number) });
                    return Ok(());
                }
                Action::Signal(execute) => {
                    execute(cx).map_err(at)?;
                    // The others often go on before the warp does, so that what it does too late shows.
                    self.has_signalled = cx.random.below(2) == 0;
                }
                Action::Wait(poll, done) => {
                    let skip = group.lanes & !cx.active;
                    let waits = checked(cx, poll, *done, here, groups).map_err(at)?;
                    group.lanes = skip | if waits { 0 } else { cx.active };
                    if group.lanes == 0 {
                        return Ok(());
                    }
                }
            }
            if let Some(traced) = &step.traced {
                trace::print(cx, traced, step.location).map_err(at)?;
            }
            if self.has_signalled {
                groups.push(LaneGroup { place: next, ..group });
                return Ok(());
            }
        }
        let at = |fault| WarpFailure::new(fault, block.end_location);
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
                    groups.push(LaneGroup { place: (otherwise, 0), lanes: stays, waits: Waits::Nothing });
                }
            }
        }
        groups.push(group);
        Ok(())
    }
}

/// A fault if lanes exit without a wait for asynchronous work that uses registers or shared memory.
fn check_exit(cx: &WarpContext<'_>, lanes: u32) -> Result<(), WarpFailure> {
    let Asynchronous { wgmma, bulk, .. } = &*cx.asynchronous;
    let wgmma = wgmma.all().next().map(|wgmma| (lanes.trailing_zeros() as usize, wgmma.location));
    let mut stores = lanes_of(lanes).flat_map(|lane| {
        bulk.get(lane).into_iter().flat_map(CommitGroups::all).map(move |store| (lane, store))
    });
    let store = stores.find(|(_, store)| !store.is_read).map(|(lane, store)| (lane, store.location));
    let Some((lane, location)) = wgmma.or(store) else { return Ok(()) };
    let problem = match wgmma {
        Some(_) => "exits without `wgmma.wait_group` for this `wgmma`",
        None => "exits without `cp.async.bulk.wait_group.read` for this copy, which reads its shared memory",
    };
    let fault = ThreadFault::new(lane as u32, FaultKind::Synchronisation, problem);
    Err(WarpFailure { fault, location })
}

/// Checks what active lanes wait for. Those that wait for something else check it later. Returns true if the
/// active lanes wait, and are among `groups`.
fn checked(
    cx: &mut WarpContext<'_>,
    poll: &Poll,
    done: Option<RegisterSlot>,
    place: Place,
    groups: &mut Vec<LaneGroup>,
) -> Outcome<bool> {
    let all = cx.active;
    let awaited = poll(cx)?;
    let others = all & !cx.active;
    if others != 0 {
        groups.push(LaneGroup { place, lanes: others, waits: Waits::Nothing });
    }
    let Some(awaited) = awaited else { return Ok(false) };
    if let Some(done) = done
        && cx.random.below(CHECKS_THAT_FAIL) == 0
    {
        cx.write_predicate(done, 0, 0);
        return Ok(false);
    }
    groups.push(LaneGroup { place, lanes: cx.active, waits: Waits::Event(awaited) });
    Ok(true)
}

/// Executes a warp-wide instruction in those lanes of a group that have the same mask, once all lanes of the
/// mask are there. Returns true if the group waits or has moved on; its lanes are then among `groups`.
fn together(
    cx: &mut WarpContext<'_>,
    members: Source<u32>,
    execute: &Execute,
    place: Place,
    group: &mut LaneGroup,
    groups: &mut Vec<LaneGroup>,
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
        groups.push(LaneGroup { place, lanes: group.lanes & !cx.active, ..*group });
        group.lanes = cx.active;
    }
    let live = groups.iter().fold(group.lanes, |all, group| all | group.lanes);
    let needed = mask & live;
    let unnamed = cx.active & !needed;
    if unnamed != 0 {
        let problem = format!("the mask {mask:#x} does not contain the lane itself");
        return Err(ThreadFault::new(unnamed.trailing_zeros(), FaultKind::Synchronisation, problem));
    }
    if cx.active == needed {
        execute(cx)?;
        return Ok(false);
    }
    // Lanes that already wait here with this mask.
    let waits = Waits::Warp(mask);
    let is_here = |other: &LaneGroup| other.place == place && other.waits == waits;
    let here = groups.iter().filter(|other| is_here(other)).fold(cx.active, |all, other| all | other.lanes);
    let next = (place.0, place.1 + 1);
    if cx.active != group.lanes {
        groups.push(LaneGroup { place: next, lanes: group.lanes & !cx.active, ..*group });
    }
    groups.retain(|other| !is_here(other));
    if here & needed == needed {
        cx.active = needed;
        execute(cx)?;
        groups.push(LaneGroup { place: next, lanes: here, waits: Waits::Nothing });
    } else {
        groups.push(LaneGroup { place, lanes: here, waits });
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registers::SlotCounts;

    #[test]
    fn lanes_that_begin_to_wait_have_not_been_here() {
        let mut warp = Warp {
            registers: Registers::new(SlotCounts::default()),
            local: Local::new(0),
            asynchronous: Asynchronous::default(),
            groups: vec![LaneGroup { place: (1, 0), lanes: 0xff, waits: Waits::Nothing }],
            rank: 0,
            first_thread: 0,
            states: HashSet::new(),
            spins: false,
            is_listed: false,
        };
        assert!(!warp.has_been_here());
        assert!(warp.has_been_here());
        warp.groups[0].waits = Waits::Warp(u32::MAX);
        assert!(!warp.has_been_here(), "a shuffle waits for other lanes, which have run or will");
        warp.groups[0].lanes = 0xffff;
        assert!(!warp.has_been_here());
    }
}
