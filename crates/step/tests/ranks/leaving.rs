//! Ranks of which one leaves in a collective.

use crate::counting::Counting;
use crate::world::{Text, World, sample};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use xtrain_distributed::{Communicator, ThreadCommunicator};
use xtrain_model::{Family, Recipe};
use xtrain_program::Shard;
use xtrain_step::error::LearnError;

/// Two steps of each rank, of which `culprit` leaves in collective `last`. Returns how they ended, with true
/// for a rank that has repeated a step, and the number of collectives.
fn run(world: &World, culprit: usize, last: usize) -> (Vec<Result<bool, LearnError>>, usize) {
    let run_rank = |communicator: Arc<Counting>| {
        let mut learner = world.learner(communicator);
        learner.weights().initialize(5, 0.1)?;
        let mut number = 0;
        while number < 2 {
            let ticket = world.launch(&mut learner, number)?;
            match learner.collect(ticket)?.overflow {
                Some(overflow) => drop(learner.grow(overflow)?),
                None => number += 1,
            }
        }
        Ok(learner.spec().capacity != world.spec(0).capacity)
    };
    let communicators: Vec<_> = ThreadCommunicator::world(world.ranks)
        .into_iter()
        .map(|inner| {
            let last = if inner.rank() == culprit { last } else { usize::MAX };
            Arc::new(Counting::leaving(inner, last))
        })
        .collect();
    let calls = communicators[0].calls.clone();
    let ended = thread::scope(|scope| {
        let handles: Vec<_> =
            communicators.into_iter().map(|communicator| scope.spawn(|| run_rank(communicator))).collect();
        handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
    });
    (ended, calls.load(Ordering::Relaxed))
}

/// In the forward and the backward of mixtures, while rows do not fit, and in the update.
#[test]
fn all_ranks_that_share_experts_end_if_one_leaves_in_any_collective() {
    let alone =
        World { experts: Some(Family::DOTS1), expert_count: 4, ..World::alone(Recipe::Fp8Block, false, 2) };
    let world = World { ranks: 4, expert: 2, wire: true, shard: Shard::Optimizer, ..alone };
    let world = World { seq_len: 128, text: Text::Equal, capacity: Some(1.0), ..world };
    let (ended, calls) = run(&world, 0, usize::MAX);
    assert!(ended.iter().all(|ended| matches!(ended, Ok(true))) && calls > 40, "{ended:?}");
    for last in sample((0..calls).collect(), 4) {
        let culprit = last % world.ranks;
        let (ended, _) = run(&world, culprit, last);
        for (rank, ended) in ended.iter().enumerate() {
            // Who needs nothing more of the others can come to its end.
            let is_last = last + 2 >= calls && rank != culprit;
            assert!(ended.is_err() || is_last, "rank {rank} goes on without {culprit}, which left in {last}");
        }
    }
}
