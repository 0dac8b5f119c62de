//! Mixtures of experts as whole models: folders in both forms, recomputation, balancing, and the loads that a
//! step reports.

#[path = "../../step/tests/common/mod.rs"]
mod common;

use common::{engine, golden, learner, random_batch, small};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize_to_file};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use xtrain_model::decoder::{Balancing, Batch};
use xtrain_model::hf::HfConfig;
use xtrain_model::{Description, Family, Recipe};
use xtrain_program::{Recompute, StateKind};
use xtrain_step::learner::Learner;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_step::weights::Weights;
use xtrain_train::exchange::import;

const FAMILIES: [&str; 3] = ["mixtral", "qwen3_moe", "dots1"];

/// Tensors by name, with their shapes.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn read(folder: &Path) -> Tensors {
    let bytes = fs::read(folder.join("model.safetensors")).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let of = |(name, tensor): (String, TensorView<'_>)| {
        (name, (tensor.shape().to_vec(), bytemuck::pod_collect_to_vec(tensor.data())))
    };
    file.tensors().into_iter().map(of).collect()
}

/// A folder with these tensors and the config.json of the golden model.
fn folder(name: &str, tensors: &Tensors) -> tempfile::TempDir {
    let place = tempfile::tempdir().expect("a folder");
    fs::copy(golden(name).join("config.json"), place.path().join("config.json")).expect("a copy");
    let views = tensors.iter().map(|(name, (shape, values))| {
        let bytes = bytemuck::cast_slice(values);
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("a tensor"))
    });
    let path = place.path().join("model.safetensors");
    serialize_to_file(views.collect::<Vec<_>>(), None, &path).expect("a file");
    place
}

/// The masters after an import, or the error.
fn imported(name: &str, folder: &Path) -> Result<BTreeMap<String, Vec<f32>>, String> {
    let text = fs::read_to_string(folder.join("config.json")).expect("config.json");
    let model = HfConfig::parse(&text).expect("it parses").model.architecture().expect("a model");
    let names: Vec<String> = model.parameters().into_iter().map(|p| p.name).collect();
    let mut weights = Weights::new(engine(), model, Recipe::Fp32).expect("weights");
    import(&mut weights, folder).map_err(|error| format!("{name}: {error}"))?;
    let master = |name: String| {
        let values = weights.read_parameter(&name).expect("a master");
        (name, values)
    };
    Ok(names.into_iter().map(master).collect())
}

/// The tensors as transformers 5 computes with them: those of all experts of a block in one.
fn fused(name: &str, tensors: &Tensors) -> Tensors {
    let (module, projections) = match name {
        "mixtral" => ("block_sparse_moe", ["w1", "w3", "w2"]),
        _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
    };
    let mut all = tensors.clone();
    for block in 0..2 {
        let at = format!("model.layers.{block}.");
        let experts = (0..).take_while(|e| {
            tensors.contains_key(&format!("{at}{module}.experts.{e}.{}.weight", projections[0]))
        });
        let count = experts.count();
        if count == 0 {
            continue;
        }
        for (to, from) in [("gate_up_proj", &projections[..2]), ("down_proj", &projections[2..])] {
            let (mut values, mut rows, mut columns) = (Vec::new(), 0, 0);
            for expert in 0..count {
                rows = 0;
                for part in from {
                    let part = format!("{at}{module}.experts.{expert}.{part}.weight");
                    let (shape, own) = all.remove(&part).expect("a tensor of an expert");
                    (rows, columns) = (rows + shape[0], shape[1]);
                    values.extend(own);
                }
            }
            all.insert(format!("{at}mlp.experts.{to}"), (vec![count, rows, columns], values));
        }
        let router = all.remove(&format!("{at}{module}.gate.weight")).expect("a router");
        all.insert(format!("{at}mlp.gate.weight"), router);
    }
    all
}

#[test]
fn experts_are_read_one_by_one_and_fused() {
    for name in FAMILIES {
        let tensors = read(&golden(name));
        let whole = fused(name, &tensors);
        assert!(whole.len() < tensors.len() && whole.values().any(|(shape, _)| shape.len() == 3));
        let place = folder(name, &whole);
        let (expected, found) = (imported(name, &golden(name)), imported(name, place.path()));
        assert_eq!(found.expect("it is read"), expected.expect("it is read"), "{name}");
    }
}

#[test]
fn damaged_experts_are_refused_by_name() {
    for name in FAMILIES {
        let tensors = read(&golden(name));
        let whole = fused(name, &tensors);
        let refused = |tensors: &Tensors| {
            let place = folder(name, tensors);
            imported(name, place.path()).expect_err("it is refused")
        };
        let mut both = tensors.clone();
        let (key, experts) =
            whole.iter().find(|(name, _)| name.ends_with("experts.down_proj")).expect("it is there");
        both.insert(key.clone(), experts.clone());
        assert!(refused(&both).contains("which hold the same weights"), "{name}");
        let mut other = whole.clone();
        other.insert(key.clone(), (vec![experts.1.len()], experts.1.clone()));
        assert!(refused(&other).contains("but should be"), "{name}: {}", refused(&other));
        let mut missing = tensors.clone();
        let expert = tensors.keys().find(|name| name.contains(".experts.1.")).expect("an expert").clone();
        missing.remove(&expert);
        assert!(refused(&missing).contains(&expert), "{name}");
    }
    let mut biased = read(&golden("dots1"));
    let bias = biased.keys().find(|name| name.ends_with("e_score_correction_bias")).expect("a bias").clone();
    biased.get_mut(&bias).expect("a bias").1[2] = f32::NAN;
    let error = imported("dots1", folder("dots1", &biased).path()).expect_err("it is not finite");
    assert!(error.contains(&bias) && error.contains("NaN"), "{error}");
}

