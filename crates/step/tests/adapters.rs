//! Adapters in place of a trained model: what they compute, what is trained, and what is not.

mod common;

use common::{Step, built, learner, random_batch, relative, small, spec, step_from, wide};
use xtrain_model::decoder::Batch;
use xtrain_model::{Adapter, Architecture, Description, Family, ParameterSpec, Recipe, Targets};
use xtrain_program::{Recompute, Role, StateKind, Storage};
use xtrain_step::learner::Learner;
use xtrain_step::linear_gemms::{fp8_share, linear_gemms};
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::formats::to_bf16;

const BATCH: Batch = Batch { sequences: 2, seq_len: 13 };

/// The standard deviation of weights that make attention sharp.
const SHARP: f64 = 0.2;

fn adapter(targets: Targets) -> Adapter {
    Adapter { rank: 3, alpha: 7.0, dropout: 0.0, targets }
}

fn named(names: &[&str]) -> Targets {
    Targets::Named(names.iter().map(|&name| name.to_owned()).collect())
}

/// Models of several families, with adapters of all layers and of some.
fn models() -> Vec<Architecture> {
    let tied = Description {
        tie_embeddings: true,
        qkv_bias: true,
        qk_norm: false,
        family: Family::QWEN2,
        ..small()
    };
    let llama = Description { qk_norm: false, family: Family::LLAMA, ..small() };
    let with = |description, targets| Architecture { adapter: Some(adapter(targets)), ..built(description) };
    vec![
        with(small(), Targets::AllLinear),
        with(tied, named(&["q_proj", "v_proj"])),
        with(llama, named(&["layers.1.mlp.up_proj", "self_attn.k_proj", "o_proj"])),
    ]
}

fn spec_of(model: Architecture) -> TrainingSpec {
    spec(model, BATCH)
}

/// A learner whose adapters are not 0.
fn with_adapters(spec: &TrainingSpec) -> Learner {
    let mut learner = learner(spec.clone(), SHARP);
    for p in spec.model.parameters().into_iter().filter(ParameterSpec::is_adapter) {
        let mut values = learner.weights().read_parameter(&p.name).expect("an adapter");
        values
            .iter_mut()
            .enumerate()
            .for_each(|(n, value)| *value += 0.1 * ((n * 37 % 19) as f32 - 9.0) / 9.0);
        learner.weights().write_parameter(&p.name, &values).expect("written");
    }
    learner.weights().refresh().expect("refreshed");
    learner
}

/// The base with the adapters of `learner` added to its weights.
fn merged(learner: &mut Learner) -> Learner {
    let spec = learner.spec().clone();
    let adapter = spec.model.adapter.clone().expect("adapters");
    let mut base = common::learner(TrainingSpec { model: spec.model.base(), ..spec.clone() }, SHARP);
    for (block, linear) in spec.model.linears() {
        let site = format!("blocks.{block}.{}", linear.site);
        let mut read = |of: &str| learner.weights().read_parameter(&format!("{site}.{of}"));
        let (Ok(a), Ok(b)) = (read("lora_a"), read("lora_b")) else { continue };
        let mut weight = read("weight").expect("a weight");
        let (mut h, mut row, mut first) = (0, 0, 0);
        for (part, rows) in &linear.parts {
            let name = format!("model.layers.{block}.{}.{part}", linear.module);
            let has = match &adapter.targets {
                Targets::AllLinear => true,
                Targets::Named(names) => names.iter().any(|of| name.ends_with(&format!(".{of}"))),
            };
            if has {
                for o in 0..*rows {
                    for r in 0..adapter.rank {
                        let factor = adapter.scale() * b[(row + o) * adapter.rank + r];
                        let a = &a[(h + r) * linear.inputs..][..linear.inputs];
                        let to = &mut weight[(first + o) * linear.inputs..][..linear.inputs];
                        to.iter_mut().zip(a).for_each(|(w, a)| *w += factor * a);
                    }
                }
                (h, row) = (h + adapter.rank, row + rows);
            }
            first += rows;
        }
        base.weights().write_parameter(&format!("{site}.weight"), &weight).expect("written");
    }
    base.weights().refresh().expect("refreshed");
    base
}

#[test]
fn new_adapters_change_nothing() {
    for model in models() {
        let batch = random_batch(BATCH, model.vocab_size, 1);
        let base = step_from(&spec_of(model.base()), &batch, SHARP).1;
        let with = step_from(&spec_of(model), &batch, SHARP).1;
        assert_eq!(base.loss.to_bits(), with.loss.to_bits());
    }
}

