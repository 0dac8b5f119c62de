//! Ranks that share the experts of each block.

use crate::equality::{assert_alike, assert_near_one_process, equal_one_process};
use crate::world::{World, drawn};
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
    for world in drawn(worlds(&[Recipe::Fp32], Reduce::SameWorld)) {
        let ranks = world.run();
        assert_alike(&world, &ranks);
        assert_near_one_process(&world, &ranks);
    }
}

#[test]
fn ranks_that_share_experts_repeat_to_the_bit_in_other_orders_of_lanes() {
    for world in drawn(worlds(&[Recipe::Bf16], Reduce::SameWorld)) {
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
    equal_one_process(&drawn(all.collect()));
}
