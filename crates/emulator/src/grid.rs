//! The execution of launches: blocks, warps and diverged lanes.
//!
//! Blocks start in the order of their indices, a few per multiprocessor at a time. A randomly drawn warp of
//! these blocks runs for a random number of steps, and then another. Among diverged lanes of a warp, those
//! furthest back in the kernel's text usually run first, so that they converge after a branch. In some turns
//! the others run first, so every lane makes progress. A launch ends with a fault if no warp can run, or if
//! all warps that can run repeat the same states.
//!
//! A launch may begin before the one before it has ended, once all blocks of that one have exited or called
//! `griddepcontrol.launch_dependents`. Turns of the two then alternate.

mod barrier;
mod group;
mod warp;

use crate::blocks::block_number;
use crate::fault::{FaultKind, Report, ThreadFault};
use crate::kernel::cluster::{Awaited, Cluster, ClusterEvent};
use crate::kernel::context::Launch;
use crate::memory::Local;
use crate::races::{self, Races, Running};
use crate::random::Random;
use crate::registers::{LANES, WARPGROUP};
use barrier::Barriers;
use group::{LaneGroup, Waits};
use std::collections::BTreeMap;
use warp::{Turn, Warp, WarpFailure};

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

/// A launch that may begin does so after one in this many turns of others.
const TURNS_BEFORE_A_LAUNCH: usize = 16;

/// Times that all waits for mbarriers time out without effect before they count as endless.
const FRUITLESS_WAITS: u32 = 3;

/// A resident cluster; a block alone is a cluster of one. Blocks are in the order of their ranks.
struct Resident {
    /// The number of the cluster among those of all launches.
    number: u32,
    cluster: Cluster,
    numbers: Vec<[u32; 3]>,
    shared: Vec<Local>,
    barriers: Vec<Barriers>,
    /// The warps of all blocks.
    warps: Vec<Warp>,
}

/// Runs launches to their end, each of which may begin before the one before it has ended; returns the number
/// of warp instructions.
pub(crate) fn run(launches: &[Launch<'_>], random: &mut Random) -> Result<u64, Report> {
    // Without the setting, only accesses of different launches are compared.
    // `count`, not `any`: every launch must be noted.
    let is_wanted = races::wanted() && launches.iter().filter(|launch| launch.note_first()).count() > 0;
    let of_races = |launch: &Launch<'_>| {
        let code = launch.code.clone();
        Running::new(code.name.clone(), [launch.grid, launch.cluster], move |at| code.describe(at))
    };
    let mut races = (is_wanted || launches.len() > 1)
        .then(|| Races::new(launches.iter().map(of_races).collect(), !is_wanted));
    let mut grids: Vec<Grid<'_>> = Vec::new();
    // The first launch that has not ended.
    let mut first = 0;
    while first < launches.len() {
        let begun = grids.len();
        let mut may_begin =
            || grids[begun - 1].lets_the_next_begin() && random.below(TURNS_BEFORE_A_LAUNCH) == 0;
        if begun == first || begun < launches.len() && may_begin() {
            let number = grids.last().map_or(0, |grid| grid.first_cluster + grid.launch.clusters());
            grids.push(Grid::new(&launches[begun], number, &mut races));
        }
        let chosen = if grids.len() > first + 1 { first + random.below(grids.len() - first) } else { first };
        // A later launch may wait for the first one.
        let chosen = if grids[chosen].can_run() { chosen } else { first };
        if grids[chosen].turn(random, &mut races)? {
            grids.iter_mut().for_each(Grid::note_change);
        }
        if grids[chosen].has_ended()
            && let Some(next) = launches.get(chosen + 1)
            && next.may_wait.replace(false)
            && let Some(grid) = grids.get_mut(chosen + 1)
        {
            for r in 0..grid.resident.len() {
                grid.resident[r].iter_mut().for_each(|of| of.cluster.events.push(ClusterEvent::Launch));
                grid.wake(r);
            }
        }
        while grids.get(first).is_some_and(Grid::has_ended) {
            first += 1;
        }
    }
    Ok(grids.iter().map(|grid| grid.steps).sum())
}

