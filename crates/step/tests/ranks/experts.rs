//! Ranks that share the experts of each block.

use crate::equality::{assert_alike, assert_near_one_process, equal_one_process};
use crate::world::{RankRun, Text, World, sample, whole};
use std::sync::Arc;
use std::thread;
use xtrain_distributed::ThreadCommunicator;
use xtrain_model::{Family, Recipe};
use xtrain_program::{Reduce, Shard};

pub(crate) const FAMILIES: [Family; 3] = [Family::MIXTRAL, Family::QWEN3_MOE, Family::DOTS1];
const SHARDS: [Shard; 4] = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights];
/// Ranks, those that share experts, and replicas.
const MESHES: [(usize, usize, usize); 5] = [(2, 2, 1), (4, 2, 1), (4, 4, 1), (4, 2, 2), (8, 2, 2)];

/// Every mesh with every shard mode, of each of these recipes; families, ties, sources and micro-steps take
/// turns.
pub(crate) fn worlds(recipes: &[Recipe], reduce: Reduce) -> Vec<World> {
    let mut all = Vec::new();
    for &recipe in recipes {
        for family in FAMILIES {
            for shard in SHARDS {
                for (ranks, expert, replicas) in MESHES {
                    let case = all.len();
                    let alone = World::alone(recipe, case % 2 == 1, 1 + case % 3);
                    let mixture = World { experts: Some(family), expert_count: 4, expert, ..alone };
                    let sources = 2 * (case / 2 % 2);
                    all.push(World { ranks, replicas, shard, reduce, sources, ..mixture });
                }
            }
        }
    }
    all
}

#[test]
fn ranks_that_share_experts_are_near_one_process() {
    for world in sample(worlds(&[Recipe::Fp32], Reduce::SameWorld), 12) {
        let ranks = world.run();
        assert_alike(&world, &ranks);
        assert_near_one_process(&world, &ranks);
    }
}

#[test]
fn ranks_that_share_experts_repeat_to_the_bit_in_other_orders_of_lanes() {
    for world in sample(worlds(&[Recipe::Bf16], Reduce::SameWorld), 8) {
        let (first, second) = (world.run(), World { orders: 1, ..world }.run());
        assert_alike(&world, &first);
        assert_eq!(first[0].results, second[0].results, "{world:?}");
    }
}

/// With at least 128 tokens, as rows of fewer tokens are not aligned.
#[test]
fn ranks_that_share_experts_have_the_bits_of_one_process_in_any_world() {
    let recipes = [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Block, Recipe::Fp8Delayed];
    let all = worlds(&recipes, Reduce::AnyWorld).into_iter().map(|world| World { seq_len: 64, ..world });
    equal_one_process(&sample(all.collect(), 10));
}

/// Fails if the runs differ in a result or a bit of the state.
pub(crate) fn assert_equal_runs(world: &World, found: &[RankRun], expected: &[RankRun]) {
    for (rank, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.results, expected.results, "{world:?}: rank {rank}");
        assert_eq!(found.applied, expected.applied, "{world:?}: rank {rank}");
    }
    let whole = |ranks| whole(world.first_replica(ranks));
    assert!(whole(found) == whole(expected), "{world:?}: other bits");
}

/// With tokens of which most choose the same experts, and enough of them that their rows are more than the
/// mean and what lies between the rows of experts and ranks.
fn unbalanced(world: World) -> World {
    World { seq_len: 256, text: Text::Equal, ..world }
}

/// Steps whose rows do not fit are repeated, also the first one, whose delayed scales are not set.
#[test]
fn a_room_that_is_too_small_changes_no_bit() {
    let recipes = [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Delayed];
    let mut all =
        sample([Reduce::SameWorld, Reduce::AnyWorld].map(|reduce| worlds(&recipes, reduce)).concat(), 2);
    // Two experts, each of a rank of its own, have the rows of nearly all tokens.
    let surely = |world: &World| world.expert == 4 && world.experts == Some(Family::QWEN3_MOE);
    all.extend(worlds(&[Recipe::Fp8Delayed], Reduce::AnyWorld).into_iter().find(surely));
    // A process that computes several parts needs the rows of the part with the most.
    let parts = |world: World| World { reduce: Reduce::AnyMesh, kv_heads: 4, ..world };
    all.extend(sample(worlds(&recipes, Reduce::AnyMesh), 1).into_iter().map(parts));
    let mut grown = 0;
    for world in all.into_iter().map(unbalanced) {
        let expected = world.run();
        for capacity in [1.0, 1.25] {
            let found = World { capacity: Some(capacity), ..world }.run();
            assert_equal_runs(&world, &found, &expected);
            grown += usize::from(found[0].has_grown);
        }
    }
    assert!(grown > 0, "every step fits");
}

/// The rows that a process needs are those of its part with the most, not the sum over parts: of rows that
/// fit in each part, no step is repeated.
#[test]
fn rows_that_fit_in_each_part_fit_in_a_process_of_several_parts() {
    let experts = Some(Family::QWEN3_MOE);
    let alone = World { experts, expert_count: 4, kv_heads: 4, ..World::alone(Recipe::Fp32, false, 2) };
    // So many tokens that rows between those of experts do not decide.
    let world = World { ranks: 2, expert: 2, seq_len: 1024, layers: 1, reduce: Reduce::AnyMesh, ..alone };
    let found = World { capacity: Some(1.5), ..world }.run();
    assert!(!found[0].has_grown, "{world:?}");
    assert_equal_runs(&world, &found, &world.run());
}

/// The steps of a rank of which two are in flight, and the number of those that were repeated.
fn run_in_flight(world: &World, communicator: ThreadCommunicator) -> (Vec<f64>, usize) {
    let mut learner = world.learner(Arc::new(communicator));
    learner.weights().initialize(5, 0.1).expect("weights");
    let (mut losses, mut repeated, mut next, mut flight) = (Vec::new(), 0, 0, Vec::new());
    while losses.len() < 6 {
        while flight.len() < 3 && next < 6 {
            flight.push(world.launch(&mut learner, next).expect("a step"));
            next += 1;
        }
        let result = learner.collect(flight.remove(0)).expect("outputs");
        let Some(overflow) = result.overflow else {
            losses.push(result.loss);
            continue;
        };
        for ticket in flight.drain(..) {
            let result = learner.collect(ticket).expect("outputs");
            assert!(result.skipped, "a step after one that did not fit is applied");
        }
        learner.grow(overflow).expect("a program with more room");
        (repeated, next) = (repeated + 1, losses.len());
    }
    (losses, repeated)
}

#[test]
fn steps_in_flight_after_one_that_does_not_fit_are_not_applied() {
    let alone =
        World { experts: Some(Family::DOTS1), expert_count: 4, ..World::alone(Recipe::Bf16, false, 2) };
    let world = unbalanced(World { ranks: 4, expert: 4, shard: Shard::Optimizer, ..alone });
    let run = |world: World| -> Vec<(Vec<f64>, usize)> {
        thread::scope(|scope| {
            let spawn = |communicator| scope.spawn(move || run_in_flight(&world, communicator));
            let handles: Vec<_> = ThreadCommunicator::world(4).into_iter().map(spawn).collect();
            handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
        })
    };
    let (small, large) = (run(World { capacity: Some(1.0), ..world }), run(world));
    for ((small, repeated), (large, _)) in small.iter().zip(&large) {
        assert!(*repeated > 0, "every step fits");
        assert_eq!(small, large);
    }
}
