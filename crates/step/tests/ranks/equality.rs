//! Equal bits on all ranks and in all worlds, and results near those of one process.

use crate::common::relative;
use crate::world::{RankRun, World, drawn, whole, whole_gradients};
use std::collections::BTreeMap;
use xtrain_model::{Family, Recipe};
use xtrain_program::{Gather, Reduce, Shard, StateKind};
use xtrain_step::learner::{Learner, StepResult};
use xtrain_tensor::DType;

/// The worlds of these numbers of ranks and replicas: every recipe, tied or not, with accumulation or not,
/// cut or not.
fn worlds(ranks: &[(usize, usize)], reduce: Reduce) -> Vec<World> {
    let mut all = Vec::new();
    for recipe in Recipe::ALL {
        for case in 0..16 * ranks.len() {
            let (tied, micro_steps) = (case & 1 == 1, if case & 2 == 0 { 1 } else { 4 });
            let shard = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights][case >> 2 & 3];
            let (ranks, replicas) = ranks[case >> 4];
            let sources = if tied { 3 } else { 0 };
            let (prefetch_blocks, layers) = (case % 3, 2 + case % 3);
            let alone = World { sources, prefetch_blocks, layers, ..World::alone(recipe, tied, micro_steps) };
            all.push(World { ranks, replicas, shard, reduce, ..alone });
        }
    }
    all
}

/// Fails if ranks differ in what they share, or replicas in their rows, or if ranks hold other memory than
/// planned or send other bytes.
pub(crate) fn assert_alike(world: &World, ranks: &[RankRun]) {
    for (n, rank) in ranks.iter().enumerate() {
        // The first rank of the stage.
        let first = n / world.stage_ranks() * world.stage_ranks();
        let twin = &ranks[first + (n - first) % (world.stage_ranks() / world.replicas)];
        assert!(rank.rows == twin.rows, "{world:?}: rank {n} has other rows than its replica");
        for (key, bytes) in &rank.saved {
            assert!(bytes == &twin.saved[key], "{world:?}: rank {n} has other bits in its rows of {key:?}");
        }
        assert_eq!(rank.first_gradients, twin.first_gradients, "{world:?}: rank {n}");
        assert_eq!(rank.results, ranks[0].results, "{world:?}: rank {n} reports other numbers");
        for (key, bytes) in &rank.shared {
            assert!(bytes == &ranks[first].shared[key], "{world:?}: rank {n} has other bits in {key:?}");
        }
        let first_of_part = first + (n - first) % world.tensor;
        for (key, bytes) in &rank.of_parts {
            assert!(bytes == &ranks[first_of_part].of_parts[key], "{world:?}: {n} has other bits in {key:?}");
        }
        assert_eq!(rank.memory[0], rank.memory[1], "{world:?}: memory of rank {n}, and its plan");
        let (sent, planned) = &rank.sent;
        assert!(
            sent.iter().all(|step| step == planned),
            "{world:?}: rank {n} sends {sent:?}, not {planned:?}"
        );
        assert!(rank.results.iter().all(|step| !step.skipped), "{world:?}");
    }
}

