//! The end of a run: what is written whatever goes wrong, and nothing twice.

use crate::place::Place;
use serde_json::Value;

fn summary(place: &Place, out: &str) -> Value {
    serde_json::from_slice(&place.read(&format!("{out}/summary.json"))).expect("JSON")
}

#[test]
fn a_prompt_that_the_vocabulary_lacks_is_refused_before_the_first_step() {
    let place = Place::new();
    let ran = place.run("train run.toml --out out --set data.tokenizer=chars --set eval.prompts=[\"the\",\"日本\"]");
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
