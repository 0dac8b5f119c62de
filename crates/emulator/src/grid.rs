//! The execution of a launch: blocks, warps and lanes that diverge.
//!
//! Blocks start in the order of their numbers, a few for each multiprocessor at a time. Of the warps of these
//! blocks one is drawn at random, runs for a random number of steps, and then another. Of a warp's lanes that
//! diverged, those furthest back in the kernel's text usually run first, which makes them converge after a
//! branch; in some turns the others run first, so every lane makes progress. A launch ends with a fault if no
//! warp can run, or if all warps that can run repeat the same states.

use crate::fault::{Fault, FaultKind, Outcome, Report};
use crate::kernel::context::{Context, Launch, PendingCopies, Position, Source};
use crate::kernel::{Action, Barrier, Code, End, ReductionKind, Target};
use crate::memory::Local;
use crate::random::Random;
use crate::registers::{LANES, Registers};
use std::collections::HashSet;

/// Multiprocessors of an emulated device.
pub(crate) const MULTIPROCESSORS: usize = 8;
/// Maximum resident threads of a multiprocessor.
const THREADS: usize = 2048;
/// Maximum resident blocks of a multiprocessor. More would only take host memory.
const BLOCKS: usize = 2;
/// Barriers of a block.
const BARRIERS: usize = 16;

/// log2 of the maximum steps in a turn.
const LONGEST_TURN: usize = 10;
/// One of this many turns begins with the lanes that are furthest ahead.
const TURNS_OF_LANES_AHEAD: usize = 16;
/// Steps without a change of memory after which warps are checked for repeated states.
const IDLE_STEPS: u64 = 100_000;
/// Steps without a change of memory that count as an endless loop.
const ENDLESS_STEPS: u64 = 200_000_000;

/// A place in a kernel: basic block and step.
type Place = (u32, u32);

/// Lanes of a warp at the same place.
#[derive(Clone, Copy, Debug)]
struct Group {
    place: Place,
    lanes: u32,
    waits: Waits,
}

/// The reason why lanes do not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Waits {
    /// They run.
    Nothing,
    /// They wait for other lanes of their warp, those of this mask.
    Warp(u32),
    /// They wait at a barrier of their block.
    Barrier(usize),
}

/// A warp of a resident block.
struct Warp {
    registers: Registers,
    local: Local,
    copies: Vec<PendingCopies>,
    groups: Vec<Group>,
    first_thread: u32,
    /// States that it was in since memory last changed.
    states: HashSet<u64>,
    /// True if it was in one of them twice: it spins.
    spins: bool,
    is_listed: bool,
}

impl Warp {
    fn new(code: &Code) -> Warp {
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
    fn emptied(mut self) -> Warp {
        self.registers.forget();
        self.local.forget();
        self.copies.clear();
        self.states.clear();
        Warp { spins: false, is_listed: false, ..self }
    }

    /// True if registers and places equal those of an earlier turn, so the warp loops until memory changes.
    fn has_been_here(&mut self) -> bool {
        let groups =
            self.groups.iter().map(|group| u64::from(group.place.0) << 32 | u64::from(group.place.1));
        let state = groups.fold(self.registers.fingerprint(), |sum, place| sum.rotate_left(9) ^ place);
        !self.states.insert(state)
    }

    /// The lanes that have not exited.
    fn live(&self) -> u32 {
        self.groups.iter().fold(0, |all, group| all | group.lanes)
    }

    fn can_run(&self) -> bool {
        self.groups.iter().any(|group| group.waits == Waits::Nothing)
    }
}

/// A barrier that some threads have reached.
#[derive(Clone, Copy, Default)]
struct Arrivals {
    threads: u32,
    place: Option<Place>,
    /// Threads whose predicate holds.
    holding: u32,
}

/// A block that runs.
struct Resident {
    number: [u32; 3],
    shared: Local,
    warps: Vec<Warp>,
    barriers: [Arrivals; BARRIERS],
}

/// A fault and its place in the source.
struct Failure {
    fault: Box<Fault>,
    location: u32,
}

/// Runs a launch to its end; returns the number of warp instructions.
pub(crate) fn run(launch: &Launch<'_>, random: &mut Random) -> Result<u64, Report> {
    let threads = launch.block.iter().product::<u32>() as usize;
    let at_once = MULTIPROCESSORS * (THREADS / threads.max(1)).clamp(1, BLOCKS);
    let mut grid = Grid {
        launch,
        resident: (0..at_once).map(|_| None).collect(),
        runnable: Vec::new(),
        spare: Vec::new(),
        next_block: 0,
        steps: 0,
        idle_steps: 0,
    };
    (0..at_once).for_each(|r| grid.start_block(r));
    while grid.resident.iter().any(Option::is_some) {
        grid.turn(random)?;
    }
    Ok(grid.steps)
}

struct Grid<'a> {
    launch: &'a Launch<'a>,
    /// Blocks that run.
    resident: Vec<Option<Resident>>,
    /// Warps that can run, by block and number; each knows that it is listed.
    runnable: Vec<(usize, usize)>,
    /// Warps of blocks that have ended, for blocks to come.
    spare: Vec<Warp>,
    next_block: u64,
    steps: u64,
    /// Steps since memory last changed.
    idle_steps: u64,
}

