//! Files of families with experts.

use super::Family;
use super::tests::config;
use crate::hf::HfConfig;
use serde_json::{Map, Value, json};

/// A config.json of a family with experts, with these keys changed.
fn mixture(family: Family, changes: Value) -> Result<HfConfig, String> {
    let mut json: Map<String, Value> = serde_json::from_str(&config(family)).expect("JSON");
    json.extend(changes.as_object().expect("keys").clone());
    HfConfig::parse(&Value::Object(json).to_string()).map_err(|error| error.to_string())
}

#[test]
fn the_number_of_experts_has_two_names_that_must_agree() {
    for (family, old, new) in [
        (Family::MIXTRAL, "num_local_experts", "num_experts"),
        (Family::QWEN3_MOE, "num_experts", "num_local_experts"),
        (Family::DOTS1, "n_routed_experts", "num_local_experts"),
    ] {
        for mut json in [json!({ old: 6 }), json!({ old: null, new: 6 }), json!({ old: 6, new: 6 })] {
            json["num_experts_per_tok"] = json!(2);
            let hf = mixture(family, json).expect("it is read");
            assert_eq!(hf.model.mixture.map(|mixture| mixture.count), Some(6));
            let written: Value = serde_json::from_str(&hf.to_json("float32")).expect("JSON");
            assert_eq!([&written[old], &written[new]], [&json!(6), &json!(6)]);
        }
        let error = mixture(family, json!({ old: 6, new: 8 })).expect_err("they differ");
        assert!(error.contains(old) && error.contains(new) && error.contains("make them equal"), "{error}");
    }
}

#[test]
fn blocks_without_experts_are_listed_or_counted() {
    let dense = |changes: Value| {
        let layers = json!({ "num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2 });
        let mut all = layers.as_object().expect("keys").clone();
        all.extend(changes.as_object().expect("keys").clone());
        let hf = mixture(Family::QWEN3_MOE, Value::Object(all)).expect("it is read");
        let model = hf.model.architecture().expect("a model");
        let again = HfConfig::parse(&hf.to_json("float32")).expect("reads back").model;
        assert_eq!(again, hf.model);
        let is_dense = |(_, layer): &(usize, &crate::Layer)| layer.feed_forward.dense().is_some();
        model.layers.iter().enumerate().filter(is_dense).map(|(block, _)| block).collect::<Vec<_>>()
    };
    assert!(dense(json!({})).is_empty());
    assert_eq!(dense(json!({ "mlp_only_layers": [0, 5] })), [0, 5]);
    assert_eq!(dense(json!({ "decoder_sparse_step": 2 })), [0, 2, 4]);
    assert_eq!(dense(json!({ "decoder_sparse_step": 3, "mlp_only_layers": [2, 9] })), [0, 1, 2, 3, 4]);
    let error = mixture(Family::QWEN3_MOE, json!({ "decoder_sparse_step": 0 })).expect_err("no step");
    assert!(error.contains("decoder_sparse_step"), "{error}");
}

#[test]
fn experts_that_do_not_fit_are_refused_by_name() {
    for (family, changes, says) in [
        (Family::MIXTRAL, json!({ "num_experts_per_tok": 9 }), "9"),
        (Family::MIXTRAL, json!({ "num_local_experts": 0 }), "experts is 0"),
        (Family::MIXTRAL, json!({ "router_jitter_noise": 0.1 }), "router_jitter_noise"),
        (Family::MIXTRAL, json!({ "sliding_window": 4096 }), "sliding_window"),
        (Family::QWEN3_MOE, json!({ "num_experts_per_tok": 0 }), "per_token is 0"),
        (Family::QWEN3_MOE, json!({ "moe_intermediate_size": 0 }), "ffn_dim is 0"),
        (Family::QWEN3_MOE, json!({ "num_experts": 2000 }), "1024"),
        (Family::QWEN3_MOE, json!({ "mlp_only_layers": ["one"] }), "mlp_only_layers"),
        (Family::DOTS1, json!({ "n_group": 3 }), "divide the number of experts (8)"),
        (Family::DOTS1, json!({ "n_group": 4, "topk_group": 5 }), "from 1 to 4 groups, not 5"),
        (Family::DOTS1, json!({ "n_shared_experts": 0 }), "there must be a shared expert"),
        (Family::DOTS1, json!({ "routed_scaling_factor": 0.0 }), "experts.scale"),
        (Family::DOTS1, json!({ "sliding_window": 64, "max_window_layers": 1 }), "from block 1 on"),
        (Family::DOTS1, json!({ "n_shared_experts": null }), "n_shared_experts"),
    ] {
        let error = mixture(family, changes.clone()).expect_err("it is refused");
        assert!(error.contains(says), "{changes}: {error}");
    }
}

#[test]
fn gates_are_normalised_only_where_the_file_says_so() {
    let normalises = |family, changes| {
        let model = mixture(family, changes).expect("it is read").model;
        model.mixture.map(|mixture| mixture.router.normalise)
    };
    assert_eq!(normalises(Family::MIXTRAL, json!({})), Some(true));
    assert_eq!(normalises(Family::QWEN3_MOE, json!({})), Some(false));
    assert_eq!(normalises(Family::QWEN3_MOE, json!({ "norm_topk_prob": true })), Some(true));
}

#[test]
fn published_mixtures_have_their_published_numbers_of_parameters() {
    let check = |family, changes: Value, published: [f64; 2]| {
        let model = mixture(family, changes).expect("it is read").model.architecture().expect("a model");
        let billions = [model.parameter_count(), model.active_parameter_count()].map(|n| n as f64 / 1e9);
        let is_near =
            billions.iter().zip(published).all(|(found, published)| (found - published).abs() < 0.1);
        assert!(is_near, "{billions:?}, not {published:?}");
    };
    // Mixtral 8x7B: 46.7 and 12.9 (arXiv 2401.04088). Qwen3-30B-A3B and 235B-A22B: their model cards.
    let mixtral = json!({
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    });
    check(Family::MIXTRAL, mixtral, [46.7, 12.9]);
    let qwen = |dim, layers, heads, width| {
        json!({
            "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151_936,
            "moe_intermediate_size": width, "num_experts": 128, "num_experts_per_tok": 8,
        })
    };
    check(Family::QWEN3_MOE, qwen(2048, 48, 32, 768), [30.5, 3.3]);
    check(Family::QWEN3_MOE, qwen(4096, 94, 64, 1536), [235.1, 22.2]);
}

#[test]
fn deepseek_v3_is_refused_for_its_attention() {
    let file = json!({ "model_type": "deepseek_v3", "hidden_size": 64 }).to_string();
    let error = HfConfig::parse(&file).expect_err("it is no family").to_string();
    assert!(error.contains("`deepseek_v3`") && error.contains("MLA") && error.contains("dots1"), "{error}");
}
