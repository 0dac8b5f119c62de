//! Checkpoints and Hugging Face folders that are damaged, incomplete or not supported.

use crate::fragments::assert_says;
use crate::place::{Place, finish};

/// A finished run at `out`, its export at `out/hf`, checkpoints of steps 3 and 6.
fn trained() -> Place {
    let place = Place::new();
    place.train("out", "--set train.steps=6");
    place
}

/// Training that begins with that export.
const CONTINUED: &str = "train continued.toml --out again --set model.init_from=out/hf";

const STATE: &str = "out/checkpoints/step-6/rank-00000-00001.safetensors";

#[test]
fn damaged_checkpoints_are_passed_over_or_named() {
    let place = trained();
    let whole = place.read(STATE);
    // A flipped bit in the middle: found when it is read; the message names what to use instead.
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 0x10;
    place.write(STATE, &flipped);
    place.run("train run.toml --out out --resume").refuses(&[
        "step-6",
        "checksum",
        "use out/checkpoints/step-3 instead",
    ]);
    // A truncated one is not complete: the one before is used.
    place.write(STATE, &whole[..whole.len() - 1]);
    let ran = place.run("generate out --prompt the -n 2 --temperature 0").succeeds();
    assert_says("generate, a truncated checkpoint", &ran.stderr);
    place.run("generate out --prompt the --step 6").refuses(&["step-6", "bytes", "incomplete"]);
    // A flipped bit in the header of the tensors.
    let mut header = whole.clone();
    header[20] ^= 0x10;
    place.write(STATE, &header);
    place.run("generate out --prompt the").refuses(&["step-6"]);
    // A manifest that is cut, and then none.
    place.write(STATE, &whole);
    let manifest = place.read("out/checkpoints/step-6/manifest.json");
    place.write("out/checkpoints/step-6/manifest.json", &manifest[..manifest.len() / 2]);
    let ran = place.run("generate out --prompt the -n 2").succeeds();
    assert!(ran.stderr.contains("manifest.json"), "{}", ran.stderr);
    // Resumed from step 3, the run makes step 6 again, the same, and reports once what it ignores.
    let ran = place.run("train run.toml --out out --resume --set train.steps=6").succeeds();
    assert_eq!(ran.stderr.matches("skipping an incomplete checkpoint").count(), 1, "{}", ran.stderr);
    assert!(place.read(STATE) == whole, "the state of step 6 differs");
    // If all are damaged, a run does not silently begin again over them.
    for step in place.names("out/checkpoints") {
        place.write(&format!("out/checkpoints/{step}/manifest.json"), b"{}");
    }
    let before = place.contents("out");
    place.run("train run.toml --out out --resume --set train.steps=6").refuses(&[
        "out/checkpoints",
        "step-6",
        "step-3",
        "from the beginning",
    ]);
    assert_eq!(place.contents("out"), before);
}

#[test]
fn a_checkpoint_or_a_run_folder_in_the_place_of_another_is_told_what_to_name() {
    let place = trained();
    let checkpoint = "out/checkpoints/step-3";
    for command in ["generate PLACE --prompt the", "eval PLACE --data a.txt", "export PLACE --out hf"] {
        let said = ["is a checkpoint of a run", "name the run folder: out --step 3"];
        place.run(&command.replace("PLACE", checkpoint)).refuses(&said);
    }
    let mut inside = place.command("generate . --prompt the");
    inside.current_dir(place.path(checkpoint));
    finish(inside, "generate .").refuses(&["is a checkpoint of a run", "/out --step 3"]);
    for verb in ["train", "plan"] {
        let begin = |from: &str| place.run(&format!("{verb} continued.toml --set model.init_from={from}"));
        begin("out").refuses(&["names out, which is a run folder", "its model is in out/hf"]);
        begin(checkpoint).refuses(&["a checkpoint of a run", "xtrain export out --step 3 --out FOLDER"]);
        begin("out/hf").succeeds();
    }
}

