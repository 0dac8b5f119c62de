//! Barriers of a block.

use super::group::{LaneGroup, Place, Waits, merge};
use crate::fault::{FaultKind, Outcome, ThreadFault};
use crate::kernel::context::WarpContext;
use crate::kernel::{Action, Barrier, Code, ReductionKind, Target};
use crate::registers::{LANES, Registers};

/// The number of barriers of a block.
const BARRIERS: usize = 16;

/// A barrier that some threads have reached.
#[derive(Clone, Copy, Default)]
struct Arrivals {
    threads: u32,
    /// The number of threads that the first arrival named.
    expected: Option<u32>,
    place: Option<Place>,
    /// Threads whose predicate holds.
    holding: u32,
}

/// The barriers of a block.
#[derive(Default)]
pub(super) struct Barriers {
    arrivals: [Arrivals; BARRIERS],
    /// Barriers that all their threads have reached, with the number of these threads.
    pub(super) complete: Vec<(usize, u32)>,
}

impl Barriers {
    /// The number of a block's threads that have arrived at a barrier.
    pub(super) fn arrived(&self, barrier: usize) -> u32 {
        self.arrivals[barrier].threads
    }

    /// Counts the active lanes at a barrier; returns its number if they wait.
    pub(super) fn arrive(
        &mut self,
        cx: &mut WarpContext<'_>,
        barrier: &Barrier,
        place: Place,
    ) -> Outcome<Option<usize>> {
        let of_block = cx.launch.block.iter().product::<u32>();
        let lane = cx.active.trailing_zeros();
        let fault = |problem: String| ThreadFault::new(lane, FaultKind::Synchronisation, problem);
        let number = cx.value(barrier.number)?[lane as usize] as usize;
        let expected = match barrier.threads {
            Some(threads) => cx.value(threads)?[lane as usize],
            None => of_block,
        };
        if number >= BARRIERS || expected == 0 || expected > of_block {
            return Err(fault(format!("barrier {number} of {expected} threads, in a block of {}", of_block)));
        }
        if barrier.threads.is_some() && !expected.is_multiple_of(LANES as u32) {
            return Err(fault(format!(
                "a barrier of {expected} threads, which is not a multiple of {LANES}"
            )));
        }
        cx.observe(|races, lanes| races.arrive(lanes, number));
        let arrivals = &mut self.arrivals[number];
        // All threads of a block meet at one place; those of a part may come from two, as producers and
        // consumers do.
        if barrier.threads.is_none() && *arrivals.place.get_or_insert(place) != place {
            return Err(fault(
                "waits at a barrier while other threads of its block wait at a different one".into(),
            ));
        }
        let first = *arrivals.expected.get_or_insert(expected);
        if first != expected {
            return Err(fault(format!("barrier {number} is used with {first} and with {expected} threads")));
        }
        if let Some(reduction) = &barrier.reduction {
            arrivals.holding += cx.decided(reduction.predicate)?.count_ones();
        }
        arrivals.threads += cx.active.count_ones();
        if arrivals.threads > expected {
            return Err(fault(format!("barrier {number} is reached by more than its {expected} threads")));
        }
        if arrivals.threads == expected {
            self.complete.push((number, expected));
        }
        Ok(barrier.waits.then_some(number))
    }

    /// Releases the `threads` that wait at a barrier, which are among the groups of `warps`.
    pub(super) fn release<'w>(
        &mut self,
        code: &Code,
        warps: impl Iterator<Item = (&'w mut Registers, &'w mut Vec<LaneGroup>)>,
        (barrier, threads): (usize, u32),
    ) {
        let Arrivals { holding, .. } = std::mem::take(&mut self.arrivals[barrier]);
        for (registers, groups) in warps {
            for group in groups.iter_mut().filter(|group| group.waits == Waits::Barrier(barrier)) {
                group.waits = Waits::Nothing;
                let step = &code.blocks[group.place.0 as usize].steps[group.place.1 as usize];
                group.place.1 += 1;
                let Action::Barrier(Barrier { reduction: Some(reduction), .. }) = &step.action else {
                    continue;
                };
                let holds = match reduction.kind {
                    ReductionKind::And => holding == threads,
                    ReductionKind::Or | ReductionKind::Count => holding > 0,
                };
                match reduction.target {
                    Target::Predicate(slot) => {
                        let all = if holds { u32::MAX } else { 0 };
                        registers.write_predicate(slot, all, 0, group.lanes);
                    }
                    Target::Number(slot) => registers.write(slot, &[holding; LANES], group.lanes),
                }
            }
            merge(groups);
        }
    }
}
