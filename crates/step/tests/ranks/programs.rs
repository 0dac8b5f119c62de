//! The programs of ranks, checked without running them.

use crate::world::World;
use std::collections::HashMap;
use xtrain_model::{Family, Recipe};
use xtrain_program::order::{self, Order};
use xtrain_program::{
    Gather, Groups, Instance, Lane, Phase, Program, Reduce, Role, Shard, StateKind, Storage, ValueId, When,
};
use xtrain_step::engine::Target;
use xtrain_step::layout::Layout;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::DType;

fn training(world: &World, rank: usize) -> Program {
    programs::training(&world.spec(rank)).expect("a program")
}

#[test]
fn what_is_gathered_is_read_before_it_is_gathered_again() {
    for recipe in [Recipe::Fp8Current, Recipe::Fp8Delayed, Recipe::Fp8Row, Recipe::Fp8Block] {
        let alone = World { gather: Gather::Fp32, ..World::alone(recipe, false, 2) };
        let world = World { ranks: 3, shard: Shard::Optimizer, ..alone };
        let training = training(&world, 0);
        for program in [programs::refresh(&training).expect("a program"), training] {
            let order = Order::new(&program);
            let gathers: Vec<usize> = (0..program.instances.len())
                .filter(|&i| program.instances[i].origin.role == Role::Gather)
                .collect();
            assert!(!gathers.is_empty());
            for &gather in &gathers {
                let slot = program.instances[gather].outputs[0].value;
                let next = gathers.iter().copied().find(|&g| g > gather && writes(&program, g, slot));
                let end = next.unwrap_or(program.instances.len());
                for reader in (gather + 1..end).filter(|&i| program.instances[i].inputs.contains(&slot)) {
                    assert!(order.before(gather, reader), "{recipe:?}");
                    assert!(next.is_none_or(|next| order.before(reader, next)), "{recipe:?}");
                }
            }
            // Two masters of each type at most exist in whole.
            let is_slot = |v: &ValueId| matches!(program.value(*v).storage, Storage::Transient);
            let mut slots: Vec<ValueId> =
                gathers.iter().map(|&g| program.instances[g].outputs[0].value).filter(is_slot).collect();
            assert!(slots.len() > 4);
            slots.sort();
            slots.dedup();
            let mut types: Vec<String> = slots.iter().map(|&v| program.ty(v).to_string()).collect();
            types.sort();
            types.dedup();
            assert_eq!(slots.len(), 2 * types.len(), "{recipe:?}");
        }
    }
}

/// For each number of prefetched blocks, and tied or not.
#[test]
fn a_gathered_weight_stays_until_its_last_reader_and_is_gathered_a_block_ahead() {
    for (prefetch_blocks, tied) in [(0, false), (1, true), (1, false), (2, false), (5, true)] {
        let alone = World { layers: 4, prefetch_blocks, ..World::alone(Recipe::Bf16, tied, 2) };
        let world = World { ranks: 2, shard: Shard::Weights, ..alone };
        let program = training(&world, 0);
        let order = Order::new(&program);
        let mut holds: HashMap<ValueId, (usize, Vec<usize>)> = HashMap::new();
        let mut gathers = 0;
        for (i, instance) in program.instances.iter().enumerate() {
            for v in &instance.inputs {
                if let Some((gather, readers)) = holds.get_mut(v) {
                    assert!(order.before(*gather, i), "{} reads what is not gathered", instance.origin);
                    readers.push(i);
                }
            }
            let is_of_weights = instance.origin.role == Role::Gather && instance.phase() == Phase::Micro;
            if is_of_weights && let [output] = instance.outputs[..] {
                gathers += 1;
                let earlier = holds.insert(output.value, (i, Vec::new()));
                for reader in earlier.into_iter().flat_map(|(_, readers)| readers) {
                    assert!(order.before(reader, i), "{} is gathered too early", instance.origin);
                }
            }
        }
        let of_blocks = program.parameters.iter().filter(|p| p.name.starts_with("blocks.")).count();
        let (of_a_block, others) = (of_blocks / world.layers, program.parameters.len() - of_blocks);
        let slots = world.layers.min(prefetch_blocks + 1);
        assert_eq!(holds.len(), others + slots * of_a_block, "{prefetch_blocks}");
        // The last blocks are still there when their backward starts, and no backward reads biases.
        let biases = program.parameters.iter().filter(|p| p.name.ends_with(".bias")).count() / world.layers;
        let again = (world.layers - slots) * (of_a_block - biases);
        assert_eq!(gathers, others + world.layers * of_a_block + again, "{prefetch_blocks}");
    }
}

