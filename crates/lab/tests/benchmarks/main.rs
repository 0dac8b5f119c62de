//! docs/benchmarks.md is up to date, and the rules by which it is generated.

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
fn the_page_is_up_to_date() {
    let Benchmarks { page, pictures } = benchmarks(&root().join("benches")).unwrap_or_else(|e| panic!("{e}"));
    let (path, folder) = (root().join("docs/benchmarks.md"), root().join("docs/benchmarks"));
    if std::env::var_os("XTRAIN_UPDATE_DOCS").is_some() {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(&path, &page).expect("written");
        for (name, svg) in &pictures {
            fs::write(folder.join(name), svg).expect("written");
        }
    }
    let stale = "is out of date; run this test with XTRAIN_UPDATE_DOCS=1 to rewrite it";
    assert!(fs::read_to_string(&path).unwrap_or_default() == page, "docs/benchmarks.md {stale}");
    let there: BTreeSet<String> = fs::read_dir(&folder)
        .expect("docs/benchmarks")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(there, pictures.iter().map(|(name, _)| name.clone()).collect(), "docs/benchmarks {stale}");
    for (name, svg) in &pictures {
        assert!(
            fs::read_to_string(folder.join(name)).unwrap_or_default() == *svg,
            "docs/benchmarks/{name} {stale}"
        );
        assert!(svg.len() < 32 << 10, "{name} is not small");
    }
}

/// The page generated from these files.
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
    let Benchmarks { page, pictures } = page_of(BARS, &files).expect("a page");
    assert!(page.contains("| A | tok/s | 24 | p | 2.000 | at least 1.5 | met |"), "{page}");
    assert!(page.contains("| B | tok/s | 12 | p | 1.200 | at least 1.1 | met |"), "{page}");
    assert!(page.contains("| C | tok/s |  |  |  | at least 1 | not measured yet |"), "{page}");
    assert!(page.contains("\n## other\n") && page.contains("| D | peak GiB | not measured yet |"), "{page}");
    assert!(
        page.contains("| A | tok/s | 7 | p | 14 | 0.500 | 3 |"),
        "another device has a row of its own: {page}"
    );
    for replaced in ["| A | tok/s | 10 |", "| A | tok/s | 20 |"] {
        assert!(!page.contains(replaced), "{page}");
    }
    assert!(page.contains("2026-01-01, NVIDIA X, driver 580, commit abc: `bench | 24`"), "{page}");
    assert!(page.contains("| a model | bf16 | 24 | the best | 12 | 2.00 | – | NVIDIA X |"), "{page}");
    assert!(page.contains("| another | fp32 | not measured yet | none |"), "{page}");
    let (name, svg) = &pictures[0];
    assert!(name == "bars.svg" && svg.contains(">A, tok/s<") && svg.contains(">2.00<"), "{svg}");
    assert!(page.contains("(benchmarks/bars.svg)"));
}

#[test]
fn a_missed_target_is_marked() {
    let new = line("A", 14.9, "p", 10.0, "NVIDIA X");
    let page = page_of(BARS, &[("2026-01-02-x-step.jsonl", new.as_str())]).expect("a page").page;
    assert!(page.contains("| A | tok/s | 14.9 | p | 1.490 | at least 1.5 | **missed by 0.7%** |"), "{page}");
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