#[test]
fn adapters_compute_what_merged_weights_do() {
    for model in models() {
        let spec = spec_of(model);
        let batch = random_batch(BATCH, spec.model.vocab_size, 2);
        let mut learner = with_adapters(&spec);
        let mut merged = merged(&mut learner);
        let loss =
            |learner: &mut Learner| learner.step(0, 0.0, std::slice::from_ref(&batch)).expect("a step").loss;
        let (adapted, merged) = (loss(&mut learner), loss(&mut merged));
        assert!((adapted - merged).abs() <= 1e-5 * merged, "{adapted} of adapters, {merged} merged");
    }
}

/// For y = (W + s B A) x, the gradients of A and B follow from that of the merged weight.
#[test]
fn gradients_are_those_of_the_merged_weight() {
    for model in models() {
        let spec = TrainingSpec { max_grad_norm: 0.0, ..spec_of(model) };
        let batch = random_batch(BATCH, spec.model.vocab_size, 3);
        let mut learner = with_adapters(&spec);
        let mut merged = merged(&mut learner);
        for learner in [&mut learner, &mut merged] {
            learner.step(0, 0.0, std::slice::from_ref(&batch)).expect("a step");
        }
        let adapter = spec.model.adapter.clone().expect("adapters");
        let gradient = |learner: &mut Learner, name: &str| -> Vec<f32> {
            let bytes = learner.read_state(StateKind::Gradient, name).expect("a gradient");
            bytemuck::pod_collect_to_vec(&bytes)
        };
        let mut seen = 0;
        for (block, linear) in spec.model.linears() {
            let site = format!("blocks.{block}.{}", linear.site);
            let Ok(b) = learner.weights().read_parameter(&format!("{site}.lora_b")) else { continue };
            // The first part of the layer that has an adapter, whatever its place.
            let of_weight = gradient(&mut merged, &format!("{site}.weight"));
            let of_a = gradient(&mut learner, &format!("{site}.lora_a"));
            let spec = spec.model.parameters().into_iter().find(|p| p.name == format!("{site}.lora_b"));
            let parts = spec.expect("B").parts.list();
            let (mut h, mut row) = (0, 0);
            for part in parts {
                let name = part.hf_name.rsplit('.').nth(2).expect("a module").to_owned();
                let first: usize =
                    linear.parts.iter().take_while(|(of, _)| *of != name).map(|(_, rows)| rows).sum();
                let mut expected = vec![0.0; adapter.rank * linear.inputs];
                for o in 0..part.rows {
                    for r in 0..adapter.rank {
                        let factor = adapter.scale() * b[(row + o) * adapter.rank + r];
                        let from = &of_weight[(first + o) * linear.inputs..][..linear.inputs];
                        let to = &mut expected[r * linear.inputs..][..linear.inputs];
                        to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
                    }
                }
                let found = &of_a[h * linear.inputs..][..expected.len()];
                let error = relative(found, &expected);
                assert!(error <= 1e-4, "{site} {name}: {error}");
                (h, row, seen) = (h + adapter.rank, row + part.rows, seen + 1);
            }
        }
        assert!(seen > 2, "adapters were compared");
    }
}

#[test]
fn only_adapters_are_trained() {
    for recipe in [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Current, Recipe::Fp8Delayed, Recipe::Fp8Block] {
        for model in models() {
            let spec = TrainingSpec { recipe, recompute: Recompute::Norms, ..spec_of(model) };
            let batch = random_batch(BATCH, spec.model.vocab_size, 4);
            let mut learner = learner(spec.clone(), SHARP);
            let read = |learner: &mut Learner| -> Vec<(ParameterSpec, Vec<f32>)> {
                let read =
                    |p: ParameterSpec| (p.clone(), learner.weights().read_parameter(&p.name).expect("held"));
                spec.model.parameters().into_iter().map(read).collect()
            };
            let before = read(&mut learner);
            let losses: Vec<f64> = (0..12)
                .map(|n| learner.step(n, 3e-2, std::slice::from_ref(&batch)).expect("a step").loss)
                .collect();
            assert!(losses[11] < losses[0] - 0.1, "{recipe:?}: {losses:?}");
            for ((p, before), (_, after)) in before.iter().zip(read(&mut learner)) {
                assert_eq!(*before == after, p.is_frozen, "{recipe:?} {}", p.name);
            }
        }
    }
}

