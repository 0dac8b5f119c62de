//! The programs of a run, checked without running them.

mod common;

use common::{adamw, built, small, small_model, spec};
use std::any::Any;
use std::collections::HashMap;
use xtrain_model::decoder::{Balancing, Batch};
use xtrain_model::{
    Architecture, Description, Family, Fp8Overrides, GemmPattern, ParameterGroup, ParameterSpec, Recipe,
    RopeScaling,
};
use xtrain_ops::adamw::AdamW;
use xtrain_ops::registry::ragged_ops;
use xtrain_program::{Op, Parallel, Recompute, Role, Stage, Storage};
use xtrain_rank::Rank;
use xtrain_step::engine::Target;
use xtrain_step::passes::PIPELINE;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

/// Llama 3 8B.
fn llama() -> Architecture {
    built(Description {
        dim: 4096,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ffn_dim: 14336,
        vocab_size: 128_256,
        max_position_embeddings: 1 << 30,
        qk_norm: false,
        ..small()
    })
}

#[test]
fn the_arithmetic_of_a_step_is_that_of_its_products_at_any_length() {
    for seq_len in [64, 8192, 1 << 24, 1 << 30] {
        let model = llama();
        let batch = Batch { sequences: 2, seq_len };
        let program = programs::training(&spec(model.clone(), batch)).expect("a program");
        let done = program.flops(|i| i.origin.stage != Stage::Update);
        let tokens = (batch.sequences * seq_len) as f64;
        let is_matrix = |group| matches!(group, ParameterGroup::Matrix | ParameterGroup::Head);
        let matrices = model.parameters().into_iter().filter(|p| is_matrix(p.group));
        let matrices: usize = matrices.map(|p| p.shape.iter().product::<usize>()).sum();
        // Three GEMMs with every matrix; two of the causal half of the scores in the forward and five in the
        // backward.
        let scores = 7.0 * (32 * 32 * 128) as f64 * seq_len as f64;
        let expected = tokens * (6.0 * matrices as f64 + scores);
        assert!((done / expected - 1.0).abs() < 1e-12, "{done:e} instead of {expected:e} at {seq_len}");
    }
}

/// The names of a program's constants.
fn constants(model: Description, seq_len: usize) -> Vec<String> {
    let program =
        programs::training(&spec(built(model), Batch { sequences: 1, seq_len })).expect("a program");
    let named = |v: &xtrain_program::Value| match &v.storage {
        Storage::Constant { name, .. } => Some(name.to_string()),
        _ => None,
    };
    program.values.iter().filter_map(named).collect()
}

#[test]
fn rotation_tables_that_differ_have_names_that_differ() {
    let base = small();
    let llama3 = |factor, low, high, context| RopeScaling::Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_max_position_embeddings: context,
    };
    let scaled = |rope_scaling| Description { rope_scaling, ..base };
    let models = [
        base,
        Description { rope_theta: 1e5, ..base },
        Description { head_dim: 8, ..base },
        scaled(RopeScaling::Linear { factor: 2.0 }),
        scaled(RopeScaling::Linear { factor: 4.0 }),
        scaled(llama3(8.0, 1.0, 4.0, 8192)),
        scaled(llama3(4.0, 1.0, 4.0, 8192)),
        scaled(llama3(8.0, 0.5, 4.0, 8192)),
        scaled(llama3(8.0, 1.0, 2.0, 8192)),
        scaled(llama3(8.0, 1.0, 4.0, 4096)),
    ];
    let mut names: Vec<String> = models.iter().flat_map(|m| constants(*m, 16)).collect();
    names.extend(constants(base, 17));
    assert_eq!(names.len(), models.len() + 1, "{names:?}");
    names.sort();
    names.dedup();
    assert_eq!(names.len(), models.len() + 1, "{names:?}");
    assert_eq!(constants(base, 16), constants(base, 16));
}

