//! Ranks of a tensor group: near one process, in the same bits again, with state cut in each way.

use crate::common::relative;
use crate::equality::{assert_alike, assert_near_one_process, equal_one_process};
use crate::world::{RankRun, Text, World, sample, whole, whole_gradients};
use xtrain_model::{Family, Recipe};
use xtrain_program::{Gather, Recompute, Reduce, Shard};
use xtrain_tensor::DType;

/// Worlds of so many ranks, tensor ranks and replicas, with each cut of state.
fn worlds(recipe: Recipe) -> Vec<World> {
    let recomputes = [Recompute::None, Recompute::Norms, Recompute::Block];
    let mut all = Vec::new();
    for (case, (ranks, tensor, replicas)) in
        [(2, 2, 1), (4, 4, 1), (4, 2, 1), (4, 2, 2), (8, 2, 2)].into_iter().enumerate()
    {
        for (n, shard) in [Shard::Optimizer, Shard::Gradients, Shard::Weights].into_iter().enumerate() {
            let alone = World::alone(recipe, (case + n) % 2 == 0, 1 + n % 2);
            // Of 14 tokens, the last of four ranks has fewer than the others.
            let (sources, seq_len, kv_heads) = ([2, 0][n % 2], if tensor == 4 { 7 } else { 16 }, 4);
            let (recompute, text) = (recomputes[(case + n) % 3], [Text::Documents, Text::Random][n % 2]);
            let state = World { ranks, tensor, replicas, shard, recompute, ..alone };
            all.push(World { kv_heads, sources, seq_len, text, ..state });
        }
    }
    all
}

#[test]
fn tensor_ranks_are_near_one_process() {
    for world in worlds(Recipe::Fp32) {
        let ranks = world.run();
        assert_alike(&world, &ranks);
        assert_near_one_process(&world, &ranks);
    }
}

#[test]
fn tensor_ranks_repeat_to_the_bit_in_other_orders_of_lanes() {
    for world in worlds(Recipe::Bf16).into_iter().step_by(2) {
        let first = world.run();
        assert_alike(&world, &first);
        let again = World { orders: 1, ..world }.run();
        assert!(whole(&again) == whole(&first), "{world:?}: other bits");
    }
}

/// Each block is computed in 4 parts, also in one process and on ranks that have all of them. Each recipe has
/// one fixed world for each number of tensor ranks, and others in a sample.
#[test]
fn every_mesh_has_the_bits_of_one_process() {
    let mut all = Vec::new();
    for recipe in Recipe::ALL {
        for (ranks, tensor) in [(2, 1), (2, 2), (4, 4)] {
            let alone = World { kv_heads: 4, reduce: Reduce::AnyMesh, ..World::alone(recipe, true, 2) };
            equal_one_process(&[World { ranks, tensor, micro_steps: 2 * tensor / ranks, ..alone }]);
        }
        let mut worlds = worlds(recipe);
        worlds.extend(worlds.clone().into_iter().map(|world| World { tensor: 1, ..world }));
        all.extend(worlds.into_iter().map(|world| World { reduce: Reduce::AnyMesh, ..world }));
    }
    equal_one_process(&sample(all, 16));
}

/// Where tensor ranks are as many as parts, a step of one micro-batch adds in one order only: so the FP8
/// casts and GEMMs of the default order are those that are proven for any mesh. (The norm of gradients is
/// added in another order, and so are losses of ranks, uses of tied embeddings, and outputs of experts.)
#[test]
fn one_part_on_each_rank_has_the_bits_of_any_mesh_in_the_default_order() {
    for recipe in Recipe::ALL {
        let alone = World { kv_heads: 4, clips: false, ..World::alone(recipe, false, 1) };
        let world = World { ranks: 4, tensor: 4, shard: Shard::Optimizer, ..alone };
        let stages = World { ranks: 8, pipeline: 2, layers: 3, text: Text::Documents, ..world };
        let all = [world, World { ranks: 8, shard: Shard::Weights, ..world }, stages];
        for world in all {
            let (found, expected) = (world.run(), World { reduce: Reduce::AnyMesh, ..world }.run());
            assert_alike(&world, &found);
            let expected = whole(&expected);
            for (key, bytes) in whole(&found) {
                assert!(bytes == expected[&key], "{world:?}: {key:?} has other bits than with any-mesh");
            }
        }
    }
}