struct Grid<'a> {
    launch: &'a Launch<'a>,
    /// The number of its first cluster among those of all launches.
    first_cluster: u32,
    /// The resident clusters.
    resident: Vec<Option<Resident>>,
    /// Warps that can run, by cluster and index; each knows that it is listed.
    runnable: Vec<(usize, usize)>,
    /// Warps of finished blocks, reused by later blocks.
    spare: Vec<Warp>,
    next_cluster: u32,
    steps: u64,
    /// Steps since memory last changed.
    idle_steps: u64,
    /// Number of warps at the end of `runnable` that something has woken since the last turn.
    woken: usize,
    /// Times that all waits have timed out since memory last changed.
    fruitless_waits: u32,
}

impl<'a> Grid<'a> {
    fn new(launch: &'a Launch<'a>, first_cluster: u32, races: &mut Option<Races>) -> Grid<'a> {
        let threads = launch.block.iter().product::<u32>() as usize;
        let blocks = launch.cluster.iter().product::<u32>() as usize;
        let at_once = (MULTIPROCESSORS * (THREADS / threads.max(1)).clamp(1, BLOCKS)).div_ceil(blocks);
        let mut grid = Grid {
            launch,
            first_cluster,
            resident: (0..at_once).map(|_| None).collect(),
            runnable: Vec::new(),
            spare: Vec::new(),
            next_cluster: 0,
            steps: 0,
            idle_steps: 0,
            woken: 0,
            fruitless_waits: 0,
        };
        (0..at_once).for_each(|r| grid.start_cluster(r, races));
        grid
    }

    fn has_ended(&self) -> bool {
        self.resident.iter().all(Option::is_none)
    }

    /// True if a warp can run, or a copy.
    fn can_run(&self) -> bool {
        !self.runnable.is_empty() || (0..self.resident.len()).any(|r| self.has_copies(r))
    }

    /// True if all blocks have exited or let the next launch begin.
    fn lets_the_next_begin(&self) -> bool {
        let mut blocks = self.resident.iter().flatten().flat_map(|resident| &resident.cluster.blocks);
        self.next_cluster == self.launch.clusters()
            && blocks.all(|block| block.has_exited || block.has_launched_dependents)
    }

    /// Starts the next cluster, if any, in slot `r`.
    fn start_cluster(&mut self, r: usize, races: &mut Option<Races>) {
        let Launch { code, grid, block, cluster, shared_bytes, .. } = *self.launch;
        let n = self.next_cluster;
        if n == self.launch.clusters() {
            return;
        }
        let number = self.first_cluster + n;
        self.next_cluster += 1;
        let (threads, blocks) = (block.iter().product::<u32>(), cluster.iter().product::<u32>());
        let mut warps = Vec::new();
        for (rank, first_thread) in
            (0..blocks).flat_map(|rank| (0..threads).step_by(LANES).map(move |t| (rank, t)))
        {
            let count = (threads - first_thread).min(LANES as u32);
            let mut warp = self.spare.pop().unwrap_or_else(|| Warp::new(code));
            (warp.rank, warp.first_thread) = (rank, first_thread);
            warp.groups.push(LaneGroup {
                place: (0, 0),
                lanes: u32::MAX >> (32 - count),
                waits: Waits::Nothing,
            });
            warps.push(warp);
        }
        if let Some(races) = races {
            races.start(number, blocks, threads);
        }
        self.resident[r] = Some(Resident {
            number,
            cluster: Cluster::new(blocks as usize, blocks * threads),
            numbers: (0..blocks).map(|rank| block_number([grid, cluster], n, rank)).collect(),
            shared: (0..blocks).map(|_| Local::new(shared_bytes as usize)).collect(),
            barriers: (0..blocks).map(|_| Barriers::default()).collect(),
            warps,
        });
        self.list(r);
    }

    /// Lists the warps of a cluster that can run.
    fn list(&mut self, r: usize) {
        let Some(resident) = &mut self.resident[r] else { return };
        for (w, warp) in resident.warps.iter_mut().enumerate() {
            if warp.can_run() && !warp.spins && !warp.is_listed {
                warp.is_listed = true;
                self.runnable.push((r, w));
            }
        }
    }

    /// Runs a random warp for a random number of steps, and some of the copies that are under way. Returns
    /// true if memory has changed.
    fn turn(&mut self, random: &mut Random, races: &mut Option<Races>) -> Result<bool, Report> {
        if self.runnable.is_empty() {
            return self.wait(random);
        }
        // Warps that wait no longer often go first.
        let chosen = match self.woken {
            1.. if random.below(2) == 0 => self.runnable.len() - 1 - random.below(self.woken),
            _ => random.below(self.runnable.len()),
        };
        self.woken = 0;
        let (r, w) = self.runnable[chosen];
        let budget = 1u64 << random.below(LONGEST_TURN + 1);
        let ahead = u64::from(random.below(TURNS_OF_LANES_AHEAD) == 0);
        let Some(resident) = &mut self.resident[r] else { unreachable!("listed warps are resident") };
        let rank = resident.warps[w].rank as usize;
        if let Some(races) = races {
            races.run(resident.number, rank as u32, resident.warps[w].first_thread);
        }
        let mut turn = Turn {
            launch: self.launch,
            block: resident.numbers[rank],
            shared: &resident.shared,
            barriers: &mut resident.barriers[rank],
            races: races.as_mut(),
            changed: false,
            changed_local: false,
            has_signalled: false,
            steps: 0,
        };
        let result = turn.run(&mut resident.warps[w], &mut resident.cluster, random, [budget, ahead]);
        let Turn { changed, changed_local, steps, .. } = turn;
        let complete = std::mem::take(&mut resident.barriers[rank].complete);
        result.map_err(|failure| report(self.launch, resident, w, failure))?;
        self.steps += steps;
        self.idle_steps += steps;
        if self.idle_steps > ENDLESS_STEPS && !changed && complete.is_empty() {
            return Err(self.endless(r, w));
        }
        let Some(resident) = &mut self.resident[r] else { unreachable!("its warp just ran") };
        for &barrier in &complete {
            if let Some(races) = races {
                let of_block = resident.warps.iter().filter(|warp| warp.rank as usize == rank);
                races.open(barrier.0, of_block.flat_map(|warp| warp.waiting_at(barrier.0)));
            }
            let of_block = resident.warps.iter_mut().filter(|warp| warp.rank as usize == rank);
            let warps = of_block.map(|warp| (&mut warp.registers, &mut warp.groups));
            resident.barriers[rank].release(self.launch.code, warps, barrier);
        }
        let warp = &mut resident.warps[w];
        warp.spins = self.idle_steps > IDLE_STEPS && !changed && !changed_local && warp.has_been_here();
        let has_exited = warp.groups.is_empty();
        if warp.spins || !warp.can_run() {
            warp.is_listed = false;
            self.runnable.swap_remove(chosen);
        }
        if has_exited {
            self.check_exit(r, rank)?;
        }
        let mut changed = changed || !complete.is_empty();
        while self.has_copies(r) && random.below(2) == 0 {
            self.run_copy(r, random)?;
            changed = true;
        }
        if !complete.is_empty() {
            self.list(r);
        }
        self.wake(r);
        let Some(resident) = &self.resident[r] else { unreachable!("its warp just ran") };
        if resident.warps.iter().all(|warp| warp.groups.is_empty()) {
            while self.has_copies(r) {
                self.run_copy(r, random)?;
                changed = true;
            }
            let ended = self.resident[r].take().map_or(Vec::new(), |resident| {
                if let Some(races) = races {
                    races.end(resident.number, self.launch.shared_bytes);
                }
                resident.warps
            });
            self.spare.extend(ended.into_iter().map(Warp::emptied));
            self.start_cluster(r, races);
        }
        Ok(changed)
    }

    /// Notes that memory has changed, so warps that spin may go on.
    fn note_change(&mut self) {
        if self.idle_steps > IDLE_STEPS {
            for warp in self.resident.iter_mut().flatten().flat_map(|resident| &mut resident.warps) {
                warp.states.clear();
                warp.spins = false;
            }
            (0..self.resident.len()).for_each(|r| self.list(r));
        }
        (self.idle_steps, self.fruitless_waits) = (0, 0);
    }

    /// True if copies of a cluster are under way.
    fn has_copies(&self, r: usize) -> bool {
        self.resident[r].as_ref().is_some_and(|resident| !resident.cluster.copies.is_empty())
    }

    /// Runs a random copy of a cluster.
    fn run_copy(&mut self, r: usize, random: &mut Random) -> Result<(), Report> {
        let Some(Resident { cluster, shared, .. }) = &mut self.resident[r] else { return Ok(()) };
        let index = random.below(cluster.copies.len());
        let ((rank, thread), location) = (cluster.copies[index].thread, cluster.copies[index].location);
        let result =
            cluster.run_copy(self.launch.memory, shared, index, &|location| self.launch.place(location));
        if let Err(problem) = result {
            return Err(self.report_of(r, (rank, thread), &problem, location));
        }
        Ok(())
    }

    /// Wakes the warps that wait for what has come in a cluster.
    fn wake(&mut self, r: usize) {
        let Some(resident) = &mut self.resident[r] else { return };
        let before = self.runnable.len();
        for event in std::mem::take(&mut resident.cluster.events) {
            resident.warps.iter_mut().for_each(|warp| warp.wake(event));
        }
        self.list(r);
        self.woken += self.runnable.len() - before;
    }

    /// Lets time pass while no warp can run: a copy ends, or else waits time out. Returns true if memory has
    /// changed.
    fn wait(&mut self, random: &mut Random) -> Result<bool, Report> {
        let (count, first) = (self.resident.len(), random.below(self.resident.len()));
        for r in (0..count).map(|n| (first + n) % count) {
            if self.has_copies(r) {
                self.run_copy(r, random)?;
                self.wake(r);
                return Ok(true);
            }
        }
        self.fruitless_waits += 1;
        if self.fruitless_waits > FRUITLESS_WAITS {
            return Err(self.stuck());
        }
        let mut some = false;
        for warp in self.resident.iter_mut().flatten().flat_map(|resident| &mut resident.warps) {
            some |= warp.give_up(self.launch.code);
        }
        (0..self.resident.len()).for_each(|r| self.list(r));
        if some { Ok(false) } else { Err(self.stuck()) }
    }

    /// Notes that a warp has exited. A fault if its block has exited and asynchronous work still uses its
    /// shared memory.
    fn check_exit(&mut self, r: usize, rank: usize) -> Result<(), Report> {
        let Some(Resident { cluster, warps, .. }) = &mut self.resident[r] else { return Ok(()) };
        if warps.iter().any(|warp| warp.rank as usize == rank && !warp.groups.is_empty()) {
            return Ok(());
        }
        cluster.blocks[rank].has_exited = true;
        let of_block: Vec<&Warp> = warps.iter().filter(|warp| warp.rank as usize == rank).collect();
        for group in of_block.chunks(WARPGROUP) {
            let executed = group.iter().map(|warp| warp.asynchronous.executed);
            let Some((hash, location)) = executed.clone().find(|(_, location)| *location != 0) else {
                continue;
            };
            if group.len() < WARPGROUP || executed.clone().any(|(other, _)| other != hash) {
                let problem = "the warps of a warpgroup execute different `wgmma`";
                let thread = (rank as u32, group[0].first_thread);
                return Err(self.report_of(r, thread, problem, location));
            }
        }
        for group in of_block.chunks(WARPGROUP) {
            if group.iter().any(|warp| warp.asynchronous.registers != group[0].asynchronous.registers) {
                let thread = (rank as u32, group[0].first_thread);
                let problem = "the warps of a warpgroup do not execute the same `setmaxnreg`";
                return Err(self.report_of(r, thread, problem, 0));
            }
        }
        let uses = cluster.copies.iter().find(|copy| copy.rank as usize == rank && copy.taken.is_none());
        let Some(copy) = uses else { return Ok(()) };
        let (thread, location) = (copy.thread, copy.location);
        Err(self.report_of(r, thread, "a copy still uses the shared memory of a block that exits", location))
    }

    /// A fault of asynchronous work that a thread of a block of a cluster began.
    fn report_of(&self, r: usize, (rank, thread): (u32, u32), problem: &str, location: u32) -> Report {
        let resident = self.resident[r].as_ref().expect("the cluster of the work");
        let first_thread = thread / LANES as u32 * LANES as u32;
        let of = |warp: &Warp| warp.rank == rank && warp.first_thread == first_thread;
        let w = resident.warps.iter().position(of).expect("the thread's warp");
        let fault = ThreadFault::new(thread % LANES as u32, FaultKind::Synchronisation, problem);
        report(self.launch, resident, w, WarpFailure { fault, location })
    }

    /// The fault of a launch in which no warp can run.
    fn stuck(&self) -> Report {
        let waiting = self.resident.iter().flatten().flat_map(|resident| {
            let warps = resident.warps.iter().enumerate();
            warps.flat_map(move |(w, warp)| warp.groups.iter().map(move |group| (resident, w, *group)))
        });
        // Threads at a barrier may wait for lanes that wait within their warp, so the latter are reported
        // first; what waits for bytes is nearer to the cause than what waits for arrivals.
        let order = |waits| match waits {
            Waits::Warp(_) => 0,
            Waits::Event(Awaited::Mbarrier(..)) => 1,
            Waits::Barrier(_) => 2,
            Waits::Event(_) => 3,
            Waits::Nothing => 4,
        };
        let (resident, w, group) = waiting
            .min_by_key(|(_, _, group)| order(group.waits))
            .expect("a block that is not over has lanes");
        let problem = match group.waits {
            Waits::Warp(_) => "waits for lanes of its warp that never execute this instruction".to_owned(),
            Waits::Barrier(n) => {
                let of = self.launch.block.iter().product::<u32>();
                let rank = resident.warps[w].rank;
                let of_block = resident.warps.iter().filter(|warp| warp.rank == rank);
                let live: u32 = of_block.map(|warp| warp.live().count_ones()).sum();
                let arrived = resident.barriers[rank as usize].arrived(n);
                let gone = of - live;
                format!(
                    "waits at a barrier that some threads never reach ({arrived} of {of} have, {gone} have exited)"
                )
            }
            Waits::Event(Awaited::Mbarrier(..)) => format!("deadlock: {}", resident.waits()),
            Waits::Event(Awaited::Cluster) => format!(
                "waits at the cluster's barrier that some threads never reach ({} of {} have)",
                resident.cluster.arrived_threads, resident.cluster.live_threads
            ),
            Waits::Event(Awaited::Registers) => {
                let free = resident.cluster.blocks[resident.warps[w].rank as usize].free_registers;
                format!("`setmaxnreg.inc` waits: {free} registers are free in the block's pool")
            }
            Waits::Event(Awaited::Launch) => "waits for the launch before it, which never ends".to_owned(),
            Waits::Nothing => "deadlock: polls memory that no other thread will change".to_owned(),
        };
        self.stopped(resident, w, group, problem)
    }

    /// The fault of a launch that runs without effect; warp `w` of block `r` ran last.
    fn endless(&self, r: usize, w: usize) -> Report {
        let resident = self.resident[r].as_ref().expect("its warp just ran");
        let group = resident.warps[w].groups.first().copied();
        let group = group.unwrap_or(LaneGroup { place: (0, 0), lanes: 1, waits: Waits::Nothing });
        let millions = ENDLESS_STEPS / 1_000_000;
        let problem =
            format!("endless loop: {millions} million instructions of this launch changed no memory");
        self.stopped(resident, w, group, problem)
    }

    /// The fault of lanes that never end.
    fn stopped(&self, resident: &Resident, w: usize, group: LaneGroup, problem: String) -> Report {
        let code = self.launch.code;
        let location = match code.blocks.get(group.place.0 as usize) {
            Some(block) => {
                block.steps.get(group.place.1 as usize).map_or(block.end_location, |step| step.location)
            }
            None => 0,
        };
        let fault = ThreadFault::new(group.lanes.trailing_zeros(), FaultKind::Synchronisation, problem);
        report(self.launch, resident, w, WarpFailure { fault, location })
    }
}

