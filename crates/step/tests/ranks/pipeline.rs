//! Stages of a pipeline: the bits of one process, with other micro-batches in flight on each stage.

use crate::equality::{assert_alike, assert_near_one_process, equal_one_process};
use crate::world::{World, drawn, whole};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use xtrain_distributed::{CommError, Communicator, Groups, ThreadCommunicator};
use xtrain_model::{Family, Recipe};
use xtrain_program::{Recompute, Reduce, Shard};

/// Worlds of so many ranks and stages.
fn worlds(meshes: &[(usize, usize)], recipes: &[Recipe], experts: Option<Family>) -> Vec<World> {
    let mut all = Vec::new();
    let recomputes = [Recompute::None, Recompute::Norms, Recompute::Block];
    for &recipe in recipes {
        for (case, &(ranks, pipeline)) in meshes.iter().enumerate() {
            for (n, micro_steps) in [1, 4, 7, 8].into_iter().enumerate() {
                for (k, shard) in
                    [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights].into_iter().enumerate()
                {
                    let sources = if (case + n) % 2 == 1 { 3 } else { 0 };
                    let alone = World::alone(recipe, (n + k) % 2 == 1, micro_steps);
                    let (layers, recompute) = (pipeline + (n + k) % 3, recomputes[(case + n + k) % 3]);
                    let reduce = Reduce::AnyWorld;
                    all.push(World {
                        ranks,
                        pipeline,
                        shard,
                        layers,
                        recompute,
                        experts,
                        sources,
                        reduce,
                        prefetch_blocks: k % 3,
                        ..alone
                    });
                }
            }
        }
    }
    all
}

const RECIPES: [Recipe; 4] = [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Delayed, Recipe::Fp8Block];

#[test]
fn stages_have_the_bits_of_one_process_in_any_world() {
    equal_one_process(&drawn(worlds(&[(2, 2), (4, 2), (4, 4), (8, 2)], &RECIPES, None)));
}

#[test]
fn stages_of_mixtures_have_the_bits_of_one_process_in_any_world() {
    for family in [Family::MIXTRAL, Family::QWEN3_MOE, Family::DOTS1] {
        equal_one_process(&drawn(worlds(&[(2, 2), (4, 2)], &[Recipe::Fp32, Recipe::Bf16], Some(family))));
    }
}

#[test]
fn stages_are_near_one_process() {
    for (ranks, pipeline, shard) in [
        (2, 2, Shard::None),
        (3, 3, Shard::None),
        (6, 2, Shard::Optimizer),
        (4, 2, Shard::Gradients),
        (4, 2, Shard::Weights),
    ] {
        let alone = World { sources: 3, layers: 3, ..World::alone(Recipe::Fp32, ranks > 3, 5) };
        let world = World { ranks, pipeline, shard, ..alone };
        let ranks = world.run();
        assert_alike(&world, &ranks);
        assert_near_one_process(&world, &ranks);
    }
}

/// Within a stage, ranks share experts, and state is cut among those of a replica.
#[test]
fn stages_whose_ranks_share_experts_have_the_bits_of_one_process_in_any_world() {
    let mut all = Vec::new();
    for (case, family) in [Family::MIXTRAL, Family::QWEN3_MOE, Family::DOTS1].into_iter().enumerate() {
        for (n, shard) in
            [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights].into_iter().enumerate()
        {
            for (k, recipe) in RECIPES.into_iter().enumerate() {
                let (ranks, replicas) = [(4, 1), (8, 2)][(n + k) % 2];
                let alone = World::alone(recipe, (n + k) % 3 == 1, 3 + case);
                let (layers, seq_len, expert_count) = (2 + n % 2, 64, 4);
                let (experts, expert) = (Some(family), 2);
                let capacity = [None, Some(1.0)][(n + case) % 2];
                let reduce = Reduce::AnyWorld;
                all.push(World {
                    ranks,
                    replicas,
                    shard,
                    reduce,
                    experts,
                    expert,
                    expert_count,
                    layers,
                    seq_len,
                    capacity,
                    pipeline: 2,
                    ..alone
                });
            }
        }
    }
    equal_one_process(&drawn(all));
}

#[test]
fn stages_repeat_to_the_bit_in_other_orders_of_lanes() {
    for (recipe, shard, experts) in [
        (Recipe::Fp32, Shard::Weights, None),
        (Recipe::Bf16, Shard::Optimizer, Some(Family::QWEN3_MOE)),
        (Recipe::Fp8Current, Shard::None, None),
        (Recipe::Fp8Row, Shard::Gradients, None),
    ] {
        let alone = World { experts, layers: 3, ..World::alone(recipe, true, 4) };
        let world = World { ranks: 4, pipeline: 2, shard, ..alone };
        let first = world.run();
        assert_alike(&world, &first);
        for orders in 1..4 {
            let again = World { orders, ..world }.run();
            assert!(whole(&again) == whole(&first), "{world:?}: other bits in the order {orders}");
        }
    }
}

/// A communicator of a stage whose forwards and backwards take a fixed time each, beside which that of a
/// small model is nothing.
struct Paced {
    inner: ThreadCommunicator,
    part: Duration,
}

impl Communicator for Paced {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn sent_bytes(&self) -> u64 {
        self.inner.sent_bytes()
    }

    fn all_gather(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.inner.all_gather(groups, first, input, output)
    }

    fn all_to_all(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.inner.all_to_all(groups, first, input, output)
    }

    /// A part of a stage ends with a message, but for the backward of the first one and the forward of the
    /// last.
    fn send(&self, groups: Groups, to: usize, message: &[u8]) -> Result<(), CommError> {
        thread::sleep(self.part);
        self.inner.send(groups, to, message)
    }

    fn receive(&self, groups: Groups, from: usize, message: &mut [u8]) -> Result<(), CommError> {
        self.inner.receive(groups, from, message)?;
        if [0, self.world_size() - 1].contains(&self.rank()) {
            thread::sleep(self.part);
        }
        Ok(())
    }
}

/// A benchmark, which prints the time of a step over that of its turns, m + p - 1 forwards and backwards of p
/// stages and m micro-batches.
#[test]
#[ignore = "a benchmark"]
fn a_step_takes_its_turns() {
    let (stages, micro_steps, part) = (4, 16, Duration::from_millis(40));
    let alone = World { layers: stages, ..World::alone(Recipe::Fp32, false, micro_steps) };
    let world = World { ranks: stages, pipeline: stages, ..alone };
    let of_rank = |inner: ThreadCommunicator| {
        let mut learner = world.learner(Arc::new(Paced { inner, part }));
        learner.weights().initialize(5, 0.1).expect("weights");
        let step = |number| {
            let begun = Instant::now();
            world.step(&mut learner, number);
            begun.elapsed()
        };
        (0..4).map(step).collect::<Vec<Duration>>()
    };
    let times = thread::scope(|scope| {
        let ranks = ThreadCommunicator::world(stages).into_iter();
        let handles: Vec<_> = ranks.map(|inner| scope.spawn(|| of_rank(inner))).collect();
        handles.into_iter().map(|handle| handle.join().expect("a rank")).collect::<Vec<_>>()
    });
    let turns = (micro_steps + stages - 1) as u32 * 2 * part;
    for time in &times[0][1..] {
        println!("{:.3} of its turns", time.as_secs_f64() / turns.as_secs_f64());
    }
}