#[test]
fn parts_in_one_process_are_near_the_whole() {
    for family in [None, Some(Family::MIXTRAL), Some(Family::QWEN3_MOE), Some(Family::DOTS1)] {
        for (case, kv_heads) in [4, 8, 2, 4].into_iter().enumerate() {
            let alone = World::alone(Recipe::Fp32, case % 2 == 0, 1 + case % 2);
            let text = [Text::Documents, Text::Random][case % 2];
            let (seq_len, sources) = ([64, 7, 16, 64][case], [2, 0][case % 2]);
            let sizes = World { kv_heads, seq_len, sources, text, expert_count: 4, ..alone };
            let world = World { experts: family, reduce: Reduce::AnyMesh, ..sizes };
            assert_near_one_process(&world, &world.run());
        }
    }
}

/// Mixtures, whose experts are not cut; stages of a pipeline; eight parts.
#[test]
fn meshes_of_mixtures_and_stages_have_the_bits_of_one_process() {
    let mut all = Vec::new();
    for (n, recipe) in
        [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Block, Recipe::Fp8Delayed].into_iter().enumerate()
    {
        for (case, world) in worlds(recipe).into_iter().enumerate() {
            let family = [Family::MIXTRAL, Family::QWEN3_MOE, Family::DOTS1][(n + case) % 3];
            let seq_len = if case % 2 == 0 { 64 } else { world.seq_len };
            let expert = [1, 2, world.ranks / world.replicas][(n + case / 2) % 3];
            all.push(World { experts: Some(family), expert_count: 4, expert, seq_len, ..world });
            all.push(World {
                pipeline: 2,
                chunks: 2,
                ranks: 2 * world.ranks,
                layers: 4,
                micro_steps: 4,
                experts: Some(family),
                expert_count: 4,
                seq_len: 64,
                ..world
            });
            all.push(World { pipeline: 2, ranks: 2 * world.ranks, layers: 3, micro_steps: 4, ..world });
            all.push(World {
                pipeline: 2,
                ranks: 2,
                tensor: 1,
                replicas: 1,
                layers: 3,
                micro_steps: 4,
                ..world
            });
            all.push(World { kv_heads: 8, seq_len: 24, ..world });
        }
        all.push(World { kv_heads: 8, tensor: 8, ranks: 8, replicas: 1, ..worlds(recipe)[0] });
    }
    let all: Vec<World> = all.into_iter().map(|world| World { reduce: Reduce::AnyMesh, ..world }).collect();
    equal_one_process(&sample(all, 20));
}

/// In FP8, products of parts have other scales, or other sums.
#[test]
fn tensor_ranks_are_near_one_process_in_low_precision() {
    for recipe in [Recipe::Bf16, Recipe::Fp8Delayed, Recipe::Fp8Current, Recipe::Fp8Row, Recipe::Fp8Block] {
        for world in sample(worlds(recipe), 6) {
            let ranks = world.run();
            assert_alike(&world, &ranks);
            assert_nearly(&world, &ranks, if recipe == Recipe::Bf16 { [2e-2, 2e-3] } else { [0.25, 2e-2] });
        }
    }
}

