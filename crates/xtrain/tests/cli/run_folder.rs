//! Folders that a run may write into, those that it must leave alone, and runs away from the folder in which
//! they were started.

use crate::fragments::assert_says;
use crate::place::Place;
use crate::resume::assert_same_end;
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

/// Verbs that read a run without its text.
const WITHOUT_TEXT: [&str; 3] =
    ["generate RUN --prompt the -n 2 --temperature 0", "export RUN --out OUT", "report RUN"];
/// Verbs that read the text of a run.
const WITH_TEXT: [&str; 3] = ["eval RUN --json", "inspect RUN --json --out OUT.html", "blame RUN --json"];

/// The output of `verb` on `run`, by its path from `folder`; `out` is where it writes.
fn output(place: &Place, folder: &str, verb: &str, run: &str, out: &str) -> String {
    fs::create_dir_all(place.path(out).parent().expect("a parent")).expect("a folder");
    let arguments = verb.replace("RUN", run).replace("OUT", &place.path(out).display().to_string());
    let said = place.run_in(folder, &arguments).succeeds().stdout;
    // What it names differs, and so does the speed.
    said.replace(&place.path(out).display().to_string(), "OUT").replace(&format!("{run:?}"), "\"RUN\"")
}

/// Goes on with `run`, by its path from `folder`, to `steps` steps.
fn go_on(place: &Place, folder: &str, run: &str, steps: u64, more: &str) -> crate::place::Ran {
    let arguments = format!("train {run}/config.toml --resume --set train.steps={steps} {more}");
    place.run_in(folder, &arguments)
}

#[test]
fn a_run_folder_works_from_every_folder_and_after_it_was_moved() {
    let place = Place::new();
    let run = "--set train.steps=6 --set schedule.kind=constant --set checkpoint.every=0 --set checkpoint.keep_best=false";
    place.train("runs/out", run);
    place.copy("runs/out", "at_home");
    place.copy("runs/out", "elsewhere/moved");
    let begun = String::from_utf8(place.read("runs/out/config.toml")).expect("text");
    assert!(begun.contains("path = \"a.txt\"") && begun.contains("cache_dir = \"cache\""), "{begun}");
    for (n, verb) in WITHOUT_TEXT.iter().chain(&WITH_TEXT).enumerate() {
        let at_home = output(&place, ".", verb, "runs/out", &format!("o/{n}"));
        let away = output(&place, "elsewhere/deep", verb, "../../runs/out", &format!("o/{n}-away"));
        let moved = output(&place, "elsewhere", verb, "moved", &format!("o/{n}-moved"));
        if !verb.starts_with("report") {
            assert_eq!((&away, &moved), (&at_home, &at_home), "{verb}");
        }
    }
    go_on(&place, ".", "at_home", 9, "").succeeds();
    go_on(&place, "elsewhere", "moved", 9, "").succeeds();
    assert_same_end(&place, "at_home", "elsewhere/moved");
    // It went on where it lies, and the run that it was copied from is as it was.
    assert!(!place.exists("runs/out/checkpoints/step-9"));
    go_on(&place, "elsewhere/deep", "../../runs/out", 9, "").succeeds();
    assert_same_end(&place, "at_home", "runs/out");
    // Nothing was written where the commands ran.
    assert_eq!(
        (place.names("elsewhere"), place.names("elsewhere/deep")),
        (vec!["deep".to_owned(), "moved".to_owned()], vec![])
    );
    // As a run file it begins another run, whose folder is named from where the command runs.
    place.run_in("elsewhere", "train moved/config.toml --out again --set train.steps=2").succeeds();
    assert!(place.exists("elsewhere/again/hf"));
    place.run_in("elsewhere", "train moved/config.toml").refuses(&["moved", "already holds a run"]);
}

