//! Models on their way in and out.

use crate::place::{Place, finish};

/// The `dtype` that a folder's config.json says, and the size of its weights.
fn kind(place: &Place, folder: &str) -> (String, usize) {
    let config: serde_json::Value =
        serde_json::from_slice(&place.read(&format!("{folder}/config.json"))).expect("JSON");
    let dtype = [&config["dtype"], &config["torch_dtype"]].into_iter().find_map(|dtype| dtype.as_str());
    (dtype.expect("a dtype").to_owned(), place.read(&format!("{folder}/model.safetensors")).len())
}

#[test]
fn an_export_rounds_nothing_unasked() {
    let place = Place::new();
    place.train("exact", "--set train.steps=2");
    place.train("rounded", "--set train.steps=2 --set precision.recipe=bf16");
    for run in ["exact", "rounded"] {
        // As the run's own export; and again from that.
        place.run(&format!("export {run} --out {run}1")).succeeds();
        place.run(&format!("export {run}/hf --out {run}2")).succeeds();
        for out in [format!("{run}1"), format!("{run}2")] {
            assert_eq!(kind(&place, &out), kind(&place, &format!("{run}/hf")), "{out}");
        }
    }
    assert_eq!(kind(&place, "exact/hf").0, "float32");
    assert_eq!(kind(&place, "rounded/hf").0, "bfloat16");
    // What is asked for is done.
    place.run("export exact --out asked --dtype bf16").succeeds();
    assert_eq!(kind(&place, "asked"), kind(&place, "rounded/hf"));
}

#[test]
fn a_model_that_is_not_there_is_told_from_one_that_is_to_be_downloaded() {
    let place = Place::new();
    let download = "hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B";
    for command in [
        "generate Qwen/Qwen3-0.6B --prompt the",
        "eval Qwen/Qwen3-0.6B --data a.txt",
        "export Qwen/Qwen3-0.6B --out hf",
        "train continued.toml --set model.init_from=Qwen/Qwen3-0.6B",
        "plan continued.toml --set model.init_from=Qwen/Qwen3-0.6B",
    ] {
        place.run(command).refuses(&["no folder Qwen/Qwen3-0.6B", download]);
    }
    let line =
        place.run("generate ./missing --prompt the").refuses(&["no folder ./missing", "check the path"]);
    assert!(!line.contains("download"), "{line}");
    // One that lies beside what is there is a slip.
    place.train("runs/quickstart", "--set train.steps=2");
    for (written, meant) in [("runs/quikstart", "runs/quickstart"), ("run", "runs")] {
        let line = place
            .run(&format!("generate {written} --prompt the"))
            .refuses(&[&format!("no folder {written}; did you mean {meant}?")]);
        assert!(!line.contains("download"), "{line}");
    }
}

#[test]
fn a_size_is_given_with_its_unit() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    place.run("export out --out parts --max-shard-size 20KB").succeeds();
    let parts: Vec<String> =
        place.names("parts").into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    assert!(parts.len() > 1, "{parts:?}");
    // One tensor may be larger than a part; headers come on top.
    assert!(parts.iter().all(|name| place.read(&format!("parts/{name}")).len() < 24_000), "{parts:?}");
    for wrong in ["0", "many", "5 apples"] {
        let mut command = place.command("export out --out wrong --max-shard-size");
        command.arg(wrong);
        let ran = finish(command, wrong);
        assert_eq!(ran.code(), Some(2), "{wrong}");
        assert!(
            ran.stderr.contains("--max-shard-size") && ran.stderr.contains("500MB, 5GB or 4GiB"),
            "{}",
            ran.stderr
        );
    }
}
