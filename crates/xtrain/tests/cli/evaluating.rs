//! Evaluations, in a run and by `xtrain eval`.

use crate::place::{Place, finish, signal, wait, wait_until};
use crate::resume::{assert_same_end, recorded};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Seven quick steps and two evaluations that take far longer.
const LONG_EVALUATIONS: &str = "train run.toml --resume --set train.steps=7 --set data.valid=long.txt --set eval.every=5 --set eval.tokens=0 \
                                --set checkpoint.every=5 --set checkpoint.keep_best=false";

/// A place whose long.txt is some 20,000 sequences to validate on; without a held-out part of the training
/// text.
fn with_much_to_evaluate() -> Place {
    let place = Place::new();
    let run = String::from_utf8(place.read("run.toml")).expect("text");
    place.write("run.toml", run.replace("held_out = 0.05\n", "").as_bytes());
    place.write("long.txt", &place.read("b.txt").repeat(48));
    place
}

fn metrics(place: &Place, out: &str) -> String {
    std::fs::read_to_string(place.path(&format!("{out}/metrics.jsonl"))).unwrap_or_default()
}

fn count(text: &str, kind: &str) -> usize {
    text.matches(&format!("\"kind\":\"{kind}\"")).count()
}

#[test]
fn a_stop_in_an_evaluation_saves_at_once_and_the_next_process_makes_the_rest_of_it() {
    let place = with_much_to_evaluate();
    place.run(&format!("{LONG_EVALUATIONS} --out peace")).succeeds();
    let stopped = format!("{LONG_EVALUATIONS} --out stopped");
    let mut child = place.command(&stopped).stdout(Stdio::null()).spawn().expect("starts");
    wait_until("the fifth step", || count(&metrics(&place, "stopped"), "step") == 5);
    signal(child.id(), "TERM");
    assert_eq!(wait(&mut child, "a run stopped in its evaluation").code(), Some(0));
    assert_eq!(count(&metrics(&place, "stopped"), "eval"), 0, "it waited for the evaluation");
    assert!(place.exists("stopped/checkpoints/step-5"));
    place.run(&stopped).succeeds();
    assert_eq!(count(&metrics(&place, "stopped"), "eval"), 2);
    assert_same_end(&place, "peace", "stopped");
}

#[test]
fn an_evaluation_that_takes_longer_than_the_time_limit_comes_to_its_end() {
    let place = with_much_to_evaluate();
    place.run(&format!("{LONG_EVALUATIONS} --out peace")).succeeds();
    let mut rounds = 0;
    while !place
        .run(&format!("{LONG_EVALUATIONS} --out cut --max-time 1s"))
        .succeeds()
        .stdout
        .contains("report: ")
        || !place.exists("cut/hf")
    {
        rounds += 1;
        assert!(rounds < 60, "it does not come to an end");
    }
    assert!(rounds > 0, "no evaluation was cut");
    // The set of checkpoints depends on where it was stopped.
    assert_eq!(recorded(&place, "peace"), recorded(&place, "cut"));
    assert!(place.read("peace/hf/model.safetensors") == place.read("cut/hf/model.safetensors"));
}

#[test]
fn a_time_limit_that_ends_in_the_last_evaluation_does_not_cut_the_end() {
    let place = with_much_to_evaluate();
    let at_end = format!("{LONG_EVALUATIONS} --set eval.every=0");
    place.run(&format!("{at_end} --out peace")).succeeds();
    let mut rounds = 0;
    let last = loop {
        let said = place.run(&format!("{at_end} --out cut --max-time 1s")).succeeds().stdout;
        if said.contains("step 7/7") {
            break said;
        }
        rounds += 1;
        assert!(rounds < 60, "it does not come to its last step");
    };
    assert!(last.contains("save 7/7") && !last.contains("time is up"), "{last}");
    assert_same_end(&place, "peace", "cut");
}

#[test]
fn a_run_that_is_stopped_in_its_last_evaluation_exports_its_last_state() {
    let place = with_much_to_evaluate();
    let at_end = format!("{LONG_EVALUATIONS} --set eval.every=0");
    place.run(&format!("{at_end} --out peace")).succeeds();
    place
        .run(&format!(
            "{at_end} --out stopped --set train.steps=6 --set eval.at_end=false --set schedule.kind=constant"
        ))
        .succeeds();
    let peace = place.read("peace/hf/model.safetensors");
    let mut child =
        place.command(&format!("{at_end} --out stopped")).stdout(Stdio::null()).spawn().expect("starts");
    wait_until("the last step", || count(&metrics(&place, "stopped"), "step") == 7);
    signal(child.id(), "TERM");
    assert_eq!(wait(&mut child, "a run stopped in its last evaluation").code(), Some(0));
    assert_eq!(count(&metrics(&place, "stopped"), "eval"), 0, "it waited for the evaluation");
    assert!(place.read("stopped/hf/model.safetensors").len() == peace.len());
    // It is the state of the last checkpoint.
    place.run("export stopped --out exported").succeeds();
    assert!(place.read("stopped/hf/model.safetensors") == place.read("exported/model.safetensors"));
}

