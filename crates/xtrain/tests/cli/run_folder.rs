//! Folders that a run may write into, and those that it must leave alone.

use crate::place::Place;
use std::fs;

/// A finished run at `out`, and its model as someone's own at `mine/hf`.
fn with_a_model_of_mine() -> Place {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    place.run("export out --out mine/hf").succeeds();
    place
}

#[test]
fn a_new_run_takes_no_folder_that_holds_anything() {
    let place = with_a_model_of_mine();
    place.write("mine/sample.txt", b"mine");
    place.write("mine/tokenizer/tokenizer.json", b"mine");
    place.write("notes/config.toml", b"title = \"a site\"\n");
    for folder in ["mine", "mine/hf", "notes", "mine/tokenizer"] {
        let before = place.contents(folder);
        for resume in ["", "--resume"] {
            place.run(&format!("train run.toml --out {folder} {resume}")).refuses(&[
                folder,
                "not empty",
                "--out FOLDER",
            ]);
            assert_eq!(place.contents(folder), before, "{folder} {resume}");
        }
    }
    fs::create_dir(place.path("empty")).expect("a folder");
    place.train("empty", "--set train.steps=2");
}

#[test]
fn a_run_that_was_stopped_while_it_began_is_begun_again() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    for resume in ["", "--resume"] {
        let folder = format!("aborted{resume}");
        for name in ["tokenizer/tokenizer.json", ".lock"] {
            place.write(&format!("{folder}/{name}"), b"half");
        }
        fs::create_dir(place.path(&format!("{folder}/checkpoints"))).expect("a folder");
        place.write(&format!("{folder}/config.toml.tmp-1"), b"[model]\nd");
        place.run(&format!("train run.toml --out {folder} {resume} --set train.steps=2")).succeeds();
        assert_eq!(
            place.read(&format!("{folder}/hf/model.safetensors")),
            place.read("out/hf/model.safetensors")
        );
    }
}

#[test]
fn an_export_replaces_neither_the_model_that_the_run_began_from_nor_one_of_someone_else() {
    let place = with_a_model_of_mine();
    let model = place.read("out/hf/model.safetensors");
    let from_itself =
        "train continued.toml --out out --resume --set model.init_from=out/hf --set train.steps=4";
    place.run(from_itself).refuses(&["out/hf", "init_from", "export_hf"]);
    assert_eq!(place.read("out/hf/model.safetensors"), model);
    // A run that exported nothing, and a model of someone's where the next part of it would export.
    place.train("other", "--set train.steps=2 --set checkpoint.export_hf=false");
    fs::rename(place.path("mine/hf"), place.path("other/hf")).expect("moved");
    let mine = place.contents("other/hf");
    let go_on = "train run.toml --out other --resume --set train.steps=4 --set schedule.warmup_steps=1";
    place.run(go_on).refuses(&["other/hf", "not from this run", "--resume"]);
    assert_eq!(place.contents("other/hf"), mine);
    fs::rename(place.path("other/hf"), place.path("moved")).expect("moved");
    place.run(go_on).succeeds();
    assert!(place.exists("other/hf/model.safetensors"));
    // Its own is replaced as before.
    let exported = place.read("other/hf/model.safetensors");
    place.run(&go_on.replace("steps=4", "steps=6")).succeeds();
    assert!(place.read("other/hf/model.safetensors") != exported);
}

#[test]
fn a_run_folder_may_have_any_name_and_what_is_wrong_is_said_of_the_option_that_was_given() {
    let place = Place::new();
    for name in ["q\"x", "a='b'", "17", "[x]"] {
        let out = format!("runs/{name}");
        let mut command = place.command("train run.toml --set train.steps=2");
        finish_at(command.args(["--out", &out]));
        assert!(place.exists(&format!("{out}/hf/config.json")), "{out}");
        let mut command = place.command("generate --prompt the -n 2");
        finish_at(command.arg(&out));
    }
    place.run("train run.toml --max-time soon").refuses(&["--max-time soon: [train]", "2h30m"]);
}

fn finish_at(command: &mut std::process::Command) {
    let ran = command.output().expect("starts");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn a_run_goes_on_in_the_precision_that_it_began_with() {
    let place = Place::new();
    place.train("out", "--set train.steps=2 --set precision.recipe=bf16");
    let config = || String::from_utf8(place.read("out/config.toml")).expect("text");
    assert!(config().contains("recipe = \"bf16\""));
    // The run file names none, and on this machine another would be chosen.
    place.run("train run.toml --out out --resume --set train.steps=4 --set train.device=cpu").succeeds();
    assert!(config().contains("recipe = \"bf16\""), "{}", config());
    place.run("train run.toml --out out --resume --set train.steps=6 --set precision.recipe=fp32").succeeds();
    assert!(config().contains("recipe = \"fp32\""), "{}", config());
}
