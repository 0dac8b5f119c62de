//! Keys of config.json against transformers: the outcomes that tests/golden/make_config_keys.py found there.
//! A key is applied with transformers' numbers, changes nothing in both, is reported, or is refused.

#[path = "../../step/tests/common/mod.rs"]
mod common;

use common::{golden, relative};
use safetensors::SafeTensors;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fs;
use xtrain_model::hf::HfConfig;
use xtrain_model::{Description, Recipe};
use xtrain_step::generate::Generator;
use xtrain_step::weights::Weights;
use xtrain_train::exchange::import;

/// Keys with which transformers trains otherwise, and xtrain as without them: the embedding of the padding
/// token has no gradient there, and the loss of the experts' balance is part of the loss only with the second
/// (docs/experts.md).
const OTHERWISE_TRAINED: [&str; 2] = ["pad_token_id", "output_router_logits"];

/// Keys with values that are refused though transformers computes the same: other readers of the folder do
/// not, or the folder says that it is no model of ours.
const REFUSED_ALL_THE_SAME: [&str; 14] = [
    "architectures",
    "attention_bias",
    "attention_chunk_size",
    "mlp_bias",
    "moe_layer_freq",
    "num_experts",
    "partial_rotary_factor",
    "per_layer_config",
    "rope_parameters",
    "rope_theta",
    "scoring_func",
    "sliding_window",
    "topk_method",
    "use_bidirectional_attention",
];

/// Tokens of the sequences on which the outcomes were found.
const SEQUENCE: usize = 40;

struct Table {
    json: Value,
}

impl Table {
    fn load() -> Self {
        let text = fs::read_to_string(golden("config_keys.json")).expect("config_keys.json");
        Table { json: serde_json::from_str(&text).expect("JSON") }
    }

    fn families(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.json["families"].as_object().expect("families").iter()
    }

    /// The cases of a family: their numbers, the keys that they change, and their outcomes.
    fn cases<'a>(&'a self, family: &'a Value) -> impl Iterator<Item = (usize, &'a Map<String, Value>, u8)> {
        let cases = self.json["cases"].as_array().expect("cases").iter().filter_map(Value::as_object);
        let outcomes = family["outcomes"].as_str().expect("outcomes").bytes();
        cases.zip(outcomes).enumerate().map(|(number, (case, outcome))| (number, case, outcome))
    }
}

/// The config.json of a family's golden folder.
fn file(family: &Value) -> Map<String, Value> {
    let folder = golden(family["folder"].as_str().expect("a folder"));
    serde_json::from_slice(&fs::read(folder.join("config.json")).expect("config.json")).expect("JSON")
}

/// The model with the weights of the family's golden folder.
fn imported(model: Description, family: &Value) -> Result<Weights, String> {
    let model = common::built(model);
    let mut weights = Weights::new(common::engine(), model, Recipe::Fp32).expect("weights");
    let folder = golden(family["folder"].as_str().expect("a folder"));
    import(&mut weights, &folder).map_err(|error| error.to_string())?;
    Ok(weights)
}

fn read(file: &Map<String, Value>) -> Result<HfConfig, String> {
    HfConfig::parse(&Value::Object(file.clone()).to_string()).map_err(|error| error.to_string())
}

fn changed(file: &Map<String, Value>, case: &Map<String, Value>) -> Map<String, Value> {
    let mut file = file.clone();
    for (key, value) in case {
        match value["absent"] == true {
            true => file.remove(key),
            false => file.insert(key.clone(), value.clone()),
        };
    }
    file
}

