//! Mixtures of experts under the FP8 recipes: which GEMMs are in FP8, that training repeats to the bit, and
//! that it stays near bf16's.

mod common;

use common::{learner, random_batch, small};
use xtrain_model::decoder::{Balancing, Batch};
use xtrain_model::{Bf16Reason, Description, Family, Fp8Overrides, GemmPattern, Recipe};
use xtrain_program::{Instance, Recompute, Stage, StateKind};
use xtrain_step::engine::Target;
use xtrain_step::learner::{Learner, StepResult};
use xtrain_step::linear_gemms::linear_gemms;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

const BATCH: Batch = Batch { sequences: 2, seq_len: 48 };
const GATE_UP: &str = "mlp.experts.gate_up_proj";
const DOWN: &str = "mlp.experts.down_proj";
/// The recipes that compute experts in FP8.
const WITH_EXPERTS: [Recipe; 3] = [Recipe::Fp8Current, Recipe::Fp8Delayed, Recipe::Fp8Block];

/// A mixture of 2 of 8 experts, whose outputs are whole blocks if `dim` is.
fn mixture(recipe: Recipe, dim: usize) -> TrainingSpec {
    mixture_of(recipe, dim, 8, 2)
}

/// A mixture in which a token passes through `top_k` of these experts.
fn mixture_of(recipe: Recipe, dim: usize, experts: usize, top_k: usize) -> TrainingSpec {
    let sizes = Description { dim, layers: 2, heads: 4, kv_heads: 2, head_dim: 32, ffn_dim: 64, ..small() };
    let balancing = Balancing { loss_weight: 0.01, z_weight: 0.001, bias_rate: None };
    let spec = common::mixture(Family::QWEN3_MOE, sizes, [experts, top_k], BATCH, balancing);
    TrainingSpec { recipe, ..spec }
}

/// The GEMMs of experts in a training step: those in FP8, and those in bf16.
fn gemms(spec: &TrainingSpec) -> [usize; 2] {
    let program = programs::training(spec).expect("a program");
    let named = |name: &str| program.instances.iter().filter(|i| i.code.op().name() == name).count();
    let bf16 = ["grouped_linear", "grouped_dgrad", "grouped_wgrad"].map(named);
    [named("grouped_scaled_matmul"), bf16.iter().sum()]
}

/// The reasons why the GEMMs of a layer are in bf16.
fn reasons(spec: &TrainingSpec, site: &str) -> [Option<Bf16Reason>; 3] {
    let layers = linear_gemms(spec);
    let found = layers.iter().find(|linear| linear.site == site).expect("a layer");
    found.gemms.clone().map(Result::err)
}

#[test]
fn all_gemms_of_experts_are_in_fp8_but_under_rows() {
    for recipe in WITH_EXPERTS {
        let spec = mixture(recipe, 128);
        assert_eq!(gemms(&spec), [12, 0], "{recipe:?}");
        assert_eq!(
            [GATE_UP, DOWN].map(|site| reasons(&spec, site)),
            [[None, None, None], [None, None, None]]
        );
        // No GEMM reads a bf16 copy of an expert; those of routers are in bf16.
        let program = programs::training(&spec).expect("a program");
        for parameter in &program.parameters {
            let is_expert = parameter.name.contains("experts");
            assert_eq!(
                parameter.compute.is_none(),
                is_expert || !parameter.quantized.is_empty() || parameter.name.contains("norm")
            );
            assert!(!is_expert || parameter.quantized.len() == 1, "{}", parameter.name);
        }
    }
    let rows = mixture(Recipe::Fp8Row, 128);
    assert_eq!(gemms(&rows), [0, 12]);
    for site in [GATE_UP, DOWN] {
        assert_eq!(reasons(&rows, site), [(); 3].map(|()| Some(Bf16Reason::Experts)));
    }
}

/// The casts of rows, of SwiGLU and of its gradient in a training step, and ops that these casts replace, by
/// layer.
fn fused_casts(spec: &TrainingSpec) -> [[usize; 2]; 3] {
    let program = programs::training(spec).expect("a program");
    let of_experts = |instance: &&Instance| {
        let site = &*instance.origin.site;
        site.starts_with("mlp.") && instance.origin.stage != Stage::Update
    };
    let named = |names: &[&str]| {
        let named = |instance: &&Instance| names.contains(&instance.code.op().name());
        program.instances.iter().filter(of_experts).filter(named).count() / spec.model.layers.len()
    };
    [
        [named(&["permute_quantize"]), named(&["permute", "quantize"])],
        [named(&["swiglu_quantize"]), named(&["swiglu", "swiglu_saving"])],
        [named(&["swiglu_grad_quantize"]), named(&["swiglu_grad", "dequantize"])],
    ]
}