/// Whatever the number of prefetched blocks. Under FP8 recipes, numbers and their scales are kinds of their
/// own.
#[test]
fn each_kind_of_experts_matrices_is_gathered_into_one_slot() {
    for recipe in [Recipe::Bf16, Recipe::Fp8Block] {
        for prefetch_blocks in [0, 1, 3] {
            let experts = Family::named("mixtral");
            let alone = World { layers: 4, prefetch_blocks, experts, ..World::alone(recipe, false, 2) };
            let world = World { ranks: 2, shard: Shard::Weights, ..alone };
            let program = training(&world, 0);
            let mut slots: HashMap<(&str, String), Vec<ValueId>> = HashMap::new();
            for instance in &program.instances {
                let Some((_, site)) = instance.origin.site.split_once(".mlp.experts.") else { continue };
                if instance.origin.role == Role::Gather && instance.phase() == Phase::Micro {
                    let slot = instance.outputs[0].value;
                    slots.entry((site, program.ty(slot).to_string())).or_default().push(slot);
                }
            }
            assert!(slots.len() >= 2, "{recipe:?}");
            for ((site, ty), mut gathered) in slots {
                // In the forward of all blocks, and in the backward of all but the last.
                assert!(gathered.len() >= world.layers, "{site} {ty}: {gathered:?}");
                gathered.dedup();
                assert_eq!(gathered.len(), 1, "{recipe:?}, {prefetch_blocks}: {site} {ty}");
            }
        }
    }
}

#[test]
fn numbers_in_8_bits_are_gathered_where_bf16_would_be_in_half_the_bytes() {
    for recipe in [Recipe::Fp8Current, Recipe::Fp8Delayed, Recipe::Fp8Block] {
        for shard in [Shard::Optimizer, Shard::Weights] {
            let world = |gather| World { ranks: 2, shard, gather, ..World::alone(recipe, false, 2) };
            let gathered = |gather, dtype: DType| -> usize {
                let program = training(&world(gather), 0);
                let gathers = program.instances.iter().filter(|i| i.origin.role == Role::Gather);
                let types = gathers.flat_map(|i| program.output_types(i));
                types.filter(|ty| ty.dtype == dtype).map(|ty| ty.bytes()).sum()
            };
            let [eight, fewer] = [DType::E4M3, DType::BF16].map(|dtype| gathered(Gather::Auto, dtype));
            let bf16 = gathered(Gather::Bf16, DType::BF16);
            assert!(eight > 0 && gathered(Gather::Bf16, DType::E4M3) == 0, "{recipe:?} {shard:?}");
            assert_eq!(2 * eight, bf16 - fewer, "{recipe:?} {shard:?}");
        }
    }
}

#[test]
fn the_update_measures_the_masters_whose_scales_depend_on_all_ranks() {
    for shard in [Shard::Optimizer, Shard::Weights] {
        let world = World { ranks: 2, shard, ..World::alone(Recipe::Fp8Current, true, 2) };
        let program = training(&world, 0);
        let count = |name: &str| program.instances.iter().filter(|i| i.code.op().name() == name).count();
        assert_eq!((count("amaxes"), count("adamw")), (0, 1), "{shard:?}");
        // The amaxes of all weights travel together: the maxima of a piece, and those of all tensors.
        assert_eq!((count("rank_amaxes"), count("max_amaxes")), (1, 2), "{shard:?}");
    }
}

/// With a row of each rank, the columns of a large model would take gigabytes on a thousand ranks.
#[test]
fn maxima_over_ranks_take_the_memory_of_the_amaxes_of_one_rank() {
    let world = World { ranks: 4, shard: Shard::Weights, ..World::alone(Recipe::Fp8Row, false, 2) };
    let program = training(&world, 0);
    let of_amaxes = program.instances.iter().filter(|i| &*i.origin.site == "amaxes");
    let numels = |i: &Instance| program.output_types(i).iter().map(|ty| ty.numel()).max().unwrap_or(0);
    let numels: Vec<usize> = of_amaxes.map(numels).collect();
    assert!(numels[0] > 100 && numels.iter().all(|&n| n < numels[0] + world.ranks), "{numels:?}");
}

fn writes(program: &Program, instance: usize, value: ValueId) -> bool {
    program.instances[instance].outputs.iter().any(|o| o.value == value)
}

