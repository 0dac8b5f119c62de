//! FP8 exports hold the numbers with which training computed, for engines that read blocks.

#[path = "../../step/tests/common/mod.rs"]
mod common;

use common::{built, random_batch, small, small_model, spec};
use serde_json::{Value, json};
use std::path::Path;
use xtrain_checkpoint::hf::{ExportDtype, ExportOptions};
use xtrain_checkpoint::tensor_file::{StoredDtype, TensorFile};
use xtrain_data::Tokenizer;
use xtrain_model::decoder::Batch;
use xtrain_model::{
    Architecture, BlockSet, Description, Family, Fp8Overrides, GemmPattern, Mixture, Numerics, Recipe, Router,
};
use xtrain_program::StateKind;
use xtrain_step::learner::Learner;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_step::weights::Weights;
use xtrain_tensor::Scaling;
use xtrain_train::error::RunError;
use xtrain_train::exchange::{Identity, export, import};

const BATCH: Batch = Batch { sequences: 1, seq_len: 16 };

/// A model of whole blocks.
fn whole() -> Description {
    Description { dim: 128, layers: 2, heads: 2, kv_heads: 1, head_dim: 128, ffn_dim: 256, ..small() }
}

fn model() -> Architecture {
    built(whole())
}

/// A model after a step of training.
fn trained(model: Architecture, recipe: Recipe, fp8: Fp8Overrides) -> Learner {
    let batch = random_batch(BATCH, model.vocab_size, 1);
    let mut learner = common::learner(TrainingSpec { recipe, fp8, ..spec(model, BATCH) }, 0.05);
    assert!(!learner.step(0, 1e-2, &[batch]).expect("a step").skipped);
    learner
}

fn written(weights: &mut Weights, folder: &Path) -> Result<(), RunError> {
    let tokenizer = Tokenizer::bytes();
    let identity = Identity::new(None, weights.model(), &tokenizer, None)?;
    let options = ExportOptions { dtype: ExportDtype::Fp8, overwrite: true, ..ExportOptions::default() };
    export(weights, &identity, &tokenizer, folder, &options)
}

/// A tensor of the exported folder.
fn stored(folder: &Path, name: &str) -> (StoredDtype, Vec<u8>) {
    let file = TensorFile::open(&folder.join("model.safetensors")).expect("a file");
    let tensor = file.tensor(name).unwrap_or_else(|| panic!("{name} is not there"));
    let mut bytes = vec![0; tensor.range.len()];
    file.read_bytes(tensor, &mut bytes).expect("bytes");
    (tensor.dtype, bytes)
}

/// The modules that config.json lists as left in bf16.
fn modules_in_bf16(folder: &Path) -> Value {
    let text = std::fs::read(folder.join("config.json")).expect("a file");
    let config: Value = serde_json::from_slice(&text).expect("JSON");
    config["quantization_config"]["modules_to_not_convert"].clone()
}

const QKV: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
const GATE_UP: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];

#[test]
fn an_export_of_an_fp8_block_run_holds_the_bytes_that_it_was_trained_with() {
    let dir = tempfile::tempdir().expect("a folder");
    for pow2_scales in [None, Some(false)] {
        let overrides = Fp8Overrides { pow2_scales, ..Default::default() };
        let mut learner = trained(model(), Recipe::Fp8Block, overrides);
        written(learner.weights(), dir.path()).expect("an export");
        let parts: [(&str, usize, &[&str]); 4] = [
            ("attn.qkv_proj", 128, &QKV),
            ("attn.o_proj", 256, &["self_attn.o_proj"]),
            ("mlp.gate_up_proj", 128, &GATE_UP),
            ("mlp.down_proj", 256, &["mlp.down_proj"]),
        ];
        for (block, (ours, cols, theirs)) in (0..2).flat_map(|n| parts.map(|part| (n, part))) {
            let powers = if pow2_scales == Some(false) { "" } else { ", powers of two" };
            let mut read = |what: &str| {
                let name = format!("blocks.{block}.{ours}.weight e4m3{what} (Block{powers}, row-major)");
                learner.read_state(StateKind::Compute, &name).expect(&name)
            };
            let (bytes, laid_out) = (read(""), read(" scales"));
            let rows = bytes.len() / cols;
            let (down, across) = (rows.div_ceil(128), cols.div_ceil(128));
            let (step, _) = Scaling::Block.steps(rows, cols);
            let scales: Vec<u8> =
                (0..down).flat_map(|n| laid_out[4 * n * step..4 * (n * step + across)].to_vec()).collect();
            let (mut found_bytes, mut found_scales) = (Vec::new(), Vec::new());
            for name in theirs.iter().map(|name| format!("model.layers.{block}.{name}.weight")) {
                let (dtype, bytes) = stored(dir.path(), &name);
                assert_eq!(dtype, StoredDtype::F8_E4M3, "{name}");
                found_bytes.extend(bytes);
                found_scales.extend(stored(dir.path(), &format!("{name}_scale_inv")).1);
            }
            assert!(found_bytes == bytes && found_scales == scales, "{ours} of block {block}");
        }
        assert_eq!(modules_in_bf16(dir.path()), json!(["lm_head"]));
        for name in ["model.embed_tokens", "lm_head", "model.norm", "model.layers.1.input_layernorm"] {
            assert_eq!(stored(dir.path(), &format!("{name}.weight")).0, StoredDtype::BF16, "{name}");
        }
    }
}