/// Experts have the tokens of each rank; ranks share them, too, whatever tensor group they are in.
#[test]
fn mixtures_on_tensor_ranks_are_near_one_process() {
    for (n, experts) in [Family::MIXTRAL, Family::QWEN3_MOE, Family::DOTS1].into_iter().enumerate() {
        for (case, (ranks, tensor, expert)) in
            [(4, 4, 1), (2, 2, 2), (4, 2, 4), (4, 4, 2), (8, 2, 2)].into_iter().enumerate()
        {
            let shard = [Shard::Optimizer, Shard::Gradients, Shard::Weights][(n + case) % 3];
            // With padding after the tokens of the last rank, or with a room that is too small.
            let (seq_len, capacity) = [(7, None), (64, Some(1.0))][(n + case) % 2];
            let recompute = [Recompute::Block, Recompute::None][case % 2];
            let alone =
                World { seq_len, kv_heads: 4, expert_count: 4, ..World::alone(Recipe::Fp32, false, 2) };
            let state = World { ranks, tensor, expert, shard, recompute, capacity, ..alone };
            let world = World { experts: Some(experts), text: Text::Documents, ..state };
            let ranks = world.run();
            assert_alike(&world, &ranks);
            assert_near_one_process(&world, &ranks);
        }
    }
}

/// The stages of a pipeline, with the tokens of a rank of each tensor group.
#[test]
fn stages_of_tensor_ranks_are_near_one_process() {
    for world in worlds(Recipe::Fp32) {
        let world = World { pipeline: 2, ranks: 2 * world.ranks, layers: 3, micro_steps: 3, ..world };
        let ranks = world.run();
        assert_alike(&world, &ranks);
        assert_near_one_process(&world, &ranks);
    }
}

/// Sums by the communicator, sums in bf16, FP8 weights that are cast from other gathers, tokens in FP8.
#[test]
fn other_ways_to_exchange_are_near_one_process() {
    let alone = World { kv_heads: 4, ..World::alone(Recipe::Bf16, true, 2) };
    let world = World { ranks: 4, tensor: 2, shard: Shard::Weights, ..alone };
    let fp8 = World { recipe: Recipe::Fp8Block, ..world };
    let mixture = World { experts: Some(Family::QWEN3_MOE), expert_count: 4, seq_len: 64, ..world };
    for world in [
        World { reduce: Reduce::Fast, ..world },
        World { reduce_dtype: DType::BF16, shard: Shard::Gradients, ..world },
        World { gather: Gather::Fp32, ..fp8 },
        World { gather: Gather::Bf16, ..fp8 },
        World { gather: Gather::Bf16, shard: Shard::Optimizer, ..fp8 },
        World { recipe: Recipe::Fp8Delayed, expert: 2, wire: true, ..mixture },
        World { ranks: 8, pipeline: 2, expert: 4, micro_steps: 3, ..mixture },
    ] {
        let ranks = world.run();
        assert_alike(&world, &ranks);
        assert_nearly(&world, &ranks, [0.25, 2e-2]);
    }
}

/// Fails unless gradients of the first step, of all parameters together, and losses are this near.
fn assert_nearly(world: &World, ranks: &[RankRun], [of_gradients, of_losses]: [f64; 2]) {
    let one = World { micro_steps: world.data_ranks() * world.micro_steps, ..*world };
    let one = World { ranks: 1, pipeline: 1, tensor: 1, expert: 1, replicas: 1, shard: Shard::None, ..one };
    let one =
        World { reduce: Reduce::SameWorld, reduce_dtype: DType::F32, gather: Gather::Auto, ..one }.run();
    let all = |of: &[RankRun]| whole_gradients(of).into_values().flatten().collect::<Vec<f32>>();
    let error = relative(&all(world.first_replica(ranks)), &all(&one));
    assert!(error < of_gradients, "{world:?}: gradients differ by {error:e}");
    for (found, expected) in ranks[0].results.iter().zip(&one[0].results) {
        let error = (found.loss / expected.loss - 1.0).abs();
        assert!(error < of_losses, "{world:?}: {} instead of {}", found.loss, expected.loss);
    }
    println!("{world:?}: gradients differ by {error:e}");
}
