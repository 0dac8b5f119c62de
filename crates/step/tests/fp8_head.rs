//! Steps whose head is in FP8 too.

mod common;

use common::{Step, drawn, random_batch, relative, slice, spec, step_from, wide_model};
use xtrain_model::decoder::{Batch, Context};
use xtrain_model::{Bf16Reason, Fp8Overrides, GemmPattern, ModelRanks, Recipe};
use xtrain_program::{Program, Recompute, Stage, StateKind, Storage};
use xtrain_step::layout::Layout;
use xtrain_step::linear_gemms::linear_gemms;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

/// 192 tokens: a whole chunk and a part of one.
const BATCH: Batch = Batch { sequences: 4, seq_len: 48 };
const VOCABULARY: usize = 112;
/// The standard deviation of weights.
const SHARP: f64 = 0.1;

fn with_head(recipe: Recipe, head: bool) -> TrainingSpec {
    let fp8 = Fp8Overrides { head, ..Default::default() };
    let model = xtrain_model::Architecture { vocab_size: VOCABULARY, ..wide_model() };
    TrainingSpec { fp8, recipe, ..spec(model, BATCH) }
}

fn skipping(recipe: Recipe, pattern: &str) -> TrainingSpec {
    let skip = vec![GemmPattern::parse(pattern).expect("a pattern")];
    let spec = with_head(recipe, true);
    TrainingSpec { fp8: Fp8Overrides { skip, ..spec.fp8.clone() }, ..spec }
}

fn step(spec: &TrainingSpec) -> Step {
    step_from(spec, &random_batch(BATCH, VOCABULARY, 7), SHARP)
}

fn training(spec: &TrainingSpec) -> Program {
    programs::training(spec).expect("a program")
}

fn named(program: &Program, name: &str) -> usize {
    program.instances.iter().filter(|i| i.code.op().name() == name).count()
}

fn states(program: &Program, kind: StateKind) -> Vec<String> {
    let name = |id| match &program.value(id).storage {
        Storage::State { kind: found, name } if *found == kind => Some(name.to_string()),
        _ => None,
    };
    program.ids().filter_map(name).filter(|name| name.starts_with("lm_head")).collect()
}

#[test]
fn the_head_is_of_fp8_factors_where_the_run_says_so() {
    for recipe in Recipe::FP8 {
        let (plain, head) = (training(&with_head(recipe, false)), training(&with_head(recipe, true)));
        let (loss, scaled) = ("linear_cross_entropy_grad", "scaled_linear_cross_entropy");
        assert_eq!([named(&plain, loss), named(&plain, scaled)], [1, 0], "{recipe:?}");
        assert_eq!([named(&head, loss), named(&head, scaled)], [0, 1], "{recipe:?}");
        // The weight is cast with the update, once, and nothing reads it in bf16.
        let weight = head.parameters.iter().find(|p| &*p.name == "lm_head.weight").expect("a head");
        assert!(weight.compute.is_none() && weight.quantized.len() == 1, "{recipe:?}");
        for value in &weight.quantized[0].values {
            let writers = head.instances.iter().filter(|i| i.outputs.iter().any(|o| o.value == *value));
            assert_eq!(writers.map(|i| i.origin.stage).collect::<Vec<_>>(), [Stage::Update], "{recipe:?}");
        }
        let shown = |spec: &TrainingSpec| {
            let all = linear_gemms(spec);
            all.last().expect("a head").gemms.clone().map(|product| product.err())
        };
        assert_eq!(shown(&with_head(recipe, false)), [(); 3].map(|()| Some(Bf16Reason::Head)));
        assert_eq!(shown(&with_head(recipe, true)), [None, None, None]);

        let some = skipping(recipe, "lm_head:dgrad");
        let kept = shown(&some)[1].as_ref().map(ToString::to_string);
        assert_eq!(kept.as_deref(), Some("skipped by \"lm_head:dgrad\""));
        let program = training(&some);
        let weight = program.parameters.iter().find(|p| &*p.name == "lm_head.weight").expect("a head");
        assert!(weight.compute.is_some() && weight.quantized.len() == 1, "{recipe:?}");
        assert_eq!(training(&skipping(recipe, "lm_*")).to_string(), plain.to_string(), "{recipe:?}");
        // Nothing else changes.
        assert_eq!(named(&head, "scaled_matmul"), named(&plain, "scaled_matmul"));
    }
}

#[test]
fn a_vocabulary_that_tensor_cores_do_not_take_stays_in_bf16() {
    let mut spec = with_head(Recipe::Fp8Block, true);
    spec.model.vocab_size = 101;
    let head = linear_gemms(&spec).pop().expect("a head");
    assert_eq!(head.gemms, [(); 3].map(|()| Err(Bf16Reason::Size(101))));
    assert_eq!(named(&training(&spec), "linear_cross_entropy_grad"), 1);
}