#[test]
fn ranks_have_equal_bits_and_are_near_one_process() {
    for world in drawn(worlds(&[(2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (2, 2)], Reduce::SameWorld)) {
        let ranks = world.run();
        assert_alike(&world, &ranks);
        if world.recipe == Recipe::Fp32 {
            assert_near_one_process(&world, &ranks);
        }
    }
}

#[test]
fn gradients_of_the_first_step_and_five_steps_are_near_one_process() {
    for (ranks, shard) in [(3, Shard::None), (3, Shard::Optimizer), (4, Shard::Optimizer)] {
        let world = World { ranks, shard, sources: 3, ..World::alone(Recipe::Fp32, ranks == 4, 2) };
        assert_near_one_process(&world, &world.run());
    }
}

pub(crate) fn assert_near_one_process(world: &World, ranks: &[RankRun]) {
    // Parts are rounded before they are added, and gradients of norms are much smaller than what they are
    // sums of.
    let has_parts = world.tensor > 1 || world.reduce.is_any_mesh();
    let alone = World::alone(world.recipe, world.tied, world.data_ranks() * world.micro_steps);
    let World { adapters, sources, layers, experts, expert_count, seq_len, text, kv_heads, .. } = *world;
    let alone =
        World { adapters, sources, layers, experts, expert_count, seq_len, text, kv_heads, ..alone }.run();
    let expected = whole_gradients(&alone);
    for (name, gradient) in whole_gradients(world.first_replica(ranks)) {
        let error = relative(&gradient, &expected[&name]);
        let bound = match (has_parts, name.contains("norm")) {
            (false, _) => 1e-6,
            (true, false) => 2e-6,
            (true, true) => 3e-6,
        };
        assert!(error < bound, "{world:?}: {name} differs by {error:e}");
    }
    for (step, (found, expected)) in ranks[0].results.iter().zip(&alone[0].results).enumerate() {
        // After an update that differs by a rounding, a token between two experts may choose the other one.
        let loads = |result: &StepResult| -> Vec<Vec<f32>> {
            result.experts.iter().map(|experts| experts.tokens.clone()).collect()
        };
        if step > 0 && loads(found) != loads(expected) {
            break;
        }
        let is_near = |x: f64, expected: f64| (x / expected - 1.0).abs() < 1e-5;
        assert!(
            is_near(found.loss, expected.loss) && is_near(found.grad_norm, expected.grad_norm),
            "{world:?}: step {step} has {found:?} instead of {expected:?}"
        );
        for (found, expected) in found.experts.iter().zip(&expected.experts) {
            let is_near = |x: f32, expected: f32| (x - expected).abs() < 1e-4 * expected;
            assert!(
                is_near(found.balance, expected.balance) && found.tokens == expected.tokens,
                "{world:?}: step {step} has {found:?} instead of {expected:?}"
            );
        }
        // With several ranks, those of all ranks.
        assert_eq!(found.source_losses.len(), world.sources);
        let mut sources = found.source_losses.iter().zip(&expected.source_losses);
        assert!(
            sources.all(|(&found, &expected)| is_near(found, expected)),
            "{world:?}: step {step} has {found:?} instead of {expected:?}"
        );
    }
}

#[test]
fn sums_for_any_world_have_the_bits_of_one_process() {
    equal_one_process(&drawn(worlds(&[(2, 1), (4, 1), (4, 2), (2, 2), (4, 4), (8, 2)], Reduce::AnyWorld)));
}

/// Loads, losses of routers and their biases too.
#[test]
fn mixtures_of_experts_have_the_bits_of_one_process_in_any_world() {
    let mut all = Vec::new();
    for (case, family) in [Family::MIXTRAL, Family::QWEN3_MOE, Family::DOTS1].into_iter().enumerate() {
        for shard in [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights] {
            for (ranks, replicas) in [(2, 1), (4, 1), (4, 2)] {
                let recipe = if ranks == replicas * 2 { Recipe::Bf16 } else { Recipe::Fp32 };
                let alone = World { sources: 2 * (case % 2), ..World::alone(recipe, case == 1, 1 + case) };
                let experts = Some(family);
                all.push(World { ranks, replicas, shard, reduce: Reduce::AnyWorld, experts, ..alone });
            }
        }
    }
    equal_one_process(&drawn(all));
}

/// Ranks gather the FP8 weights of experts, each rank with rows of its own.
#[test]
fn fp8_experts_have_the_bits_of_one_process_in_any_world() {
    let mut all = Vec::new();
    for recipe in [Recipe::Fp8Current, Recipe::Fp8Delayed, Recipe::Fp8Block] {
        for (case, shard) in
            [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights].into_iter().enumerate()
        {
            let (ranks, replicas) = if case == 3 { (4, 2) } else { (2, 1) };
            let experts = Some(Family::MIXTRAL);
            let alone = World { experts, ..World::alone(recipe, case == 1, 1 + case % 2) };
            all.push(World { ranks, replicas, shard, reduce: Reduce::AnyWorld, ..alone });
        }
    }
    equal_one_process(&drawn(all));
}

/// Fails unless each of these worlds has the bits of one process.
pub(crate) fn equal_one_process(worlds: &[World]) {
    let mut alone: BTreeMap<String, Vec<RankRun>> = BTreeMap::new();
    for &world in worlds {
        let one = World {
            ranks: 1,
            replicas: 1,
            expert: 1,
            tensor: 1,
            pipeline: 1,
            chunks: 1,
            micro_steps: world.data_ranks() * world.micro_steps,
            shard: Shard::None,
            ..world
        };
        let one = alone.entry(format!("{one:?}")).or_insert_with(|| one.run());
        let ranks = world.run();
        assert_alike(&world, &ranks);
        assert_eq!(ranks[0].results, one[0].results, "{world:?}");
        let (found, expected) = (whole(world.first_replica(&ranks)), whole(one));
        assert_eq!(found.len(), expected.len());
        for (key, bytes) in found {
            assert!(bytes == expected[&key], "{world:?}: {key:?} has other bits than in one process");
        }
    }
}

/// Where NCCL does not add, the sums are those of `sum_ranks`.
#[test]
fn sums_of_the_communicator_have_the_bits_of_the_default() {
    for world in drawn(worlds(&[(2, 1), (3, 1), (4, 1), (4, 2), (6, 3), (2, 2)], Reduce::Fast)) {
        let same_world = World { reduce: Reduce::SameWorld, ..world };
        let (ranks, expected) = (world.run(), same_world.run());
        assert_alike(&world, &ranks);
        assert_eq!(ranks[0].results, expected[0].results, "{world:?}");
        let whole = |ranks| whole(world.first_replica(ranks));
        assert!(
            whole(&ranks) == whole(&expected),
            "{world:?}: other bits than with parallel.reduce = same-world"
        );
        assert_eq!(ranks[0].sent.1, expected[0].sent.1, "{world:?}: other bytes are sent");
    }
}

const FP8: [Recipe; 4] = [Recipe::Fp8Current, Recipe::Fp8Delayed, Recipe::Fp8Row, Recipe::Fp8Block];

/// Each rank casts its rows in one run, and the whole of the gathered masters in the other.
#[test]
fn weights_that_are_gathered_in_8_bits_have_the_bits_of_gathered_masters() {
    let mut all = Vec::new();
    for recipe in FP8 {
        for (case, shard) in [Shard::Optimizer, Shard::Gradients, Shard::Weights].into_iter().enumerate() {
            for (ranks, replicas) in [(2, 1), (3, 1), (4, 1), (4, 2)] {
                let tied = (case + ranks + replicas) % 2 == 0;
                let alone = World { layers: 2 + ranks % 2, ..World::alone(recipe, tied, 1 + case) };
                all.push(World { ranks, replicas, shard, prefetch_blocks: case, ..alone });
            }
        }
    }
    for world in drawn(all) {
        let (ranks, expected) = (world.run(), World { gather: Gather::Fp32, ..world }.run());
        assert_alike(&world, &ranks);
        assert_alike(&World { gather: Gather::Fp32, ..world }, &expected);
        assert_eq!(ranks[0].results, expected[0].results, "{world:?}");
        let whole = |ranks| whole(world.first_replica(ranks));
        assert!(whole(&ranks) == whole(&expected), "{world:?}: other bits than with gathered masters");
        let gathered = |ranks: &[RankRun]| ranks[0].sent.1["all_gather"];
        assert!(gathered(&ranks) < gathered(&expected), "{world:?}");
    }
}

#[test]
fn weights_that_are_gathered_in_bf16_are_rounded_twice_and_train_alike() {
    for (recipe, shard) in
        FP8.into_iter().zip([Shard::Weights, Shard::Optimizer, Shard::Weights, Shard::Gradients])
    {
        let eight = World { ranks: 2, shard, ..World::alone(recipe, false, 2) };
        let world = World { gather: Gather::Bf16, ..eight };
        let (ranks, eight) = (world.run(), eight.run());
        assert_alike(&world, &ranks);
        assert_ne!(ranks[0].results, eight[0].results, "{world:?}");
        for (found, expected) in ranks[0].results.iter().zip(&eight[0].results) {
            assert!((found.loss / expected.loss - 1.0).abs() < 5e-3, "{world:?}: {found:?}, {expected:?}");
        }
    }
}

#[test]
fn gradients_that_are_sent_in_bf16_are_near_and_equal_on_all_ranks() {
    let shards = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights];
    let all = shards.map(|shard| [(3, 1), (4, 2)].map(|(ranks, replicas)| (shard, ranks, replicas)));
    for (shard, ranks, replicas) in all.into_iter().flatten() {
        let alone = World::alone(Recipe::Fp32, false, 2);
        let exact = World { ranks, replicas, shard, ..alone };
        let world = World { reduce_dtype: DType::BF16, ..exact };
        let (ranks, exact) = (world.run(), exact.run());
        assert_alike(&world, &ranks);
        // Gradients are sent in half as many bytes.
        let exchanged = |ranks: &[RankRun]| ranks[0].sent.1["all_to_all"];
        assert_eq!(2 * exchanged(&ranks), exchanged(&exact));
        let expected = whole_gradients(world.first_replica(&exact));
        for (name, gradient) in whole_gradients(world.first_replica(&ranks)) {
            let error = relative(&gradient, &expected[&name]);
            assert!(error > 1e-6 && error < 4e-3, "{world:?}: {name} differs by {error:e}");
        }
    }
}

