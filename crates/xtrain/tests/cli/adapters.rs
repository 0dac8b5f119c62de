//! Runs that train adapters of a folder: killed and resumed, planned, exported for PEFT, used, and what is
//! refused.

use crate::place::{Place, assert_same_file};
use crate::resume::{recorded, survives_kills_in};
use serde_json::Value;
use std::collections::BTreeMap;

/// Adapters of the folder `base/hf`.
const ADAPTED: &str = "--set model.init_from=base/hf --set adapter.rank=4 --set schedule.kind=constant";

/// A place with a model to tune, `base/hf`.
fn with_base() -> Place {
    let place = Place::new();
    place.train("base", "--set train.steps=9 --set eval.every=0 --set model.max_position_embeddings=64");
    place
}

/// Trains adapters into `out`.
fn adapt(place: &Place, out: &str, more: &str) {
    place.run(&format!("train continued.toml --out {out} {ADAPTED} {more}")).succeeds();
}

/// The header of a safetensors file: name, type and shape of each tensor.
fn tensors(bytes: &[u8]) -> BTreeMap<String, (String, Vec<u64>)> {
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
    let header = header.as_object().expect("an object").iter().filter(|(name, _)| *name != "__metadata__");
    let of = |tensor: &Value| {
        let shape = tensor["shape"].as_array().expect("a shape").iter();
        let shape = shape.map(|size| size.as_u64().expect("a size")).collect();
        (tensor["dtype"].as_str().expect("a type").to_owned(), shape)
    };
    header.map(|(name, tensor)| (name.clone(), of(tensor))).collect()
}

#[test]
fn killed_runs_with_adapters_end_like_one_in_peace() {
    let sets = format!(
        "{ADAPTED} --set adapter.dropout=0.1 --set precision.recipe=bf16 --set train.micro_batch_size=2 --set train.recompute=block"
    );
    survives_kills_in(&with_base(), "continued.toml", "adapters", &sets);
}

/// One process, two that each have rows of what is trained, and one again.
#[test]
fn in_any_world_not_a_bit_depends_on_the_ranks_that_go_on() {
    let place = with_base();
    let sets = "--set parallel.reduce=any-world --set train.micro_batch_size=1 --set adapter.dropout=0.1 --set checkpoint.every=0 --set \
                eval.at_end=false";
    adapt(&place, "whole", &format!("{sets} --set train.steps=12"));
    for (n, shard) in ["none", "optimizer", "gradients", "none"].into_iter().enumerate() {
        let (steps, ranks) = (3 * n + 3, if shard == "none" { 1 } else { 2 });
        let resume = if n == 0 { "" } else { "--resume" };
        let mesh = format!("--ranks {ranks} --set parallel.shard={shard}");
        adapt(&place, "parts", &format!("{sets} --set train.steps={steps} {mesh} {resume}"));
    }
    let file = "hf/adapter_model.safetensors";
    assert_same_file(&place.path(&format!("whole/{file}")), &place.path(&format!("parts/{file}")));
    assert_eq!(recorded(&place, "parts"), recorded(&place, "whole"));
}

#[test]
fn a_base_that_has_changed_is_refused() {
    let place = with_base();
    place.train("other", "--set train.steps=10 --set eval.every=0 --set model.max_position_embeddings=64");
    place.copy("base/hf", "folder");
    let sets = format!("{ADAPTED} --set model.init_from=folder --set eval.every=0");
    let train = |steps: usize, more: &str| {
        place.run(&format!("train continued.toml --out out {sets} --set train.steps={steps} {more}"))
    };
    train(6, "").succeeds();
    // Another model of the same sizes.
    place.copy("folder", "kept");
    place.write("folder/model.safetensors", &place.read("other/hf/model.safetensors"));
    let before = place.contents("out");
    for ran in [train(9, "--resume"), place.run("eval out"), place.run("generate out --prompt the")] {
        ran.refuses(&["folder has changed since the adapters of this run were trained on it", "hash "]);
    }
    assert_eq!(place.contents("out"), before);
    // The folder that is named may be another one with the same model.
    train(9, "--resume --set model.init_from=kept").succeeds();
    std::fs::remove_dir_all(place.path("kept")).expect("removes");
    for ran in [train(12, "--resume --set model.init_from=kept"), place.run("eval out")] {
        ran.refuses(&["kept"]);
    }
}

