//! The execution of a launch: blocks, warps and diverged lanes.
//!
//! Blocks start in the order of their indices, a few per multiprocessor at a time. A randomly drawn warp of
//! these blocks runs for a random number of steps, and then another. Among diverged lanes of a warp, those
//! furthest back in the kernel's text usually run first, so that they converge after a branch. In some turns
//! the others run first, so every lane makes progress. A launch ends with a fault if no warp can run, or if
//! all warps that can run repeat the same states.

mod barrier;
mod group;
mod warp;

use crate::fault::{Fault, FaultKind, Report};
use crate::kernel::context::Launch;
use crate::memory::Local;
use crate::random::Random;
use crate::registers::LANES;
use barrier::Barriers;
use group::{Group, Waits};
use warp::{Failure, Turn, Warp};

/// Multiprocessors of an emulated device.
pub(crate) const MULTIPROCESSORS: usize = 8;
/// Maximum resident threads of a multiprocessor.
const THREADS: usize = 2048;
/// Maximum resident blocks of a multiprocessor. More would only use host memory.
const BLOCKS: usize = 2;

/// log2 of the maximum number of steps in a turn.
const LONGEST_TURN: usize = 10;
/// One in this many turns begins with the lanes that are furthest ahead.
const TURNS_OF_LANES_AHEAD: usize = 16;
/// Steps without a change of memory after which warps are checked for repeated states.
const IDLE_STEPS: u64 = 100_000;
/// Steps without a change of memory that count as an endless loop.
const ENDLESS_STEPS: u64 = 200_000_000;

/// A resident block.
struct Resident {
    number: [u32; 3],
    shared: Local,
    warps: Vec<Warp>,
    barriers: Barriers,
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
    /// The resident blocks.
    resident: Vec<Option<Resident>>,
    /// Warps that can run, by block and index; each knows that it is listed.
    runnable: Vec<(usize, usize)>,
    /// Warps of finished blocks, reused by later blocks.
    spare: Vec<Warp>,
    next_block: u64,
    steps: u64,
    /// Steps since memory last changed.
    idle_steps: u64,
}

impl Grid<'_> {
    /// Starts the next block, if any, in slot `r`.
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
            barriers: Barriers::default(),
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
            shared: &resident.shared,
            barriers: &mut resident.barriers,
            changed: false,
            changed_local: false,
            steps: 0,
        };
        let ahead = random.below(TURNS_OF_LANES_AHEAD) == 0;
        let result = turn.run(&mut resident.warps[w], budget, ahead);
        let Turn { changed, changed_local, steps, .. } = turn;
        let complete = std::mem::take(&mut resident.barriers.complete);
        result.map_err(|failure| report(self.launch, resident, w, failure))?;
        self.steps += steps;
        self.idle_steps += steps;
        if self.idle_steps > ENDLESS_STEPS && !changed && complete.is_empty() {
            return Err(self.endless(r, w));
        }
        let Some(resident) = &mut self.resident[r] else { unreachable!("its warp just ran") };
        for &barrier in &complete {
            let warps = resident.warps.iter_mut().map(|warp| (&mut warp.registers, &mut warp.groups));
            resident.barriers.release(self.launch.code, warps, barrier);
        }
        let warp = &mut resident.warps[w];
        warp.spins = self.idle_steps > IDLE_STEPS && !changed && !changed_local && warp.has_been_here();
        if warp.spins || !warp.can_run() {
            warp.is_listed = false;
            self.runnable.swap_remove(chosen);
        }
        let has_ended = resident.warps.iter().all(|warp| warp.groups.is_empty());
        if !complete.is_empty() {
            self.list(r);
        }
        if changed || !complete.is_empty() {
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
                let arrived = resident.barriers.arrived(n);
                let gone = of - live;
                format!(
                    "waits at a barrier that some threads never reach ({arrived} of {of} have, {gone} have exited)"
                )
            }
            Waits::Nothing => "deadlock: polls memory that no other thread will change".to_owned(),
        };
        self.stopped(resident, w, group, problem)
    }

    /// The fault of a launch that runs without effect; warp `w` of block `r` ran last.
    fn endless(&self, r: usize, w: usize) -> Report {
        let resident = self.resident[r].as_ref().expect("its warp just ran");
        let group = resident.warps[w].groups.first().copied();
        let group = group.unwrap_or(Group { place: (0, 0), lanes: 1, waits: Waits::Nothing });
        let millions = ENDLESS_STEPS / 1_000_000;
        let problem =
            format!("endless loop: {millions} million instructions of this launch changed no memory");
        self.stopped(resident, w, group, problem)
    }

    /// The fault of lanes that never end.
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
