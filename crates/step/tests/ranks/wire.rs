//! Tokens that travel to their experts in FP8.

use crate::common::relative;
use crate::equality::{assert_alike, equal_one_process};
use crate::experts::{FAMILIES, assert_equal_runs, worlds};
use crate::world::{RankRun, World, sample, whole_gradients};
use std::collections::BTreeMap;
use xtrain_model::{Family, Recipe};
use xtrain_program::{Collective, Instance, Payload, Program, Recompute, Reduce, Shard};
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::{DType, Scaling, TILE};

/// The recipes in which tokens may travel in FP8.
const RECIPES: [Recipe; 2] = [Recipe::Fp8Block, Recipe::Fp8Delayed];

/// One process that casts tokens before it permutes them.
fn alone(recipe: Recipe, experts: Family) -> World {
    let experts = Some(experts);
    World { experts, expert_count: 4, seq_len: 64, wire: true, ..World::alone(recipe, false, 2) }
}

fn program(world: &World) -> Program {
    programs::training(&world.spec(0)).expect("a program")
}

/// The number of instances of ops of this name.
fn count(program: &Program, op: &str) -> usize {
    program.instances.iter().filter(|i| i.code.op().name() == op).count()
}

/// With at least 128 tokens, as rows of fewer tokens are not aligned.
#[test]
fn tokens_that_travel_in_fp8_have_the_bits_of_one_process_in_any_world() {
    let all = worlds(&RECIPES, Reduce::AnyWorld).into_iter();
    equal_one_process(&sample(all.map(|world| World { seq_len: 64, wire: true, ..world }).collect(), 8));
}

#[test]
fn in_the_default_order_they_are_near_one_process() {
    for (n, recipe) in RECIPES.into_iter().enumerate() {
        for (ranks, expert, replicas) in [(2, 2, 1), (4, 2, 2), (4, 4, 1)] {
            let alone = alone(recipe, FAMILIES[(n + ranks + expert) % 3]);
            let shard = [Shard::Weights, Shard::None][n];
            let world = World { ranks, expert, replicas, shard, micro_steps: 1, ..alone };
            let (ranks, one) = (world.run(), World { micro_steps: ranks, ..alone }.run());
            assert_alike(&world, &ranks);
            // Of all parameters together: terms of a small gradient cancel.
            let all = |of: &[RankRun]| whole_gradients(of).into_values().flatten().collect::<Vec<f32>>();
            let error = relative(&all(world.first_replica(&ranks)), &all(&one));
            assert!(error < 0.2, "{world:?}: gradients differ by {error:e}");
            assert_near(&world, &ranks, &one, 6e-3);
        }
    }
}

/// Fails unless the losses of all steps differ by less than this.
fn assert_near(world: &World, found: &[RankRun], expected: &[RankRun], bound: f64) {
    for (found, expected) in found[0].results.iter().zip(&expected[0].results) {
        let error = (found.loss / expected.loss - 1.0).abs();
        assert!(error < bound, "{world:?}: {} instead of {}", found.loss, expected.loss);
    }
}

/// The rows of fprop and dgrad are equal, and wgrad of experts reads numbers that may be rounded twice.
#[test]
fn only_gradients_of_experts_differ_from_those_of_bf16_tokens() {
    for experts in FAMILIES {
        let world = alone(Recipe::Fp8Block, experts);
        let (found, bf16) = (world.run(), World { wire: false, ..world }.run());
        assert_eq!(found[0].results[0].loss, bf16[0].results[0].loss);
        let expected = whole_gradients(&bf16);
        let mut differ = 0;
        for (name, gradient) in whole_gradients(&found) {
            if name.contains(".experts.") {
                let error = relative(&gradient, &expected[&name]);
                assert!(error < 2e-2, "{name} differs by {error:e}");
                differ += usize::from(error > 0.0);
            } else {
                assert!(gradient == expected[&name], "{name}");
            }
        }
        assert!(differ > 0);
        assert_near(&world, &found, &bf16, 1e-3);
    }
}

/// The scale is known, so nothing is rounded otherwise.
#[test]
fn with_delayed_scales_it_changes_no_bit_of_one_process() {
    for experts in FAMILIES {
        // In any world the scales of the first step are fixed, too.
        let world = World { reduce: Reduce::AnyWorld, ..alone(Recipe::Fp8Delayed, experts) };
        let (found, bf16) = (world.run(), World { wire: false, ..world }.run());
        assert_eq!(found[0].results, bf16[0].results, "{experts:?}");
        assert!(found[0].saved == bf16[0].saved, "{experts:?}");
    }
}