/// The base of this run is in fp32, and held in bf16 by the second part.
#[test]
fn the_hash_of_a_base_does_not_depend_on_the_type_in_which_it_is_held() {
    let place = with_base();
    adapt(&place, "out", "--set train.steps=6");
    adapt(&place, "out", "--resume --set train.steps=9 --set precision.recipe=bf16");
    let position = |step: usize| -> Value {
        serde_json::from_slice(&place.read(&format!("out/checkpoints/step-{step}/position.json")))
            .expect("JSON")
    };
    assert!(position(6)["base"].is_string());
    assert_eq!(position(6)["base"], position(9)["base"]);
}

#[test]
fn the_export_is_a_folder_of_pefts() {
    let place = with_base();
    adapt(&place, "all", "--set train.steps=3 --set adapter.dropout=0.05");
    let names = place.names("all/hf");
    assert_eq!(
        names,
        ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    );
    let json: Value = serde_json::from_slice(&place.read("all/hf/adapter_config.json")).expect("JSON");
    for (key, value) in [
        ("peft_type", Value::from("LORA")),
        ("task_type", "CAUSAL_LM".into()),
        ("base_model_name_or_path", "base/hf".into()),
        ("r", 4.into()),
        ("lora_alpha", 8.0.into()),
        ("lora_dropout", 0.05.into()),
        ("bias", "none".into()),
        ("use_dora", false.into()),
        ("use_rslora", false.into()),
        ("modules_to_save", Value::Null),
        (
            "target_modules",
            Value::from(vec!["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ),
    ] {
        assert_eq!(json[key], value, "{key}");
    }
    // dim 16, two heads and one key/value head of 8, and the feed-forward of the base.
    let base = tensors(&place.read("base/hf/model.safetensors"));
    let found = tensors(&place.read("all/hf/adapter_model.safetensors"));
    let mut expected = BTreeMap::new();
    for (name, (_, shape)) in base {
        let Some(module) = name.strip_suffix(".weight").filter(|name| name.ends_with("_proj")) else {
            continue;
        };
        for (matrix, shape) in [("lora_A", vec![4, shape[1]]), ("lora_B", vec![shape[0], 4])] {
            expected.insert(format!("base_model.model.{module}.{matrix}.weight"), ("F32".to_owned(), shape));
        }
    }
    assert_eq!(expected.len(), 2 * 2 * 7);
    assert_eq!(found, expected);
    // Some matrices, by ends of names.
    adapt(&place, "some", "--set train.steps=3 --set adapter.targets=['q_proj','layers.1.mlp.up_proj']");
    let found = tensors(&place.read("some/hf/adapter_model.safetensors"));
    let modules = ["0.self_attn.q_proj", "1.mlp.up_proj", "1.self_attn.q_proj"];
    let names = modules.map(|module| {
        ["lora_A", "lora_B"].map(|matrix| format!("base_model.model.model.layers.{module}.{matrix}.weight"))
    });
    assert_eq!(found.into_keys().collect::<Vec<_>>(), names.concat());
    // Again from the checkpoint; no other type.
    place.run("export some --out again").succeeds();
    assert_eq!(place.contents("again").len(), place.contents("some/hf").len());
    let file = "adapter_model.safetensors";
    assert_same_file(&place.path(&format!("some/hf/{file}")), &place.path(&format!("again/{file}")));
    place.run("export some --out other --dtype bf16").refuses(&["adapters are exported in fp32", "--dtype"]);
}

#[test]
fn other_commands_take_a_run_with_adapters() {
    let place = with_base();
    let said =
        place.run(&format!("train continued.toml --out out {ADAPTED} --set train.steps=21")).succeeds();
    assert!(said.stdout.contains(", adapters of rank 4; "), "{}", said.stdout);
    let loss = |ran: &str| -> f64 {
        let json: Value = serde_json::from_str(&place.run(ran).succeeds().stdout).expect("JSON");
        json["loss"].as_f64().unwrap_or_else(|| panic!("{json}"))
    };
    let last = place.records("out", "eval").last().expect("evaluations")["loss"].as_f64().expect("a loss");
    let found = loss("eval out --json");
    assert!((found / last - 1.0).abs() < 1e-6, "{found} and {last}");
    assert!((found - loss("eval base --json")).abs() > 1e-3, "adapters change the loss");
    let text = place.run("generate out --prompt the --max-tokens 8").succeeds().stdout;
    assert!(!text.is_empty());
    // The folder alone is no model.
    place
        .run("generate out/hf --prompt the")
        .refuses(&["is a LoRA adapter of the model 'base/hf', not a model"]);
    place
        .run("train continued.toml --out full --set model.init_from=out/hf")
        .refuses(&["is a LoRA adapter of the model 'base/hf', not a model"]);
}

/// The GEMMs of the frozen layers that the run computes: no wgrad, and no dgrad of the first layer.
#[test]
fn inspect_and_blame_compute_the_step_of_a_run_with_adapters() {
    let place = Place::new();
    let sizes = "--set data.seq_len=32 --set model.ffn_dim=32";
    place.train("base", &format!("{sizes} --set train.steps=9 --set eval.every=0"));
    let fp8 = "--set precision.recipe=fp8-current --set precision.skip_slower=[]";
    adapt(&place, "out", &format!("{sizes} {fp8} --set train.steps=6"));
    let json =
        |ran: &str| -> Value { serde_json::from_str(&place.run(ran).succeeds().stdout).expect("JSON") };
    let found = json("inspect out --step 3 --json");
    let next = &place.records("out", "step")[3];
    let loss = |of: &Value| of["loss"].as_f64().expect("a loss");
    assert!((loss(&found) / loss(next) - 1.0).abs() < 1e-6, "{found}: {next}");
    let tensors = found["tensors"].as_array().expect("a list");
    let names: Vec<&str> = tensors.iter().map(|t| t["name"].as_str().expect("a name")).collect();
    // Two blocks, four layers, two GEMMs of two operands.
    assert_eq!(names.len(), 2 * 4 * 4 - 2, "{names:?}");
    assert!(names.iter().all(|name| !name.contains("lora") && !name.contains("wgrad")), "{names:?}");
    let found = json("blame out --json");
    assert_eq!(found["groups"].as_array().map(Vec::len), Some(4 * 2), "{found}");
    let error = found["all"]["gradient_error"].as_f64().expect("an error");
    assert!((1e-3..0.3).contains(&error), "{found}");
}

#[test]
fn a_plan_shows_frozen_weights_and_no_gradients_of_them() {
    let place = with_base();
    let plan = |sets: &str| place.run(&format!("plan continued.toml {sets}")).succeeds().stdout;
    let text = plan(&format!("{ADAPTED} --set precision.recipe=bf16"));
    let bytes = |text: &str, name: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.get(44..62)?.trim().replace(',', "").parse().ok()
    };
    // In bf16 but for the norms, of 16 numbers each or of a head's 8.
    let base = tensors(&place.read("base/hf/model.safetensors"));
    let numbers = |shapes: &dyn Fn(&[u64]) -> u64| base.values().map(|(_, shape)| shapes(shape)).sum::<u64>();
    let matrices = numbers(&|shape| if shape.len() == 2 { shape.iter().product() } else { 0 });
    let norms = numbers(&|shape| if shape.len() == 1 { shape[0] } else { 0 });
    assert_eq!(bytes(&text, "frozen weights"), Some(2 * matrices + 4 * norms), "{text}");
    let trained: u64 =
        numbers(&|shape| if shape.len() == 2 { 4 * (shape[0] + shape[1]) } else { 0 }) - 2 * 4 * (257 + 16);
    let parameters = text.lines().find(|line| line.starts_with("parameters ")).expect("parameters");
    assert!(
        parameters.ends_with("(4,112 in the embedding), frozen; 2,816 of adapters are trained"),
        "{text}"
    );
    assert_eq!(trained, 2816);
    for name in ["masters", "gradients", "first moments", "second moments"] {
        assert_eq!(bytes(&text, name), Some(4 * trained), "{name}: {text}");
    }
    assert!(bytes(&plan(""), "frozen weights").is_none());
    let dump = plan(&format!("{ADAPTED} --dump"));
    let gradients: Vec<&str> = dump.lines().filter(|line| line.ends_with(" wgrad")).collect();
    assert_eq!(gradients.len(), 2 * 2 * 4, "A and B of four layers in two blocks: {dump}");
    for line in gradients {
        assert!(line.contains(".lora_a wgrad") || line.contains(".lora_b wgrad"), "{line}");
    }
    assert!(dump.contains("= frozen blocks.0.attn."), "{dump}");
}

#[test]
fn what_adapters_cannot_do_is_refused_in_one_line() {
    let place = with_base();
    for (sets, words) in [
        ("--set adapter.targets=['qkv']", &["names \"qkv\"", "it has q_proj, k_proj"][..]),
        ("--set adapter.rank=17", &["`rank` = 17", "the narrowest layer with an adapter, 16"]),
        ("--set optimizer.kind=muon", &["muon", "not supported with adapters", "\"adamw\""]),
        ("--ranks 2 --set parallel.tensor=2", &["`tensor` = 2", "not supported with adapters yet"]),
        ("--ranks 2 --set parallel.pipeline=2", &["`pipeline` = 2", "not supported with adapters yet"]),
        ("--set checkpoint.export_dtype=bf16", &["`export_dtype`", "adapters are exported in fp32"]),
        ("--set model.init_from=", &["none is named", "`init_from` in [model]"]),
        (
            "--ranks 64 --set parallel.shard=optimizer --set train.batch_size=64 --set adapter.targets=['o_proj']",
            &["64 ranks", "o_proj.lora_b has the most"],
        ),
    ] {
        place.run(&format!("plan continued.toml {ADAPTED} {sets}")).refuses(words);
    }
    // Tokens that the model does not have.
    let row = |n: usize| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "where {n}"}}, {{"role": "assistant", "content": "sea"}}]}}"#
        )
    };
    let rows: Vec<String> = (0..40).map(row).collect();
    place.write("chats.jsonl", rows.join("\n").as_bytes());
    let chat = "--set data.train=chats.jsonl --set data.chat_template=chatml --set data.seq_len=64";
    place
        .run(&format!("train continued.toml --out chat {ADAPTED} {chat}"))
        .refuses(&["the vocabulary grows", "adapters do not train new tokens yet"]);
}