/// A mixture of whole blocks, in the first of whose blocks there are no experts.
fn mixture() -> Architecture {
    let family = Family::QWEN3_MOE;
    let router = Router { top_k: 2, ..family.router().expect("a family with experts") };
    let dense = BlockSet::from_iter([0]);
    let mixture = Mixture { count: 3, ffn_dim: 128, router, shared_ffn_dim: 0, dense };
    built(Description { family, mixture: Some(mixture), ..whole() })
}

#[test]
fn experts_are_exported_as_they_were_trained_and_come_back() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut learner = trained(mixture(), Recipe::Fp8Block, Fp8Overrides::default());
    written(learner.weights(), dir.path()).expect("an export");
    assert_eq!(modules_in_bf16(dir.path()), json!(["lm_head", "model.layers.1.mlp.gate"]));
    assert_eq!(stored(dir.path(), "model.layers.1.mlp.gate.weight").0, StoredDtype::BF16);
    for (ours, theirs) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])] {
        let name = format!("blocks.1.mlp.experts.{ours}.weight e4m3 (Block, powers of two, row-major)");
        let bytes = learner.read_state(StateKind::Compute, &name).expect(&name);
        let mut found = Vec::new();
        for (expert, part) in (0..3).flat_map(|expert| theirs.iter().map(move |part| (expert, part))) {
            let name = format!("model.layers.1.mlp.experts.{expert}.{part}.weight");
            let (dtype, own) = stored(dir.path(), &name);
            assert_eq!(dtype, StoredDtype::F8_E4M3, "{name}");
            assert_eq!(stored(dir.path(), &format!("{name}_scale_inv")).1.len(), 4, "{name}");
            found.extend(own);
        }
        assert!(found == bytes, "{ours}");
    }
    comes_back(mixture(), dir.path());
}

#[test]
fn what_comes_back_computes_with_the_same_fp8_numbers() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut learner = trained(model(), Recipe::Fp8Block, Fp8Overrides::default());
    written(learner.weights(), dir.path()).expect("an export");
    comes_back(model(), dir.path());
}

/// Fails unless an export of this folder holds the folder's numbers.
fn comes_back(model: Architecture, folder: &Path) {
    let imported = |folder: &Path, numerics: Numerics| {
        let mut weights = Weights::new(common::engine(), model.clone(), numerics).expect("a place");
        import(&mut weights, folder).expect("an import");
        weights
    };
    let mut weights = imported(folder, Numerics::from(Recipe::Fp8Block));
    let again = tempfile::tempdir().expect("a folder");
    written(&mut weights, again.path()).expect("an export");
    let mut back = imported(again.path(), Numerics::from(Recipe::Fp32));
    for entry in weights.masters() {
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let (a, b) = (weights.read_parameter(&entry.name), back.read_parameter(&entry.name));
        assert!(bits(a.expect("a master")) == bits(b.expect("a master")), "{}", entry.name);
    }
}

#[test]
fn what_the_run_left_in_bf16_and_what_is_not_of_whole_blocks_goes_out_as_bf16() {
    let dir = tempfile::tempdir().expect("a folder");
    let patterns = ["blocks.0.mlp.gate_up_proj", "*.o_proj:wgrad"];
    let skip = patterns.map(|text| GemmPattern::parse(text).expect("a pattern")).to_vec();
    let left = Fp8Overrides { skip, bf16_last_layers: 1, ..Default::default() };
    let all = |block: usize, names: &[&str]| -> Vec<String> {
        names.iter().map(|name| format!("model.layers.{block}.{name}")).collect()
    };
    let of_block = [&QKV[..], &["self_attn.o_proj"], &GATE_UP, &["mlp.down_proj"]].concat();
    // Keys and values of half a block.
    let narrow = built(Description { heads: 4, kv_heads: 1, head_dim: 64, ..whole() });
    let cases = [
        (model(), Recipe::Fp8Current, left.clone(), [all(0, &GATE_UP), all(1, &of_block)].concat()),
        // A run in bf16 has left nothing out.
        (model(), Recipe::Bf16, left, vec![]),
        (narrow.clone(), Recipe::Fp8Row, Fp8Overrides::default(), [all(0, &QKV), all(1, &QKV)].concat()),
        (narrow, Recipe::Fp32, Fp8Overrides::default(), [all(0, &QKV), all(1, &QKV)].concat()),
    ];
    for (model, recipe, overrides, kept) in cases {
        let mut learner = trained(model, recipe, overrides);
        written(learner.weights(), dir.path()).expect("an export");
        let expected: Vec<String> = std::iter::once("lm_head".to_owned()).chain(kept.clone()).collect();
        assert_eq!(modules_in_bf16(dir.path()), json!(expected), "{recipe:?}");
        for block in 0..2 {
            for module in all(block, &of_block) {
                let is_kept = kept.contains(&module);
                let dtype = if is_kept { StoredDtype::BF16 } else { StoredDtype::F8_E4M3 };
                assert_eq!(stored(dir.path(), &format!("{module}.weight")).0, dtype, "{module}");
            }
        }
    }
}

#[test]
fn an_export_of_which_nothing_would_be_fp8_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let all = Fp8Overrides { bf16_first_layers: 2, ..Default::default() };
    let cases = [
        (small_model(), Fp8Overrides::default(), "multiples of 128"),
        (model(), all, "8 that the run computed in bf16"),
    ];
    for (model, overrides, why) in cases {
        let mut learner = trained(model, Recipe::Fp8Block, overrides);
        let folder = dir.path().join("model");
        let error = written(learner.weights(), &folder).expect_err("nothing in FP8");
        let text = error.to_string();
        assert!(text.contains(why) && text.contains("use \"bf16\""), "{text}");
        assert!(!folder.exists());
    }
}
