//! `xtrain compare`: the gap between runs, as text and as curves, for runs of all kinds.

use crate::fragments::assert_says;
use crate::place::Place;
use serde_json::Value;

const SHORT: &str = "--set train.steps=20 --set log.every=1";

fn json(place: &Place, arguments: &str) -> Value {
    let ran = place.run(&format!("compare {arguments} --json")).succeeds();
    serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.stdout))
}

#[test]
fn recipes_are_set_against_the_seeds_of_a_baseline() {
    let place = Place::new();
    for seed in 1..=3 {
        place.train(
            &format!("bf16-{seed}"),
            &format!("{SHORT} --set precision.recipe=bf16 --set train.seed={seed}"),
        );
    }
    for seed in 1..=2 {
        place.train(
            &format!("fp8-{seed}"),
            &format!("{SHORT} --set precision.recipe=fp8-current --set train.seed={seed}"),
        );
    }
    let runs = "fp8-1 fp8-2 --baseline bf16-1 bf16-2 bf16-3 --last 10";
    let found = json(&place, runs);
    assert_eq!(found["baseline"]["recipe"], "bf16");
    assert_eq!(
        found["compared"].as_array().map(Vec::len),
        Some(1),
        "seeds of one recipe are one row: {found}"
    );
    let row = &found["compared"][0];
    assert_eq!((&row["recipe"], &row["bar_percent"]), (&"fp8-current".into(), &0.5.into()));
    let training = &row["training"];
    assert_eq!(
        (&training["from"], &training["to"], &training["paired"]),
        (&11.into(), &20.into(), &2.into())
    );
    for figure in ["loss", "baseline_loss", "gap_percent", "gap_interval_percent", "seed_spread_percent"] {
        assert!(training[figure].as_f64().is_some_and(f64::is_finite), "{figure}: {training}");
    }
    assert!(row["validation"]["gap_percent"].is_f64(), "{row}");

    let ran = place.run(&format!("compare {runs}")).succeeds();
    for said in
        ["fp8-current", "bf16-1 and 2 more", "11-20", "0.5%", "validation", "page: fp8-1/compare.html"]
    {
        assert!(ran.stdout.contains(said), "{said}: {}", ran.stdout);
    }
    let page = String::from_utf8(place.read("fp8-1/compare.html")).expect("text");
    for part in ["Gap to the baseline", "class=\"band c0\"", "bar 0.5%"] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn the_first_run_is_the_baseline_where_none_is_named() {
    let place = Place::new();
    place.train("a", SHORT);
    place.train("b", &format!("{SHORT} --set optimizer.lr=1e-3"));
    let ran = place.run("compare a b --out gap.html").succeeds();
    assert_says("compare, another key", &ran.stdout);
    assert!(place.exists("gap.html") && !place.exists("b/compare.html"));
    assert_eq!(json(&place, "a b")["compared"][0]["training"]["paired"], 1);
    place.run("compare a").refuses(&["nothing to compare", "--baseline"]);
    place.run("compare a --baseline a").refuses(&["nothing to compare"]);
    // A shell's star includes the baseline too.
    assert_eq!(json(&place, "a b --baseline a")["compared"][0]["runs"][0], "b");
    place.write("notes.txt", b"mine");
    place.run("compare a b --out notes.txt").refuses(&["notes.txt", "--overwrite"]);
    assert_eq!(place.read("notes.txt"), b"mine");
}

#[test]
fn runs_of_one_seed_are_unclear_and_other_tokenizers_are_compared_in_bits_per_byte() {
    let place = Place::new();
    place.train("bf16", &format!("{SHORT} --set precision.recipe=bf16"));
    place.train("fp8", &format!("{SHORT} --set precision.recipe=fp8-current"));
    let found = json(&place, "bf16 fp8");
    let training = &found["compared"][0]["training"];
    let gap = training["gap_percent"].as_f64().expect("a gap");
    assert_eq!(training["inside_bar"], if gap > 1.5 { false.into() } else { Value::Null }, "{training}");
    let ran = place.run("compare bf16 fp8").succeeds();
    assert!(
        gap > 1.5 || ran.stdout.contains("unclear") && ran.stdout.contains("a single seed"),
        "{}",
        ran.stdout
    );

    place.train("chars", &format!("{SHORT} --set data.tokenizer=chars"));
    let found = json(&place, "bf16 chars");
    let row = &found["compared"][0];
    assert_eq!((&row["training"], &row["validation"]["unit"]), (&Value::Null, &"bits/byte".into()), "{row}");
    let ran = place.run("compare bf16 chars").succeeds();
    for said in ["validation, bits/byte", "note: chars: the tokenizer differs from the baseline's"] {
        assert!(ran.stdout.contains(said), "{said}: {}", ran.stdout);
    }
    place.run("report bf16 chars --out both.html").succeeds();
    let page = String::from_utf8(place.read("both.html")).expect("text");
    assert!(page.contains("The tokenizers differ") && page.contains(">Bits per byte</th>"));
}

#[test]
fn runs_that_are_short_damaged_or_none_are_told_and_not_a_crash() {
    let place = Place::new();
    place.train("whole", SHORT);
    place.train("short", "--set train.steps=9 --set log.every=1");
    let found = json(&place, "whole short");
    assert_eq!(found["compared"][0]["training"]["to"], 9, "{found}");

    let metrics = String::from_utf8(place.read("whole/metrics.jsonl")).expect("text");
    let torn: String = metrics
        .lines()
        .enumerate()
        .map(|(n, line)| if n == 3 { "{]\n".into() } else { format!("{line}\n") })
        .collect();
    place.train("torn", SHORT);
    place.write("torn/metrics.jsonl", format!("{torn}{{\"kind\":\"st").as_bytes());
    let ran = place.run("compare whole torn").succeeds();
    assert_says("compare, a damaged line", &ran.stdout);
    ran.is_readable();

    place.write("torn/config.toml", b"\xff nothing");
    place.write("torn/metrics.jsonl", b"");
    let ran = place.run("compare whole torn").succeeds();
    for said in ["torn: no step has been reported yet", "configuration cannot be read"] {
        assert!(ran.stdout.contains(said), "{said}: {}", ran.stdout);
    }
    place.write("other/file", b"");
    place.run("compare whole other").refuses(&["other", "metrics.jsonl"]);
    place.run("compare whole nowhere").refuses(&["nowhere"]);
    place.run("compare whole short --last 0").refuses_in_lines();
}