const BATCH: Batch = Batch { sequences: 2, seq_len: 48 };

/// A step of a small mixture of `family` with 2 of 5 experts.
fn mixture(family: Family, balancing: Balancing) -> TrainingSpec {
    common::mixture(family, Description { ffn_dim: 12, ..small() }, [5, 2], BATCH, balancing)
}

/// All state that a checkpoint has.
fn state(learner: &mut Learner) -> Vec<Vec<u8>> {
    let entries = learner.saved_state();
    entries.iter().map(|e| learner.read_state(e.kind, &e.name).expect("a value")).collect()
}

fn families() -> [Family; 3] {
    FAMILIES.map(|name| Family::named(name).expect("a family"))
}

#[test]
fn every_copy_of_a_token_is_a_load_and_recomputation_changes_no_bit() {
    for family in families() {
        let balancing = Balancing { loss_weight: 0.05, z_weight: 0.01, bias_rate: None };
        let plain = mixture(family, balancing);
        let vocabulary = plain.model.vocab_size;
        let batches: Vec<_> = (0..3).map(|seed| random_batch(BATCH, vocabulary, seed)).collect();
        let mut expected = None;
        for recompute in [Recompute::None, Recompute::Norms, Recompute::Block] {
            let mut learner = learner(TrainingSpec { recompute, ..plain.clone() }, 0.1);
            let results: Vec<_> = (0..3).map(|n| learner.step(n, 1e-3, &batches).expect("a step")).collect();
            for result in &results {
                assert_eq!(result.experts.len(), 3);
                for block in &result.experts {
                    // Two experts of each token, but of those that pad a sequence.
                    let tokens: f32 = block.tokens.iter().sum();
                    assert_eq!(tokens as usize, 3 * 2 * copied(&batches[0].targets), "{family:?}");
                    assert!(block.balance > 1.5 && block.balance < 5.0 && block.z_loss > 0.0, "{block:?}");
                }
            }
            let ended = (results, state(&mut learner));
            match &expected {
                None => expected = Some(ended),
                Some(expected) => assert!(ended == *expected, "{family:?} with {recompute:?}"),
            }
        }
    }
}

/// Tokens that have a row: all up to the last target of their sequence.
fn copied(targets: &[i32]) -> usize {
    let of = |targets: &[i32]| targets.iter().rposition(|&target| target >= 0).map_or(0, |last| last + 1);
    targets.chunks(BATCH.seq_len).map(of).sum()
}

#[test]
fn biases_move_towards_equal_loads_and_not_in_skipped_steps() {
    let rate = 0.25;
    let balancing = Balancing { loss_weight: 0.0, z_weight: 0.0, bias_rate: Some(rate) };
    let mut learner = learner(mixture(Family::DOTS1, balancing), 0.1);
    let batch = random_batch(BATCH, learner.spec().model.vocab_size, 1);
    let result = learner.step(0, 0.0, std::slice::from_ref(&batch)).expect("a step");
    for (block, sums) in result.experts.iter().enumerate() {
        let name = format!("blocks.{block}.mlp.router.bias");
        let bias = learner.weights().read_parameter(&name).expect("a bias");
        let mean = sums.tokens.iter().sum::<f32>() / 5.0;
        let signs: Vec<f32> =
            sums.tokens.iter().map(|&load| ((mean - load) as f64).signum() as f32).collect();
        let centre = signs.iter().sum::<f32>() / 5.0;
        for (bias, sign) in bias.iter().zip(&signs) {
            assert!((bias - rate * (sign - centre)).abs() < 1e-6, "{bias:?} of {:?}", sums.tokens);
        }
        assert!(bias.iter().any(|&bias| bias != 0.0));
    }
    let before = learner.weights().read_parameter("blocks.0.mlp.router.bias").expect("a bias");
    let nan = vec![f32::NAN; learner.spec().model.dim];
    learner.write_state(StateKind::Master, "norm.weight", bytemuck::cast_slice(&nan)).expect("written");
    learner.weights().refresh().expect("refreshed");
    let result = learner.step(1, 0.0, &[batch]).expect("a step");
    let after = learner.weights().read_parameter("blocks.0.mlp.router.bias").expect("a bias");
    assert!(result.skipped && before == after, "{before:?} {after:?}");
}

#[test]
fn the_balance_loss_makes_loads_more_equal() {
    let most = |loss_weight: f32| {
        let balancing = Balancing { loss_weight, z_weight: 0.0, bias_rate: None };
        let mut learner = learner(mixture(Family::MIXTRAL, balancing), 0.1);
        let vocabulary = learner.spec().model.vocab_size;
        let mut last = 0.0;
        for n in 0..60 {
            let result = learner.step(n, 1e-2, &[random_batch(BATCH, vocabulary, n)]).expect("a step");
            let most = |tokens: &[f32]| tokens.iter().copied().fold(0.0, f32::max);
            last = result.experts.iter().map(|block| most(&block.tokens)).fold(0.0, f32::max);
        }
        last
    };
    let (without, with) = (most(0.0), most(1.0));
    assert!(with < without, "the largest load is {with} with the loss and {without} without");
}
