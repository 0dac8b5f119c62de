//! Steps that are not finite: skipped, counted, shown, and an end after the limit.

use crate::place::Place;
use crate::resume::assert_same_end;

/// A rate at which every weight is out of the range of any number after one step.
const EXPLODE: &str = "--set optimizer.lr=1e38 --set schedule.warmup_steps=0 --set schedule.kind=constant";

#[test]
fn a_run_that_explodes_ends_after_the_limit_and_can_go_on_from_its_good_checkpoint() {
    let place = Place::new();
    let steady = "--set schedule.warmup_steps=0 --set schedule.kind=constant --set checkpoint.every=5";
    place.train("peace", steady);
    // Ten good steps, the last of them saved, then an absurd rate.
    place.train("out", &format!("{steady} --set train.steps=10 --set eval.at_end=false"));
    let state = place.read("out/checkpoints/step-10/rank-00000-00001.safetensors");
    let kept = place.names("out/checkpoints");
    let ran = place.run(&format!("train run.toml --out out --resume {EXPLODE} --set checkpoint.every=5 --set train.max_nonfinite_steps=4"));
    ran.refuses(&[
        "not finite in 4 steps in a row",
        "lower optimizer.lr",
        "--resume",
        "out/checkpoints",
        "check_numerics",
    ]);
    assert!(ran.stdout.contains("skip") && ran.stdout.contains("no update  skipped 4"), "{}", ran.stdout);
    let metrics = String::from_utf8(place.read("out/metrics.jsonl")).expect("text");
    assert_eq!(metrics.lines().filter(|l| l.contains("\"kind\":\"skipped\"")).count(), 4);
    // Nothing was saved since, and what was saved before is whole.
    assert_eq!(place.names("out/checkpoints"), kept);
    assert_eq!(place.read("out/checkpoints/step-10/rank-00000-00001.safetensors"), state);
    place.train("out", &format!("--resume {steady}"));
    assert_same_end(&place, "peace", "out");
}

#[test]
fn a_limit_of_0_never_stops_and_the_skipped_steps_are_in_the_report() {
    let place = Place::new();
    let ran =
        place.train("out", &format!("{EXPLODE} --set train.max_nonfinite_steps=0 --set checkpoint.every=1"));
    let skipped = ran.stdout.matches("no update").count();
    assert!(skipped >= 30, "{skipped}");
    let page = String::from_utf8(place.read("out/report.html")).expect("text");
    assert!(
        page.contains("skipped") && page.contains(&skipped.to_string()),
        "the report does not say {skipped}"
    );
    // Skipped steps push no good checkpoint out: only the end is saved after the first of them.
    let kept = place.names("out/checkpoints");
    assert!(kept.contains(&"step-40".to_owned()) && kept.contains(&"step-1".to_owned()), "{kept:?}");
}

#[test]
fn check_numerics_names_the_operation_the_place_and_the_step() {
    let place = Place::new();
    let ran = place.run(&format!("train run.toml --out out {EXPLODE} --set train.check_numerics=true"));
    ran.refuses(&["step 2: ", " at ", "(fprop)", "non-finite value in its output", "optimizer.lr"]);
}

#[test]
fn a_model_whose_weights_are_not_numbers_is_told_and_not_sampled_from() {
    let place = Place::new();
    place.train("out", &format!("{EXPLODE} --set train.max_nonfinite_steps=0 --set train.steps=5"));
    let ran = place.run("generate out --prompt the");
    ran.refuses(&["logits contain", "diverged"]);
    assert_eq!(ran.stdout, "");
}
