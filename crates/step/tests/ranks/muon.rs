//! Muon on several ranks: the bits of one process, whatever rows of matrices a rank has.

use crate::equality::{assert_alike, equal_one_process};
use crate::world::{World, sample, whole};
use std::collections::BTreeMap;
use xtrain_model::{Family, Recipe};
use xtrain_program::{Groups, Payload, Program, Reduce, Shard, StateKind, Storage};
use xtrain_step::programs;

const SHARDS: [Shard; 4] = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights];

fn muon(recipe: Recipe, tied: bool, micro_steps: usize) -> World {
    World { muon: true, ..World::alone(recipe, tied, micro_steps) }
}

fn training(world: &World, rank: usize) -> Program {
    programs::training(&world.spec(rank)).expect("a program")
}

/// Rows that divide among the ranks, and rows that do not, so that matrices begin on different ranks.
#[test]
fn ranks_have_the_bits_of_one_process() {
    let mut all = Vec::new();
    for recipe in [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Delayed, Recipe::Fp8Block] {
        for (n, shard) in SHARDS.into_iter().enumerate() {
            for (ranks, replicas) in [(2, 1), (4, 1), (4, 2), (8, 1)] {
                let alone = World { layers: 2 + n % 2, ..muon(recipe, n % 2 == 1, 1 + n % 3) };
                all.push(World { ranks, replicas, shard, reduce: Reduce::AnyWorld, ..alone });
            }
        }
    }
    equal_one_process(&sample(all, 16));
}

/// Ranks have several experts, one, or rows of one, with and without parts of experts.
#[test]
fn ranks_that_share_experts_have_the_bits_of_one_process() {
    let mut all = Vec::new();
    for family in [Family::MIXTRAL, Family::QWEN3_MOE, Family::DOTS1] {
        for (n, shard) in SHARDS.into_iter().enumerate() {
            for (ranks, expert) in [(2, 1), (2, 2), (4, 2), (4, 4), (8, 1)] {
                let alone = muon([Recipe::Fp32, Recipe::Bf16][n % 2], false, 1 + n % 2);
                let mixture = World { experts: Some(family), expert_count: 4, seq_len: 64, ..alone };
                all.push(World { ranks, expert, shard, reduce: Reduce::AnyWorld, ..mixture });
            }
        }
    }
    equal_one_process(&sample(all, 10));
}

#[test]
fn stages_and_parts_of_matrices_have_the_bits_of_one_process() {
    let mut all = Vec::new();
    for (n, shard) in SHARDS.into_iter().enumerate() {
        let stages =
            World { pipeline: 2, layers: 3, reduce: Reduce::AnyWorld, ..muon(Recipe::Fp32, n % 2 == 1, 4) };
        all.push(World { ranks: 4, shard, ..stages });
        if shard != Shard::None {
            let parts = World { kv_heads: 4, reduce: Reduce::AnyMesh, shard, ..muon(Recipe::Bf16, false, 1) };
            all.extend([1, 2].map(|tensor| World { ranks: 4, tensor, ..parts }));
        }
    }
    equal_one_process(&all);
}

/// Of three ranks, and in other orders of lanes.
#[test]
fn runs_repeat_to_the_bit() {
    for (n, shard) in SHARDS.into_iter().enumerate() {
        let world = World { ranks: 3, shard, layers: 2 + n % 2, ..muon(Recipe::Bf16, false, 1) };
        let (first, second) = (world.run(), World { orders: 1, ..world }.run());
        assert_alike(&world, &first);
        assert_eq!(first[0].results, second[0].results, "{world:?}");
        assert!(whole(&first) == whole(&second), "{world:?}");
    }
}

