//! Every family, the example of docs/add-a-model.md among them.

use super::Family;
use super::settings::{Effect, Harmless, Setting};
use crate::hf::HfConfig;
use serde_json::{Map, Value, json};

/// A config.json of the family with every size given and no other key but those that it needs.
pub(super) fn config(family: Family) -> String {
    let mut json = json!({
        "model_type": family.name(), "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "sliding_window": null,
    });
    if family == Family::DOTS1 {
        json["n_routed_experts"] = json!(8);
        json["num_experts_per_tok"] = json!(2);
        json["n_shared_experts"] = json!(1);
    }
    json.to_string()
}

#[test]
fn every_family_reads_what_it_writes() {
    for &family in Family::ALL {
        let hf = HfConfig::parse(&config(family)).unwrap_or_else(|e| panic!("{family:?}: {e}"));
        let model = hf.model;
        assert_eq!(
            (model.family, model.qkv_bias, model.qk_norm),
            (family, family.qkv_bias(), family.qk_norm())
        );
        let written = hf.to_json("float32");
        assert_eq!(HfConfig::parse(&written).expect("reads back").model, model, "{family:?}");
        let json: Map<String, Value> = serde_json::from_str(&written).expect("JSON");
        assert_eq!(json["architectures"], json!([family.rules().class]));
    }
}

/// A value of the key that is not harmless.
fn harmful(harmless: Harmless) -> Value {
    match harmless {
        Harmless::False => json!(true),
        Harmless::True => json!(false),
        Harmless::Zero => json!(0.5),
        Harmless::Null | Harmless::Empty => json!({ "x": 1 }),
        Harmless::Words(_) => json!("x"),
    }
}

/// The family's file with another key.
fn with(family: Family, key: &str, value: &Value) -> Result<HfConfig, crate::ModelError> {
    HfConfig::parse(&config(family).replacen('{', &format!("{{{key:?}: {value}, "), 1))
}

#[test]
fn every_setting_of_a_family_is_refused_or_reported_by_name() {
    for &family in Family::ALL {
        for Setting { key, harmless, otherwise } in family.rules().all_settings() {
            let found = with(family, key, &harmful(*harmless));
            match otherwise {
                Effect::Refused(why) => {
                    let error = found.expect_err(key).to_string();
                    assert!(error.contains(key) && error.contains(why), "{family:?}: {error}");
                }
                Effect::Training(why) => {
                    let notes = found.expect(key).notes;
                    let [note] = &notes.training[..] else { panic!("{family:?} {key}: {notes:?}") };
                    assert!(note.contains(key) && note.contains(why), "{family:?}: {note}");
                }
            }
            assert!(!matches!(harmless, Harmless::True) || with(family, key, &Value::Null).is_err());
        }
    }
}

#[test]
fn keys_that_nothing_reads_are_listed() {
    for &family in Family::ALL {
        let found = with(family, "unheard_of", &json!(1)).expect("it parses");
        assert_eq!((found.notes.unknown, found.notes.training), (vec!["unheard_of".to_owned()], vec![]));
        let written = HfConfig::parse(&found_again(family)).expect("it parses");
        assert_eq!(written.notes, crate::hf::Notes::default(), "{family:?}");
    }
}

/// The family's file as an export writes it.
fn found_again(family: Family) -> String {
    HfConfig::parse(&config(family)).expect("it parses").to_json("float32")
}

#[test]
fn names_are_one_each_and_survive_files() {
    for &family in Family::ALL {
        assert_eq!(Family::named(family.name()), Some(family));
        let text = serde_json::to_string(&family).expect("JSON");
        assert_eq!(serde_json::from_str::<Family>(&text).expect("reads back"), family);
    }
    assert!(serde_json::from_str::<Family>("\"gpt2\"").is_err_and(|e| e.to_string().contains("qwen3")));
}
