//! Tokens that tensor ranks cast to FP8 before they gather them: in the bits of casts after the gather.

use crate::equality::assert_alike;
use crate::world::{RankRun, Text, World, sample, whole, whole_gradients};
use xtrain_model::decoder::Batch;
use xtrain_model::{Family, Recipe};
use xtrain_program::{Collective, Gather, Instance, Payload, Program, Recompute, Shard, Stage};
use xtrain_step::layout::Layout;
use xtrain_step::programs;
use xtrain_tensor::{DType, TILE};

const RECIPES: [Recipe; 4] = [Recipe::Fp8Current, Recipe::Fp8Delayed, Recipe::Fp8Row, Recipe::Fp8Block];

/// So many tensor ranks, of which each has a tile of tokens in recipes with tiles.
fn world(recipe: Recipe, tensor: usize) -> World {
    let (seq_len, dim) = match recipe {
        // With scales of two tiles for a token.
        Recipe::Fp8Block => (TILE * tensor / 2, Some(TILE + 16)),
        _ => (16, None),
    };
    let state = World { shard: Shard::Optimizer, ..World::alone(recipe, false, 2) };
    World { ranks: tensor, tensor, seq_len, dim, kv_heads: 4, ..state }
}

fn worlds() -> Vec<World> {
    let mut all = Vec::new();
    for recipe in RECIPES {
        for (case, tensor) in [2, 4].into_iter().enumerate() {
            for (n, recompute) in
                [Recompute::None, Recompute::Norms, Recompute::Block].into_iter().enumerate()
            {
                let shard = [Shard::Optimizer, Shard::Gradients, Shard::Weights][(n + case) % 3];
                let text = [Text::Documents, Text::Random][(n + case) % 2];
                all.push(World { recompute, shard, text, tied: case == 1, ..world(recipe, tensor) });
            }
        }
        // Two data ranks, and stages of a pipeline.
        let of = world(recipe, 2);
        all.push(World { ranks: 4, recompute: Recompute::Norms, micro_steps: 1, ..of });
        all.push(World { ranks: 4, pipeline: 2, layers: 3, micro_steps: 3, ..of });
    }
    all
}

/// The run of a world that gathers tokens in bf16 and casts them then.
fn cast_after_gathers(world: &World) -> Vec<RankRun> {
    World { gather: Gather::Fp32, orders: 1, ..*world }.run()
}

fn assert_equal_to_casts_after_gathers(world: &World) {
    let (found, expected) = (world.run(), cast_after_gathers(world));
    assert_alike(world, &found);
    assert_eq!(found[0].results, expected[0].results, "{world:?}");
    assert!(whole_gradients(&found) == whole_gradients(&expected), "{world:?}: other gradients");
    assert!(whole(&found) == whole(&expected), "{world:?}: other state");
}

#[test]
fn casts_before_gathers_have_the_bits_of_casts_after_them() {
    for world in sample(worlds(), 12) {
        assert_equal_to_casts_after_gathers(&world);
    }
}

#[test]
fn so_they_do_in_mixtures() {
    for (n, recipe) in RECIPES.into_iter().enumerate() {
        let recompute = [Recompute::None, Recompute::Norms][n % 2];
        let experts = Some([Family::MIXTRAL, Family::QWEN3_MOE, Family::DOTS1][n % 3]);
        let world = World { experts, expert_count: 4, seq_len: TILE, recompute, ..world(recipe, 2) };
        let dim = if recipe == Recipe::Fp8Block { Some(TILE) } else { None };
        assert_equal_to_casts_after_gathers(&World { dim, ..world });
    }
}

fn program(world: &World) -> Program {
    programs::training(&world.spec(0)).expect("a program")
}

/// The types of tokens that ranks gather in a stage, those of each block alike.
fn gathered(program: &Program, stage: Stage) -> Vec<DType> {
    let is_gather = |i: &&Instance| {
        let is_gather = matches!(i.code.op().collective(), Some((Collective::AllGather { .. }, _)));
        is_gather && Payload::from_instance(i) == Payload::Tokens
    };
    let of_stage = program.instances.iter().filter(|i| i.origin.stage == stage && i.origin.block == Some(0));
    let mut types: Vec<DType> =
        of_stage.filter(is_gather).map(|i| program.ty(i.outputs[0].value).dtype).collect();
    types.sort_by_key(|dtype| dtype.bits());
    types
}

