//! Random orders of a program's instances, for tests: every order that lanes and dependencies allow gives the
//! same values.
//!
//! One thread runs the instances. An order of the instances is enough to find a missing dependency and a
//! place in memory that is shared too early: the lane that runs ahead reads values before they are written,
//! or overwrites them before they are read.

use crate::part::Part;
use xtrain_program::order::Order;
use xtrain_program::{Lane, Program};
use xtrain_tensor::Philox;

/// The instances of the phases of `part`, in a random order among those that the program allows.
pub(crate) fn random_order(program: &Program, part: Part, rng: &Philox) -> Vec<usize> {
    let order = Order::new(program);
    let mut waiting: [Vec<usize>; Lane::COUNT] = Default::default();
    let mut is_done: Vec<bool> = program.instances.iter().map(|i| !part.includes(i.phase())).collect();
    for (index, instance) in program.instances.iter().enumerate().rev().filter(|(index, _)| !is_done[*index])
    {
        waiting[instance.lane as usize].push(index);
    }
    let mut ordered = Vec::new();
    loop {
        let is_ready =
            |lane: &Vec<usize>| lane.last().is_some_and(|&i| order.waits(i).iter().all(|&w| is_done[w]));
        let ready: Vec<usize> = (0..Lane::COUNT).filter(|&lane| is_ready(&waiting[lane])).collect();
        let Some(index) = (!ready.is_empty())
            .then(|| ready[rng.word(ordered.len() as u64) as usize % ready.len()])
            .and_then(|lane| waiting[lane].pop())
        else {
            break;
        };
        is_done[index] = true;
        ordered.push(index);
    }
    ordered
}