#[test]
fn casts_of_experts_are_fused_into_the_ops_that_compute_the_operands() {
    for recipe in WITH_EXPERTS {
        for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
            let spec = TrainingSpec { recompute, ..mixture(recipe, 128) };
            // Rows of tokens and of their gradients. What the backward recomputes or restores is cast again.
            let [is_recomputed, saves] = [recompute != Recompute::None, recipe == Recipe::Fp8Block];
            let [rows, swiglu] = [2 + usize::from(is_recomputed), 1 + usize::from(is_recomputed || saves)];
            // A block that is recomputed recomputes what SwiGLU saves, but not SwiGLU.
            let saved_alone = usize::from(saves && recompute == Recompute::Block);
            let expected = [[rows, saved_alone], [swiglu, 0], [1, 0]];
            assert_eq!(fused_casts(&spec), expected, "{recipe:?} {recompute:?}");
        }
    }
}

#[test]
fn values_that_a_gemm_in_bf16_reads_are_written() {
    let skip = vec![GemmPattern::parse("*.experts.*:wgrad").expect("a pattern")];
    let fp8 = Fp8Overrides { skip, ..Fp8Overrides::default() };
    let spec = TrainingSpec { fp8, ..mixture(Recipe::Fp8Block, 128) };
    // Wgrad reads the rows of tokens, those of their gradients, SwiGLU's output, computed again, and the
    // gradient of gate and up. In the forward nothing reads SwiGLU's output but its cast.
    assert_eq!(fused_casts(&spec), [[0, 5], [1, 1], [0, 3]]);
}

/// The sizes of this router are those of FP8.
#[test]
fn routers_are_in_bf16_and_their_casts_are_not_measured() {
    for recipe in Recipe::FP8 {
        let spec = mixture_of(recipe, 128, 16, 2);
        let program = programs::training(&spec).expect("a program");
        let routers = program.instances.iter().filter(|i| &*i.origin.site == "mlp.router");
        let names: Vec<_> = routers.map(|i| i.code.op().name()).collect();
        assert!(["linear_dgrad", "linear_wgrad"].iter().all(|name| names.contains(name)), "{names:?}");
        assert!(!["quantize", "scaled_matmul"].iter().any(|name| names.contains(name)), "{names:?}");
        let measured = programs::inspection(&spec, &recipe.into()).expect("a program").measured;
        assert!(measured.iter().all(|cast| &*cast.layer.site != "mlp.router"));
        assert!(measured.iter().any(|cast| &*cast.layer.site == GATE_UP));
    }
}

#[test]
fn blocks_never_cross_experts() {
    let blocks = mixture(Recipe::Fp8Block, 96);
    // 128 outputs of gate and up are whole blocks, 96 are not.
    assert_eq!(gemms(&blocks), [6, 6]);
    assert_eq!(reasons(&blocks, GATE_UP), [None, None, None]);
    assert_eq!(reasons(&blocks, DOWN), [(); 3].map(|()| Some(Bf16Reason::ExpertOutputs(96))));
    assert_eq!(gemms(&mixture(Recipe::Fp8Current, 96)), [12, 0]);
}

#[test]
fn gemms_of_experts_are_skipped_by_name() {
    for (pattern, expected) in [
        ("*.experts.down_proj", [6, 6]),
        ("*.experts.*:wgrad", [8, 4]),
        ("blocks.1.mlp.experts.gate_up_proj:dgrad", [11, 1]),
    ] {
        let skip = vec![GemmPattern::parse(pattern).expect("a pattern")];
        let fp8 = Fp8Overrides { skip, ..Fp8Overrides::default() };
        let spec = TrainingSpec { fp8, ..mixture(Recipe::Fp8Block, 128) };
        assert_eq!(gemms(&spec), expected, "{pattern}");
        let of = |linear: &xtrain_step::linear_gemms::LinearGemms| {
            let is_fp8 = linear.gemms.iter().filter(|gemm| gemm.is_ok()).count();
            if linear.experts.is_some() { linear.blocks.len() * is_fp8 } else { 0 }
        };
        assert_eq!(linear_gemms(&spec).iter().map(of).sum::<usize>(), expected[0], "{pattern}");
    }
}

/// All state that a checkpoint has.
fn state(learner: &mut Learner) -> Vec<(StateKind, String, Vec<u8>)> {
    let entries = learner.saved_state();
    let read = |entry: &xtrain_runtime::StateEntry| {
        let bytes = learner.read_state(entry.kind, &entry.name).expect("a value");
        (entry.kind, entry.name.clone(), bytes)
    };
    entries.iter().map(read).collect()
}

const STEPS: u64 = 20;

/// Some steps of a run.
fn train(learner: &mut Learner, steps: std::ops::Range<u64>) -> Vec<StepResult> {
    let vocabulary = learner.spec().model.vocab_size;
    // The batches repeat, so that there is something to learn.
    let batch = |n: u64| random_batch(BATCH, vocabulary, n % 4);
    steps.map(|n| learner.step(n, 3e-3, &[batch(n)]).expect("a step")).collect()
}

