//! Static scales on several ranks: the bits of delayed scaling that is frozen at them, in all modes.

use crate::common::delayed_scales;
use crate::equality::{assert_alike, equal_one_process};
use crate::world::{FixedScales, RankRun, STEPS, World, drawn, whole};
use std::sync::Arc;
use xtrain_distributed::Alone;
use xtrain_model::{Family, Recipe, StaticScales};
use xtrain_program::{CastOperand, Gather, Reduce, Shard, StateKind};
use xtrain_step::learner::StepResult;

/// Scales of a run of one process with delayed ones. One tensor saturates at them.
fn scales(world: World) -> &'static StaticScales {
    let micro_steps = world.ranks * world.micro_steps;
    let alone = World { ranks: 1, replicas: 1, micro_steps, shard: Shard::None, ..world };
    let mut learner = alone.learner(Arc::new(Alone));
    learner.weights().initialize(5, 0.1).expect("weights");
    drop(alone.step(&mut learner, 0));
    let mut scales = delayed_scales(&mut learner);
    let layer = scales.layers.get_mut("blocks.1.attn.qkv_proj").expect("a layer");
    *layer.scales[CastOperand::Input as usize].as_mut().expect("a scale") *= 4.0;
    Box::leak(Box::new(scales))
}

/// Worlds in all modes, with their static scales.
fn worlds(reduce: Reduce, experts: Option<Family>) -> Vec<World> {
    let mut all = Vec::new();
    for (case, shard) in
        [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights].into_iter().enumerate()
    {
        for (ranks, replicas) in [(2, 1), (4, 2)] {
            let gather = [Gather::Auto, Gather::Fp32, Gather::Bf16][(case + ranks / 2) % 3];
            let alone = World { experts, ..World::alone(Recipe::Fp8Delayed, case % 2 == 1, 1 + case % 2) };
            let world = World { ranks, replicas, shard, reduce, gather, prefetch_blocks: case % 3, ..alone };
            all.push(World { scales: Some(FixedScales::Static(scales(world))), ..world });
        }
    }
    all
}

/// Fails unless ranks agree, count the same saturated casts, and have the bits of frozen delayed scales.
fn equal_frozen(worlds: Vec<World>) {
    for world in worlds {
        let Some(FixedScales::Static(scales)) = world.scales else { panic!("{world:?}") };
        let ranks = world.run();
        assert_alike(&world, &ranks);
        let saturated = |result: &StepResult| -> Vec<String> {
            let saturated = result.saturated.as_ref().expect("static scales");
            saturated.iter().map(|of| of.tensor.to_string()).collect()
        };
        let raised = "blocks.1.attn.qkv_proj input".to_owned();
        assert!(ranks[0].results.iter().all(|step| saturated(step).contains(&raised)), "{world:?}");
        let frozen = World { scales: Some(FixedScales::Frozen(scales)), ..world }.run();
        for (found, expected) in ranks.iter().zip(&frozen) {
            let results = found.results.iter().cloned().map(|step| StepResult { saturated: None, ..step });
            assert_eq!(results.collect::<Vec<_>>(), expected.results, "{world:?}");
            assert_eq!(found.results.len(), STEPS);
        }
        let whole = |ranks: &[RankRun]| whole(world.first_replica(ranks));
        let (found, mut expected) = (whole(&ranks), whole(&frozen));
        expected.retain(|(kind, _), _| !matches!(kind, StateKind::Scale | StateKind::AmaxHistory));
        assert!(found.keys().eq(expected.keys()), "{world:?}: other state");
        for (key, bytes) in found {
            assert!(bytes == expected[&key], "{world:?}: {key:?} has other bits than with frozen scales");
        }
    }
}

#[test]
fn ranks_have_the_bits_of_frozen_delayed_scales() {
    let all = [Reduce::SameWorld, Reduce::Fast].map(|reduce| worlds(reduce, None));
    equal_frozen(drawn(all.into_iter().flatten().collect()));
}

#[test]
fn ranks_of_a_mixture_of_experts_have_the_bits_of_frozen_delayed_scales() {
    let all = [Reduce::SameWorld, Reduce::Fast].map(|reduce| worlds(reduce, Some(Family::MIXTRAL)));
    // Half of them: each mode of sharding with each number of ranks in one order of sums.
    let all = all.into_iter().flatten().enumerate();
    equal_frozen(all.filter(|(n, _)| (n + n / 8) % 2 == 0).map(|(_, world)| world).collect());
}

#[test]
fn any_world_has_the_bits_and_the_saturated_casts_of_one_process() {
    let of_parts = |world: &World| world.gather != Gather::Bf16;
    for experts in [None, Some(Family::MIXTRAL)] {
        let worlds: Vec<World> = worlds(Reduce::AnyWorld, experts).into_iter().filter(of_parts).collect();
        equal_one_process(&worlds);
    }
}
