//! Reference segments: steps of an FP8 run that are also run in bf16.

use crate::place::Place;
use crate::resume::assert_same_end;
use serde_json::Value;

/// Sizes that FP8 takes, and checkpoints where segments begin.
const FP8: &str = "--set precision.recipe=fp8-current --set precision.skip_slower=[] --set data.seq_len=32 --set model.ffn_dim=32 --set train.micro_batch_size=2 \
                   --set checkpoint.every=10 --set checkpoint.keep_last=9 --set checkpoint.keep_best=false \
                   --set train.attention_deterministic=true";
const SEGMENTS: &str = "--set precision.reference_every=10 --set precision.reference_steps=4";

fn number(of: &Value, key: &str) -> f64 {
    of[key].as_f64().unwrap_or_else(|| panic!("no {key}: {of}"))
}

/// The mean loss of the steps after `after`.
fn mean(steps: &[Value], after: u64, count: u64) -> f64 {
    let is_in = |step: &&Value| step["step"].as_u64().is_some_and(|n| n > after && n <= after + count);
    steps.iter().filter(is_in).map(|step| number(step, "loss")).sum::<f64>() / count as f64
}

#[test]
fn a_run_with_segments_ends_as_one_without_and_they_are_what_bf16_would_have_made() {
    ends_as_one_without_segments(FP8);
}

/// Loads of experts and the biases of routers, which are state, are those of the run alone.
#[test]
fn a_mixture_with_segments_ends_as_one_without_too() {
    let experts = "--set model.family=dots1 --set experts.count=4 --set experts.ffn_dim=16 --set experts.dense_blocks=[0]";
    ends_as_one_without_segments(&format!("{FP8} {experts} --set experts.bias_rate=0.01"));
}

fn ends_as_one_without_segments(run: &str) {
    let place = Place::new();
    place.train("plain", run);
    let ran = place.train("out", &format!("{run} {SEGMENTS}"));
    let told = place.records("out", "reference");
    assert_eq!(told.iter().map(|line| line["step"].clone()).collect::<Vec<_>>(), [14, 24, 34]);
    let own = place.records("out", "step");
    for segment in &told {
        let after = segment["step"].as_u64().expect("a number") - 4;
        assert_eq!(segment["steps"], 4, "{segment}");
        assert_eq!(number(segment, "loss"), mean(&own, after, 4), "{segment}");
        let gap = number(segment, "gap");
        assert!(gap != 0.0 && gap.abs() < 0.02, "{segment}");
        // A run that continues from there in bf16.
        let name = format!("from{after}");
        place.train(&name, run);
        for step in (after + 10..=40).step_by(10) {
            std::fs::remove_dir_all(place.path(&format!("{name}/checkpoints/step-{step}"))).expect("removed");
        }
        place.train(&name, &format!("{run} --resume --set precision.recipe=bf16"));
        let bf16 = place.records(&name, "step");
        assert_eq!(number(segment, "bf16_loss"), mean(&bf16, after, 4), "{segment}");
    }
    assert!(ran.stdout.contains("\nreference 14/40  loss "), "{}", ran.stdout);
    let page = String::from_utf8(place.read("out/report.html")).expect("text");
    assert!(page.contains("Gap to bf16") && page.contains("over reference segments"));
    assert!(!String::from_utf8(place.read("plain/report.html")).expect("text").contains("Gap to bf16"));
    // All but the segments themselves.
    let text = String::from_utf8(place.read("out/metrics.jsonl")).expect("text");
    let others: Vec<&str> = text.lines().filter(|line| !line.contains("\"kind\":\"reference\"")).collect();
    place.write("out/metrics.jsonl", (others.join("\n") + "\n").as_bytes());
    assert_same_end(&place, "plain", "out");
}

#[test]
fn a_segment_ends_with_the_run() {
    let place = Place::new();
    place.train("out", &format!("{FP8} {SEGMENTS} --set train.steps=22"));
    let told = place.records("out", "reference");
    let shown: Vec<_> = told.iter().map(|line| (line["step"].clone(), line["steps"].clone())).collect();
    assert_eq!(shown, [(14.into(), 4.into()), (22.into(), 2.into())]);
}

#[test]
fn what_makes_no_sense_is_refused_in_a_line() {
    let place = Place::new();
    place.run(&format!("train run.toml --set precision.recipe=bf16 {SEGMENTS}")).refuses(&[
        "recipe = \"bf16\" has no FP8, so `reference_every` would change nothing",
        "--set 'precision.reference_every=0'",
    ]);
    let long = format!("{FP8} {SEGMENTS} --set precision.reference_steps=11");
    place
        .run(&format!("train run.toml {long}"))
        .refuses(&["reference_steps = 11 is more than reference_every = 10", "lower reference_steps"]);
    place.run("train run.toml --set precision.reference_steps=0").refuses(&["reference_steps"]);
}

#[test]
fn a_plan_counts_them() {
    let place = Place::new();
    let total = |sets: &str| {
        let said = place.run(&format!("plan run.toml --set train.device=cpu {FP8} {sets}")).succeeds().stdout;
        let line = said.lines().find(|line| line.starts_with("total ")).expect("a total").to_owned();
        let bytes: u64 =
            line.split_whitespace().nth(1).expect("bytes").replace(',', "").parse().expect("a number");
        (bytes, said)
    };
    let (plain, said) = total("");
    assert!(!said.contains("reference"), "{said}");
    let (with, said) = total(SEGMENTS);
    assert!(with > plain, "{said}");
    for word in [
        "\nreference                   every 10 steps, 4 of them in bf16 too\n",
        "\nreference steps, in bf16 ",
        "\na reference segment copies ",
    ] {
        assert!(said.contains(word), "{word}: {said}");
    }
}