impl Grid<'_> {
    /// Starts the next block, if any, in a free place.
    fn start_block(&mut self, r: usize) {
        let Launch { code, grid, block, shared_bytes, .. } = *self.launch;
        let n = self.next_block;
        let [x, y, z] = grid.map(u64::from);
        if n == x * y * z {
            return;
        }
        self.next_block += 1;
        let threads = block.iter().product::<u32>();
        let warps = (0..threads).step_by(LANES).map(|first_thread| {
            let count = (threads - first_thread).min(LANES as u32);
            let mut warp = self.spare.pop().unwrap_or_else(|| Warp::new(code));
            warp.first_thread = first_thread;
            warp.groups.push(Group { place: (0, 0), lanes: u32::MAX >> (32 - count), waits: Waits::Nothing });
            warp
        });
        self.resident[r] = Some(Resident {
            warps: warps.collect(),
            number: [(n % x) as u32, (n / x % y) as u32, (n / x / y) as u32],
            shared: Local::new(shared_bytes as usize),
            barriers: [Arrivals::default(); BARRIERS],
        });
        self.list(r);
    }

    /// Lists the warps of a block that can run.
    fn list(&mut self, r: usize) {
        let Some(resident) = &mut self.resident[r] else { return };
        for (w, warp) in resident.warps.iter_mut().enumerate() {
            if warp.can_run() && !warp.spins && !warp.is_listed {
                warp.is_listed = true;
                self.runnable.push((r, w));
            }
        }
    }

    /// Runs a random warp for a random number of steps.
    fn turn(&mut self, random: &mut Random) -> Result<(), Report> {
        if self.runnable.is_empty() {
            return Err(self.stuck());
        }
        let chosen = random.below(self.runnable.len());
        let (r, w) = self.runnable[chosen];
        let budget = 1u64 << random.below(LONGEST_TURN + 1);
        let Some(resident) = &mut self.resident[r] else { unreachable!("listed warps are resident") };
        let mut turn = Turn {
            launch: self.launch,
            block: resident.number,
            threads: self.launch.block.iter().product(),
            shared: &resident.shared,
            barriers: &mut resident.barriers,
            released: Vec::new(),
            changed: false,
            changed_local: false,
            steps: 0,
        };
        let ahead = random.below(TURNS_OF_LANES_AHEAD) == 0;
        let result = turn.run(&mut resident.warps[w], budget, ahead);
        let Turn { released, changed, changed_local, steps, .. } = turn;
        result.map_err(|failure| report(self.launch, resident, w, failure))?;
        self.steps += steps;
        self.idle_steps += steps;
        if self.idle_steps > ENDLESS_STEPS && !changed && released.is_empty() {
            return Err(self.endless(r, w));
        }
        let Some(resident) = &mut self.resident[r] else { unreachable!("its warp just ran") };
        for &(barrier, count) in &released {
            release(self.launch, resident, barrier, count);
        }
        let warp = &mut resident.warps[w];
        warp.spins = self.idle_steps > IDLE_STEPS && !changed && !changed_local && warp.has_been_here();
        if warp.spins || !warp.can_run() {
            warp.is_listed = false;
            self.runnable.swap_remove(chosen);
        }
        let has_ended = resident.warps.iter().all(|warp| warp.groups.is_empty());
        if !released.is_empty() {
            self.list(r);
        }
        if changed || !released.is_empty() {
            if self.idle_steps > IDLE_STEPS {
                for warp in self.resident.iter_mut().flatten().flat_map(|resident| &mut resident.warps) {
                    warp.states.clear();
                    warp.spins = false;
                }
                (0..self.resident.len()).for_each(|r| self.list(r));
            }
            self.idle_steps = 0;
        }
        if has_ended {
            let ended = self.resident[r].take().map_or(Vec::new(), |resident| resident.warps);
            self.spare.extend(ended.into_iter().map(Warp::emptied));
            self.start_block(r);
        }
        Ok(())
    }

    /// The fault of a launch in which no warp can run.
    fn stuck(&self) -> Report {
        let waiting = self.resident.iter().flatten().flat_map(|resident| {
            let warps = resident.warps.iter().enumerate();
            warps.filter_map(move |(w, warp)| Some((resident, w, *warp.groups.first()?)))
        });
        // Threads at a barrier may wait for lanes that wait within their warp, so the latter are reported
        // first.
        let order = |waits| match waits {
            Waits::Warp(_) => 0,
            Waits::Barrier(_) => 1,
            Waits::Nothing => 2,
        };
        let (resident, w, group) = waiting
            .min_by_key(|(_, _, group)| order(group.waits))
            .expect("a block that is not over has lanes");
        let problem = match group.waits {
            Waits::Warp(_) => "waits for lanes of its warp that never execute this instruction".to_owned(),
            Waits::Barrier(n) => {
                let of = self.launch.block.iter().product::<u32>();
                let live: u32 = resident.warps.iter().map(|warp| warp.live().count_ones()).sum();
                let arrived = resident.barriers[n].threads;
                let gone = of - live;
                format!(
                    "waits at a barrier that some threads never reach ({arrived} of {of} have, {gone} have exited)"
                )
            }
            Waits::Nothing => "deadlock: polls memory that no other thread will change".to_owned(),
        };
        self.stopped(resident, w, group, problem)
    }

    /// The fault of a launch that runs without an effect; warp `w` of block `r` ran last.
    fn endless(&self, r: usize, w: usize) -> Report {
        let resident = self.resident[r].as_ref().expect("its warp just ran");
        let group = resident.warps[w].groups.first().copied();
        let group = group.unwrap_or(Group { place: (0, 0), lanes: 1, waits: Waits::Nothing });
        let millions = ENDLESS_STEPS / 1_000_000;
        let problem =
            format!("endless loop: {millions} million instructions of this launch changed no memory");
        self.stopped(resident, w, group, problem)
    }

    /// The fault of lanes that can never end.
    fn stopped(&self, resident: &Resident, w: usize, group: Group, problem: String) -> Report {
        let code = self.launch.code;
        let location = match code.blocks.get(group.place.0 as usize) {
            Some(block) => {
                block.steps.get(group.place.1 as usize).map_or(block.end_location, |step| step.location)
            }
            None => 0,
        };
        let fault = Fault::new(group.lanes.trailing_zeros(), FaultKind::Synchronisation, problem);
        report(self.launch, resident, w, Failure { fault, location })
    }
}