#[test]
fn a_frozen_parameter_has_no_state_but_itself_and_no_gradient() {
    for model in models() {
        let spec = TrainingSpec { recipe: Recipe::Bf16, ..spec_of(model) };
        let program = programs::training(&spec).expect("a program");
        let parameters = spec.model.parameters();
        let frozen = |name: &str| parameters.iter().any(|p| p.name == name && p.is_frozen);
        for value in &program.values {
            let Storage::State { kind, name } = &value.storage else { continue };
            assert_eq!(frozen(name), *kind == StateKind::Frozen, "{} {name}", kind.name());
        }
        let sites: Vec<String> = program
            .instances
            .iter()
            .filter(|i| i.origin.role == Role::Wgrad)
            .map(|i| i.origin.site.to_string())
            .collect();
        assert!(!sites.is_empty() && sites.iter().all(|site| site.contains("lora_")), "{sites:?}");
        let adapters: usize =
            parameters.iter().filter(|p| p.is_adapter()).map(|p| p.shape.iter().product::<usize>()).sum();
        assert_eq!(adapters, spec.model.trained_count());
        // In bf16 but for norms.
        let bytes: usize = program
            .values
            .iter()
            .filter(|v| matches!(v.storage, Storage::State { kind: StateKind::Frozen, .. }))
            .map(|v| v.ty.bytes())
            .sum();
        let matrices: usize = parameters
            .iter()
            .filter(|p| p.is_frozen && p.shape.len() > 1)
            .map(|p| p.shape.iter().product::<usize>())
            .sum();
        assert!(bytes >= 2 * matrices && bytes < 2 * matrices + 8192, "{bytes} for {matrices} numbers");
    }
}

/// With an adapter in the first layer, and only in the second block, below which nothing is differentiated.
#[test]
fn the_fp8_gemms_that_a_plan_shows_are_those_of_the_program() {
    let base = Description { qk_norm: false, ..wide() };
    for (targets, expected) in [
        (Targets::AllLinear, [8, 7]),
        (named(&["o_proj"]), [8, 6]),
        (named(&["layers.1.self_attn.q_proj"]), [8, 3]),
    ] {
        let model = Architecture { adapter: Some(adapter(targets)), ..built(base) };
        for recipe in [Recipe::Fp8Current, Recipe::Fp8Row] {
            let spec = TrainingSpec { recipe, ..spec(model.clone(), Batch { sequences: 2, seq_len: 16 }) };
            let shown = linear_gemms(&spec);
            let of = |gemm: usize| -> usize {
                shown.iter().map(|l| l.blocks.len() * usize::from(l.gemms[gemm].is_ok())).sum()
            };
            assert_eq!([of(0), of(1), of(2)], [expected[0], expected[1], 0], "{recipe:?}");
            let program = programs::training(&spec).expect("a program");
            let made = program.instances.iter().filter(|i| i.code.op().name() == "scaled_matmul").count();
            assert_eq!(made, expected.iter().sum::<usize>(), "{recipe:?}");
            assert!((fp8_share(&shown) - 1.0).abs() < 1e-12, "all that are computed");
        }
    }
}

#[test]
fn a_base_in_bf16_has_the_bits_of_the_folder() {
    let model = models().remove(0);
    let spec = TrainingSpec { recipe: Recipe::Bf16, ..spec_of(model) };
    let mut learner = learner(spec, SHARP);
    let name = "blocks.1.mlp.down_proj.weight";
    let values = learner.weights().read_parameter(name).expect("held");
    let bytes = learner.read_state(StateKind::Frozen, name).expect("held");
    let rounded: Vec<u16> = values.iter().map(|&value| to_bf16(value)).collect();
    assert_eq!(bytes, bytemuck::cast_slice::<u16, u8>(&rounded));
}

#[test]
fn recompute_changes_no_bit_of_adapters() {
    for recipe in [Recipe::Fp32, Recipe::Bf16] {
        for model in models() {
            let mut spec = TrainingSpec { recipe, ..spec_of(model) };
            spec.model.adapter.as_mut().expect("adapters").dropout = 0.3;
            let batch = random_batch(BATCH, spec.model.vocab_size, 5);
            let step =
                |recompute| -> Step { step_from(&TrainingSpec { recompute, ..spec.clone() }, &batch, SHARP) };
            let expected = step(Recompute::None);
            for recompute in [Recompute::Norms, Recompute::Block] {
                assert!(step(recompute) == expected, "{recompute:?}");
            }
        }
    }
}