#[test]
fn tokens_travel_in_a_byte_and_gradients_where_one_layout_is_enough() {
    use DType::{BF16, E4M3, E5M2, F32};
    for recompute in [Recompute::None, Recompute::Norms] {
        let of = |recipe| {
            let program = program(&World { recompute, ..world(recipe, 2) });
            [Stage::Forward, Stage::Backward].map(|stage| gathered(&program, stage))
        };
        // Inputs of two layers, in the backward for wgrad, and gradients of the outputs of two others.
        for recipe in [Recipe::Fp8Current, Recipe::Fp8Delayed] {
            let [forward, mut backward] = of(recipe);
            backward.sort_by_key(|dtype| *dtype == E5M2);
            assert_eq!([forward, backward], [vec![E4M3; 2], vec![E4M3, E4M3, E5M2, E5M2]], "{recipe:?}");
        }
        // A scale of each token; transposed, ranks have the scales of all.
        let expected = [vec![E4M3, E4M3, F32, F32], vec![E4M3, E4M3, BF16, BF16]];
        assert_eq!(of(Recipe::Fp8Row), expected);
        let expected = [vec![E4M3, E4M3, F32, F32], vec![E4M3, E4M3, BF16, BF16, F32, F32]];
        assert_eq!(of(Recipe::Fp8Block), expected);
    }
}

/// Bytes of tokens that a rank sends to others in all-gathers of a micro-step.
fn sent(world: &World) -> u64 {
    let sent = program(world).traffic(1).into_iter();
    let of_tokens = sent.filter(|sent| sent.payload == Payload::Tokens && sent.collective == "all_gather");
    of_tokens.map(|sent| sent.bytes).sum()
}

#[test]
fn ranks_send_half_the_bytes_of_tokens() {
    for recompute in [Recompute::None, Recompute::Norms] {
        for recipe in RECIPES {
            let world = World { recompute, ..world(recipe, 4) };
            let spec = world.spec(0);
            let [tokens, dim, tile] = [spec.own_tokens(), spec.model.dim, TILE].map(|n| n as u64);
            let bytes = |of_layer: u64| 3 * 2 * world.layers as u64 * of_layer;
            // A byte in the forward and in the backward, the scales of both, and a gradient.
            let (scales, of_gradient) = match recipe {
                Recipe::Fp8Row => (4 * tokens, 2),
                Recipe::Fp8Block => (4 * (tokens * dim.div_ceil(tile) + tokens / tile * dim), 2),
                _ => (0, 1),
            };
            assert_eq!(sent(&world), bytes((2 + of_gradient) * tokens * dim + scales), "{recipe:?}");
            let again = if recompute == Recompute::Norms { 2 } else { 0 };
            let after = World { gather: Gather::Fp32, ..world };
            assert_eq!(sent(&after), bytes((2 + again + 2) * tokens * dim), "{recipe:?}");
        }
    }
}

/// With fewer tokens than a tile, or in an evaluation with padding after the tokens of the last rank.
#[test]
fn tokens_that_ranks_do_not_divide_are_cast_after_they_are_gathered() {
    let is_in_bf16 = |program: &Program| {
        let of = |stage| gathered(program, stage);
        [Stage::Forward, Stage::Backward].into_iter().flat_map(of).all(|ty| ty == DType::BF16)
    };
    assert!(is_in_bf16(&program(&World { seq_len: TILE / 2, ..world(Recipe::Fp8Block, 2) })));
    for (seq_len, is_cast_after) in [(7, true), (6, false)] {
        let spec = world(Recipe::Fp8Delayed, 4).spec(0);
        let (layout, batch) = (Layout::from_spec(&spec).expect("a layout"), Batch { sequences: 2, seq_len });
        let program = programs::evaluation(&spec.model, &spec.numerics(), &layout, batch, false, spec.loss);
        assert_eq!(is_in_bf16(&program.expect("a program")), is_cast_after, "{seq_len} tokens");
    }
}