/// Releases the threads that wait at a barrier.
fn release(launch: &Launch<'_>, resident: &mut Resident, barrier: usize, threads: u32) {
    let Arrivals { holding, .. } = std::mem::take(&mut resident.barriers[barrier]);
    for warp in &mut resident.warps {
        for group in warp.groups.iter_mut().filter(|group| group.waits == Waits::Barrier(barrier)) {
            group.waits = Waits::Nothing;
            let step = &launch.code.blocks[group.place.0 as usize].steps[group.place.1 as usize];
            group.place.1 += 1;
            let Action::Barrier(Barrier { reduction: Some(reduction), .. }) = &step.action else { continue };
            let holds = match reduction.kind {
                ReductionKind::And => holding == threads,
                ReductionKind::Or | ReductionKind::Count => holding > 0,
            };
            match reduction.target {
                Target::Predicate(slot) => {
                    let all = if holds { u32::MAX } else { 0 };
                    warp.registers.write_predicate(slot, all, 0, group.lanes);
                }
                Target::Number(slot) => warp.registers.write(slot, &[holding; LANES], group.lanes),
            }
        }
        merge(&mut warp.groups);
    }
}

/// Joins lanes at the same place.
fn merge(groups: &mut Vec<Group>) {
    if groups.len() > 1 {
        groups.sort_by_key(|group| (group.place, group.waits));
        groups.dedup_by(|next, kept| {
            let is_same = next.place == kept.place && next.waits == kept.waits;
            if is_same {
                kept.lanes |= next.lanes;
            }
            is_same
        });
    }
}

fn report(launch: &Launch<'_>, resident: &Resident, warp: usize, failure: Failure) -> Report {
    let [x, y, _] = launch.block;
    let number = resident.warps[warp].first_thread + failure.fault.lane;
    Report {
        kind: failure.fault.kind,
        kernel: launch.code.name.clone(),
        location: launch.code.describe(failure.location),
        block: resident.number,
        thread: [number % x, number / x % y, number / x / y],
        problem: failure.fault.problem,
    }
}

/// A warp's turn.
struct Turn<'a> {
    launch: &'a Launch<'a>,
    block: [u32; 3],
    /// Threads of the block.
    threads: u32,
    shared: &'a Local,
    barriers: &'a mut [Arrivals; BARRIERS],
    /// Barriers that all their threads have reached, and how many these are.
    released: Vec<(usize, u32)>,
    /// True if global or shared memory changed.
    changed: bool,
    /// True if local memory changed.
    changed_local: bool,
    steps: u64,
}

