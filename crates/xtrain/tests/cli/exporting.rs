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
    // Requests are followed.
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
    // A similar name of an existing folder is a typo.
    place.train("runs/quickstart", "--set train.steps=2");
    for (written, meant) in [("runs/quikstart", "runs/quickstart"), ("run", "runs")] {
        let line = place
            .run(&format!("generate {written} --prompt the"))
            .refuses(&[&format!("no folder {written}; did you mean {meant}?")]);
        assert!(!line.contains("download"), "{line}");
    }
}

#[test]
fn a_warning_about_the_files_of_a_folder_is_printed_once() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    place.write("out/hf/model.safetensors.index.json", b"{}");
    for command in [
        "train continued.toml --out new --set train.steps=3 --set model.init_from=out/hf",
        "generate out/hf --prompt the -n 1",
        "eval out/hf --data b.txt --seq-len 16",
        "export out/hf --out again",
    ] {
        let ran = place.run(command).succeeds();
        let said = format!("{}{}", ran.stdout, ran.stderr);
        assert_eq!(said.matches("and ignoring model.safetensors.index.json").count(), 1, "{command}: {said}");
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
            ran.stderr.contains("--max-shard-size") && ran.stderr.contains("500MB, 5GB or 1.5GiB"),
            "{}",
            ran.stderr
        );
    }
}

/// Sizes of which every linear layer is of whole blocks.
const BLOCKS: &str = "--set train.steps=2 --set model.dim=128 --set model.heads=1 --set model.kv_heads=1 --set model.ffn_dim=128";

#[test]
fn an_fp8_folder_is_written_read_and_trained_on() {
    let place = Place::new();
    place.train(
        "run",
        &format!("{BLOCKS} --set precision.recipe=fp8-block --set precision.skip_slower=[] --set checkpoint.export_dtype=fp8"),
    );
    place.run("export run --out fp8 --dtype fp8").succeeds();
    place.run("export run --out fp32 --dtype fp32").succeeds();
    let of = |folder: &str| (place.read(&format!("{folder}/model.safetensors")), kind(&place, folder));
    assert!(of("fp8") == of("run/hf"), "the run's own export is the same");
    let (small, large) = (kind(&place, "fp8"), kind(&place, "fp32"));
    assert_eq!(small.0, "bfloat16");
    assert!(small.1 * 2 < large.1, "{small:?} {large:?}");
    // By default, an export has the format of the import; bf16 loses nothing either.
    place.run("export fp8 --out again").succeeds();
    assert!(of("again") == of("fp8"));
    place.run("export fp8 --out bf16 --dtype bf16").succeeds();
    let config = String::from_utf8(place.read("bf16/config.json")).expect("text");
    assert!(!config.contains("quantization_config"), "{config}");
    let eval = |folder: &str| place.run(&format!("eval {folder} --data b.txt --json")).succeeds().stdout;
    assert_eq!(eval("fp8"), eval("bf16"));
    assert_ne!(eval("fp8"), eval("fp32"));
    // The masters of a run that begins with it are what its numbers stand for.
    let sizes = "--set model.dim= --set model.layers= --set model.heads= --set model.kv_heads=";
    place
        .run(&format!(
            "train continued.toml --out continued --set model.init_from=fp8 {sizes} --set train.steps=2 --set optimizer.lr=1e-44"
        ))
        .succeeds();
    assert_eq!(eval("continued/hf"), eval("fp8"));
    place.run("generate fp8 --prompt the --max-tokens 3 --precision fp8-block").succeeds();
}

#[test]
fn fp8_without_a_layer_for_it_is_refused_before_anything_is_done() {
    let place = Place::new();
    let why = ["none of the linear layers", "not multiples of 128", "use \"bf16\""];
    place.run("train run.toml --out out --set checkpoint.export_dtype=fp8").refuses(&why);
    assert!(!place.exists("out"));
    place.train("out", "--set train.steps=2");
    place.run("export out --out fp8 --dtype fp8").refuses(&why);
    assert!(!place.exists("fp8"));
}

#[test]
fn an_fp8_export_names_the_layer_that_keeps_others_from_fp8_and_its_size() {
    let place = Place::new();
    let narrow = "--set train.steps=2 --set model.dim=128 --set model.heads=2 --set model.kv_heads=1 --set model.ffn_dim=128";
    place.train("out", narrow);
    let said = place.run("export out --out fp8 --dtype fp8").succeeds().stderr;
    let named = "2 of 8 linear layers are exported as bf16: 2 with sizes that are not multiples of 128 \
                 (model.layers.0.self_attn.k_proj.weight is 64 x 128; parts of one fused layer share one type)";
    assert!(said.contains(named), "{said}");
}

#[test]
fn an_fp8_folder_that_is_damaged_is_refused_in_one_line() {
    let place = Place::new();
    place.train("run", BLOCKS);
    place.run("export run --out fp8 --dtype fp8").succeeds();
    let config = String::from_utf8(place.read("fp8/config.json")).expect("text");
    for (from, to, named) in [
        ("\"fp8\"", "\"awq\"", "quantization_config.quant_method"),
        ("\"e4m3\"", "\"e5m2\"", "quantization_config.fmt"),
        ("\"weight_block_size\"", "\"other\"", "quantization_config.weight_block_size"),
    ] {
        assert!(config.contains(from), "{config}");
        place.write("fp8/config.json", config.replace(from, to).as_bytes());
        for command in [
            "generate fp8 --prompt the",
            "eval fp8 --data a.txt",
            "train continued.toml --set model.init_from=fp8",
        ] {
            place.run(command).refuses(&["config.json", named]);
        }
    }
    place.write("fp8/config.json", config.as_bytes());
    let weights = place.read("fp8/model.safetensors");
    let name = b"mlp.down_proj.weight_scale_inv";
    let at = weights.windows(name.len()).position(|part| part == name).expect("scales");
    let mut other = weights.clone();
    other[at + name.len() - 1] = b'x';
    place.write("fp8/model.safetensors", &other);
    place.run("generate fp8 --prompt the").refuses(&[
        "F8_E4M3",
        "there is no",
        "mlp.down_proj.weight_scale_inv",
    ]);
}
