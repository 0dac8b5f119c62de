//! Static scales: a run has the bits of delayed scaling that is frozen at them, and counts the casts that
//! saturate.

mod common;

use common::{delayed_scales, drawn, freeze, learner, mixture, random_batch, slice, spec, wide, wide_model};
use std::sync::Arc;
use xtrain_model::decoder::{Balancing, Batch};
use xtrain_model::{Architecture, Family, Fp8Overrides, GemmPattern, Recipe, StaticScales};
use xtrain_program::{CastOperand, Recompute, StateKind};
use xtrain_step::learner::{Learner, StepResult};
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::formats::max_finite;

const BATCH: Batch = Batch { sequences: 2, seq_len: 48 };
const STEPS: u64 = 3;
/// Standard deviation of the weights.
const STD: f64 = 0.1;

/// A model with its head in FP8.
fn delayed(fp8: Fp8Overrides) -> TrainingSpec {
    let model = Architecture { vocab_size: 112, ..wide_model() };
    TrainingSpec { recipe: Recipe::Fp8Delayed, fp8: Fp8Overrides { head: true, ..fp8 }, ..spec(model, BATCH) }
}

fn skip(pattern: &str) -> Fp8Overrides {
    Fp8Overrides { skip: vec![GemmPattern::parse(pattern).expect("a pattern")], ..Fp8Overrides::default() }
}

fn fixed(spec: &TrainingSpec, scales: &StaticScales) -> TrainingSpec {
    let static_scales = Some(Arc::new(scales.clone()));
    TrainingSpec { fp8: Fp8Overrides { static_scales, ..spec.fp8.clone() }, ..spec.clone() }
}

/// Step `n`, of two micro-batches.
fn step(learner: &mut Learner, n: u64) -> StepResult {
    let whole = Batch { sequences: 2 * BATCH.sequences, ..BATCH };
    let batch = random_batch(whole, learner.spec().model.vocab_size, n);
    let halves = [0, BATCH.sequences].map(|first| slice(&batch, first, BATCH.sequences));
    learner.step(n, 1e-3, &halves).expect("a step")
}

/// Scales of a run with delayed ones.
fn scales_of(spec: &TrainingSpec) -> StaticScales {
    let mut learner = learner(spec.clone(), STD);
    (0..2).for_each(|n| drop(step(&mut learner, n)));
    delayed_scales(&mut learner)
}

/// All state of checkpoints but delayed scales.
fn state(learner: &mut Learner) -> Vec<(StateKind, String, Vec<u8>)> {
    let mut entries = learner.saved_state();
    entries.retain(|entry| !matches!(entry.kind, StateKind::Scale | StateKind::AmaxHistory));
    let mut read = |entry: &xtrain_runtime::StateEntry| {
        (entry.kind, entry.name.clone(), learner.read_state(entry.kind, &entry.name).expect("a value"))
    };
    entries.iter().map(&mut read).collect()
}

#[test]
fn a_run_has_the_bits_of_delayed_scaling_that_is_frozen() {
    let saved =
        Fp8Overrides { swiglu_input: Some(true), attention_output: Some(true), ..Fp8Overrides::default() };
    let balancing = Balancing { loss_weight: 0.01, z_weight: 0.001, bias_rate: None };
    let experts = mixture(Family::MIXTRAL, wide(), [3, 2], BATCH, balancing);
    let cases = [
        delayed(Fp8Overrides::default()),
        TrainingSpec { recompute: Recompute::Block, dropout: 0.1, ..delayed(saved) },
        // Wgrad alone casts the inputs, and then fprop alone.
        delayed(skip("*:fprop")),
        delayed(skip("*:wgrad")),
        TrainingSpec { recipe: Recipe::Fp8Delayed, ..experts },
    ];
    for (case, spec) in drawn(cases.into_iter().enumerate(), 2) {
        let scales = scales_of(&spec);
        let (mut frozen, mut fixed) = (learner(spec.clone(), STD), learner(fixed(&spec, &scales), STD));
        for n in 0..STEPS {
            freeze(&mut frozen, &scales);
            let (expected, found) = (step(&mut frozen, n), step(&mut fixed, n));
            assert!(
                !found.skipped && found.saturated.is_some() && expected.saturated.is_none(),
                "case {case}"
            );
            assert_eq!(StepResult { saturated: None, ..found }, expected, "case {case}, step {n}");
        }
        let is_of_scales = |kind| matches!(kind, StateKind::Scale | StateKind::AmaxHistory);
        assert!(!fixed.saved_state().iter().any(|entry| is_of_scales(entry.kind)), "case {case}");
        assert!(state(&mut fixed) == state(&mut frozen), "case {case}: other bits");
    }
}

