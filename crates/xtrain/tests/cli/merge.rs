//! Adapters from outside: added to a model, merged, exported, trained further, refused.

use crate::place::{Place, assert_same_file};
use serde_json::Value;

const ADAPTERS: &str = "--set adapter.rank=2 --set model.init_from=base/hf --set model.dim= --set model.layers= --set model.heads= \
                        --set model.kv_heads= --set train.steps=6 --set optimizer.lr=3e-2";

/// A run `base` of a whole model, and one `lora` of adapters of that.
fn place() -> Place {
    let place = Place::new();
    place.train("base", "--set train.steps=6");
    place.run(&format!("train continued.toml --out lora {ADAPTERS}")).succeeds();
    place
}

fn loss(place: &Place, model: &str) -> f64 {
    let ran = place.run(&format!("eval {model} --data b.txt --seq-len 16 --json")).succeeds();
    let json: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    json["loss"].as_f64().expect("a loss")
}

#[test]
fn a_run_its_folder_and_the_merged_model_are_one_model() {
    let place = place();
    place.run("merge lora --out merged").succeeds();
    let expected = loss(&place, "lora");
    assert!((expected / loss(&place, "base") - 1.0).abs() > 1e-3, "the adapters were trained");
    for model in ["merged", "base/hf --adapter lora/hf"] {
        let found = loss(&place, model);
        assert!((found / expected - 1.0).abs() < 1e-5, "{model}: {found} instead of {expected}");
    }
    let text = |model: &str| place.run(&format!("generate {model} --prompt the -n 8 -t 0")).succeeds().stdout;
    assert_eq!(text("lora"), text("base/hf --adapter lora/hf"));
    // The description names the base, also for a folder of adapters.
    place.run("merge lora/hf --out again").succeeds();
    place.run("merge lora --base base/hf --best --out best").succeeds();
    place.run("export base/hf --adapter lora/hf --out copy").succeeds();
    for (one, other) in [
        ("merged/model.safetensors", "again/model.safetensors"),
        ("merged/tokenizer.json", "base/hf/tokenizer.json"),
        ("lora/hf/adapter_model.safetensors", "copy/adapter_model.safetensors"),
    ] {
        assert_same_file(&place.path(one), &place.path(other));
    }
    let names = |folder: &str| place.names(folder);
    assert_eq!(names("merged"), names("base/hf"));
    assert_eq!(names("again"), names("base/hf"));
    place.run("merge lora --dtype bf16 --max-shard-size 5KB --out parts").succeeds();
    assert!(names("parts").iter().any(|name| name == "model.safetensors.index.json"));
}

#[test]
fn a_merge_that_cannot_be_right_is_refused() {
    let place = place();
    place.run("merge base --out new").refuses(&["no adapters to merge", "xtrain export"]);
    place.run("merge base/hf --out new").refuses(&["no adapter_config.json"]);
    place.run("merge lora --out base/hf").refuses(&["base/hf", "--overwrite"]);
    place.run("merge lora --step 99 --out new").refuses(&["99"]);
    place.run("merge lora/hf --best --out new").refuses(&["--best", "run folder"]);
    place.run("merge missing --out new").refuses(&["no folder missing"]);
    place.run("generate lora --prompt the --adapter lora/hf").refuses(&["lora/hf", "is a run"]);
    place.run("generate base/hf --prompt the --adapter lora").refuses(&["adapter_config.json", "lora/hf"]);
    place.run("generate lora/hf --prompt the").refuses(&["xtrain merge", "--adapter"]);
    // Another model in the folder of the base: a bit of a weight.
    let weights = place.read("base/hf/model.safetensors");
    let mut other = weights.clone();
    let last = other.len() - 3;
    other[last] ^= 1;
    place.write("base/hf/model.safetensors", &other);
    for command in ["merge lora --out new", "generate lora --prompt the"] {
        place.run(command).refuses(&["base/hf has changed"]);
    }
    place.copy("base/hf", "moved");
    place.write("moved/model.safetensors", &weights);
    place.run("merge lora --base moved --out new").succeeds();
    // Without a base.
    let config = String::from_utf8(place.read("lora/hf/adapter_config.json")).expect("text");
    place.write("lora/hf/adapter_config.json", config.replace("base/hf", "owner/model").as_bytes());
    place.run("merge lora/hf --out other").refuses(&["--base", "owner/model"]);
    assert!(!place.exists("other"));
}

/// The base has another type than the run computes in, and its hash is that of the folder.
#[test]
fn the_base_of_a_run_is_known_in_every_precision() {
    let place = Place::new();
    place.train("base", "--set train.steps=3");
    place.run(&format!("train continued.toml --out lora {ADAPTERS} --set precision.recipe=bf16")).succeeds();
    place.run("generate lora --prompt the -n 2 --precision fp32").succeeds();
    place.run("merge lora --out merged").succeeds();
    let config = String::from_utf8(place.read("merged/config.json")).expect("text");
    assert!(config.contains("float32"), "{config}");
}

#[test]
fn a_run_begins_with_the_adapters_of_a_folder() {
    let place = place();
    let from = ADAPTERS.replace("--set adapter.rank=2", "--set adapter.init_from=lora/hf");
    // With so small a learning rate nothing changes.
    place.run(&format!("train continued.toml --out same {from} --set optimizer.lr=1e-44")).succeeds();
    let file = "hf/adapter_model.safetensors";
    assert_same_file(&place.path(&format!("same/{file}")), &place.path(&format!("lora/{file}")));
    let train = |more: &str| place.run(&format!("train continued.toml --out further {from} {more}"));
    for (set, words) in [
        ("adapter.rank=3", ["`rank` is 3, but 2"]),
        ("adapter.alpha=3", ["`alpha` is 3.0, but 4.0"]),
        ("adapter.targets=['q_proj']", ["`targets`"]),
        ("adapter.init_from=nowhere", ["no folder nowhere"]),
    ] {
        train(&format!("--set {set}")).refuses(&words);
        assert!(!place.exists("further"));
    }
    // What agrees may be given, and the folder may be gone when the run is resumed.
    train("--set adapter.rank=2 --set adapter.dropout=0.1 --set train.steps=3").succeeds();
    place.run(&format!("plan continued.toml {from}")).succeeds();
    place.copy("lora", "kept");
    std::fs::remove_dir_all(place.path("lora")).expect("removed");
    train("--resume --set adapter.dropout=0.1").succeeds();
    train("--resume --set adapter.alpha=8 --set train.steps=9").refuses(&["`alpha` is 8.0, but 4.0"]);
    let whole = format!("train continued.toml --out kept {ADAPTERS} --resume --set train.steps=9");
    place.run(&format!("{whole} --set adapter.alpha=8")).refuses(&["adapter.alpha: 4.0 -> 8.0"]);
    place.run("train run.toml --out x --set adapter.init_from=kept/hf").refuses(&["init_from", "[model]"]);
}