#[test]
fn gradients_are_added_a_block_after_they_are_exchanged() {
    for (shard, reduce) in [
        (Shard::None, Reduce::SameWorld),
        (Shard::Optimizer, Reduce::SameWorld),
        (Shard::Optimizer, Reduce::AnyWorld),
    ] {
        let world = World { ranks: 2, shard, reduce, ..World::alone(Recipe::Bf16, true, 4) };
        let program = training(&world, 0);
        let order = Order::new(&program);
        let is_of_block = |i: &Instance| i.lane == Lane::Compute && i.origin.block.is_some();
        let ends = |i: &Instance| is_of_block(i) && i.origin.role == Role::Dgrad;
        let end = program.instances.iter().rposition(ends).expect("blocks");
        let mut waits = 0;
        for (i, instance) in program.instances[..end].iter().enumerate() {
            for &exchange in order.waits(i).iter().filter(|_| instance.lane == Lane::Compute) {
                waits += 1;
                assert_eq!(instance.origin.role, Role::Reduce, "{} waits", instance.origin);
                let between = program.instances[exchange..i].iter().filter(|i| is_of_block(i));
                assert!(between.count() > 10, "{} waits for the exchange before it", instance.origin);
            }
        }
        // Tied embeddings are exchanged once for each use if the sums are those of any world.
        let of_head = usize::from(reduce.is_any_world());
        assert_eq!(waits, world.layers - 1 + of_head, "{shard:?} {reduce:?}");
    }
}

#[test]
fn the_collectives_of_a_block_are_issued_together() {
    for reduce in [Reduce::SameWorld, Reduce::Fast] {
        let alone = World::alone(Recipe::Bf16, true, 2);
        issues_blocks_together(&World { ranks: 2, shard: Shard::Weights, reduce, ..alone });
    }
}

fn issues_blocks_together(world: &World) {
    let program = training(world, 0);
    let runs = order::runs(&program);
    for block in 0..world.layers {
        let name = format!("blocks.{block}.");
        let of = |role: Role| {
            let is_it = |i: &Instance| i.origin.role == role && i.origin.site.starts_with(&*name);
            let lengths = runs.iter().map(|run| &program.instances[run.clone()]);
            lengths.filter(|run| run.iter().all(is_it)).map(<[Instance]>::len).max()
        };
        let of_block = program.parameters.iter().filter(|p| p.name.starts_with(&name));
        assert_eq!(of(Role::Gather), Some(of_block.clone().count()), "{block}");
        // The gradients of the first block's matrices are exchanged beside those that follow.
        let together = of_block.filter(|p| block > 0 || p.name.contains("norm"));
        assert_eq!(of(Role::Reduce), Some(together.count()), "{block}");
    }
}

#[test]
fn the_last_exchange_of_a_backward_has_gradients_of_matrices_beside_it() {
    for shard in [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights] {
        for tied in [true, false] {
            let world = World { ranks: 2, shard, ..World::alone(Recipe::Fp8Current, tied, 1) };
            let program = training(&world, 0);
            let is_exchange = |i: &Instance| i.code.op().name() == "all_to_all";
            let of_embedding = |i: &Instance| is_exchange(i) && &*i.origin.site == "embed.weight";
            let exchange = program.instances.iter().position(of_embedding).expect("an exchange");
            let after = &program.instances[exchange..];
            let wgrads: Vec<usize> = after
                .iter()
                .filter(|i| i.lane == Lane::Compute && i.origin.role == Role::Wgrad)
                .map(|i| program.output_types(i).iter().map(|ty| ty.bytes()).sum())
                .collect();
            assert!(wgrads.len() >= 4 && wgrads.is_sorted_by(|a, b| a >= b), "{shard:?}: {wgrads:?}");
            let alone = order::runs(&program).into_iter().filter(|run| run.start > exchange);
            let exchanges = alone.filter(|run| is_exchange(&program.instances[run.start]));
            assert!(exchanges.map(|run| run.len()).max() == Some(1), "{shard:?}");
        }
    }
}

#[test]
fn a_communicator_that_adds_needs_no_room_for_the_gradients_of_all_ranks() {
    for shard in [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights] {
        let alone = World { layers: 3, ..World::alone(Recipe::Bf16, false, 2) };
        let same_world = World { ranks: 4, shard, ..alone };
        let worlds = [same_world, World { reduce: Reduce::Fast, ..same_world }];
        let [exchanges, adds] = worlds.map(|world| training(&world, 0));
        let count = |name: &str| adds.instances.iter().filter(|i| i.code.op().name() == name).count();
        let parameters = adds.parameters.len();
        let accumulated = if matches!(shard, Shard::None | Shard::Optimizer) { 0 } else { parameters };
        let counts = ["reduce_scatter", "all_to_all", "sum_ranks"].map(count);
        assert_eq!(counts, [parameters, 0, accumulated], "{shard:?}");
        let [before, after] = [&exchanges, &adds].map(|program| Target::Cuda.plan_bytes(&[program]));
        assert!(after < before, "{shard:?}: {after} and {before} bytes");
        let bytes = |program: &Program| -> u64 { program.traffic(2).iter().map(|of| of.step_bytes()).sum() };
        assert_eq!(bytes(&exchanges), bytes(&adds), "{shard:?}");
    }
}

