//! Adapters on several ranks: each has the whole frozen model, and its share of what is trained.

use crate::equality::{assert_alike, assert_near_one_process, equal_one_process};
use crate::world::{World, fill_adapters, frozen, sample};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use xtrain_distributed::ThreadCommunicator;
use xtrain_model::{ParameterSpec, Recipe};
use xtrain_program::{Payload, Program, Reduce, Role, Shard, StateKind, Storage};
use xtrain_step::programs;

/// With these each rank has the whole frozen model.
const SHARDS: [Shard; 3] = [Shard::None, Shard::Optimizer, Shard::Gradients];
const ALL_SHARDS: [Shard; 4] = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights];

fn adapters(recipe: Recipe, tied: bool, micro_steps: usize) -> World {
    World { adapters: true, ..World::alone(recipe, tied, micro_steps) }
}

fn training(world: &World, rank: usize) -> Program {
    programs::training(&world.spec(rank)).expect("a program")
}

/// With masks of dropout that depend on the place in the whole batch.
#[test]
fn ranks_have_the_bits_of_one_process_in_any_world() {
    let mut all = Vec::new();
    for recipe in [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Delayed, Recipe::Fp8Block] {
        for (n, shard) in ALL_SHARDS.into_iter().enumerate() {
            for (ranks, replicas) in [(2, 1), (4, 1), (4, 2), (4, 4)] {
                let alone = World { layers: 2 + n % 2, ..adapters(recipe, n % 2 == 1, 1 + n % 3) };
                all.push(World { ranks, replicas, shard, reduce: Reduce::AnyWorld, ..alone });
            }
        }
    }
    equal_one_process(&sample(all, 24));
}

#[test]
fn ranks_have_equal_bits_and_are_near_one_process() {
    let mut all = Vec::new();
    for recipe in [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Current] {
        for (n, shard) in ALL_SHARDS.into_iter().enumerate() {
            for (ranks, replicas) in [(2, 1), (3, 1), (4, 2)] {
                let alone = World { sources: 3 * (n % 2), ..adapters(recipe, n % 2 == 0, 1 + n) };
                all.push(World { ranks, replicas, shard, layers: 2 + n % 2, ..alone });
            }
        }
    }
    for world in sample(all, 16) {
        let ranks = world.run();
        assert_alike(&world, &ranks);
        if world.recipe == Recipe::Fp32 {
            assert_near_one_process(&world, &ranks);
        }
    }
}

/// Held in the type of the recipe, by each rank as a whole.
#[test]
fn frozen_weights_have_the_bits_of_their_beginning_after_100_steps() {
    let recipes = [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Delayed, Recipe::Fp8Block];
    for (recipe, ranks) in recipes.into_iter().zip(1..) {
        let shard = SHARDS[ranks % SHARDS.len()];
        let world = World { ranks, shard, ..adapters(recipe, ranks == 2, 1) };
        let run = |communicator: ThreadCommunicator| {
            let mut learner = world.learner(Arc::new(communicator));
            learner.weights().initialize(5, 0.1).expect("weights");
            fill_adapters(&mut learner);
            let before = frozen(&mut learner);
            for number in 0..100 {
                assert!(!world.step(&mut learner, number).skipped, "{world:?}");
            }
            assert!(frozen(&mut learner) == before, "{world:?}");
            before
        };
        let of_ranks: Vec<_> = thread::scope(|scope| {
            let communicators = ThreadCommunicator::world(ranks).into_iter();
            let handles: Vec<_> =
                communicators.map(|communicator| scope.spawn(|| run(communicator))).collect();
            handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
        });
        let model = world.spec(0).model;
        let held: BTreeSet<&String> = of_ranks[0].keys().collect();
        let parameters = model.parameters();
        assert_eq!(held, parameters.iter().filter(|p| p.is_frozen).map(|p| &p.name).collect());
        assert!(of_ranks.iter().all(|of_rank| *of_rank == of_ranks[0]), "{world:?}");
    }
}

/// The names of the parameters of a program's state of these kinds.
fn state_of(program: &Program, kinds: &[StateKind]) -> BTreeSet<String> {
    let of = |storage: &Storage| match storage {
        Storage::State { kind, name } if kinds.contains(kind) => Some(name.to_string()),
        _ => None,
    };
    program.values.iter().filter_map(|value| of(&value.storage)).collect()
}