#[test]
fn a_run_goes_on_with_the_adapters_that_it_has() {
    let place = with_base();
    adapt(&place, "out", "--set train.steps=6");
    place.run("train continued.toml --out full --set model.init_from=base/hf --set train.steps=6").succeeds();
    let before = place.contents("out");
    let resume = |sets: &str| place.run(&format!("train continued.toml {sets} --resume --set train.steps=9"));
    for (sets, change) in [
        (
            format!("--out out {ADAPTED} --set adapter.rank=2"),
            "adapter.rank: 4 -> 2, adapter.alpha: 8.0 -> 4.0",
        ),
        (format!("--out out {ADAPTED} --set adapter.alpha=3"), "adapter.alpha: 8.0 -> 3.0"),
        (
            format!("--out out {ADAPTED} --set adapter.targets=['q_proj']"),
            "adapter.targets: \"all-linear\" -> [\"q_proj\"]",
        ),
        ("--out out --set model.init_from=base/hf".to_owned(), "adapter.rank: 4 -> not set"),
        (format!("--out full {ADAPTED}"), "adapter.rank: not set -> 4"),
    ] {
        resume(&sets).refuses(&["the checkpoint has other adapters (", change, "begin a new run"]);
    }
    assert_eq!(place.contents("out"), before);
    // The share of inputs that is dropped may change.
    resume(&format!("--out out {ADAPTED} --set adapter.dropout=0.2")).succeeds();
}
