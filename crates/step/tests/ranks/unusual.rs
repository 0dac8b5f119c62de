//! Ranks that share experts, with unusual inputs.

use crate::equality::{assert_alike, assert_near_one_process, equal_one_process};
use crate::experts::{FAMILIES, assert_equal_runs};
use crate::world::{Text, World, sample, whole};
use xtrain_model::{Family, Recipe};
use xtrain_program::{Recompute, Reduce, Shard, StateKind};
use xtrain_step::learner::Learner;

/// Four ranks of which `expert` share experts.
fn four_ranks(recipe: Recipe, family: Family, expert: usize) -> World {
    let alone = World { experts: Some(family), expert_count: 4, ..World::alone(recipe, false, 2) };
    World { ranks: 4, expert, ..alone }
}

/// Writes these bytes into all copies that a rank has of the weights whose name ends like this.
fn overwrite(learner: &mut Learner, name: &str, byte: u8) {
    let copies = [StateKind::Master, StateKind::Compute, StateKind::Gathered];
    let entries = learner.weights().engine().state_entries();
    let of_weight = |kind, found: &str| copies.contains(&kind) && found.ends_with(name);
    let found: Vec<_> = entries.into_iter().filter(|entry| of_weight(entry.kind, &entry.name)).collect();
    assert!(!found.is_empty(), "no weight is named {name}");
    for entry in found {
        let bytes = vec![byte; entry.ty.bytes()];
        learner.weights().engine().write_state(entry.kind, &entry.name, &bytes).expect("a weight");
    }
}

#[test]
fn recomputation_changes_no_bit_of_ranks_that_share_experts() {
    let recipes = [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Block, Recipe::Fp8Delayed];
    for (n, recipe) in recipes.into_iter().enumerate() {
        let shard = [Shard::None, Shard::Weights][n / 2];
        let world = World { layers: 3, shard, ..four_ranks(recipe, FAMILIES[n % 3], [2, 4][n % 2]) };
        let expected = world.run();
        for recompute in [Recompute::Norms, Recompute::Block] {
            let world = World { recompute, ..world };
            let found = world.run();
            assert_alike(&world, &found);
            assert_equal_runs(&world, &found, &expected);
        }
    }
}

#[test]
fn micro_batches_without_targets_add_nothing() {
    for (n, family) in FAMILIES.into_iter().enumerate() {
        let padding = |recipe, expert| World { text: Text::Padding, ..four_ranks(recipe, family, expert) };
        let world = padding(Recipe::Fp32, [2, 4][n % 2]);
        assert_near_one_process(&world, &world.run());
        let recipe = [Recipe::Bf16, Recipe::Fp8Block, Recipe::Fp8Delayed][n];
        let world = padding(recipe, [4, 2][n % 2]);
        equal_one_process(&[World { reduce: Reduce::AnyWorld, seq_len: 64, ..world }]);
    }
}

/// Some of them get a token in no step, and a rank can be without any.
#[test]
fn there_may_be_more_experts_than_copies_of_tokens() {
    for family in FAMILIES {
        let world = World { expert_count: 32, seq_len: 4, ..four_ranks(Recipe::Fp32, family, 4) };
        let ranks = world.run();
        assert_alike(&world, &ranks);
        assert_near_one_process(&world, &ranks);
    }
}

/// With equal logits each token chooses the first experts, all of one rank if two ranks share them.
#[test]
fn all_tokens_may_choose_the_experts_of_one_rank() {
    let damage = |_: usize, learner: &mut Learner| overwrite(learner, "router.weight", 0);
    let recipes = [Recipe::Fp8Block, Recipe::Fp32, Recipe::Bf16].into_iter();
    for (recipe, family) in sample(recipes.zip(FAMILIES).collect(), 1) {
        let world = four_ranks(recipe, family, 2);
        let world = World { reduce: Reduce::AnyWorld, seq_len: 256, text: Text::Equal, ..world };
        let one = World { ranks: 1, expert: 1, micro_steps: world.ranks * world.micro_steps, ..world };
        let expected = one.run_with(&damage);
        for capacity in [None, Some(1.0)] {
            let world = World { capacity, ..world };
            let found = world.run_with(&damage);
            assert_eq!(found[0].has_grown, capacity.is_some(), "{world:?}");
            assert_eq!(found[0].results, expected[0].results, "{world:?}");
            assert!(whole(&found) == whole(&expected), "{world:?}");
        }
    }
}

/// Its rows are gathered, so the rank with the numbers is not the only one that computes with them.
#[test]
fn numbers_that_are_not_finite_on_one_rank_change_nothing_on_any_also_if_rows_do_not_fit() {
    for weight in ["embed.weight", "experts.gate_up_proj.weight"] {
        // Bytes of NaNs.
        let damage = |rank: usize, learner: &mut Learner| {
            if rank == 1 {
                overwrite(learner, weight, 0xFF);
            }
        };
        for capacity in [None, Some(1.0)] {
            let world =
                World { seq_len: 128, text: Text::Equal, ..four_ranks(Recipe::Fp32, Family::DOTS1, 4) };
            let world = World { capacity, ..world };
            for (n, rank) in world.run_with(&damage).iter().enumerate() {
                assert_eq!(rank.has_grown, capacity.is_some(), "{world:?}: rank {n}");
                assert!(rank.results.iter().all(|step| step.skipped), "{world:?}: rank {n} updates");
                assert_eq!(rank.applied, 0, "{world:?}: rank {n}");
                let mut moments = rank.saved.iter().filter(|((kind, _), _)| *kind == StateKind::Moment1);
                assert!(moments.all(|(_, bytes)| bytes.iter().all(|byte| *byte == 0)), "{world:?}: rank {n}");
                let mut biases = rank.saved.iter().filter(|((_, name), _)| name.ends_with("router.bias"));
                assert!(biases.clone().count() > 0, "{:?}", rank.saved.keys());
                assert!(biases.all(|(_, bytes)| bytes.iter().all(|byte| *byte == 0)), "{world:?}: rank {n}");
            }
        }
    }
}