#[test]
fn the_entropy_that_a_loss_is_compared_with_is_that_of_the_evaluated_tokens() {
    let place = Place::new();
    let entropy = |out: &str| {
        let summary: Value =
            serde_json::from_slice(&place.read(&format!("{out}/summary.json"))).expect("JSON");
        summary["unigram_entropy"].as_f64()
    };
    let train = |out: &str, more: &str| {
        place.train(out, &format!("--set train.steps=7 --set data.seq_len=8 --set log.every=7 {more}"));
    };
    // Eight tokens cannot have more than this.
    train("few", "--set eval.tokens=8");
    let few = entropy("few").expect("an entropy");
    assert!(few <= 8f64.ln() + 1e-9, "{few}");
    train("all", "--set eval.tokens=0");
    let all = entropy("all").expect("an entropy");
    assert!(all > 8f64.ln() + 0.2, "{all}");
    // A process without an evaluation knows it from the checkpoint.
    train("all", "--resume --set eval.tokens=8");
    assert_eq!(entropy("all"), Some(all));
    train("none", "--set eval.every=0 --set eval.at_end=false");
    assert_eq!(entropy("none"), None);
}

#[test]
fn a_run_is_evaluated_as_it_evaluated_itself() {
    let place = Place::new();
    let run = String::from_utf8(place.read("run.toml")).expect("text");
    place.write("run.toml", run.replace("held_out = 0.05\n", "valid = \"b.txt\"\n").as_bytes());
    place.train(
        "out",
        "--set data.document_mask=true --set data.separator=a --set model.max_position_embeddings=64 --set eval.tokens=0",
    );
    let last =
        metrics(&place, "out").lines().rfind(|line| line.contains("\"kind\":\"eval\"")).map(String::from);
    let last: Value = serde_json::from_str(&last.expect("an evaluation")).expect("JSON");
    let eval = |more: &str| -> Value {
        let ran = place.run(&format!("eval out --data b.txt --separator a --json {more}")).succeeds();
        serde_json::from_str(&ran.stdout).expect("JSON")
    };
    let loss = |json: &Value| json["loss"].as_f64().expect("a loss");
    let same = eval("");
    assert_eq!((&same["seq_len"], &same["document_mask"]), (&16.into(), &true.into()));
    // The sums of larger batches round otherwise.
    assert!((loss(&same) - loss(&last)).abs() < 1e-6, "{same} {last}");
    for other in ["--document-mask false", "--seq-len 8"] {
        assert!((loss(&eval(other)) - loss(&last)).abs() > 1e-5, "{other}");
    }
}

#[test]
fn texts_are_evaluated_from_the_disk_and_leave_nothing_unless_they_are_kept() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    std::fs::create_dir(place.path("tmp")).expect("a folder");
    place.write("mixed/a.txt", &place.read("a.txt"));
    place.write("mixed/b.txt", &place.read("b.txt"));
    let eval = |more: &str| {
        let mut command = place.command(&format!("eval out --data mixed {more}"));
        command.env("TMPDIR", place.path("tmp"));
        finish(command, more).succeeds().stdout
    };
    let found = eval("");
    assert_eq!(place.names("tmp"), [""; 0], "what was temporary is there still");
    assert_eq!(eval("--cache-dir kept"), found);
    let kept = place.contents("kept");
    assert!(kept.keys().any(|path| path.ends_with("dataset.json")), "{:?}", kept.keys());
    assert_eq!(eval("--cache-dir kept"), found);
    assert_eq!(place.contents("kept"), kept);
    // A text that cannot be encoded is named with its file.
    place.train("chars", "--set train.steps=2 --set data.tokenizer=chars");
    place.write("mixed/c.txt", "the river ran 日".as_bytes());
    place.run("eval chars --data mixed").refuses(&["mixed/c.txt", "'日'"]);
}