impl Turn<'_> {
    /// Runs `warp` for about `budget` steps, or until it waits; the lanes furthest `ahead` first, or those
    /// furthest back.
    fn run(&mut self, warp: &mut Warp, budget: u64, ahead: bool) -> Result<(), Failure> {
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
        while self.steps < budget && self.released.is_empty() {
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

    /// Runs a group to the end of its basic block and puts it, or the groups into which it splits, back.
    fn run_block(
        &mut self,
        cx: &mut Context<'_>,
        mut group: Group,
        groups: &mut Vec<Group>,
    ) -> Result<(), Failure> {
        let Some(block) = self.launch.code.blocks.get(group.place.0 as usize) else {
            // The kernel's end: these lanes exit. Waiting lanes may have waited only for these.
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
                    // Lanes with a different mask execute it separately.
                    let (mask, others) = match *members {
                        Source::Constant(mask) => (mask, 0),
                        members => {
                            let members = cx.value(members).map_err(at)?;
                            let mask = members[cx.active.trailing_zeros() as usize];
                            let differs = |lane: usize| u32::from(members[lane] != mask) << lane;
                            (mask, (0..LANES).map(differs).sum())
                        }
                    };
                    if cx.active & others != 0 {
                        cx.active &= !others;
                        groups.push(Group { place, lanes: group.lanes & !cx.active, ..group });
                        group.lanes = cx.active;
                    }
                    let live = groups.iter().fold(group.lanes, |all, group| all | group.lanes);
                    let needed = mask & live;
                    let unnamed = cx.active & !needed;
                    if unnamed != 0 {
                        let problem = format!("the mask {mask:#x} does not contain the lane itself");
                        let lane = unnamed.trailing_zeros();
                        return Err(at(Fault::new(lane, FaultKind::Synchronisation, problem)));
                    }
                    if cx.active != needed {
                        // Lanes that already wait here with this mask.
                        let waits = Waits::Warp(mask);
                        let is_here = |other: &Group| other.place == place && other.waits == waits;
                        let here =
                            groups.iter().filter(|other| is_here(other)).fold(cx.active, |a, g| a | g.lanes);
                        if cx.active != group.lanes {
                            groups.push(Group {
                                place: (place.0, place.1 + 1),
                                lanes: group.lanes & !cx.active,
                                ..group
                            });
                        }
                        groups.retain(|other| !is_here(other));
                        if here & needed != needed {
                            groups.push(Group { place, lanes: here, waits });
                        } else {
                            cx.active = needed;
                            execute(cx).map_err(at)?;
                            groups.push(Group {
                                place: (place.0, place.1 + 1),
                                lanes: here,
                                waits: Waits::Nothing,
                            });
                        }
                        return Ok(());
                    }
                    execute(cx).map_err(at)?;
                }
                Action::Barrier(barrier) => {
                    let place = (group.place.0, n as u32);
                    let waits = self.arrive(cx, barrier, place).map_err(at)?;
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

    /// Counts the active lanes at a barrier; returns its number if they wait.
    fn arrive(&mut self, cx: &mut Context<'_>, barrier: &Barrier, place: Place) -> Outcome<Option<usize>> {
        let lane = cx.active.trailing_zeros();
        let fault = |problem: String| Fault::new(lane, FaultKind::Synchronisation, problem);
        let number = cx.value(barrier.number)?[lane as usize] as usize;
        let expected = match barrier.threads {
            Some(threads) => cx.value(threads)?[lane as usize],
            None => self.threads,
        };
        if number >= BARRIERS || expected == 0 || expected > self.threads {
            return Err(fault(format!(
                "barrier {number} of {expected} threads, in a block of {}",
                self.threads
            )));
        }
        if barrier.threads.is_some() && !expected.is_multiple_of(LANES as u32) {
            return Err(fault(format!(
                "a barrier of {expected} threads, which is not a multiple of {LANES}"
            )));
        }
        let arrivals = &mut self.barriers[number];
        // All threads of a block meet at one place; those of a part may come from two, as producers and
        // consumers do.
        if barrier.threads.is_none() && *arrivals.place.get_or_insert(place) != place {
            return Err(fault(
                "waits at a barrier while other threads of its block wait at a different one".into(),
            ));
        }
        if let Some(reduction) = &barrier.reduction {
            arrivals.holding += cx.decided(reduction.predicate)?.count_ones();
        }
        arrivals.threads += cx.active.count_ones();
        if arrivals.threads > expected {
            return Err(fault(format!("barrier {number} is reached by more than its {expected} threads")));
        }
        if arrivals.threads == expected {
            self.released.push((number, expected));
        }
        Ok(barrier.waits.then_some(number))
    }
}