#[test]
fn a_run_goes_on_without_its_text_while_its_tokens_are_in_the_cache() {
    let place = Place::new();
    let run = "--set train.steps=6 --set schedule.kind=constant --set checkpoint.every=0 --set checkpoint.keep_best=false";
    place.train("out", run);
    place.copy("out", "kept");
    let before: Vec<String> = WITH_TEXT.iter().map(|verb| output(&place, ".", verb, "out", "o/a")).collect();
    go_on(&place, ".", "kept", 9, "").succeeds();
    fs::remove_file(place.path("a.txt")).expect("removed");
    for (verb, before) in WITH_TEXT.iter().zip(before) {
        assert_eq!(output(&place, "elsewhere", verb, "../out", "o/b"), before, "{verb}");
    }
    let ran = go_on(&place, "elsewhere", "../out", 9, "").succeeds();
    assert_says("train, a text that has gone", &ran.stderr);
    assert_same_end(&place, "kept", "out");
}

#[test]
fn a_run_without_its_text_and_tokens_names_what_is_missing_and_an_option_that_replaces_it() {
    let place = Place::new();
    place.train("out", "--set train.steps=4");
    place.copy("out", "away/out");
    for lost in ["a.txt", "cache"] {
        let path = place.path(lost);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect("removed");
    }
    for verb in WITHOUT_TEXT {
        output(&place, "away", verb, "out", "o/a");
    }
    let home = place.path("").canonicalize().expect("a folder").display().to_string();
    let home = format!("looked for in {home}, where the run was started, and in the current folder");
    for verb in WITH_TEXT {
        let arguments = verb.replace("RUN", "out").replace("OUT", "o");
        place.run_in("away", &arguments).refuses(&["a.txt", &home, "--data FILE"]);
        let data = format!("{verb} --data ../b.txt");
        output(&place, "away", &data, "out", "o/b");
    }
    go_on(&place, "away", "out", 6, "").refuses(&["a.txt", &home, "--set data.train=FILE"]);
    // A text of the name in the current folder is taken.
    place.write("away/a.txt", &place.read("b.txt"));
    place.run_in("away", "inspect out").refuses(&["a.txt", "the checkpoint cannot continue with this data"]);
    // Paths of options start where the command runs.
    let began =
        place.run_in("away", "train out/config.toml --out new --set data.train=a.txt --set train.steps=2");
    began.succeeds();
    let config = String::from_utf8(place.read("away/new/config.toml")).expect("text");
    assert!(config.contains("/away/a.txt\""), "{config}");
}

#[test]
fn an_evaluation_opens_only_what_was_validated_on() {
    let place = Place::new();
    let run = String::from_utf8(place.read("run.toml")).expect("text");
    place.write("run.toml", run.replace("held_out = 0.05\n", "valid = \"b.txt\"\n").as_bytes());
    place.train("out", "--set train.steps=4");
    let before = place.run("eval out --json").succeeds().stdout;
    for lost in ["a.txt", "cache"] {
        let path = place.path(lost);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect("removed");
    }
    assert_eq!(place.run("eval out --json").succeeds().stdout, before);
    assert_eq!(place.run_in("away", "eval ../out --json").succeeds().stdout, before);
    fs::remove_file(place.path("b.txt")).expect("removed");
    fs::remove_dir_all(place.path("cache")).expect("removed");
    place.run("eval out").refuses(&["b.txt", "--data FILE"]);
}

#[test]
fn token_shards_and_a_tokenizer_are_found_from_every_folder() {
    let place = Place::new();
    place.run("tokenize a.txt --bpe-vocab-size 270 --out data/shards").succeeds();
    let run = String::from_utf8(place.read("continued.toml")).expect("text");
    place.write("run.toml", run.replace("a.txt", "data/shards").as_bytes());
    place.train("out", "--set train.steps=4 --set checkpoint.every=0");
    fs::remove_file(place.path("a.txt")).expect("removed");
    let config = String::from_utf8(place.read("out/config.toml")).expect("text");
    assert!(config.contains("tokenizer = \"data/shards\""), "{config}");
    for (n, verb) in WITH_TEXT.iter().enumerate() {
        let at_home = output(&place, ".", verb, "out", &format!("o/{n}"));
        assert_eq!(output(&place, "away", verb, "../out", &format!("o/{n}-away")), at_home, "{verb}");
    }
    go_on(&place, "away", "../out", 6, "").succeeds();
    place.run_in("away", "plan ../out/config.toml").succeeds();
    assert_eq!(place.names("away"), [""; 0]);
}