fn mean_loss(results: &[StepResult]) -> f64 {
    results.iter().map(|result| result.loss).sum::<f64>() / results.len() as f64
}

#[test]
fn training_repeats_to_the_bit_and_is_near_bf16() {
    let run = |spec: TrainingSpec| {
        let mut learner = learner(spec, 0.05);
        let results = train(&mut learner, 0..STEPS);
        (results, state(&mut learner))
    };
    let bf16 = run(mixture(Recipe::Bf16, 128)).0;
    assert!(bf16[STEPS as usize - 1].loss < 0.9 * bf16[0].loss, "nothing is learned");
    for recipe in WITH_EXPERTS {
        let spec = mixture(recipe, 128);
        let expected = run(spec.clone());
        assert!(expected.0.iter().all(|result| !result.skipped));
        let gap = mean_loss(&expected.0) / mean_loss(&bf16) - 1.0;
        println!("{recipe:?}: {gap:+.2e}");
        // Rounding lets tokens choose other experts, and so do few steps on few batches.
        assert!(gap.abs() < 2e-2 && expected.0[1] != bf16[1], "{recipe:?}: {gap:e}");
        let again = [Recompute::None, Recompute::Norms, Recompute::Block];
        for recompute in again {
            assert!(run(TrainingSpec { recompute, ..spec.clone() }) == expected, "{recipe:?} {recompute:?}");
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
        assert!(pool.install(|| run(spec.clone())) == expected, "{recipe:?} on one thread");

        let mut first = learner(spec.clone(), 0.05);
        train(&mut first, 0..STEPS / 2);
        let mut second = learner(spec, 0.5);
        for (kind, name, bytes) in state(&mut first) {
            second.write_state(kind, &name, &bytes).expect("written");
        }
        second.weights().refresh().expect("refreshed");
        let rest = train(&mut second, STEPS / 2..STEPS);
        assert!(
            rest == expected.0[STEPS as usize / 2..] && state(&mut second) == expected.1,
            "{recipe:?}, resumed"
        );
    }
}

/// Tokens pass through all experts, since rounding lets some of them choose others.
#[test]
fn gradients_of_experts_are_as_near_to_those_of_bf16_as_formats_allow() {
    let step = |recipe| common::step_from(&mixture_of(recipe, 128, 8, 8), &random_batch(BATCH, 37, 1), 0.05);
    let bf16 = step(Recipe::Bf16);
    for recipe in WITH_EXPERTS {
        let found = step(recipe);
        let of_experts = found.0.iter().zip(&bf16.0).filter(|((name, _), _)| name.contains("experts"));
        for ((name, a), (_, b)) in of_experts {
            let error = common::relative(a, b);
            println!("{recipe:?}: {name} differs by {error:.1e}");
            assert!(error > 1e-2 && error < 0.2, "{recipe:?}: {name} differs by {error:e}");
        }
    }
}

#[test]
fn fp8_experts_take_less_memory_and_less_with_a_saved_input_of_swiglu() {
    let batch = Batch { sequences: 8, seq_len: 64 };
    let scratch = |spec: TrainingSpec| {
        let program = programs::training(&TrainingSpec { batch, ..spec }).expect("a program");
        Target::Cpu.plan(&program).region_bytes[2]
    };
    let bf16 = scratch(mixture(Recipe::Bf16, 128));
    for recipe in WITH_EXPERTS {
        let saving = |swiglu_input| {
            let fp8 = Fp8Overrides { swiglu_input: Some(swiglu_input), ..Fp8Overrides::default() };
            scratch(TrainingSpec { fp8, ..mixture(recipe, 128) })
        };
        let [plain, saved] = [false, true].map(saving);
        assert!(saved < plain && plain < bf16, "{recipe:?}: {saved}, {plain} and {bf16} bytes");
    }
}

#[test]
fn a_saved_input_of_swiglu_changes_gradients_alone() {
    for recipe in WITH_EXPERTS {
        let with = |swiglu_input| {
            let fp8 = Fp8Overrides { swiglu_input: Some(swiglu_input), ..Fp8Overrides::default() };
            TrainingSpec { fp8, ..mixture(recipe, 128) }
        };
        let step = |spec: &TrainingSpec| common::step_from(spec, &random_batch(BATCH, 37, 2), 0.05);
        let (plain, saved) = (step(&with(false)), step(&with(true)));
        assert_eq!(plain.1.loss, saved.1.loss, "{recipe:?}: the forward is the same");
        let worst =
            plain.0.iter().zip(&saved.0).map(|(a, b)| common::relative(&a.1, &b.1)).fold(0.0, f64::max);
        assert!(worst > 1e-3 && worst < 0.3, "{recipe:?}: {worst:e}");
        for recompute in [Recompute::Norms, Recompute::Block] {
            assert!(step(&TrainingSpec { recompute, ..with(true) }) == saved, "{recompute:?} of {recipe:?}");
        }
    }
}
