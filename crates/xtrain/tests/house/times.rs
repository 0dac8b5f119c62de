//! Tests that depend on the speed of a machine: a loaded one misses an upper bound of less than a second.

use super::files_of_crates;
use std::fs;

/// Upper bounds of a time, as code writes them before a number, and the number's units in a second.
const BOUNDS: [(&str, f64); 16] = [
    (".as_nanos() <", 1e9),
    (".as_micros() <", 1e6),
    (".as_millis() <", 1e3),
    (".as_secs() <", 1.0),
    (".as_secs_f32() <", 1.0),
    (".as_secs_f64() <", 1.0),
    ("< Duration::from_nanos(", 1e9),
    ("<= Duration::from_nanos(", 1e9),
    ("< Duration::from_micros(", 1e6),
    ("<= Duration::from_micros(", 1e6),
    ("< Duration::from_millis(", 1e3),
    ("<= Duration::from_millis(", 1e3),
    ("< Duration::from_secs_f32(", 1.0),
    ("<= Duration::from_secs_f32(", 1.0),
    ("< Duration::from_secs_f64(", 1.0),
    ("<= Duration::from_secs_f64(", 1.0),
];

/// True if the line has an upper bound of a time that is not a literal of at least a second.
fn is_short(line: &str) -> bool {
    BOUNDS.iter().any(|(start, per_second)| {
        line.split(start).skip(1).any(|rest| {
            let rest = rest.trim_start_matches(['=', ' ']);
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(rest.len());
            let number: Result<f64, _> = rest[..end].replace('_', "").parse();
            number.is_ok_and(|number| number / per_second < 1.0) || end == 0
        })
    })
}

#[test]
fn no_test_asserts_that_something_takes_less_than_a_second() {
    let mut found = Vec::new();
    for path in files_of_crates().into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs")) {
        // This file.
        if path.ends_with("tests/house/times.rs") {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source file");
        let short = text.lines().enumerate().filter(|(_, line)| is_short(line));
        found.extend(short.map(|(n, line)| format!("{}:{}: {}", path.display(), n + 1, line.trim())));
    }
    assert!(found.is_empty(), "wait for a channel or count instead:\n{}", found.join("\n"));
}

#[test]
fn upper_bounds_of_less_than_a_second_are_found_in_each_form() {
    for line in [
        "assert!(since.elapsed() < Duration::from_millis(200));",
        "assert!(since.elapsed() <= Duration::from_secs_f64(0.5), \"slow\");",
        "assert!(since.elapsed().as_millis() < 900);",
        "assert!(since.elapsed().as_millis() <= LIMIT);",
        "assert!(since.elapsed().as_secs_f64() < 0.25 && is_there);",
        "assert!(since.elapsed().as_micros() < 10_000);",
    ] {
        assert!(is_short(line), "{line}");
    }
    for line in [
        "assert!(since.elapsed() < Duration::from_secs(6));",
        "assert!(since.elapsed().as_millis() < 30_000);",
        "assert!(since.elapsed().as_secs_f64() < 2.5);",
        "assert!(since.elapsed() > Duration::from_millis(20));",
        "thread::sleep(Duration::from_millis(500));",
    ] {
        assert!(!is_short(line), "{line}");
    }
}
