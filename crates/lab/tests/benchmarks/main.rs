//! docs/benchmarks.md and docs/benchmarks are up to date, and the rules by which they are generated.

mod page;
mod picture;
mod results;

use page::{Benchmarks, benchmarks};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_pages_are_up_to_date() {
    let Benchmarks { overview, files } =
        benchmarks(&root().join("benches")).unwrap_or_else(|e| panic!("{e}"));
    let (path, folder) = (root().join("docs/benchmarks.md"), root().join("docs/benchmarks"));
    if std::env::var_os("XTRAIN_UPDATE_DOCS").is_some() {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(&path, &overview).expect("written");
        for (name, text) in &files {
            fs::write(folder.join(name), text).expect("written");
        }
    }
    let stale = "is out of date; run this test with XTRAIN_UPDATE_DOCS=1 to rewrite it";
    assert!(fs::read_to_string(&path).unwrap_or_default() == overview, "docs/benchmarks.md {stale}");
    let there: BTreeSet<String> = fs::read_dir(&folder)
        .expect("docs/benchmarks")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(there, files.iter().map(|(name, _)| name.clone()).collect(), "docs/benchmarks {stale}");
    for (name, text) in &files {
        assert!(
            fs::read_to_string(folder.join(name)).unwrap_or_default() == *text,
            "docs/benchmarks/{name} {stale}"
        );
        assert!(text.len() < 32 << 10, "{name} is not small");
    }
}

/// The pages generated from these files.
fn page_of(bars: &str, files: &[(&str, &str)]) -> Result<Benchmarks, String> {
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir(folder.path().join("results")).expect("a folder");
    fs::write(folder.path().join("bars.toml"), bars).expect("written");
    for (name, text) in files {
        fs::write(folder.path().join("results").join(name), text).expect("written");
    }
    benchmarks(folder.path()).map_err(|e| e.to_string())
}

fn line(work: &str, value: f64, peer: &str, peer_value: f64, card: &str) -> String {
    let ratio = value / peer_value;
    format!(
        r#"{{"work": "{work}", "metric": "tok/s", "value": {value}, "peer": "{peer}", "peer_value": {peer_value}, "ratio": {ratio:.3}, "card": "{card}", "driver": "580", "command": "bench | {value}", "commit": "abc", "date": "2026-01-01"}}"#
    ) + "\n"
}

const BARS: &str = r#"
card = "NVIDIA X"
[[summary]]
model = "a model"
precision = "bf16"
work = "A"
peer = "the best"
[[summary]]
model = "another"
precision = "fp32"
work = "C"
peer = "none"
[[topic]]
name = "step"
title = "Steps"
[[bar]]
topic = "step"
work = "A"
metric = "tok/s"
at_least = 1.5
[[bar]]
topic = "step"
work = "B"
metric = "tok/s"
at_least = 1.1
[[bar]]
topic = "step"
work = "C"
metric = "tok/s"
at_least = 1.0
[[bar]]
topic = "other"
work = "D"
metric = "peak GiB"
"#;

