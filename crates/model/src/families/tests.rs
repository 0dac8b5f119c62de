//! Every family, the example of CONTRIBUTING.md among them.

use super::Family;
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

#[test]
fn every_flag_that_a_family_refuses_is_named() {
    for &family in Family::ALL {
        for (key, why) in family.rules().refused {
            let text = config(family).replacen('{', &format!("{{{key:?}: true, "), 1);
            let error = HfConfig::parse(&text).expect_err(key).to_string();
            assert!(error.contains(key) && error.contains(why), "{family:?}: {error}");
        }
    }
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