#[test]
fn a_run_folder_of_parts_that_do_not_belong_together_is_refused() {
    let place = trained();
    let config = String::from_utf8(place.read("out/config.toml")).expect("text");
    for (from, to, said) in [
        ("layers = 2", "layers = 1", "blocks.1"),
        ("layers = 2", "layers = 3", "missing"),
        ("dim = 16", "dim = 32", "different"),
        ("family = \"qwen3\"", "family = \"llama\"", ""),
        ("[model]", "[modell]", "modell"),
    ] {
        place.write("out/config.toml", config.replacen(from, to, 1).as_bytes());
        for line in place.run("generate out --prompt the -n 2").refuses_in_lines() {
            assert!(line.contains(said), "{to}: {line}");
        }
    }
    place.write("out/config.toml", config.as_bytes());
    std::fs::remove_dir_all(place.path("out/tokenizer")).expect("removes");
    place.run("generate out --prompt the").refuses(&["out/tokenizer"]);
    std::fs::remove_dir_all(place.path("out/checkpoints")).expect("removes");
    place.run("generate out --prompt the").refuses(&["out", "no complete checkpoint"]);
    place.run("export out --out hf2").refuses(&["out", "no complete checkpoint"]);
}

#[test]
fn damaged_hugging_face_folders_are_refused() {
    let place = trained();
    let config = String::from_utf8(place.read("out/hf/config.json")).expect("text");
    let generate = "generate out/hf --prompt the -n 2";
    place.run(generate).succeeds();
    for (from, to, words) in [
        ("\"qwen3\"", "\"gpt2\"", &["out/hf", "gpt2", "not supported", "llama"][..]),
        ("\"hidden_size\": 16", "\"hidden_size\": 32", &["model.embed_tokens.weight"]),
        ("\"hidden_size\": 16", "\"hidden_size\": -16", &["hidden_size", "whole number"]),
        ("\"hidden_size\": 16", "\"hidden_size\": 1e300", &["hidden_size", "whole number"]),
        (
            "\"hidden_size\": 16",
            "\"hidden_size\": 2147483647",
            &["[257, 16] but should be [257, 2147483647]"],
        ),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", &["model.layers.2"]),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", &["model.layers.1"]),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 2000000000", &["layers = 2000000000", "typo"]),
        ("\"head_dim\": 8", "\"head_dim\": 9", &["head_dim", "even"]),
        ("\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", &["hidden_act"]),
        ("\"vocab_size\": 257", "\"vocab_size\": 300", &["embed_tokens"]),
        ("{", "[", &["config.json"]),
    ] {
        assert!(config.contains(from), "{from}");
        place.write("out/hf/config.json", config.replacen(from, to, 1).as_bytes());
        place.run(generate).refuses(words);
        place.run(CONTINUED).refuses_in_lines();
        assert!(!place.exists("again"), "{to}");
    }
    place.write("out/hf/config.json", config.as_bytes());

    let weights = place.read("out/hf/model.safetensors");
    for damaged in [&weights[..weights.len() / 2], &weights[..4], b"", b"\xff\xff\xff\xff\xff\xff\xff\xff{}"]
    {
        place.write("out/hf/model.safetensors", damaged);
        place.run(generate).refuses(&["model.safetensors"]);
    }
    std::fs::remove_file(place.path("out/hf/model.safetensors")).expect("removes");
    place.run(generate).refuses(&["out/hf", "safetensors"]);
    place.write("out/hf/model.safetensors", &weights);

    let tokenizer = place.read("out/hf/tokenizer.json");
    place.write("out/hf/tokenizer.json", &tokenizer[..tokenizer.len() / 2]);
    place.run(generate).refuses(&["tokenizer.json", "not JSON"]);
    std::fs::remove_file(place.path("out/hf/tokenizer.json")).expect("removes");
    place.run(generate).refuses(&["out/hf", "no tokenizer.json"]);
    place.write("out/hf/tokenizer.json", &tokenizer);
    place.run(generate).succeeds();
    place.run(CONTINUED).succeeds();
}

