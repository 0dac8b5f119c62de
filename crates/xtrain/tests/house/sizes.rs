//! A short way into the code: sizes of crates, and things that stand in one place.

use super::root;
use super::type_names::sources;
use std::fs;

/// Maximum number of lines of a crate, comments included, tests left out. A crate that outgrows its number is
/// two crates, or says something twice.
const LINES: [(&str, usize); 2] = [("step", 3_600), ("train", 8_000)];

/// Path and code of the files of a crate, without tests at their ends.
fn code(name: &str) -> Vec<(String, String)> {
    let mut files = Vec::new();
    sources(&root().join("crates").join(name).join("src"), &mut files);
    let read = |file: std::path::PathBuf| {
        let text = fs::read_to_string(&file).expect("a file");
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned();
        let place = file.strip_prefix(root()).unwrap_or(&file).display().to_string();
        (place, code)
    };
    files.into_iter().map(read).collect()
}

/// The files of all crates.
fn all_code() -> Vec<(String, String)> {
    let crates = fs::read_dir(root().join("crates")).expect("crates/").map(|entry| entry.expect("an entry"));
    crates.flat_map(|entry| code(&entry.file_name().to_string_lossy())).collect()
}

/// The files in which a line of code satisfies `is_it`.
fn files_with(files: &[(String, String)], is_it: impl Fn(&str) -> bool) -> Vec<&str> {
    let has = |code: &str| code.lines().any(|line| !line.trim_start().starts_with("//") && is_it(line));
    files.iter().filter(|(_, code)| has(code)).map(|(place, _)| place.as_str()).collect()
}

#[test]
fn crates_that_are_read_first_stay_short() {
    for (name, most) in LINES {
        let lines: usize = code(name).iter().map(|(_, code)| code.lines().count()).sum();
        assert!(lines > 1_000 && lines <= most, "crates/{name} has {lines} lines, more than {most}");
    }
}

#[test]
fn a_setting_that_a_run_may_leave_open_stands_in_few_files() {
    let files = all_code();
    // The table of other programs' names for keys is not counted.
    let mut found = files_with(&files, |line| line.contains("recompute_blocks"));
    found.retain(|place| !place.ends_with("elsewhere/aliases.rs"));
    assert!((1..=7).contains(&found.len()), "recompute_blocks in {} files: {found:#?}", found.len());
}

#[test]
fn what_is_decided_once_stands_in_one_file() {
    let files = all_code();
    let of_config: Vec<_> =
        files.iter().filter(|(place, _)| place.starts_with("crates/config/src/section/")).cloned().collect();
    assert!(files_with(&of_config, |line| line.contains("x-aliases")).is_empty());
    let of_train: Vec<_> =
        files.iter().filter(|(place, _)| place.starts_with("crates/train/")).cloned().collect();
    assert_eq!(
        files_with(&of_train, |line| line.contains(" locate(") || line.contains("(locate(")),
        ["crates/train/src/paths.rs"]
    );
    for name in ["Shard", "Reduce", "Gather"] {
        let found = files_with(&files, |line| line.trim() == format!("pub enum {name} {{"));
        assert_eq!(found, ["crates/program/src/parallel.rs"], "{name}");
    }
}

#[test]
fn functions_are_named_with_verbs() {
    let files = all_code();
    let named =
        |line: &str| ["fn of(", "fn of<", "fn at(", "fn at<"].iter().any(|start| line.contains(start));
    let found = files_with(&files, named);
    assert!(found.len() <= 10, "functions named `of` or `at`: {found:#?}");
}