#[test]
fn each_tensor_that_saturates_is_named_with_its_excess() {
    let spec = delayed(Fp8Overrides::default());
    let mut scales = scales_of(&spec);
    // Far from the largest numbers of the formats, whatever the batch.
    for of in scales.layers.values_mut().flat_map(|layer| layer.scales.iter_mut().flatten()) {
        *of /= 16.0;
    }
    let raised = [
        ("blocks.0.mlp.down_proj", CastOperand::Input),
        ("blocks.1.attn.qkv_proj", CastOperand::Weight),
        ("blocks.1.mlp.gate_up_proj", CastOperand::OutputGradient),
        ("lm_head", CastOperand::Input),
    ];
    for (layer, operand) in raised {
        let scale = scales.layers.get_mut(layer).expect("a layer").scales[operand as usize].as_mut();
        *scale.expect("a scale") *= 256.0;
    }
    let spec = fixed(&spec, &scales);
    let tensors = programs::training(&spec).expect("a program").delayed;
    let mut learner = learner(spec, STD);
    for n in 0..2 {
        // The amax of a weight is that before the update.
        let amax = |learner: &mut Learner, is_weight: bool| -> Vec<f32> {
            let of_kind =
                tensors.iter().filter(|tensor| (tensor.operand == CastOperand::Weight) == is_weight);
            let mut read = |name: &str| learner.read_state(StateKind::Amax, name).expect("an amax");
            of_kind
                .map(|tensor| tensor.name.clone())
                .map(|name| read(&name))
                .map(|b| bytemuck::pod_read_unaligned(&b))
                .collect()
        };
        let weights = amax(&mut learner, true);
        let saturated = step(&mut learner, n).saturated.expect("static scales");
        let mut amaxes = (weights.into_iter(), amax(&mut learner, false).into_iter());
        let expected = tensors.iter().filter_map(|tensor| {
            let amaxes = if tensor.operand == CastOperand::Weight { &mut amaxes.0 } else { &mut amaxes.1 };
            let scaled = amaxes.next()? * scales.get(&tensor.layer.to_string(), tensor.operand)?;
            let excess = f64::from(scaled) / f64::from(max_finite(tensor.format));
            (excess > 2.0).then(|| (format!("{} {}", tensor.layer, tensor.operand.name()), excess))
        });
        let expected: Vec<_> = expected.collect();
        let found: Vec<_> = saturated.iter().map(|of| (of.tensor.to_string(), of.excess)).collect();
        assert_eq!((found.len(), found), (raised.len(), expected), "step {n}");
    }
}

#[test]
fn a_tensor_without_a_scale_is_an_error_that_names_it() {
    let spec = delayed(Fp8Overrides::default());
    let mut scales = scales_of(&spec);
    scales.layers.get_mut("lm_head").expect("the head").scales[CastOperand::Weight as usize] = None;
    let error = programs::training(&fixed(&spec, &scales)).err().expect("no scale").to_string();
    assert!(
        error.contains("lm_head") && error.contains("weight") && error.contains("no static scale"),
        "{error}"
    );
}