#[test]
fn a_tokenizer_larger_than_the_models_vocabulary_is_refused() {
    let place = trained();
    place.run("tokenize a.txt --bpe-vocab-size 400 --out bpe").succeeds();
    place
        .run(&format!("{CONTINUED} --set data.tokenizer=bpe"))
        .refuses(&["`tokenizer` = \"bpe\"", "leave it out"]);
    place.run(&format!("{CONTINUED} --set data.train=bpe")).refuses(&[
        "bpe",
        "not this run's",
        "--tokenizer out/hf",
    ]);
    // A folder whose own tokenizer has tokens that its model does not.
    place.write("out/hf/tokenizer.json", &place.read("bpe/tokenizer.json"));
    place.run("generate out/hf --prompt the_river_ran").refuses(&["vocabulary", "257"]);
    place.run("eval out/hf --data a.txt").refuses(&["vocabulary", "257"]);
    place.run(CONTINUED).refuses(&["tokenizer in \"out/hf\"", "257", "belong together", "tokenizer.json"]);
    assert!(!place.exists("again"));
}

#[test]
fn prompts_that_cannot_be_continued_are_refused() {
    let place = trained();
    let mut empty = place.command("generate out");
    empty.args(["--prompt", ""]);
    crate::place::finish(empty, "an empty prompt").refuses(&["the prompt is empty"]);
    let long = "the_river_".repeat(20);
    place.run(&format!("generate out --prompt {long}")).refuses(&[
        "the prompt has 200 tokens",
        "16",
        "shorter",
    ]);
    place.run("generate out --tokens 256,300").refuses(&["token 300", "257"]);
    let mut binary = place.command("generate out --prompt -");
    place.write("latin1.txt", b"caf\xe9");
    binary.stdin(std::fs::File::open(place.path("latin1.txt")).expect("opens"));
    crate::place::finish(binary, "a prompt in Latin-1").refuses(&["standard input", "UTF-8"]);
}

#[test]
fn exports_replace_nothing_unasked() {
    let place = trained();
    place.run("export out --out hf2 --dtype fp32").succeeds();
    place.run("export out --out hf2").refuses(&["hf2", "--overwrite"]);
    place.run("export out --out hf2 --overwrite --step 3").succeeds();
    place.write("mine/notes.txt", b"mine");
    place.run("export out --out mine").refuses(&["mine"]);
    assert_eq!(place.read("mine/notes.txt"), b"mine");
    place.run("generate hf2 --prompt the -n 2").succeeds();
}

#[test]
fn names_with_control_characters_and_names_without_end_give_one_readable_line() {
    let place = Place::new();
    for (name, shown) in
        [("no\nsuch\u{1b}[31m.toml", "no\\nsuch\\u{1b}[31m.toml"), ("a\rb.toml", "a\\rb.toml")]
    {
        let mut command = place.command("train");
        command.arg(name);
        finish(command, name).refuses(&[shown, "check the path"]);
        let mut command = place.command("tokenize --bytes --out out");
        command.arg(name);
        finish(command, name).refuses(&[shown, "check the path"]);
    }
    place.train("out", "--set train.steps=2");
    std::fs::remove_file(place.path("out/hf/model.safetensors")).expect("removes");
    let missing: serde_json::Map<String, serde_json::Value> = (0..9)
        .map(|n| (format!("tensor {n}"), format!("shard\n\u{7}{n}{}", "x".repeat(30_000)).into()))
        .collect();
    let index = serde_json::json!({ "weight_map": missing });
    place.write("out/hf/model.safetensors.index.json", index.to_string().as_bytes());
    let line =
        place.run("generate out/hf --prompt the").refuses(&["9 of 9 shards", "and 4 more", "download"]);
    assert!(line.contains("shard\\n\\u{7}0xxx") && !line.contains('\u{7}'), "{line}");
}
