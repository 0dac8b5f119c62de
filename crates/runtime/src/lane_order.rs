//! Random orders of a program's instances, for tests: every order that lanes and dependencies allow gives the
//! same values.
//!
//! One thread runs the instances. An order of the instances is enough to find a missing dependency and a
//! place in memory that is shared too early: the lane that runs ahead reads values before they are written,
//! or overwrites them before they are read. Collectives that may be issued together run in the opposite of
//! the list order.

use crate::part::Part;
use std::collections::VecDeque;
use std::ops::Range;
use xtrain_program::order::{Order, runs};
use xtrain_program::{Lane, Program};
use xtrain_tensor::Philox;

/// The instances of the phases of `part`, in a random order among those that the program allows.
pub(crate) fn random_order(program: &Program, part: Part, rng: &Philox) -> Vec<usize> {
    let order = Order::new(program);
    let mut waiting: [VecDeque<Range<usize>>; Lane::COUNT] = Default::default();
    let mut is_done: Vec<bool> = program.instances.iter().map(|i| !part.includes(i)).collect();
    for run in runs(program).into_iter().filter(|run| !is_done[run.start]) {
        waiting[program.instances[run.start].lane as usize].push_back(run);
    }
    let mut ordered = Vec::new();
    loop {
        let can_run = |run: &Range<usize>| run.clone().flat_map(|i| order.waits(i)).all(|&w| is_done[w]);
        let is_ready = |&lane: &usize| waiting[lane].front().is_some_and(can_run);
        let ready: Vec<usize> = (0..Lane::COUNT).filter(is_ready).collect();
        let Some(run) = (!ready.is_empty())
            .then(|| ready[rng.word(ordered.len() as u64) as usize % ready.len()])
            .and_then(|lane| waiting[lane].pop_front())
        else {
            break;
        };
        is_done[run.clone()].fill(true);
        // Orders differ between ranks, but not those of collectives.
        ordered.extend(run.rev());
    }
    ordered
}
