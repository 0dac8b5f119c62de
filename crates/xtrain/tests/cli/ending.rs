//! The end of a run: what is written whatever goes wrong, and nothing twice.

use crate::messages::assert_message;
use crate::place::Place;
use serde_json::Value;
use std::fs;

fn summary(place: &Place, out: &str) -> Value {
    serde_json::from_slice(&place.read(&format!("{out}/summary.json"))).expect("JSON")
}

#[test]
fn a_prompt_without_a_token_is_refused_before_the_first_step() {
    let place = Place::new();
    let ran = place.run(r#"train run.toml --out out --set eval.prompts=["the",""]"#);
    ran.refuses(&["prompts[1]", "it is empty", "give it some text"]);
    assert!(!place.exists("out"));
}

#[test]
fn a_prompt_that_the_vocabulary_lacks_is_refused_before_the_first_step() {
    let place = Place::new();
    let ran = place
        .run("train run.toml --out out --set data.tokenizer=chars --set eval.prompts=[\"the\",\"日本\"]");
    ran.refuses(&["[eval]", "prompts[1]", "'日'"]);
    assert!(!place.exists("out"));
}

#[test]
fn a_run_that_cannot_be_sampled_from_still_has_its_summary_and_its_report() {
    let place = Place::new();
    let explode = "--set optimizer.lr=1e38 --set schedule.warmup_steps=0 --set schedule.kind=constant";
    let ran = place.run(&format!(
        "train run.toml --out out {explode} --set train.max_nonfinite_steps=0 --set train.steps=5 --set eval.prompts=[\"the\"]"
    ));
    ran.refuses(&["logits contain"]);
    assert_eq!(summary(&place, "out")["outcome"], "finished");
    assert!(place.exists("out/report.html"));
}

const SAMPLED: &str = "--set log.tensorboard=true --set eval.prompts=[\"the\",\"a\"]";

/// Numbers of steps, evaluations and samples in the metrics of `out`.
fn kinds(place: &Place) -> [usize; 3] {
    let text = String::from_utf8(place.read("out/metrics.jsonl")).expect("text");
    ["step", "eval", "sample"].map(|kind| text.matches(&format!("\"kind\":\"{kind}\"")).count())
}

#[test]
fn a_finished_run_that_is_resumed_says_so_and_changes_nothing() {
    let place = Place::new();
    let sampled = format!("{SAMPLED} --set train.steps=4");
    place.train("out", &sampled);
    let before = place.contents("out");
    for change in ["", "--set optimizer.lr=1e-5", "--set train.steps=3"] {
        let ran = place.train("out", &format!("--resume {sampled} {change}"));
        let steps = if change.contains('3') { "4 steps, of which 3 were requested" } else { "4 of 4 steps" };
        let said = format!("already finished: {steps}; continue with --set train.steps=...\n");
        assert_eq!((ran.stdout, ran.stderr), (said, String::new()));
        assert_eq!(place.contents("out"), before, "{change}");
    }
    // Its length is reported in the key that it is given in, and the suggested command continues the run.
    let tokens = SAMPLED.to_owned() + " --set train.steps= --set train.tokens";
    let ran = place.train("out", &format!("--resume {tokens}=256"));
    assert_message("train, a finished run whose length is in tokens", &ran.stdout);
    place.train("out", &format!("--resume {tokens}=384"));
    assert!(place.exists("out/checkpoints/step-6"));
}

#[test]
fn what_a_finished_run_lacks_of_its_end_is_made_and_nothing_is_said_twice() {
    let place = Place::new();
    let sampled = format!("{SAMPLED} --set train.steps=4");
    place.train("out", &sampled);
    let (before, counted) = (place.contents("out"), kinds(&place));
    assert_eq!(counted[2], 2);
    for (lost, again) in [
        ("hf", "hf/model.safetensors"),
        ("sample.txt", "sample.txt"),
        ("report.html", "report.html"),
        // Killed before it said that it had come to its end.
        (".finished", ".finished"),
    ] {
        let path = place.path(&format!("out/{lost}"));
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect("removed");
        let ran = place.train("out", &format!("--resume {sampled} --set optimizer.lr=1e-5"));
        assert!(
            !ran.stdout.contains("[model]") && ran.stdout.contains("all 4 steps are done"),
            "{}",
            ran.stdout
        );
        assert!(place.exists(&format!("out/{again}")), "{lost}");
        for same in ["hf/model.safetensors", "sample.txt", "config.toml"] {
            assert_eq!(
                place.read(&format!("out/{same}")),
                before[&place.path(&format!("out/{same}"))],
                "{lost}: {same}"
            );
        }
        assert_eq!(kinds(&place), counted, "{lost}");
        assert!(place.train("out", &format!("--resume {sampled}")).stdout.starts_with("already finished"));
    }
    let events = place.names("out").into_iter().filter(|name| name.starts_with("events.out."));
    let found: usize = events
        .map(|name| place.read(&format!("out/{name}")).windows(6).filter(|bytes| bytes == b"sample").count())
        .sum();
    assert_eq!(found, 2, "TensorBoard has each sample once");
}

#[test]
fn a_run_that_went_on_and_was_killed_at_its_end_exports_its_last_state() {
    let place = Place::new();
    let at = |steps: u64| {
        format!("--set train.steps={steps} --set schedule.kind=constant --set schedule.warmup_steps=1")
    };
    place.train("out", &at(4));
    let earlier = ["hf/model.safetensors", ".finished"].map(|name| place.read(&format!("out/{name}")));
    place.train("out", &format!("--resume {}", at(6)));
    let last = place.read("out/hf/model.safetensors");
    place.write("out/hf/model.safetensors", &earlier[0]);
    place.write("out/.finished", &earlier[1]);
    // Also where it is asked for no more than it had at first.
    place.train("out", &format!("--resume {}", at(4)));
    assert!(place.read("out/hf/model.safetensors") == last);
    assert_eq!(summary(&place, "out")["total_steps"], 6);
}

#[test]
fn a_report_of_several_runs_is_written_only_where_it_was_asked_for() {
    let place = Place::new();
    place.train("one", "--set train.steps=2");
    place.train("two", "--set train.steps=2");
    place.write("report.html", b"mine");
    place.run("report one two").refuses(&["--out comparison.html"]);
    assert_eq!(place.read("report.html"), b"mine");
    place.run("report one two --out both.html").succeeds();
    assert!(String::from_utf8(place.read("both.html")).expect("text").contains("<h1>one · two</h1>"));
}

#[test]
fn a_report_replaces_reports_and_nothing_else() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    for (name, bytes) in
        [("notes.txt", &b"mine"[..]), ("page.html", b"<!DOCTYPE html>\n<html lang=\"en\">\n")]
    {
        place.write(name, bytes);
        place.run(&format!("report out --out {name}")).refuses(&[
            name,
            "was not written by xtrain",
            "--overwrite",
        ]);
        assert_eq!(place.read(name), bytes);
    }
    place.write("empty.html", b"");
    for name in ["empty.html", "new.html", "out/report.html"] {
        place.run(&format!("report out --out {name}")).succeeds();
        // Now it is a report.
        place.run(&format!("report out --out {name}")).succeeds();
    }
    place.run("report out --out notes.txt --overwrite").succeeds();
    assert_eq!(place.read("notes.txt"), place.read("new.html"));
}