#[test]
fn recomputation_changes_no_bit_of_tokens_in_fp8() {
    for recipe in RECIPES {
        for (ranks, experts) in [(1, Family::DOTS1), (2, Family::QWEN3_MOE)] {
            let world = World { ranks, expert: ranks, layers: 3, ..alone(recipe, experts) };
            let expected = world.run();
            let mut gathers = BTreeMap::new();
            for recompute in [Recompute::Norms, Recompute::Block] {
                let world = World { recompute, ..world };
                let found = world.run();
                assert_alike(&world, &found);
                assert_equal_runs(&world, &found, &expected);
                gathers.insert(format!("{recompute:?}"), found[0].sent.1.get("all_gather").copied());
            }
            // Norms permutes the saved numbers again, and a block gathers again.
            assert_eq!(gathers["Norms"], expected[0].sent.1.get("all_gather").copied());
            assert_eq!(gathers["Block"] > gathers["Norms"], ranks > 1);
        }
    }
}

/// Each rank sends a byte of each number, and four of each scale of tiles.
#[test]
fn tokens_and_gradients_of_outputs_are_sent_in_half_the_bytes() {
    for recipe in RECIPES {
        for ranks in [2, 4] {
            let world = World { ranks, expert: ranks, ..alone(recipe, Family::DOTS1) };
            let gathered = |wire| -> u64 {
                let program = program(&World { wire, ..world });
                let of_tokens = |sent: &xtrain_program::Sent| sent.payload == Payload::Tokens;
                let sent = program.traffic(1).into_iter().filter(of_tokens);
                sent.filter(|sent| sent.collective == "all_gather").map(|sent| sent.bytes).sum()
            };
            let spec: TrainingSpec = world.spec(0);
            let (tokens, dim) = (spec.batch.tokens(), spec.model.dim);
            let scales = if recipe == Recipe::Fp8Block { Scaling::Tile.shape(tokens, dim) } else { [0, 0] };
            let saved = tokens * dim - 4 * scales[0] * scales[1];
            assert!(saved >= tokens * (dim - 4 * dim.div_ceil(TILE)));
            // Once in the forward and once in the backward of each block.
            let expected = (2 * world.layers * (ranks - 1) * saved) as u64;
            assert_eq!(gathered(false) - gathered(true), expected, "{recipe:?} on {ranks} ranks");
        }
    }
}

#[test]
fn no_token_travels_in_bf16_and_one_process_casts_in_the_same_order() {
    let one_process = alone(Recipe::Fp8Block, Family::MIXTRAL);
    for recipe in RECIPES {
        let one = World { recipe, ..one_process };
        for world in [one, World { ranks: 2, expert: 2, ..one }] {
            let program = program(&world);
            assert_eq!(count(&program, "retile"), 2 * world.layers, "{world:?}");
            assert_eq!(count(&program, "permute") + gathers_in_bf16(&program), 0, "{world:?}");
        }
    }
    // Measurements of casts do not count, and measure numbers that travel.
    let spec = one_process.spec(0);
    let inspected = programs::inspection(&spec, &spec.numerics()).expect("a program");
    let found = ["retile", "permute"].map(|op| count(&inspected, op));
    assert_eq!(found, [3, 1].map(|casts| 2 * casts * one_process.layers));
    // Operands that have a scale for the tensor of this step are cast where all of it is.
    let current = program(&alone(Recipe::Fp8Current, Family::MIXTRAL));
    assert_eq!((count(&current, "retile"), count(&current, "permute_quantize")), (0, 4));
}

/// Tokens or gradients that are gathered in bf16.
fn gathers_in_bf16(program: &Program) -> usize {
    let gathers = |i: &&Instance| matches!(i.code.op().collective(), Some((Collective::AllGather { .. }, _)));
    let of_block = program.instances.iter().filter(|i| i.origin.block.is_some()).filter(gathers);
    of_block.filter(|i| program.ty(i.outputs[0].value).dtype == DType::BF16).count()
}

/// A GEMM that reads the rows in bf16 leaves them as they are.
#[test]
fn rows_that_a_gemm_reads_in_bf16_are_not_cast_before() {
    let world = World { ranks: 2, expert: 2, ..alone(Recipe::Fp8Block, Family::MIXTRAL) };
    let mut spec = world.spec(0);
    let skip = xtrain_model::GemmPattern::parse("*.experts.gate_up_proj:wgrad").expect("a pattern");
    spec.fp8.skip.push(skip);
    let program = programs::training(&spec).expect("a program");
    // The gradients of outputs are.
    assert_eq!((count(&program, "retile"), gathers_in_bf16(&program)), (world.layers, world.layers));
}