#[test]
fn the_newest_file_counts_and_rows_without_a_result_are_marked() {
    let old = line("A", 10.0, "p", 10.0, "NVIDIA X") + &line("A", 10.0, "q", 10.0, "NVIDIA X");
    let new = line("A", 20.0, "p", 16.0, "NVIDIA X")
        + &line("B", 12.0, "p", 10.0, "NVIDIA X")
        + &line("A", 24.0, "p", 12.0, "NVIDIA X");
    let elsewhere = line("A", 7.0, "p", 14.0, "CPU");
    let files = [
        ("2026-01-01-x-step.jsonl", old.as_str()),
        ("2026-01-02-x-step.jsonl", new.as_str()),
        ("2026-01-03-cpu-step.jsonl", elsewhere.as_str()),
    ];
    let Benchmarks { overview, files } = page_of(BARS, &files).expect("pages");
    let file = |name: &str| &files.iter().find(|(n, _)| n == name).expect("a file").1;
    let (step, other) = (file("step.md"), file("other.md"));
    assert!(step.contains("|A|tok/s|24|\"|12|2.000|at least 1.5: met|1:3|"), "{step}");
    assert!(step.contains("|B|tok/s|12|p|10|1.200|at least 1.1: met|1:2|"), "{step}");
    assert!(step.contains("|C|tok/s|not measured yet|"), "{step}");
    assert!(overview.contains("|C|tok/s||||at least 1|not measured yet|"), "{overview}");
    assert!(overview.contains("2 of 3 targets are met") && !overview.contains("|A|tok/s|"), "{overview}");
    assert!(overview.contains("|[Steps](benchmarks/step.md)|3|2 of 3 met|"), "{overview}");
    assert!(other.starts_with("# other\n") && other.contains("|D|peak GiB|not measured yet|"), "{other}");
    assert!(step.contains("|A|tok/s|7|\"|14|0.500||2:1|"), "another device has a row of its own: {step}");
    for replaced in ["|A|tok/s|10|", "|A|tok/s|20|"] {
        assert!(!step.contains(replaced), "{step}");
    }
    let source = "1. [2026-01-02-x-step.jsonl](../../benches/results/2026-01-02-x-step.jsonl):\n   \
                  NVIDIA X; commit abc; `bench`";
    assert!(step.contains(source), "{step}");
    assert!(overview.contains("|a model|bf16|24|the best|12|2.00|–|NVIDIA X|"), "{overview}");
    assert!(overview.contains("|another|fp32|not measured yet|none|"), "{overview}");
    let svg = file("bars.svg");
    assert!(svg.contains(">A, tok/s<") && svg.contains(">2.00<"), "{svg}");
    assert!(overview.contains("(benchmarks/bars.svg)"));
}

#[test]
fn a_missed_target_is_marked() {
    let new = line("A", 14.9, "p", 10.0, "NVIDIA X");
    let pages = page_of(BARS, &[("2026-01-02-x-step.jsonl", new.as_str())]).expect("pages");
    let row = "|A|tok/s|14.9|p|1.490|at least 1.5|**missed by 0.7%**|";
    assert!(pages.overview.contains(row), "{}", pages.overview);
}

#[test]
fn of_older_files_only_results_with_a_target_are_shown_if_a_topic_says_so() {
    let old = line("A", 20.0, "p", 10.0, "NVIDIA X")
        + &line("E", 5.0, "p", 10.0, "NVIDIA X")
        + &line("H", 5.0, "p", 10.0, "NVIDIA X");
    let new = line("F", 6.0, "q", 10.0, "NVIDIA X") + &line("G", 7.0, "q", 10.0, "NVIDIA X");
    let files = [("2026-01-01-x-step.jsonl", old.as_str()), ("2026-01-02-x-step.jsonl", new.as_str())];
    let bars = BARS.replace("title = \"Steps\"", "title = \"Steps\"\nnewest_files = 1");
    let pages = page_of(&bars, &files).expect("pages");
    let step = &pages.files.iter().find(|(name, _)| name == "step.md").expect("a page").1;
    assert!(step.contains("|A|tok/s|20|p|") && !step.contains("|E|"), "{step}");
    assert!(step.contains("|F|tok/s|6|q|10|0.600||2:1|"), "{step}");
    assert!(step.contains("|G|tok/s|7|\"|10|0.700||2:2|"), "the peer is named once: {step}");
    assert!(step.contains("; not shown here: 2"), "{step}");
}

#[test]
fn inconsistent_results_are_refused_with_their_place() {
    let of = |name: &str, text: &str| page_of(BARS, &[(name, text)]).err().expect("refused");
    let good = line("A", 2.0, "p", 1.0, "NVIDIA X");
    for (name, text, said) in [
        (
            "2026-01-01-x-step.jsonl",
            good.replace("\"ratio\": 2.000", "\"ratio\": 2.2"),
            ":1: the ratio 2.2 is not 2 / 1",
        ),
        ("2026-01-01-x-step.jsonl", good.clone() + "{\n", ":2: "),
        ("2026-01-01-x-step.jsonl", good.replace("\"peer\": \"p\", ", ""), "all three or none"),
        ("2026-01-01-x-step.jsonl", good.replace("\"card\"", "\"cart\""), "missing field `card`"),
        ("x-step.jsonl", good.clone(), "<card>-<topic>"),
    ] {
        let error = of(name, &text);
        assert!(error.contains(name) && error.contains(said), "{error}");
    }
}
