//! config.json, read and written.

use super::{CONTEXT, HfConfig};
use serde_json::{Map, Value, json};
use xtrain_ops::qk_norm_rope::RopeScaling;

fn llama(extra: &str) -> String {
    format!(
        r#"{{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100{extra}}}"#
    )
}

/// Llama 3's scaling with this factor (and what follows it) and original context.
fn scaled(factor: &str, context: &str) -> String {
    format!(r#", "rope_scaling": {{"rope_type": "llama3", "factor": {factor}, "{CONTEXT}": {context}}}"#)
}

#[test]
fn both_forms_of_rope_say_the_same() {
    let scaling = r#""factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192"#;
    let old =
        llama(&format!(r#", "rope_theta": 500000.0, "rope_scaling": {{"rope_type": "llama3", {scaling}}}"#));
    let new = llama(&format!(
        r#", "rope_parameters": {{"rope_type": "llama3", "rope_theta": 500000.0, {scaling}}}"#
    ));
    let (old, new) = (HfConfig::parse(&old).expect("old form"), HfConfig::parse(&new).expect("new form"));
    assert_eq!(old.model, new.model);
    assert_eq!(old.model.rope_theta, 500_000.0);
    assert!(matches!(old.model.rope_scaling, RopeScaling::Llama3 { .. }));
    let both = old.to_json("float32");
    assert!(both.contains("rope_scaling") && both.contains("rope_parameters"));
    assert_eq!(HfConfig::parse(&both).expect("both forms").model, old.model);
    let empty = llama(r#", "rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2}"#);
    let empty = HfConfig::parse(&empty).expect("an empty table says nothing");
    assert_eq!(empty.model.rope_scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn what_is_written_reads_back_equal_and_keeps_what_it_does_not_know() {
    let text =
        llama(r#", "rms_norm_eps": 1e-05, "head_dim": 24, "eos_token_id": [7, 9], "my_key": {"a": [1, 2]}"#);
    let first = HfConfig::parse(&text).expect("parses");
    let written = first.to_json("bfloat16");
    let second = HfConfig::parse(&written).expect("parses again");
    assert_eq!(first.model, second.model);
    assert_eq!(second.eos_token_ids, [7, 9]);
    assert_eq!(second.source["my_key"], json!({"a": [1, 2]}));
    assert_eq!(second.source["rms_norm_eps"], json!(1e-5));
    assert_eq!(second.source["rope_theta"], second.source["rope_parameters"]["rope_theta"]);
}

#[test]
fn every_key_that_was_there_is_there_again() {
    let text = llama(
        r#", "use_cache": false, "transformers_version": "4.46.0", "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2,
        "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0, "note": "kept"}, "torch_dtype": "float16""#,
    );
    let mut hf = HfConfig::parse(&text).expect("parses");
    hf.parse_generation(r#"{"temperature": 0.6, "do_sample": true, "eos_token_id": [7, 2]}"#)
        .expect("parses");
    // Tokenizers know of more ends than config.json names, and may begin otherwise.
    hf.bos_token_id = Some(6);
    hf.eos_token_ids = vec![2, 5, 7];
    let written: Map<String, Value> = serde_json::from_str(&hf.to_json("float32")).expect("JSON");
    for (key, value) in &hf.source {
        match key.as_str() {
            "torch_dtype" => assert_eq!(written[key], "float32"),
            _ => assert_eq!(&written[key], value, "{key}"),
        }
    }
    let generation: Value = serde_json::from_str(&hf.generation_json()).expect("JSON");
    assert_eq!(
        generation,
        json!({"temperature": 0.6, "do_sample": true, "eos_token_id": [7, 2, 5], "bos_token_id": 6})
    );
    let error = hf.parse_generation("[]").expect_err("no object").to_string();
    assert!(error.contains("generation_config.json"), "{error}");
}

#[test]
fn an_end_token_that_is_none_any_more_is_not_written_back() {
    let mut hf = HfConfig::parse(&llama(r#", "eos_token_id": [2, 9]"#)).expect("parses");
    hf.eos_token_ids = vec![9];
    assert_eq!(HfConfig::parse(&hf.to_json("float32")).expect("parses").eos_token_ids, [9]);
}

#[test]
fn the_window_that_is_off_is_as_in_the_source_and_else_named_where_engines_insist_on_it() {
    for (given, window) in [
        ("", json!(32768)),
        (r#", "sliding_window": null"#, Value::Null),
        (r#", "sliding_window": 64"#, json!(64)),
    ] {
        let text = llama("")
            .replace("llama", "qwen2")
            .replace("}", &format!(r#", "num_key_value_heads": 2{given}}}"#));
        let written = HfConfig::parse(&text).expect("parses").to_json("float32");
        let written: Value = serde_json::from_str(&written).expect("JSON");
        assert_eq!(written["sliding_window"], window, "{given}");
        assert_eq!(written["max_window_layers"], 2);
        assert_eq!(written["use_sliding_window"], false);
    }
}

#[test]
fn a_window_is_reported_only_if_a_sequence_can_be_longer() {
    for (window, is_reported) in [(4, true), (2047, true), (2048, false), (4096, false)] {
        let keys = format!(r#", "max_position_embeddings": 2048, "sliding_window": {window}"#);
        let hf = HfConfig::parse(&llama(&keys)).expect("a config");
        assert_eq!(hf.model.window, Some(window));
        assert_eq!(hf.notes.training.iter().any(|note| note.contains("window")), is_reported, "{window}");
    }
}

#[test]
fn windows_are_read_where_a_layer_has_one_and_written_again() {
    let rows: [(&str, &str, Option<usize>); 22] = [
        ("llama", "", None),
        ("llama", r#""sliding_window": 8"#, Some(8)),
        ("mistral", "", Some(4096)),
        ("mistral", r#""sliding_window": null"#, None),
        ("mistral", r#""sliding_window": 8, "use_sliding_window": false"#, Some(8)),
        ("mixtral", "", None),
        ("mixtral", r#""sliding_window": 8, "max_window_layers": 2"#, Some(8)),
        ("qwen2", r#""sliding_window": 8"#, None),
        ("qwen2", r#""sliding_window": 8, "use_sliding_window": true"#, None),
        ("qwen2", r#""sliding_window": 8, "use_sliding_window": true, "max_window_layers": 2"#, None),
        ("qwen2", r#""sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1"#, Some(8)),
        ("qwen3", r#""use_sliding_window": true, "max_window_layers": 0"#, Some(4096)),
        ("qwen3", r#""sliding_window": null, "use_sliding_window": true, "max_window_layers": 0"#, None),
        (
            "qwen3",
            r#""sliding_window": 8, "use_sliding_window": true, "max_window_layers": 0, "layer_types": ["full_attention", "full_attention"]"#,
            None,
        ),
        (
            "qwen3",
            r#""sliding_window": 8, "use_sliding_window": true, "layer_types": ["full_attention", "sliding_attention"]"#,
            Some(8),
        ),
        ("qwen3_moe", r#""sliding_window": 8"#, None),
        ("qwen3_moe", r#""sliding_window": 8, "use_sliding_window": true, "max_window_layers": 2"#, Some(8)),
        ("qwen3_moe", r#""use_sliding_window": true"#, Some(4096)),
        ("dots1", r#""sliding_window": 8"#, None),
        ("dots1", r#""sliding_window": 8, "max_window_layers": 1, "use_sliding_window": false"#, Some(8)),
        ("dots1", r#""max_window_layers": 1"#, Some(4096)),
        ("dots1", r#""max_window_layers": 1, "sliding_window": null"#, None),
    ];
    for (family, keys, window) in rows {
        let experts = r#""num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1"#;
        let comma = if keys.is_empty() { "" } else { ", " };
        let text = llama(&format!(", {experts}{comma}{keys}")).replace("llama", family);
        let hf = HfConfig::parse(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(hf.model.window, window, "{family}: {keys}");
        let again = HfConfig::parse(&hf.to_json("float32")).expect("reads back");
        assert_eq!(again.model, hf.model, "{family}: {keys}");
    }
}

#[test]
fn a_context_that_llama3_lacks_is_that_of_the_model() {
    let table = r#", "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}"#;
    let context = |extra: &str| {
        let hf = HfConfig::parse(&llama(&format!("{table}{extra}"))).expect("parses");
        let again = HfConfig::parse(&hf.to_json("float32")).expect("reads back");
        assert_eq!(again.model, hf.model);
        let RopeScaling::Llama3 { original_max_position_embeddings, .. } = hf.model.rope_scaling else {
            panic!("{:?}", hf.model.rope_scaling)
        };
        original_max_position_embeddings
    };
    assert_eq!(context(""), 2048);
    assert_eq!(context(r#", "max_position_embeddings": 512"#), 512);
    assert_eq!(context(r#", "max_position_embeddings": 512, "original_max_position_embeddings": 64"#), 64);
}

#[test]
fn what_may_mean_other_results_or_another_training_is_reported() {
    let notes = |extra: &str| HfConfig::parse(&llama(extra)).expect(extra).notes;
    assert_eq!(
        notes(r#", "attention_dropout": 0.0, "pad_token_id": 0, "eos_token_id": 2"#),
        super::Notes::default()
    );
    for (extra, named) in [
        (r#", "attention_dropout": 0.1"#, "`attention_dropout` = 0.1"),
        (r#", "resid_pdrop": 0.1"#, "`resid_pdrop` = 0.1"),
        (r#", "hidden_dropout_prob": 1"#, "`hidden_dropout_prob` = 1"),
        (r#", "drop_path_rate": 0.1"#, "`drop_path_rate` = 0.1"),
        (r#", "pad_token_id": 2, "eos_token_id": [1, 2]"#, "`pad_token_id` = 2"),
    ] {
        let [note] = &notes(extra).training[..] else { panic!("{extra}") };
        assert!(note.contains(named), "{note}");
    }
    for (extra, named) in [
        (r#", "architectures": ["MistralForCausalLM"]"#, "MistralForCausalLM"),
        (r#", "auto_map": {"AutoModelForCausalLM": "modeling_x.X"}"#, "AutoModelForCausalLM"),
    ] {
        let [warning] = &notes(extra).warnings[..] else { panic!("{extra}") };
        assert!(warning.contains(named) && warning.contains("LlamaForCausalLM"), "{warning}");
    }
    assert!(
        notes(r#", "architectures": ["LLaMAForCausalLM"], "auto_map": {"AutoConfig": "x.X"}"#)
            .warnings
            .is_empty()
    );
    assert!(notes(r#", "architectures": ["LlamaModel"]"#).warnings.is_empty());
}

/// A `quantization_config` as DeepSeek-V3's, with one key otherwise.
fn quantized(other: &str) -> String {
    format!(
        r#", "quantization_config": {{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], {other}}}"#
    )
}

#[test]
fn what_is_said_of_quantized_weights_goes_with_them() {
    let mut hf = HfConfig::parse(&llama(&quantized(r#""scale_fmt": "ue8m0""#))).expect("blocks of FP8");
    let read = |text: &str| -> Map<String, Value> { serde_json::from_str(text).expect("JSON") };
    assert_eq!(read(&hf.to_json("float32")).get("quantization_config"), None);
    let modules = ["lm_head".to_owned(), "model.layers.0.mlp.down_proj".to_owned()];
    for _ in 0..2 {
        let written = hf.to_fp8_json(&modules);
        let json = read(&written);
        let said = json!({
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
            "modules_to_not_convert": modules,
        });
        assert_eq!((&json["quantization_config"], &json["dtype"]), (&said, &json!("bfloat16")));
        hf = HfConfig::parse(&written).expect("what is written is read");
    }
}

#[test]
fn what_would_change_the_result_is_refused_by_name() {
    for (extra, named) in [
        (r#", "hidden_act": "gelu""#, "hidden_act"),
        (r#", "attention_bias": true"#, "attention_bias"),
        (r#", "rope_scaling": {"type": "yarn", "factor": 4.0}"#, "yarn"),
        (r#", "rope_scaling": {"type": "linear"}"#, "factor"),
        (
            r#", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}"#,
            "partial_rotary_factor",
        ),
        (r#", "rope_parameters": {"full_attention": {"rope_theta": 1e4}}"#, "full_attention"),
        (r#", "rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}"#, "rope_theta"),
        (r#", "layer_types": ["full_attention", "sliding_attention"]"#, "no window"),
        (r#", "layer_types": ["full_attention"]"#, "`layer_types` has 1 layers"),
        (r#", "layer_types": ["full_attention", "chunked_attention"]"#, "chunked_attention"),
        (r#", "sliding_window": "8""#, "sliding_window"),
        (r#", "architectures": ["LlamaForSequenceClassification"]"#, "architectures"),
        (r#", "architectures": ["LlamaBidirectionalModel"]"#, "architectures"),
        (r#", "is_causal": null"#, "is_causal"),
        (r#", "text_config": {"hidden_size": 64}"#, "text_config"),
        (
            r#", "rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "linear", "factor": 2.0}"#,
            "rope_scaling",
        ),
        (&quantized(r#""expert_dtype": "fp4""#), "quantization_config.expert_dtype"),
        (r#", "num_key_value_heads": 3"#, "multiple of kv_heads"),
        (r#", "head_dim": 7"#, "even"),
        (r#", "num_key_value_heads": "4""#, "whole number"),
        (r#", "quantization_config": {}"#, "quantization_config.quant_method"),
        (r#", "quantization_config": "fp8""#, "quantization_config"),
        (&quantized(r#""quant_method": "compressed-tensors""#), "quantization_config.quant_method"),
        (&quantized(r#""weight_block_size": null"#), "quantization_config.weight_block_size"),
        (&quantized(r#""weight_block_size": [1, 128]"#), "quantization_config.weight_block_size` is [1,128]"),
        (&quantized(r#""weight_block_size": 128"#), "quantization_config.weight_block_size"),
        (&quantized(r#""fmt": "e5m2""#), "quantization_config.fmt"),
        (&quantized(r#""activation_scheme": "static""#), "quantization_config.activation_scheme"),
        (r#", "hidden_act": 5"#, "hidden_act"),
        (r#", "layer_types": "sliding_attention""#, "layer_types"),
        (r#", "rope_scaling": {"rope_type": 5, "factor": 4.0}"#, "rope_scaling.rope_type"),
        (r#", "rope_scaling": {"factor": 4.0}"#, "rope_scaling.factor"),
        (
            r#", "rope_scaling": {"rope_type": "default", "type": "linear", "factor": 4.0}"#,
            "rope_scaling.type",
        ),
        (r#", "rope_scaling": [1]"#, "rope_scaling"),
        (
            r#", "rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", "factor": 4.0}"#,
            "yarn",
        ),
        (
            r#", "rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}"#,
            "differently",
        ),
        (r#", "rope_parameters": {"rope_theta": 2.0}, "rope_scaling": {"rope_theta": 3.0}"#, "rope_theta"),
        (r#", "rope_scaling": {"type": "linear", "factor": 0}"#, "factor"),
        (r#", "rope_scaling": {"type": "linear", "factor": -2}"#, "factor"),
        (r#", "rope_scaling": {"type": "linear", "factor": 1e39}"#, "factor"),
        (&scaled("8.0, \"low_freq_factor\": 4.0, \"high_freq_factor\": 1.0", "8192"), "high_freq_factor"),
        (&scaled("8.0, \"low_freq_factor\": 0.0, \"high_freq_factor\": 1.0", "8192"), "low_freq_factor"),
        (&scaled("8.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0", "-5.5"), CONTEXT),
        (&scaled("8.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0", "0"), CONTEXT),
        (&scaled("0.5, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0", "8192"), "factor"),
        (r#", "rms_norm_eps": 0"#, "norm_eps"),
        (r#", "rope_theta": 1e39"#, "rope_theta"),
    ] {
        let error = HfConfig::parse(&llama(extra)).expect_err(extra).to_string();
        assert!(error.contains(named), "{error}");
    }
    let error = HfConfig::parse(r#"{"model_type": "gpt2"}"#).expect_err("gpt2").to_string();
    assert!(error.contains("gpt2") && error.contains("qwen3"), "{error}");
    assert!(HfConfig::parse("[1").is_err());
}

#[test]
fn key_value_heads_that_are_null_are_as_many_as_heads_and_absent_ones_what_transformers_takes() {
    let kv_heads = |family: &str, extra: &str| {
        let text = llama(extra).replace("llama", family).replace("heads\": 4", "heads\": 64");
        HfConfig::parse(&text).expect(&text).model.kv_heads
    };
    for (family, absent) in [("llama", 64), ("qwen2", 32), ("qwen3", 32)] {
        assert_eq!(kv_heads(family, r#", "head_dim": 2"#), absent, "{family}");
        assert_eq!(kv_heads(family, r#", "head_dim": 2, "num_key_value_heads": null"#), 64, "{family}");
    }
}