#[test]
fn a_linears_input_dies_before_the_gradient_of_its_size_is_born() {
    let batch = Batch { sequences: 1, seq_len: 8192 };
    for recompute in [Recompute::None, Recompute::Block] {
        let spec = TrainingSpec { recompute, recipe: Recipe::Bf16, ..spec(llama(), batch) };
        let program = programs::training(&spec).expect("a program");
        let at = |op: &str| {
            let found = program.instances.iter().enumerate().filter(|(_, i)| i.code.op().name() == op);
            found.map(|(n, i)| (i.origin.to_string(), n)).collect::<HashMap<_, _>>()
        };
        let (wgrad, dgrad) = (at("linear_wgrad"), at("linear_dgrad"));
        assert_eq!((wgrad.len(), dgrad.len()), (4 * 32, 4 * 32));
        // Except for an input that is recomputed next to the gradient that reads it.
        let is_remade = |site: &str| recompute == Recompute::Block && site.ends_with("mlp.down_proj");
        assert!(wgrad.iter().all(|(site, n)| is_remade(site) || *n < dgrad[site]), "{recompute:?}");
    }
}

#[test]
fn norms_are_made_again_from_sums_that_are_kept() {
    let mut spec = TrainingSpec {
        recompute: Recompute::Norms,
        ..spec(small_model(), Batch { sequences: 2, seq_len: 8 })
    };
    spec.dropout = 0.1;
    let program = programs::training(&spec).expect("a program");
    let again = program.instances.iter().filter(|i| i.origin.role == Role::Recompute);
    let mut count: HashMap<&str, usize> = HashMap::new();
    again.for_each(|i| *count.entry(i.code.op().name()).or_default() += 1);
    // In each of the 3 blocks the rotation with its norm. Norms of rows and the activation of the
    // feed-forward are rematerialised by their gradients.
    assert_eq!(count, HashMap::from([("qk_norm_rope", 3)]));
    let outputs = |op: &str| {
        let found = program.instances.iter().filter(|i| i.code.op().name() == op);
        found.map(|i| i.outputs.len()).collect::<Vec<_>>()
    };
    assert_eq!(outputs("swiglu_grad"), [2, 2, 2]);
    // The last norm is read by the loss alone, which runs forward.
    assert_eq!(outputs("rms_norm_grad"), [2, 3, 3, 3, 3, 3, 3]);
}

#[test]
fn recomputation_ends_with_the_block_that_is_named() {
    let spec = spec(small_model(), Batch { sequences: 2, seq_len: 8 });
    for recompute in [Recompute::Norms, Recompute::Block] {
        let scratch = |blocks| {
            let spec = TrainingSpec { recompute, recompute_blocks: blocks, ..spec.clone() };
            let program = programs::training(&spec).expect("a program");
            let again = program.instances.iter().filter(|i| i.origin.role == Role::Recompute);
            let last = again.filter_map(|i| i.origin.block).max().map_or(0, |b| b as usize + 1);
            assert_eq!(last, blocks.unwrap_or(3), "{recompute:?}");
            Target::Cpu.plan(&program).total_bytes()
        };
        let all = scratch(None);
        assert_eq!(scratch(Some(3)), all);
        assert!(scratch(Some(0)) > scratch(Some(2)) && scratch(Some(2)) > all, "{recompute:?}");
    }
}

