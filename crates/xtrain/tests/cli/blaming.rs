//! `xtrain blame`: groups of GEMMs whose return to bf16 brings a step nearer to bf16.

use crate::place::Place;
use serde_json::Value;

/// Sizes that FP8 takes.
const FP8: &str = "--set train.steps=4 --set precision.recipe=fp8-current --set precision.skip_slower=[] --set data.seq_len=32 --set model.ffn_dim=32";

fn json(place: &Place, arguments: &str) -> Value {
    let ran = place.run(&format!("blame {arguments} --json")).succeeds();
    serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.stdout))
}

fn number(of: &Value, key: &str) -> f64 {
    of[key].as_f64().unwrap_or_else(|| panic!("no {key}: {of}"))
}

fn list<'a>(found: &'a Value, key: &str) -> &'a [Value] {
    found[key].as_array().expect("a list")
}

#[test]
fn every_gemm_returns_to_bf16_and_the_shares_of_blame_add_up() {
    let place = Place::new();
    place.train("out", FP8);
    let before = place.contents("out");
    let found = json(&place, "out --batches 2 --by-block 2");
    assert_eq!(
        (&found["step"], &found["casts"], &found["batches"]),
        (&4.into(), &"fp8-current".into(), &2.into())
    );
    let groups = list(&found, "groups");
    // Four layers of three GEMMs.
    assert_eq!(groups.len(), 12, "{found}");
    let all = number(&found["all"], "gradient_error");
    assert!((1e-2..0.3).contains(&all), "{found}");
    let blames: Vec<f64> = groups.iter().map(|group| number(group, "blame")).collect();
    assert!(blames.is_sorted_by(|a, b| a >= b), "{blames:?}");
    assert!((0.7..1.3).contains(&blames.iter().sum::<f64>()), "{blames:?}");
    let operations: f64 = groups.iter().map(|group| number(group, "operations")).sum();
    assert!((operations - 1.0).abs() < 1e-9, "{operations}");
    // The two worst, in two blocks each, which together are to blame for what they are together.
    let blocks = list(&found, "blocks");
    assert_eq!(blocks.len(), 4, "{found}");
    for group in &groups[..2] {
        let of = |block: &&Value| block["site"] == group["site"] && block["product"] == group["product"];
        let blame: f64 = blocks.iter().filter(of).map(|block| number(block, "blame")).sum();
        assert!((blame - number(group, "blame")).abs() < 0.15, "{blame}: {group}");
    }
    assert!(place.contents("out") == before, "a search changed the run");
}

#[test]
fn a_head_in_fp8_is_put_back_too() {
    let place = Place::new();
    let head = format!("{FP8} --set precision.head=fp8 --set model.vocab_size=288");
    place.train("out", &head);
    let found = json(&place, "out --by-block 15");
    let groups = list(&found, "groups");
    assert_eq!(groups.len(), 15, "{found}");
    let of_head: Vec<_> = groups.iter().filter(|group| group["site"] == "lm_head").collect();
    let mut patterns: Vec<_> = of_head.iter().filter_map(|group| group["pattern"].as_str()).collect();
    patterns.sort_unstable();
    assert_eq!(patterns, ["lm_head:dgrad", "lm_head:fprop", "lm_head:wgrad"]);
    assert!(of_head.iter().all(|group| group["block"].is_null()), "{found}");
    // The error of its logits is small compared with that of their gradients.
    let blame: f64 = of_head.iter().map(|group| number(group, "blame")).sum();
    assert!((0.1..1.1).contains(&blame), "{found}");
    let operations: f64 = groups.iter().map(|group| number(group, "operations")).sum();
    assert!((operations - 1.0).abs() < 1e-9, "{operations}");
    // It is in no block, and so takes the place of none that is: two blocks of the worst other group.
    assert_eq!(list(&found, "blocks").len(), 24, "{found}");
    assert_eq!(groups[0]["site"], "lm_head", "{found}");
    assert_eq!(list(&json(&place, "out --by-block 1"), "blocks").len(), 2);
    place.train(
        "out",
        &format!("{head} --resume --set train.steps=5 --set precision.skip=[\"lm_head:fprop\"]"),
    );
    assert_eq!(list(&json(&place, "out"), "groups").len(), 14);
}

#[test]
fn skip_takes_its_patterns_and_that_gemm_then_has_no_blame() {
    let place = Place::new();
    place.train("out", FP8);
    let found = json(&place, "out");
    let worst = &list(&found, "groups")[0];
    let (pattern, set) = (worst["pattern"].as_str().expect("text"), worst["set"].as_str().expect("text"));
    assert_eq!(set, format!("--set 'precision.skip=[\"{pattern}\"]'"));
    // Goes on with it in bf16.
    place.train("out", &format!("{FP8} --resume --set train.steps=5 --set precision.skip=[\"{pattern}\"]"));
    let without = json(&place, "out");
    assert_eq!(list(&without, "groups").len(), 11, "{without}");
    let error = |of: &Value| number(of, "gradient_error");
    assert!(error(&without["all"]) < error(&found["all"]), "{without}");
    // The step before ran without.
    place.train("other", &format!("{FP8} --set checkpoint.every=4"));
    let on = "--resume --set train.steps=8 --set checkpoint.every=4";
    place.train("other", &format!("{FP8} {on} --set precision.skip=[\"{pattern}\"]"));
    let before = json(&place, "other --step 4");
    assert_eq!((&before["all"], list(&before, "groups").len()), (&found["all"], 12), "{before}");
    let second = list(&without, "groups")[0]["set"].as_str().expect("text").to_owned();
    assert!(second.starts_with(&format!("--set 'precision.skip=[\"{pattern}\", \"")), "{second}");
}

#[test]
fn a_bf16_run_is_searched_under_any_recipe_and_told_in_a_table() {
    let place = Place::new();
    place.train("out", &FP8.replace("fp8-current", "bf16"));
    let ran = place.run("blame out --casts fp8-row").succeeds();
    for said in [
        "step 5, loss in bf16 ",
        "returned from fp8-row",
        "\nnothing ",
        "*.attn.qkv_proj:wgrad",
        // A healthy run: its error is spread over all.
        "nothing is wrong",
        "is normal for FP8",
    ] {
        assert!(ran.stdout.contains(said), "{said}: {}", ran.stdout);
    }
    assert!(!ran.stdout.contains("--set"), "{}", ran.stdout);
    assert_eq!(json(&place, "out --casts fp8-row")["proposed"], Value::Null);
}

#[test]
fn what_has_nothing_in_fp8_is_refused_in_a_line() {
    let place = Place::new();
    // Sizes that FP8 does not take.
    place.train("out", "--set train.steps=2 --set model.dim=24 --set model.ffn_dim=24");
    place.run("blame out").refuses(&["fp8-block leaves all GEMMs", "24 is not a multiple of 16"]);
    place.run("blame nowhere").refuses(&["no folder nowhere"]);
}
