//! Steps whose casts are measured: they compute the same as the plain step, use no more memory, and measure
//! each operand of each GEMM once.

mod common;

use common::{spec, wide_model};
use xtrain_model::Recipe;
use xtrain_model::decoder::Batch;
use xtrain_program::LinearOperand;
use xtrain_program::{Program, Recompute, Stage, StateKind, Storage};
use xtrain_step::engine::Target;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

const BATCH: Batch = Batch { sequences: 4, seq_len: 128 };

fn of(recipe: Recipe) -> TrainingSpec {
    TrainingSpec { recipe, ..spec(wide_model(), BATCH) }
}

fn count(program: &Program, name: &str) -> usize {
    program.instances.iter().filter(|i| i.code.op().name() == name).count()
}

#[test]
fn every_factor_of_every_product_is_measured_and_what_is_the_same_is_cast_once() {
    // Inputs, weights and gradients, each for two GEMMs; per-block and per-tensor casts have the same scales
    // in both.
    for (casts, different) in [(Recipe::Fp8Current, 3), (Recipe::Fp8Row, 6), (Recipe::Fp8Block, 5)] {
        let spec = of(Recipe::Bf16);
        let program = programs::inspection(&spec, &casts.into()).expect("a program");
        let measured = &program.measured;
        let linears = 4 * spec.model.layers.len();
        assert_eq!(measured.len(), 6 * linears, "{casts:?}");
        assert_eq!(count(&program, "quantize"), different * linears, "{casts:?}");
        assert_eq!(count(&program, "cast_statistics"), different * linears, "{casts:?}");
        for cast in measured {
            for name in &cast.outputs {
                assert!(program.output(name).is_some(), "{name}");
            }
        }
        let mut names: Vec<String> =
            measured.iter().map(|c| format!("{}:{} {}", c.layer, c.gemm.name(), c.operand.name())).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), measured.len(), "{casts:?}");
    }
}

#[test]
fn inputs_and_weights_are_measured_in_the_forward_and_weights_are_masters() {
    let program = programs::inspection(&of(Recipe::Bf16), &Recipe::Fp8Row.into()).expect("a program");
    for cast in &program.measured {
        let output = program.output(&cast.outputs[0]).expect("an output");
        let measures = |i: &&xtrain_program::Instance| i.outputs.iter().any(|o| o.value == output);
        let instance = program.instances.iter().find(measures).expect("what measures it");
        let is_forward = cast.operand != LinearOperand::OutputGradient;
        assert_eq!(instance.origin.stage == Stage::Forward, is_forward, "{cast:?}");
        let is_master = matches!(
            program.value(instance.inputs[0]).storage,
            Storage::State { kind: StateKind::Master, .. }
        );
        assert_eq!(is_master, cast.operand == LinearOperand::Weight, "{cast:?}");
    }
}

#[test]
fn a_measured_step_takes_no_more_memory_than_a_plain_one_and_has_the_same_products() {
    for recipe in [Recipe::Bf16, Recipe::Fp8Current, Recipe::Fp8Delayed, Recipe::Fp8Block] {
        for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
            for casts in Recipe::FP8 {
                let spec = TrainingSpec { recompute, ..of(recipe) };
                let plain = programs::training(&spec).expect("a program");
                let program = programs::inspection(&spec, &casts.into()).expect("a program");
                let bytes = |program: &Program| Target::Cpu.plan(program).total_bytes();
                // Moments belong to the optimizer; each output takes a piece of memory.
                let moments = 2 * 4 * plain.parameter_count();
                let (measured, trained) = (bytes(&program), bytes(&plain) - moments);
                let told = 256 * program.outputs().count();
                assert!(
                    measured <= trained + told,
                    "{recipe:?} {recompute:?} {casts:?}: {measured} bytes, not {trained}"
                );
                for product in ["scaled_matmul", "linear", "linear_dgrad", "linear_wgrad"] {
                    assert_eq!(count(&program, product), count(&plain, product), "{recipe:?} {product}");
                }
            }
        }
    }
}