impl Resident {
    /// Who waits for which phase of which mbarrier.
    fn waits(&self) -> String {
        let mut warps: BTreeMap<_, Vec<String>> = BTreeMap::new();
        for warp in &self.warps {
            for group in &warp.groups {
                if let Waits::Event(Awaited::Mbarrier(at, phase)) = group.waits {
                    let name = format!("{}:{}", warp.rank, warp.first_thread / LANES as u32);
                    warps.entry((at, phase)).or_default().push(name);
                }
            }
        }
        let all = warps.into_iter().map(|((at, phase), warps)| {
            let who = match &warps[..] {
                [first, .., last] => {
                    format!("{} warps from {first} to {last} (block of the cluster:warp) wait", warps.len())
                }
                _ => format!("warp {} (block of the cluster:warp) waits", warps[0]),
            };
            let lacks = self.cluster.lacks(at);
            format!(
                "{who} for phase {phase} of the mbarrier at {} of block {}, whose {lacks}",
                at.offset, at.rank
            )
        });
        all.collect::<Vec<_>>().join("; ")
    }
}

fn report(launch: &Launch<'_>, resident: &Resident, warp: usize, failure: WarpFailure) -> Report {
    let [x, y, _] = launch.block;
    let number = resident.warps[warp].first_thread + failure.fault.lane;
    Report {
        kind: failure.fault.kind,
        kernel: launch.code.name.clone(),
        location: launch.code.describe(failure.location),
        block: resident.numbers[resident.warps[warp].rank as usize],
        thread: [number % x, number / x % y, number / x / y],
        problem: failure.fault.problem,
    }
}