#[test]
fn what_is_traced_is_what_the_model_lists_and_decays_as_it_says() {
    for &family in Family::ALL {
        for (tie_embeddings, qkv_bias, qk_norm) in
            (0..8).map(|bits| (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0))
        {
            let model = built(Description { family, tie_embeddings, qkv_bias, qk_norm, ..small() });
            let mut spec = spec(model.clone(), Batch { sequences: 1, seq_len: 4 });
            adamw(&mut spec).weight_decay = 0.25;
            let program = programs::training(&spec).expect("a program");
            let traced: Vec<(String, Vec<usize>)> = (program.parameters.iter())
                .map(|p| (p.name.to_string(), program.ty(p.master).shape.to_vec()))
                .collect();
            let listed: Vec<(String, Vec<usize>)> =
                model.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
            assert_eq!(traced, listed, "{model:?}");
            // Options are in the order of the parameters.
            let update = program.instances.iter().find(|i| i.code.op().name() == "adamw").expect("an update");
            let op: &dyn Any = update.code.op();
            let op = op.downcast_ref::<AdamW>().expect("it is AdamW");
            let decay: Vec<f64> = op.parameters().iter().map(|p| p.weight_decay).collect();
            // One per matrix; the table of the embedding has none.
            let is_decayed = |p: &ParameterSpec| p.shape.len() == 2 && p.name != "embed.weight";
            let expected: Vec<f64> =
                model.parameters().iter().map(|p| if is_decayed(p) { 0.25 } else { 0.0 }).collect();
            assert_eq!(decay, expected, "{model:?}");
        }
    }
}

#[test]
fn all_parameters_but_norms_have_compute_copies_and_the_update_writes_both() {
    let spec =
        TrainingSpec { recipe: Recipe::Bf16, ..spec(small_model(), Batch { sequences: 1, seq_len: 4 }) };
    let refresh = programs::weights(&spec.model, &spec.numerics()).expect("a program");
    let training = programs::training(&spec).expect("a program");
    for program in [&refresh, &training] {
        assert_eq!(program.parameters.iter().filter(|p| p.compute.is_some()).count(), 2 + 4 * 3);
    }
    let update = training.instances.iter().find(|i| i.code.op().name() == "adamw").expect("an update");
    let written = |id: xtrain_program::ValueId| update.effects(&training).any(|effect| effect == id);
    assert!(training.parameters.iter().all(|p| written(p.master) && p.compute.is_none_or(written)));
    assert!(training.parameters.iter().all(|p| !p.gradient.is_some_and(written)));
}

#[test]
fn the_architectures_table_of_passes_is_the_pipeline() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../ARCHITECTURE.md");
    let page = std::fs::read_to_string(path).expect("ARCHITECTURE.md");
    let mut table = String::from("| pass | needs | afterwards | calls of `Op` |\n|---|---|---|---|\n");
    for pass in PIPELINE {
        let needs = if pass.needs.is_empty() { "the traced model".to_owned() } else { pass.needs.join(", ") };
        let calls: Vec<String> = pass.calls.iter().map(|method| format!("`{method}`")).collect();
        table += &format!("| {} | {needs} | {} | {} |\n", pass.name, pass.guarantees, calls.join(", "));
    }
    assert!(page.contains(&table), "ARCHITECTURE.md lacks\n{table}");
}

#[test]
fn the_last_pass_ends_with_the_program_of_the_step() {
    let spec = spec(small_model(), Batch { sequences: 1, seq_len: 4 });
    let last = PIPELINE.last().expect("a pass").name;
    let program = programs::training(&spec).expect("a program").to_string();
    assert_eq!(programs::training_after(&spec, last).expect("a program").to_string(), program);
    let forward = programs::training_after(&spec, "precision").expect("a program");
    assert!(forward.instances.iter().all(|i| i.origin.stage == Stage::Forward));
}