#[test]
fn no_gradient_of_a_frozen_weight_is_computed_or_sent() {
    for recipe in [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Block] {
        for shard in SHARDS {
            let world = World { ranks: 2, shard, ..adapters(recipe, false, 3) };
            let program = training(&world, 0);
            let model = world.spec(0).model;
            let trained: BTreeSet<String> =
                model.parameters().into_iter().filter(ParameterSpec::is_trained).map(|p| p.name).collect();
            let kinds = [
                StateKind::Master,
                StateKind::Gradient,
                StateKind::ReducedGradient,
                StateKind::Moment1,
                StateKind::Moment2,
            ];
            let found = state_of(&program, &kinds);
            assert_eq!(found, trained, "{world:?}");
            // The dump names a GEMM of a gradient, and an exchange of it, by the adapter's matrix.
            let sites = |role: Role| {
                let of_role = program.instances.iter().filter(move |i| i.origin.role == role);
                of_role.map(|i| i.origin.site.to_string()).collect::<BTreeSet<_>>()
            };
            for role in [Role::Wgrad, Role::Reduce, Role::Gather] {
                let others: Vec<String> =
                    sites(role).into_iter().filter(|site| !site.contains("lora_")).collect();
                assert!(others.is_empty(), "{world:?}: {} of {others:?}", role.name());
            }
            assert!(!sites(Role::Wgrad).is_empty() && !sites(Role::Reduce).is_empty(), "{world:?}");
        }
    }
}

/// The f32 gradients of adapters, and the bf16 copies of those that the other rank updates.
#[test]
fn ranks_exchange_adapters_alone() {
    for (shard, gradients, copies) in [
        // Half of them to the other rank, which adds them and sends the sums back.
        (Shard::None, 8, 0),
        (Shard::Optimizer, 4, 2),
        // After each of the three micro-batches.
        (Shard::Gradients, 3 * 4, 2),
    ] {
        let world = World { ranks: 2, shard, ..adapters(Recipe::Bf16, false, 3) };
        let (program, trained) = (training(&world, 0), world.spec(0).model.trained_count() as u64);
        let traffic = program.traffic(world.micro_steps);
        let sent = |payload: Payload| -> u64 {
            traffic.iter().filter(|of| of.payload == payload).map(|of| of.step_bytes()).sum()
        };
        assert_eq!(sent(Payload::Gradients), gradients * trained / 2, "{shard:?}");
        assert_eq!(sent(Payload::Copies), copies * trained / 2, "{shard:?}");
        assert_eq!(sent(Payload::Weights), 0, "{shard:?}");
    }
}

#[test]
fn more_ranks_than_rows_of_adapters_are_refused() {
    let world = World { ranks: 1024, shard: Shard::Optimizer, ..adapters(Recipe::Bf16, false, 1) };
    let error = programs::training(&world.spec(0)).err().expect("a rank has no row").to_string();
    assert!(error.contains("1024 ranks") && error.contains("lora_b has the most"), "{error}");
}

/// Frozen weights are whole on each rank, or cut with `shard = "weights"`; moments and masters of adapters
/// are cut.
#[test]
fn ranks_hold_what_is_frozen_whole_or_in_rows() {
    let bytes = |world: &World, kinds: &[StateKind]| -> usize {
        let program = training(world, 0);
        let is_of =
            |storage: &Storage| matches!(storage, Storage::State { kind, .. } if kinds.contains(kind));
        program.values.iter().filter(|v| is_of(&v.storage)).map(|v| v.ty.bytes()).sum()
    };
    let alone = adapters(Recipe::Bf16, false, 1);
    for shard in [Shard::Optimizer, Shard::Gradients, Shard::Weights] {
        let four = World { ranks: 4, shard, ..alone };
        let [held, all] = [&four, &alone].map(|world| bytes(world, &[StateKind::Frozen]));
        match shard {
            Shard::Weights => assert!(held >= all / 4 && held < all / 3, "{held} bytes of {all}"),
            _ => assert_eq!(held, all, "{shard:?}"),
        }
        let moments = [StateKind::Moment1, StateKind::Moment2];
        let (cut, whole) = (bytes(&four, &moments), bytes(&alone, &moments));
        assert!(cut >= whole / 4 && cut < whole / 3, "{cut} bytes of {whole}");
    }
}