#[test]
fn runs_repeat_to_the_bit_in_other_orders_of_lanes() {
    let three = World { ranks: 3, shard: Shard::Optimizer, ..World::alone(Recipe::Bf16, true, 2) };
    for world in [three, World { ranks: 4, replicas: 2, shard: Shard::Weights, ..three }] {
        let (first, second) = (world.run(), World { orders: 1, ..world }.run());
        assert_eq!(first[0].results, second[0].results);
        let whole = |ranks| whole(world.first_replica(ranks));
        assert!(whole(&first) == whole(&second), "{world:?}");
    }
}

#[test]
fn a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() {
    let damage = |rank: usize, learner: &mut Learner| {
        if rank == 1 {
            // A copy that rank 1 reads, of a weight whose other copies are good.
            let kind = [StateKind::Gathered, StateKind::Compute, StateKind::Master];
            let entries = learner.weights().engine().state_entries();
            let of = |kind| entries.iter().find(|entry| entry.kind == kind && entry.name == "embed.weight");
            let entry = kind.into_iter().find_map(of).expect("a copy that the forward reads");
            // Bytes of NaNs.
            let engine = learner.weights().engine();
            engine.write_state(entry.kind, &entry.name, &vec![0xFF; entry.ty.bytes()]).expect("a copy");
        }
    };
    for recipe in [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Delayed, Recipe::Fp8Block] {
        for (shard, reduce, ranks, replicas) in [
            (Shard::None, Reduce::SameWorld, 3, 1),
            (Shard::Optimizer, Reduce::Fast, 3, 1),
            (Shard::Optimizer, Reduce::AnyWorld, 2, 1),
            (Shard::Optimizer, Reduce::SameWorld, 4, 2),
            (Shard::Gradients, Reduce::SameWorld, 2, 1),
            (Shard::Weights, Reduce::SameWorld, 4, 2),
        ] {
            let world = World { ranks, replicas, shard, reduce, ..World::alone(recipe, false, 2) };
            for (n, rank) in world.run_with(&damage).iter().enumerate() {
                assert!(rank.results[0].skipped, "{world:?}: rank {n} updates");
                // The gathers after the first update replace the damaged copy, if masters are cut.
                let good = rank.results.iter().filter(|step| !step.skipped).count();
                assert_eq!(rank.applied as usize, good, "{world:?}: rank {n}");
                let replaces = recipe != Recipe::Fp32 || matches!(shard, Shard::Optimizer | Shard::Gradients);
                assert_eq!(good > 0, replaces, "{world:?}");
            }
        }
    }
}