#[test]
fn gradients_are_near_those_of_a_head_in_bf16() {
    for (recipe, tied) in
        drawn(Recipe::FP8.into_iter().flat_map(|recipe| [(recipe, false), (recipe, true)]), 2)
    {
        let of = |head| {
            let mut spec = with_head(recipe, head);
            spec.model.tie_embeddings = tied;
            spec
        };
        let (plain, head) = (step(&of(false)), step(&of(true)));
        let loss = head.1.loss / plain.1.loss - 1.0;
        assert!(loss != 0.0 && loss.abs() < 6e-3, "{recipe:?}: {loss:e}");
        for ((name, a), (_, b)) in plain.0.iter().zip(&head.0) {
            let error = relative(b, a);
            assert!(error < 0.3, "{recipe:?}, tied {tied}: {name} is off by {error:e}");
        }
        for recompute in [Recompute::Norms, Recompute::Block] {
            assert!(step(&TrainingSpec { recompute, ..of(true) }) == head, "{recompute:?} of {recipe:?}");
        }
    }
}

#[test]
fn scales_of_the_head_are_of_earlier_steps_under_delayed_scaling() {
    let spec = with_head(Recipe::Fp8Delayed, true);
    let batch = |n| random_batch(BATCH, VOCABULARY, n);
    let losses = |spec: &TrainingSpec| -> Vec<f64> {
        let mut learner = common::learner(spec.clone(), SHARP);
        (0..4).map(|n| learner.step(n, 1e-3, &[batch(n)]).expect("a step").loss).collect()
    };
    let (delayed, current) = (losses(&spec), losses(&with_head(Recipe::Fp8Current, true)));
    assert!(delayed[0] == current[0] && delayed[1] != current[1], "{delayed:?} {current:?}");
    // They drift apart.
    assert!(delayed.iter().zip(&current).all(|(a, b)| (a / b - 1.0).abs() < 2e-2), "{delayed:?} {current:?}");
    let of_head = ["lm_head input", "lm_head output gradient", "lm_head.weight"];
    for kind in [StateKind::Scale, StateKind::AmaxHistory, StateKind::Amax] {
        let mut names = states(&training(&spec), kind);
        names.sort();
        assert_eq!(names, of_head, "{kind:?}");
    }
    // Over micro-batches the largest amax counts; in a first step each micro-batch casts with its own.
    let parts = TrainingSpec { batch: Batch { sequences: 1, ..BATCH }, ..spec.clone() };
    let amax = |order: &[usize]| {
        let mut learner = common::learner(parts.clone(), SHARP);
        let micro_batches: Vec<_> = order.iter().map(|&n| slice(&batch(0), n, 1)).collect();
        learner.step(0, 1e-3, &micro_batches).expect("a step");
        let history = learner.read_state(StateKind::AmaxHistory, of_head[0]).expect("a history");
        bytemuck::pod_collect_to_vec::<u8, f32>(&history)[0]
    };
    let alone = [0, 1, 2, 3].map(|n| amax(&[n]));
    let largest = alone.iter().copied().fold(0.0, f32::max);
    assert!(alone.iter().any(|&a| a != largest), "{alone:?}");
    assert_eq!([amax(&[0, 1, 2, 3]), amax(&[3, 2, 1, 0])], [largest; 2], "{alone:?}");
    // Evaluation casts by the scales and leaves them.
    let numerics = spec.numerics();
    let evaluation = programs::evaluation(
        &spec.model,
        &numerics,
        &Layout::alone(),
        Batch { sequences: 1, seq_len: 21 },
        false,
        spec.loss,
    )
    .expect("a program");
    let mut read = states(&evaluation, StateKind::Scale);
    read.sort();
    assert_eq!(read, [of_head[0], of_head[2]]);
    assert_eq!(evaluation.instances.iter().map(|i| i.effects(&evaluation).count()).sum::<usize>(), 0);
}

#[test]
fn generation_reads_the_head_in_fp8_too() {
    for recipe in Recipe::FP8 {
        let spec = with_head(recipe, true);
        let context =
            Context::Sequence { document_mask: false, deterministic: true, ranks: ModelRanks::ALONE };
        let batch = Batch { sequences: 1, seq_len: 5 };
        let program = programs::logits(&spec.model, &spec.numerics(), &Layout::alone(), batch, context, 1)
            .expect("a program");
        let head = program.instances.last().expect("an instance");
        assert_eq!((head.code.op().name(), &*head.origin.site), ("scaled_matmul", "lm_head"), "{recipe:?}");
    }
}

#[test]
fn an_infinity_in_the_head_marks_the_step() {
    for recipe in Recipe::FP8 {
        let mut learner = common::learner(with_head(recipe, true), SHARP);
        let name = "norm.weight";
        let mut norm = learner.weights().read_parameter(name).expect("a norm");
        norm[5] = f32::INFINITY;
        learner.weights().write_parameter(name, &norm).expect("written");
        learner.weights().refresh().expect("refreshed");
        let batch = random_batch(BATCH, VOCABULARY, 3);
        assert!(learner.step(0, 1e-2, &[batch]).expect("a step").skipped, "{recipe:?}");
    }
}