#[test]
fn a_matrix_has_one_moment_and_other_parameters_have_two() {
    for world in [
        muon(Recipe::Bf16, false, 1),
        World { ranks: 2, shard: Shard::Optimizer, ..muon(Recipe::Bf16, false, 1) },
    ] {
        let program = training(&world, 0);
        let mut held: BTreeMap<String, Vec<StateKind>> = BTreeMap::new();
        for value in &program.values {
            let Storage::State { kind, name } = &value.storage else { continue };
            if matches!(kind, StateKind::Moment1 | StateKind::Moment2) {
                held.entry(name.to_string()).or_default().push(*kind);
            }
        }
        for p in world.spec(0).model.parameters().into_iter().filter(|p| p.group.has_gradient()) {
            let expected = world.spec(0).optimizer.state(p.group);
            assert_eq!(held[&p.name][..], *expected, "{}", p.name);
            let is_matrix = p.name.starts_with("blocks.") && p.shape.len() == 2;
            assert_eq!(expected.len(), if is_matrix { 1 } else { 2 }, "{}", p.name);
        }
    }
}

/// The extents of the matrices that a rank orthogonalises.
fn orthogonalized(program: &Program) -> Vec<Vec<usize>> {
    let all = program.instances.iter().filter(|i| i.code.op().name() == "orthogonalize");
    all.map(|i| program.input_types(i)[0].shape.to_vec()).collect()
}

/// Bytes of updates that a rank sends in a step.
fn sent(program: &Program) -> u64 {
    let updates = program.traffic(1).into_iter().filter(|of| of.payload == Payload::Updates);
    updates.map(|of| of.step_bytes()).sum()
}

/// Of four blocks, each of four ranks has one matrix of each shape.
#[test]
fn each_rank_orthogonalises_its_share_of_the_matrices() {
    let alone = World { layers: 4, ..muon(Recipe::Bf16, false, 1) };
    let (one, four) =
        (training(&alone, 0), training(&World { ranks: 4, shard: Shard::Optimizer, ..alone }, 0));
    assert_eq!((orthogonalized(&one).len(), orthogonalized(&four).len()), (16, 4));
    let flops = |program: &Program| program.flops(|i| i.code.op().name() == "orthogonalize");
    assert_eq!(4.0 * flops(&four), flops(&one));
    // Rows of three other ranks to each matrix, and back, and padding.
    let elements: usize = alone
        .spec(0)
        .model
        .parameters()
        .iter()
        .filter(|p| p.shape.len() == 2 && p.name.starts_with("blocks."))
        .map(|p| p.shape.iter().product::<usize>())
        .sum();
    let least = (2 * 4 * elements / 4 * 3 / 4) as u64;
    assert!((least..=least + least / 10).contains(&sent(&four)), "{} bytes, at least {least}", sent(&four));
    assert_eq!(sent(&one), 0);
}

/// A rank that has whole experts sends nothing of them; one that has a half shares it with its neighbour.
#[test]
fn experts_are_exchanged_only_among_the_ranks_that_have_their_rows() {
    let mixture = World { experts: Some(Family::MIXTRAL), expert_count: 4, ..muon(Recipe::Bf16, false, 1) };
    let groups = |ranks: usize| {
        let world = World { ranks, shard: Shard::Optimizer, ..mixture };
        let program = training(&world, 0);
        let is_of_experts = |name: &str| name.contains("experts");
        let mut groups = Vec::new();
        for (n, instance) in program.instances.iter().enumerate() {
            let is_momentum = instance.code.op().name() == "muon_momentum";
            let names = instance.inputs.iter().filter_map(|v| match &program.value(*v).storage {
                Storage::State { kind: StateKind::Moment1, name } => Some(name.to_string()),
                _ => None,
            });
            if is_momentum && names.into_iter().all(|name| is_of_experts(&name)) {
                let next = program.instances.get(n + 1).and_then(|next| next.code.op().collective());
                groups.push(next.map(|(_, groups)| groups));
            }
        }
        assert!(!groups.is_empty());
        groups
    };
    assert!(groups(2).iter().all(Option::is_none) && groups(4).iter().all(Option::is_none));
    assert!(groups(8).iter().all(|groups| *groups == Some(Groups { size: 2, stride: 1 })), "{:?}", groups(8));
}