#[test]
fn passes_call_the_methods_that_the_pipeline_lists() {
    let methods = [
        "infer",
        "operand",
        "in_place",
        "accumulates",
        "cost",
        "is_cheap",
        "rebuild",
        "gathers_apart",
        "gemms",
    ];
    // The update is no file of the crate: it is traced.
    for pass in PIPELINE.iter().filter(|pass| pass.name != "update") {
        let read = |file: &str| {
            let path = format!("{}/../program/src/{file}.rs", env!("CARGO_MANIFEST_DIR"));
            std::fs::read_to_string(&path).expect("a file for every pass")
        };
        let mut source = read(pass.name);
        // The files of its folder, if it has one.
        let folder = format!("{}/../program/src/{}", env!("CARGO_MANIFEST_DIR"), pass.name);
        for file in std::fs::read_dir(folder).into_iter().flatten() {
            let file = file.expect("a file").path();
            source.push_str(&std::fs::read_to_string(file).expect("a file"));
        }
        if pass.name == "backward" {
            // Ops emit their backward through this interface.
            source.push_str(&read("program/differentiate"));
        }
        // Creating an instance infers its types.
        let calls = |method: &str| {
            let is_inferred = method == "infer" && source.contains("instantiate(");
            is_inferred || source.contains(&format!(".{method}("))
        };
        let found: Vec<&str> = methods.into_iter().filter(|method| calls(method)).collect();
        assert_eq!(found, pass.calls, "{}", pass.name);
    }
}

/// Mixtures whose outputs of experts are whole blocks, on one rank and on two that share the experts.
fn mixtures(recipe: Recipe) -> Vec<TrainingSpec> {
    let batch = Batch { sequences: 2, seq_len: 48 };
    let families = ["mixtral", "qwen3_moe", "dots1"].map(|name| Family::named(name).expect("a family"));
    let balancing = Balancing { loss_weight: 0.01, z_weight: 0.001, bias_rate: None };
    let of = |(family, ranks): (Family, usize)| {
        let sizes = Description { dim: 128, ffn_dim: 128, layers: 2, ..small() };
        let spec = common::mixture(family, sizes, [8, 2], batch, balancing);
        let parallel = Parallel { rank: Rank::first_of(ranks), expert: ranks, ..Parallel::ALONE };
        let mut spec = TrainingSpec { recipe, parallel, ..spec };
        spec.fp8.wire = ranks > 1 && matches!(recipe, Recipe::Fp8Block | Recipe::Fp8Delayed);
        spec
    };
    families.into_iter().flat_map(|family| [(family, 1), (family, 2)]).map(of).collect()
}

/// The tails of a training step that are written, and those that are left undefined, by op.
fn tails(spec: &TrainingSpec) -> [Vec<&'static str>; 2] {
    let program = programs::training(spec).expect("a program");
    let ragged = ragged_ops();
    let of = |is_undefined: bool| {
        let has = |op: &dyn Op, outputs: usize| {
            let tails = (0..outputs).filter_map(|k| ragged.find(op)?.tail(k));
            tails.into_iter().any(|tail| tail.is_undefined() == is_undefined)
        };
        let ops = program.instances.iter().map(|i| (i.code.op(), i.outputs.len()));
        let mut names: Vec<&str> =
            ops.filter(|(op, outputs)| has(*op, *outputs)).map(|(op, _)| op.name()).collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    [false, true].map(of)
}

#[test]
fn no_op_of_a_mixture_writes_a_tail() {
    for recipe in Recipe::ALL {
        for recompute in [Recompute::None, Recompute::Norms] {
            for spec in mixtures(recipe) {
                let spec = TrainingSpec { recompute, ..spec };
                let [written, undefined] = tails(&spec);
                assert!(written.is_empty(), "{recipe:?} {recompute:?}: {written:?}");
                assert!(undefined.len() >= 4, "{recipe:?} {recompute:?}: {undefined:?}");
            }
        }
    }
}

#[test]
fn tails_that_a_cast_of_its_own_reads_are_written() {
    let skip = vec![GemmPattern::parse("*.experts.down_proj:wgrad").expect("a pattern")];
    let fp8 = Fp8Overrides { skip, ..Fp8Overrides::default() };
    for spec in mixtures(Recipe::Fp8Current) {
        let [written, undefined] = tails(&TrainingSpec { fp8: fp8.clone(), ..spec });
        // Those of the gradient of the outputs, and of SwiGLU's output and what it is computed from.
        assert_eq!(written, ["grouped_scaled_matmul", "permute", "swiglu"]);
        assert!(undefined.contains(&"swiglu_grad_quantize"), "{undefined:?}");
    }
}