#[test]
fn ranks_run_one_program_but_for_the_places_of_their_rows() {
    let world = World { ranks: 3, shard: Shard::Optimizer, ..World::alone(Recipe::Bf16, true, 2) };
    let [first, last] = [0, 2].map(|rank| training(&world, rank));
    let shape = |program: &Program| -> Vec<(&'static str, Vec<String>)> {
        let types = |i| program.input_types(i).iter().map(ToString::to_string).collect();
        program.instances.iter().map(|i| (i.code.op().name(), types(i))).collect()
    };
    assert_eq!(shape(&first), shape(&last));
    // Attributes differ in the optimizer alone: the first elements of its rows.
    let lines = |program: &Program| program.to_string().lines().map(String::from).collect::<Vec<_>>();
    let (first, last) = (lines(&first), lines(&last));
    let differing: Vec<&String> = first.iter().zip(&last).filter(|(a, b)| a != b).map(|(a, _)| a).collect();
    assert!(matches!(&differing[..], [line] if line.contains("AdamW")), "{differing:?}");
}

#[test]
fn a_rank_has_its_rows_of_masters_and_moments_alone() {
    let world = World { ranks: 4, shard: Shard::Optimizer, ..World::alone(Recipe::Bf16, false, 1) };
    let alone = training(&World::alone(Recipe::Bf16, false, 4), 0);
    let of_rank = training(&world, 1);
    let bytes = |program: &Program, kind: StateKind| -> usize {
        let is_kind =
            |v: &&xtrain_program::Value| matches!(v.storage, Storage::State { kind: k, .. } if k == kind);
        program.values.iter().filter(is_kind).map(|v| v.ty.bytes()).sum()
    };
    for kind in [StateKind::Master, StateKind::Moment1, StateKind::Moment2] {
        let (held, whole) = (bytes(&of_rank, kind), bytes(&alone, kind));
        // Padding is at most a row of each parameter.
        assert!(held < whole / 4 + whole / 20, "{kind:?}: {held} of {whole}");
    }
    assert_eq!(bytes(&of_rank, StateKind::Compute), bytes(&alone, StateKind::Compute));
    assert_eq!(of_rank.parameter_count(), alone.parameter_count());
}

#[test]
fn with_one_process_nothing_of_ranks_is_in_the_program() {
    for recipe in Recipe::ALL {
        let world = World { shard: Shard::Optimizer, ..World::alone(recipe, true, 2) };
        let program = training(&world, 0);
        let alone =
            programs::training(&TrainingSpec { parallel: xtrain_program::Parallel::ALONE, ..world.spec(0) });
        assert_eq!(program.to_string(), alone.expect("a program").to_string());
        assert!(program.instances.iter().all(|i| i.lane == Lane::Compute));
        let is_of_ranks = |i: &xtrain_program::Instance| matches!(i.origin.role, Role::Gather | Role::Reduce);
        assert!(!program.instances.iter().any(is_of_ranks));
    }
}

#[test]
fn replicas_add_their_rows_once_in_a_step_of_the_same_world() {
    for shard in [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights] {
        let world = World { ranks: 4, replicas: 2, shard, ..World::alone(Recipe::Bf16, true, 4) };
        let program = training(&world, 0);
        let whole: usize = program.parameters.iter().map(|p| 4 * program.whole_type(p).numel()).sum();
        let among_replicas = |instance: &&xtrain_program::Instance| {
            matches!(instance.code.op().collective(), Some((_, Groups { size: 2, stride: 2 })))
        };
        let mut bytes = 0;
        for instance in program.instances.iter().filter(among_replicas) {
            assert_eq!(instance.when, When::Last, "{shard:?}");
            bytes += program.input_types(instance)[0].bytes();
        }
        // A rank's rows, which are half of all, and half of those again; paddings are small.
        let expected = whole / 2 + whole / 4;
        assert!(bytes >= expected && bytes < expected + expected / 10, "{shard:?}: {bytes} of {expected}");
        let is_of_world = |instance: &&xtrain_program::Instance| {
            instance.code.op().collective().is_some_and(|(_, groups)| groups == Groups::world(4))
        };
        let of_world = program.instances.iter().filter(is_of_world);
        // The words of the step.
        assert_eq!(of_world.count(), 1, "{shard:?}");
    }
}

#[test]
fn some_ranks_have_nothing_of_some_matrices() {
    let world =
        World { ranks: 4, replicas: 2, shard: Shard::Weights, ..World::alone(Recipe::Fp8Block, false, 1) };
    for world in [world, World { replicas: 1, ..world }] {
        let nothing = |rank| {
            let layout = Layout::from_spec(&world.spec(rank)).expect("a layout");
            let names = world.spec(rank).model.parameters().into_iter().map(|p| p.name);
            let held = |name: &String| layout.held(StateKind::Master, name).expect("a cut").rows;
            names.filter(|name| name.contains("proj.weight") && held(name).is_empty()).count()
        };
        assert!((0..world.ranks).any(|rank| nothing(rank) > 0), "{world:?}");
    }
}
