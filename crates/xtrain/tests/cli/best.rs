//! The checkpoint with the lowest validation loss: when it is saved, and how it is opened.

use crate::place::Place;

/// All checkpoints that a run ever saved, in the order of their steps.
fn saved(place: &Place, out: &str, more: &str) -> Vec<u64> {
    place.train(out, &format!("--set checkpoint.keep_last=100 --set checkpoint.every=10 {more}"));
    let names = place.names(&format!("{out}/checkpoints"));
    let mut steps: Vec<u64> =
        names.iter().map(|name| name["step-".len()..].parse().expect("a step")).collect();
    steps.sort();
    steps
}

#[test]
fn evaluations_save_no_more_often_than_checkpoints_are_due() {
    let place = Place::new();
    // The loss falls all the time: each evaluation is the best so far.
    assert_eq!(saved(&place, "all", "--set eval.every=1"), [10, 20, 30, 40]);
    assert_eq!(saved(&place, "between", "--set eval.every=7"), [10, 14, 20, 28, 30, 40]);
    assert_eq!(
        saved(&place, "none", "--set eval.every=7 --set checkpoint.keep_best=false"),
        [10, 20, 30, 40]
    );
    assert_eq!(saved(&place, "end", "--set eval.every=7 --set checkpoint.every=0"), [40]);
}

#[test]
fn the_best_checkpoint_is_named_at_the_end_and_opened_by_every_verb_that_takes_a_model() {
    let place = Place::new();
    // It learns, and then a rate that is far too high takes it away from what it had.
    let steps = "--set schedule.kind=constant --set schedule.warmup_steps=0 --set eval.every=10 --set checkpoint.every=10";
    place.train("out", &format!("{steps} --set train.steps=30"));
    let ran = place.train("out", &format!("{steps} --resume --set train.steps=60 --set optimizer.lr=3.0"));
    let summary: serde_json::Value = serde_json::from_slice(&place.read("out/summary.json")).expect("JSON");
    assert_eq!(summary["best_step"], 30, "{summary}");
    let line = format!(
        "best checkpoint, validation loss {:.4}: out/checkpoints/step-30\n",
        summary["best_loss"].as_f64().expect("a loss")
    );
    assert!(ran.stdout.contains(&line), "{}", ran.stdout);
    assert_eq!(place.names("out/checkpoints"), ["step-30", "step-50", "step-60"]);

    for verb in ["generate out --prompt the -n 9 --temperature 0", "eval out --data b.txt"] {
        let [best, step, latest] =
            ["--best", "--step 30", ""].map(|which| place.run(&format!("{verb} {which}")).succeeds().stdout);
        assert_eq!(best, step, "{verb}");
        assert_ne!(best, latest, "{verb}");
    }
    place.run("export out --best --out hf").succeeds();
    place.run("export out --step 30 --out again").succeeds();
    assert!(place.read("hf/model.safetensors") == place.read("again/model.safetensors"));
    assert_eq!(place.run("generate out --prompt the --best --step 30").code(), Some(2));
    place.run("generate hf --prompt the --best").refuses(&["hf", "no checkpoints", "--best"]);
    place.train("none", "--set train.steps=3 --set checkpoint.keep_best=false");
    place.run("generate none --prompt the --best").refuses(&["none", "keep_best"]);
}