#[test]
fn no_key_changes_results_silently() {
    let table = Table::load();
    let mut refused_all_the_same = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for (name, family) in table.families() {
        let file = file(family);
        let base = read(&file).expect("the folder is read");
        for (number, case, outcome) in table.cases(family) {
            let what = format!("{name}, case {number}: {case:?}");
            seen.insert(outcome);
            let found = match read(&changed(&file, case)) {
                Ok(found) => found,
                Err(error) => {
                    if outcome == b's' {
                        refused_all_the_same.extend(case.keys().cloned());
                    }
                    // Checks of the whole model have the words of run files.
                    let words = ["rope_scaling.factor", "groups have 2 experts"].into_iter();
                    let names_it =
                        case.keys().map(String::as_str).chain(words).any(|key| error.contains(key));
                    assert!(names_it || outcome == b'f', "{what}: {error}");
                    continue;
                }
            };
            // A bound, not a number of the computation.
            let max_position_embeddings = base.model.max_position_embeddings;
            let model = Description { max_position_embeddings, window: base.model.window, ..found.model };
            let is_short = |window: &usize| *window < SEQUENCE;
            let window = found.model.window.filter(is_short);
            let is_same = model == base.model && window.is_none();
            match outcome {
                b's' if is_same => {}
                // Some classes of a family slide all the same, so the window bounds sequences.
                b's' if model == base.model && case.contains_key("layer_types") => {}
                // A head that differs from the embedding that it is said to share is refused by the import.
                b's' => {
                    let error = imported(found.model, family).err();
                    let error = error.unwrap_or_else(|| panic!("{what}: transformers computes the same"));
                    assert!(error.contains("tie_word_embeddings"), "{what}: {error}");
                }
                b't' => {
                    let is_said = !found.notes.training.is_empty();
                    let is_known = case.keys().all(|key| OTHERWISE_TRAINED.contains(&key.as_str()));
                    assert!(is_same && (is_said || is_known), "{what}: transformers trains otherwise");
                }
                b'w' => {
                    assert_eq!(window, Some(8), "{what}");
                    assert_eq!(model, base.model, "{what}");
                }
                b'd' => assert!(!is_same, "{what}: transformers computes otherwise"),
                b'g' => panic!("{what}: transformers generates otherwise"),
                // transformers fails, or the tensors do not fit the sizes, which an import checks.
                b'f' => {}
                other => panic!("outcome {other}"),
            }
        }
    }
    assert!(seen.len() >= 5, "outcomes of all kinds: {seen:?}");
    let expected: BTreeSet<String> = REFUSED_ALL_THE_SAME.map(str::to_owned).into();
    assert_eq!(refused_all_the_same, expected, "keys that are refused though harmless");
}

#[test]
fn keys_that_are_applied_give_the_logits_of_transformers() {
    let table = Table::load();
    let mut applied = 0;
    for (name, family) in table.families() {
        let (file, folder) = (file(family), golden(family["folder"].as_str().expect("a folder")));
        let bytes = fs::read(folder.join("golden.safetensors")).expect("golden.safetensors");
        let ids = SafeTensors::deserialize(&bytes).expect("safetensors");
        let ids: Vec<u32> = bytemuck::pod_collect_to_vec(ids.tensor("input_ids").expect("tokens").data());
        for (number, case, outcome) in table.cases(family) {
            let Ok(found) = read(&changed(&file, case)) else { continue };
            if outcome != b'd' {
                continue;
            }
            let expected: Vec<f32> = family["logits"][number.to_string()]
                .as_array()
                .into_iter()
                .flatten()
                .map(|logit| logit.as_f64().expect("a number") as f32)
                .collect();
            assert!(expected.len() > 3, "{name}, case {number}");
            let mut weights = imported(found.model, family).expect("the folder imports");
            let mut generator = Generator::new(&mut weights, SEQUENCE).expect("a generator");
            let logits = generator.append(&mut weights, &ids[..SEQUENCE]).expect("logits");
            let error = relative(&logits[..expected.len()], &expected);
            assert!(error < 1e-5, "{name}, case {number}, {case:?}: {error:e}");
            applied += 1;
        }
    }
    assert!(applied > 100, "{applied}");
}

#[test]
fn every_key_of_transformers_is_known() {
    let table = Table::load();
    for (name, family) in table.families() {
        let mut file = file(family);
        for key in family["fields"].as_array().expect("fields").iter().filter_map(Value::as_str) {
            file.entry(key).or_insert(Value::Null);
        }
        // It is not false for null.
        file.insert("is_causal".into(), true.into());
        let found = read(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(found.notes.unknown, Vec::<String>::new(), "{name}");
    }
}
