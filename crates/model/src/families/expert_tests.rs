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
        (
            Family::MIXTRAL,
            json!({ "num_local_experts": 0 }),
            "`num_local_experts` is 0; it must be at least 1",
        ),
        (Family::MIXTRAL, json!({ "num_hidden_layers": 1_u64 << 60 }), "(1024); check for a typo"),
        (Family::QWEN3_MOE, json!({ "num_hidden_layers": 1_u64 << 60 }), "(1024); check for a typo"),
        (
            Family::QWEN3_MOE,
            json!({ "mlp_only_layers": [0, 1] }),
            "all blocks are dense; leave one with experts",
        ),
        (
            Family::QWEN3_MOE,
            json!({ "decoder_sparse_step": 3 }),
            "all blocks are dense; leave one with experts",
        ),
        (
            Family::DOTS1,
            json!({ "first_k_dense_replace": 2 }),
            "all blocks are dense; leave one with experts",
        ),
        (
            Family::DOTS1,
            json!({ "first_k_dense_replace": 1_000_000_000_000_000_000_u64 }),
            "`first_k_dense_replace` is 1000000000000000000, but the model has 2 layers",
        ),
        (
            Family::DOTS1,
            json!({ "topk_method": "greedy" }),
            "`topk_method` = \"greedy\": only \"noaux_tc\" is supported",
        ),
        (Family::DOTS1, json!({ "moe_layer_freq": 2 }), "`moe_layer_freq` = 2: only 1 is supported"),
        (
            Family::DOTS1,
            json!({ "scoring_func": "softmax" }),
            "`scoring_func` = \"softmax\": only \"sigmoid\" is supported",
        ),
        (Family::MIXTRAL, json!({ "router_jitter_noise": "x" }), "router_jitter_noise"),
        (Family::MIXTRAL, json!({ "sliding_window": 0 }), "`sliding_window` is 0"),
        (
            Family::QWEN3_MOE,
            json!({ "num_experts_per_tok": 0 }),
            "`num_experts_per_tok` is 0; it must be at least 1",
        ),
        (
            Family::QWEN3_MOE,
            json!({ "moe_intermediate_size": 0 }),
            "`moe_intermediate_size` is 0; it must be from 1 to 16777216",
        ),
        (Family::QWEN3_MOE, json!({ "num_experts": 2000 }), "1024"),
        (Family::QWEN3_MOE, json!({ "mlp_only_layers": ["one"] }), "mlp_only_layers"),
        (Family::DOTS1, json!({ "n_group": 3 }), "divide the number of experts (8)"),
        (Family::DOTS1, json!({ "n_group": 4, "topk_group": 5 }), "from 1 to 4 groups, not 5"),
        (Family::DOTS1, json!({ "n_shared_experts": 0 }), "there must be a shared expert"),
        (Family::DOTS1, json!({ "routed_scaling_factor": 0.0 }), "`routed_scaling_factor` is 0.0"),
        (Family::DOTS1, json!({ "moe_intermediate_size": 0 }), "`moe_intermediate_size` is 0;"),
        (
            Family::DOTS1,
            json!({ "moe_intermediate_size": 1_u64 << 63 }),
            "`moe_intermediate_size` is 9223372036854775808;",
        ),
        (Family::DOTS1, json!({ "n_group": 8, "topk_group": 8 }), "a group must have at least 2 experts"),
        (
            Family::DOTS1,
            json!({ "n_routed_experts": 1, "num_experts_per_tok": 1 }),
            "a group must have at least 2 experts",
        ),
        (
            Family::QWEN3_MOE,
            json!({ "num_experts": 4, "num_experts_per_tok": null }),
            "`num_experts_per_tok` is missing, and its default is 8, but there are only 4 experts",
        ),
        (Family::DOTS1, json!({ "n_shared_experts": null }), "n_shared_experts"),
    ] {
        let error = mixture(family, changes.clone()).expect_err("it is refused");
        assert!(error.contains(says), "{changes}: {error}");
    }
}

#[test]
fn the_weight_of_the_balance_loss_is_a_number_in_the_range_of_run_files() {
    for family in [Family::MIXTRAL, Family::QWEN3_MOE, Family::DOTS1] {
        let read = |weight: Value| mixture(family, json!({ "router_aux_loss_coef": weight }));
        for (weight, found) in [(json!(null), None), (json!(0), Some(0.0)), (json!(100), Some(100.0))] {
            assert_eq!(read(weight).expect("it is read").balance_loss, found);
        }
        for wrong in [json!("0.01"), json!(-1), json!(1e39), json!(100.5), json!(1e-46)] {
            let error = read(wrong.clone()).expect_err("it is refused");
            let says =
                format!("`router_aux_loss_coef` is {wrong}; it must be 0 or a number from 1e-45 to 100");
            assert!(error.starts_with("config.json: ") && error.contains(&says), "{error}");
        }
    }
    // Families without experts do not read it.
    let dense = mixture(Family::QWEN3, json!({ "router_aux_loss_coef": "none" })).expect("it is read");
    assert_eq!(dense.balance_loss, None);
}

#[test]
fn an_export_has_the_weight_of_its_own_balance_loss() {
    for family in [Family::MIXTRAL, Family::QWEN3_MOE] {
        let written = |source: Value, own: Option<f64>| {
            let hf = HfConfig { balance_loss: own, ..mixture(family, source).expect("it is read") };
            let json: Value = serde_json::from_str(&hf.to_json("float32")).expect("JSON");
            json["router_aux_loss_coef"].clone()
        };
        assert_eq!(written(json!({}), None), json!(0.001));
        assert_eq!(written(json!({}), Some(0.02)), json!(0.02));
        assert_eq!(written(json!({ "router_aux_loss_coef": 0.5 }), Some(0.02)), json!(0.02));
        assert_eq!(written(json!({ "router_aux_loss_coef": 0.5 }), None), json!(0.5));
        assert_eq!(written(json!({ "router_aux_loss_coef": 1 }), Some(1.0)), json!(1));
    }
}

#[test]
fn dots1_has_the_keys_of_deepseeks_routing_that_vllm_reads() {
    let keys = ["topk_method", "moe_layer_freq", "scoring_func"];
    let written = |changes: Value| {
        let hf = mixture(Family::DOTS1, changes).expect("it is read");
        let text = hf.to_json("float32");
        assert_eq!(HfConfig::parse(&text).expect("reads back").model, hf.model);
        let json: Value = serde_json::from_str(&text).expect("JSON");
        keys.map(|key| json[key].clone())
    };
    assert_eq!(written(json!({})), [json!("noaux_tc"), json!(1), json!("sigmoid")]);
    // As in the published folders, from which llama.cpp converts.
    assert_eq!(
        written(json!({ "scoring_func": "noaux_tc" })),
        [json!("noaux_tc"), json!(1), json!("noaux_tc")]
    );
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
