//! Ranks of which one leaves in a collective.

use crate::world::{Text, World, sample};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use xtrain_distributed::{CommError, Communicator, Groups, ThreadCommunicator};
use xtrain_model::{Family, Recipe};
use xtrain_program::Shard;
use xtrain_step::error::LearnError;

/// A communicator whose rank leaves in one of its collectives.
struct Leaving {
    /// None after it has left.
    inner: Mutex<Option<ThreadCommunicator>>,
    rank: usize,
    world_size: usize,
    /// Collectives so far.
    calls: Arc<AtomicUsize>,
    /// The number of the collective in which it leaves, from 0.
    last: usize,
}

impl Leaving {
    fn new(inner: ThreadCommunicator, last: usize) -> Self {
        let (rank, world_size) = (inner.rank(), inner.world_size());
        Leaving { inner: Mutex::new(Some(inner)), rank, world_size, calls: Arc::default(), last }
    }

    fn call(
        &self,
        collective: impl FnOnce(&ThreadCommunicator) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let mut inner = self.inner.lock().expect("a communicator");
        if self.calls.fetch_add(1, Ordering::Relaxed) == self.last {
            *inner = None;
        }
        inner.as_ref().map_or(Err(CommError::Left { rank: self.rank }), collective)
    }
}

impl Communicator for Leaving {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn sent_bytes(&self) -> u64 {
        0
    }

    fn all_gather(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.call(|inner| inner.all_gather(groups, first, input, output))
    }

    fn all_to_all(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.call(|inner| inner.all_to_all(groups, first, input, output))
    }
}

/// Two steps of each rank, of which `culprit` leaves in collective `last`. Returns how they ended, and the
/// number of collectives.
fn run(world: &World, culprit: usize, last: usize) -> (Vec<Result<(), LearnError>>, usize) {
    let run_rank = |communicator: Arc<Leaving>| {
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
        Ok(())
    };
    let communicators: Vec<_> = ThreadCommunicator::world(world.ranks)
        .into_iter()
        .map(|inner| {
            let last = if inner.rank() == culprit { last } else { usize::MAX };
            Arc::new(Leaving::new(inner, last))
        })
        .collect();
    // A rank leaves when its communicator is dropped.
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
    assert!(ended.iter().all(Result::is_ok) && calls > 40, "{ended:?}");
    for last in sample((0..calls).collect(), 6) {
        let culprit = last % world.ranks;
        let (ended, _) = run(&world, culprit, last);
        for (rank, ended) in ended.iter().enumerate() {
            // Who needs nothing more of the others can come to its end.
            let is_last = last + 2 >= calls && rank != culprit;
            assert!(ended.is_err() || is_last, "rank {rank} goes on without {culprit}, which left in {last}");
        }
    }
}
