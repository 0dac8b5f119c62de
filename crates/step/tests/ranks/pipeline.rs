//! Stages of a pipeline: the bits of one process, with other micro-batches in flight on each stage.

use crate::counting::Counting;
use crate::equality::{assert_alike, assert_near_one_process, equal_one_process};
use crate::world::{World, drawn, sample, whole};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use xtrain_distributed::ThreadCommunicator;
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

/// Chunks go around the stages, so a stage also sends to the first one.
#[test]
fn chunks_of_stages_have_the_bits_of_one_process_in_any_world() {
    let mut all = Vec::new();
    for (n, recipe) in RECIPES.into_iter().enumerate() {
        for (k, (ranks, pipeline, chunks)) in
            [(2, 2, 2), (4, 2, 3), (4, 4, 2), (8, 2, 2)].into_iter().enumerate()
        {
            for (j, shard) in
                [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights].into_iter().enumerate()
            {
                let alone = World::alone(recipe, (n + k + j) % 2 == 1, pipeline * (1 + (k + j) % 3));
                all.push(World {
                    ranks,
                    pipeline,
                    chunks,
                    shard,
                    layers: pipeline * chunks + (n + j) % 3,
                    recompute: [Recompute::None, Recompute::Norms, Recompute::Block][(n + k + j) % 3],
                    sources: if (n + j) % 2 == 1 { 3 } else { 0 },
                    reduce: Reduce::AnyWorld,
                    prefetch_blocks: j % 3,
                    ..alone
                });
            }
        }
    }
    equal_one_process(&drawn(all));
}

/// The ranks of a stage share the experts of its chunks, in part of the worlds.
#[test]
fn chunks_of_mixtures_have_the_bits_of_one_process_in_any_world() {
    let mut all = Vec::new();
    for (case, family) in [Family::MIXTRAL, Family::QWEN3_MOE, Family::DOTS1].into_iter().enumerate() {
        for (n, recipe) in RECIPES.into_iter().enumerate() {
            for (k, (ranks, expert, chunks)) in [(2, 1, 2), (4, 2, 2), (4, 1, 3)].into_iter().enumerate() {
                let shards = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights];
                let alone = World::alone(recipe, (n + k) % 2 == 1, 2 * (1 + (n + case) % 3));
                all.push(World {
                    ranks,
                    expert,
                    chunks,
                    pipeline: 2,
                    experts: Some(family),
                    expert_count: 4,
                    seq_len: if expert > 1 { 64 } else { alone.seq_len },
                    shard: shards[(case + n + k) % 4],
                    layers: 2 * chunks + (n + k) % 2,
                    capacity: if (n + case) % 2 == 0 { Some(1.0) } else { None },
                    recompute: [Recompute::None, Recompute::Norms, Recompute::Block][(case + n) % 3],
                    sources: if (n + case) % 2 == 1 { 3 } else { 0 },
                    reduce: Reduce::AnyWorld,
                    ..alone
                });
            }
        }
    }
    equal_one_process(&sample(all, 10));
}

#[test]
fn chunks_of_stages_are_near_one_process() {
    for (ranks, pipeline, shard, experts) in [
        (2, 2, Shard::None, None),
        (3, 3, Shard::None, None),
        (6, 2, Shard::Optimizer, None),
        (4, 2, Shard::Weights, Some(Family::DOTS1)),
    ] {
        let alone = World::alone(Recipe::Fp32, ranks > 3, 2 * pipeline);
        let alone = World { experts, sources: 3, layers: 7, ..alone };
        let world = World { ranks, pipeline, shard, chunks: 2, ..alone };
        let ranks = world.run();
        assert_alike(&world, &ranks);
        assert_near_one_process(&world, &ranks);
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
        let alone = World { experts, layers: 5, ..World::alone(recipe, true, 4) };
        let world = World { ranks: 4, pipeline: 2, chunks: 2, shard, ..alone };
        let first = world.run();
        assert_alike(&world, &first);
        for orders in 1..4 {
            let again = World { orders, ..world }.run();
            assert!(whole(&again) == whole(&first), "{world:?}: other bits in the order {orders}");
        }
    }
}

/// A benchmark, which prints the time of a step over that of its turns, m + p - 1 forwards and backwards of p
/// stages and m micro-batches.
#[test]
#[ignore = "a benchmark"]
fn a_step_takes_its_turns() {
    let (stages, micro_steps, pass) = (4, 16, Duration::from_millis(40));
    let alone = World { layers: stages, ..World::alone(Recipe::Fp32, false, micro_steps) };
    let world = World { ranks: stages, pipeline: stages, ..alone };
    let of_rank = |inner: ThreadCommunicator| {
        let mut learner = world.learner(Arc::new(Counting::paced(inner, pass)));
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
    let turns = (micro_steps + stages - 1) as u32 * 2 * pass;
    for time in &times[0][1..] {
        println!("{:.3} of its turns", time.as_secs_f64() / turns.as_secs_f64());
    }
}