#[test]
fn an_evaluation_that_is_stopped_says_so_and_leaves_nothing_behind() {
    let place = with_much_to_evaluate();
    place.train("out", "--set train.steps=2 --set eval.every=0 --set eval.at_end=false");
    place.write("long.txt", &place.read("long.txt").repeat(20));
    std::fs::create_dir(place.path("tmp")).expect("a folder");
    for (signal, wanted) in [("TERM", "source.json"), ("INT", "dataset.json")] {
        let mut command = place.command("eval out --data long.txt --seq-len 16 --json");
        command.env("TMPDIR", place.path("tmp")).stdout(place.sink("said")).stderr(place.sink("told"));
        let mut child = command.spawn().expect("starts");
        // tmp/<temporary folder>/<entry>/<wanted>
        let inside = |folder: &Path| -> Vec<PathBuf> {
            let entries = folder.read_dir().into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect()
        };
        wait_until("tokens are made", || {
            let entries = inside(&place.path("tmp")).into_iter().flat_map(|folder| inside(&folder));
            entries.into_iter().any(|entry| entry.join(wanted).exists())
        });
        crate::place::signal(child.id(), signal);
        assert_eq!(wait(&mut child, "a stopped evaluation").code(), Some(130));
        assert_eq!(place.names("tmp"), [""; 0], "{signal} left something");
        assert!(place.read("said").is_empty(), "a stopped evaluation has no result");
        assert!(String::from_utf8_lossy(&place.read("told")).contains("there is no result"));
    }
}

#[test]
fn without_a_text_it_is_what_the_run_validated_on() {
    let place = Place::new();
    place.train("out", "--set train.steps=7");
    let last: Value = serde_json::from_str(
        metrics(&place, "out")
            .lines()
            .rfind(|line| line.contains("\"kind\":\"eval\""))
            .expect("an evaluation"),
    )
    .expect("JSON");
    let found: Value = serde_json::from_str(&place.run("eval out --json").succeeds().stdout).expect("JSON");
    let number = |json: &Value, key: &str| json[key].as_f64().expect("a number");
    for key in ["loss", "bits_per_byte", "token_accuracy"] {
        // The sums of larger batches round otherwise.
        assert!((number(&found, key) - number(&last, key)).abs() < 1e-5, "{key}: {found} {last}");
    }
    assert_eq!((&found["step"], &found["precision"]), (&7.into(), &"fp32".into()));
    place.run("eval out/hf").refuses(&["Hugging Face folder", "--data"]);
    let refused = place.run("eval out --seq-len 8");
    assert!(refused.code() == Some(2) && refused.stderr.contains("--data"), "{}", refused.stderr);
    place.train(
        "none",
        "--set train.steps=2 --set data.held_out=0 --set eval.every=0 --set eval.at_end=false",
    );
    place.run("eval none").refuses(&["had no validation data", "--data"]);
    // Of another text another part is held out, and some of it was trained on.
    place.write("a.txt", &place.read("b.txt"));
    place.run("eval out").refuses(&["a.txt"]);
}

#[test]
fn precisions_are_compared_on_the_same_tokens() {
    let place = Place::new();
    place.train(
        "out",
        "--set train.steps=7 --set model.dim=32 --set precision.recipe=fp8-block --set precision.skip=[\"*.o_proj\"] \
         --set precision.skip_slower=[]",
    );
    let eval = |more: &str| -> Vec<Value> {
        let ran = place.run(&format!("eval out --json {more}")).succeeds();
        ran.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let alone: Vec<Value> =
        ["", "--precision fp8-block", "--precision bf16"].iter().flat_map(|more| eval(more)).collect();
    let loss = |json: &Value| json["loss"].as_f64().expect("a loss");
    // Layers that the run left in bf16 stay so if its precision is named.
    assert_eq!(alone[0], alone[1]);
    assert_ne!(loss(&alone[0]), loss(&alone[2]));
    let both = eval("--precision bf16 --precision fp8-block");
    let gap = 100.0 * (loss(&alone[0]) / loss(&alone[2]) - 1.0);
    for (found, (alone, expected)) in both.iter().zip([(&alone[2], 0.0), (&alone[0], gap)]) {
        let mut found = found.clone();
        let gap = found.as_object_mut().and_then(|found| found.remove("gap_percent")).expect("a gap");
        assert!((gap.as_f64().expect("a number") - expected).abs() < 1e-9, "{gap} {expected}");
        assert_eq!(&found, alone);
    }
    assert!(gap != 0.0 && gap.abs() < 1.0, "{gap}");
    let table = place.run("eval out --precision bf16 --precision fp8-block").succeeds().stdout;
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["precision", "loss", "perplexity", "bits", "per", "byte", "accuracy", "gap"]);
    assert_eq!((rows[1][0], rows[2][0], rows[3][0]), ("bf16", "fp8-block", "tokens"));
    assert_eq!(rows[2][5], format!("{gap:+.3}%"));
}
