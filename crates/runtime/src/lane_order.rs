//! Random orders of a program's instances, for tests: every order that lanes and dependencies allow gives the
//! same values.
//!
//! One thread runs the instances. An order of the instances is enough to find a missing dependency and a
//! place in memory that is shared too early: the lane that runs ahead reads values before they are written,
//! or overwrites them before they are read. Collectives that may be issued together run in the opposite of
//! the list order.

use crate::part::Part;
use std::collections::HashMap;
use std::ops::Range;
use xtrain_program::order::{Order, coalesced};
use xtrain_program::{Lane, Program};
use xtrain_tensor::Philox;

/// The instances of the phases of `part`, in a random order among those that the program allows.
pub(crate) fn random_order(program: &Program, part: Part, rng: &Philox) -> Vec<usize> {
    let order = Order::new(program);
    let together: HashMap<usize, Range<usize>> =
        coalesced(program).into_iter().map(|run| (run.start, run)).collect();
    let mut waiting: [Vec<usize>; Lane::COUNT] = Default::default();
    let mut is_done: Vec<bool> = program.instances.iter().map(|i| !part.includes(i.phase())).collect();
    for (index, instance) in program.instances.iter().enumerate().rev().filter(|(index, _)| !is_done[*index])
    {
        waiting[instance.lane as usize].push(index);
    }
    let mut ordered = Vec::new();
    loop {
        let run = |i: usize| together.get(&i).cloned().unwrap_or(i..i + 1);
        let can_run = |i: usize| run(i).flat_map(|i| order.waits(i)).all(|&w| is_done[w]);
        let is_ready = |lane: &Vec<usize>| lane.last().is_some_and(|&i| can_run(i));
        let ready: Vec<usize> = (0..Lane::COUNT).filter(|&lane| is_ready(&waiting[lane])).collect();
        let draw = rng.word(ordered.len() as u64) as usize;
        let lane = (!ready.is_empty()).then(|| &mut waiting[ready[draw % ready.len()]]);
        let Some((lane, first)) = lane.and_then(|lane| lane.pop().map(|first| (lane, first))) else { break };
        let run = run(first);
        lane.truncate(lane.len() - (run.len() - 1));
        is_done[run.clone()].fill(true);
        // Orders differ between ranks, but not those of collectives.
        ordered.extend(run.rev());
    }
    ordered
}
