//! The end of a run: what is written whatever goes wrong, and nothing twice.

use crate::place::Place;
use serde_json::Value;

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

#[test]
fn a_finished_run_that_is_resumed_says_nothing_twice() {
    let place = Place::new();
    let sampled = "--set train.steps=4 --set log.tensorboard=true --set eval.prompts=[\"the\",\"a\"]";
    place.train("out", sampled);
    let kinds = || {
        let text = String::from_utf8(place.read("out/metrics.jsonl")).expect("text");
        ["step", "eval", "sample"].map(|kind| text.matches(&format!("\"kind\":\"{kind}\"")).count())
    };
    let before = kinds();
    assert_eq!(before[2], 2);
    let samples = place.read("out/sample.txt");
    for _ in 0..2 {
        place.train("out", &format!("--resume {sampled}"));
        assert_eq!(kinds(), before);
        assert_eq!(place.read("out/sample.txt"), samples);
    }
    let events = place.names("out").into_iter().filter(|name| name.starts_with("events.out."));
    let found: usize = events
        .map(|name| place.read(&format!("out/{name}")).windows(6).filter(|bytes| bytes == b"sample").count())
        .sum();
    assert_eq!(found, 2, "TensorBoard has each sample once");
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
        place.run(&format!("report out --out {name}")).refuses(&[name, "no report", "--overwrite"]);
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
