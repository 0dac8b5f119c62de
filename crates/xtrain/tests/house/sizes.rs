//! A short way into the code: sizes of crates, of what is read first and of what is asserted, and things that
//! stand in one place. `pages.rs` has the sizes of pages, `tour.rs` those of the tour's stops:
//! `cargo test --workspace --test house --test pages --test tour` checks all of them.

use super::type_names::sources;
use super::{files_of_crates, root};
use std::fs;

/// Maximum number of lines of a crate, comments included, tests left out. A crate that outgrows its number is
/// two crates, or says something twice. Ranks that share experts have taken 50 and 100 lines, pipelines 450
/// in `step`: its layout, its update and its learner know of stages. Frozen weights have taken 60 in `step`,
/// and folders of adapters 620 in `train`.
const LINES: [(&str, usize); 2] = [("step", 4_470), ("train", 8_900)];

/// Maximum number of lines of the smallest program that trains.
const MINIMAL: usize = 150;

/// Maximum number of fields of an open run.
const FIELDS_OF_RUN: usize = 14;

/// Maximum number of lines that assert a long text. The prose of messages stands in catalogues
/// (`tests/messages.rs`).
const LONG_TEXTS: usize = 108;

/// Characters of the shortest text that counts as long.
const LONG: usize = 25;

/// Maximum number of files that name a setting which a run may leave open: those that declare, check, choose
/// or read it, and the table of other programs' names.
const FILES_OF_A_SETTING: usize = 7;

/// Maximum number of functions that are named `of` or `at`.
const WITHOUT_VERBS: usize = 10;

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

/// The lines of code that satisfy `is_it`, each with the path of its file.
fn lines_with(files: &[(String, String)], is_it: impl Fn(&str) -> bool) -> Vec<(&str, &str)> {
    let lines = files.iter().flat_map(|(place, code)| code.lines().map(|line| (place.as_str(), line.trim())));
    lines.filter(|(_, line)| !line.starts_with("//") && is_it(line)).collect()
}

/// The files in which a line of code satisfies `is_it`.
fn files_with(files: &[(String, String)], is_it: impl Fn(&str) -> bool) -> Vec<&str> {
    let mut places: Vec<_> = lines_with(files, is_it).into_iter().map(|(place, _)| place).collect();
    places.dedup();
    places
}

/// The files of `files` below a folder, which must be there.
fn below(files: &[(String, String)], folder: &str) -> Vec<(String, String)> {
    let found: Vec<_> = files.iter().filter(|(place, _)| place.starts_with(folder)).cloned().collect();
    assert!(found.len() > 5, "{folder} has {} files: name the folder that has its content now", found.len());
    found
}

/// True if the line begins to define an enum of this name, of any visibility.
fn defines_enum(line: &str, name: &str) -> bool {
    let rest =
        line.trim().split_once("enum ").filter(|(before, _)| before.is_empty() || before.starts_with("pub"));
    rest.and_then(|(_, rest)| rest.split([' ', '<']).next()).is_some_and(|defined| defined == name)
}

/// The number of fields of a struct that begins a line of this source.
fn fields(source: &str, name: &str) -> usize {
    let (_, rest) = source.split_once(&format!("\nstruct {name} {{\n")).expect("the struct");
    let (body, _) = rest.split_once("\n}\n").expect("its end");
    let is_field = |line: &&str| !line.trim_start().starts_with(['/', '#']) && line.contains(": ");
    body.lines().filter(is_field).count()
}

#[test]
fn crates_that_are_read_first_stay_short() {
    for (name, most) in LINES {
        let lines: usize = code(name).iter().map(|(_, code)| code.lines().count()).sum();
        assert!(lines > 1_000 && lines <= most, "crates/{name} has {lines} lines, more than {most}");
    }
}

#[test]
fn the_smallest_program_that_trains_stays_short() {
    let text = fs::read_to_string(root().join("crates/step/examples/minimal.rs")).expect("the example");
    let lines = text.lines().count();
    assert!((50..=MINIMAL).contains(&lines), "minimal.rs has {lines} lines, more than {MINIMAL}");
}

#[test]
fn an_open_run_has_few_fields() {
    let text = fs::read_to_string(root().join("crates/train/src/run/mod.rs")).expect("the file of `Run`");
    let count = fields(&text, "Run");
    assert!((5..=FIELDS_OF_RUN).contains(&count), "`Run` has {count} fields, more than {FIELDS_OF_RUN}");
}

#[test]
fn few_tests_assert_prose() {
    let rust = files_of_crates().into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    let is_long = |rest: &str| rest.split('"').next().unwrap_or_default().chars().count() >= LONG;
    let mut count = 0;
    for path in rust {
        let text = fs::read_to_string(&path).expect("a source");
        let lines = text.lines().filter(|line| line.split("contains(\"").skip(1).any(is_long));
        count += lines.count();
    }
    assert!(count > 0, "no long text was found: are assertions still read right?");
    assert!(
        count <= LONG_TEXTS,
        "{count} lines assert {LONG} or more characters: put the prose in a catalogue"
    );
}

#[test]
fn a_setting_that_a_run_may_leave_open_stands_in_few_files() {
    let files = all_code();
    let found = files_with(&files, |line| line.contains("recompute_blocks"));
    let is_few = (1..=FILES_OF_A_SETTING).contains(&found.len());
    assert!(is_few, "recompute_blocks in {} files: {found:#?}", found.len());
}

#[test]
fn what_is_decided_once_stands_in_one_file() {
    let files = all_code();
    let of_config = below(&files, "crates/config/src/section/");
    assert!(files_with(&of_config, |line| line.contains("x-aliases")).is_empty());
    let of_train = below(&files, "crates/train/src/");
    assert_eq!(
        files_with(&of_train, |line| line.contains(" locate(") || line.contains("(locate(")),
        ["crates/train/src/paths.rs"]
    );
    for name in ["Shard", "Reduce", "Gather"] {
        // cuDNN's kinds of a reduction are something else.
        let mut found = files_with(&files, |line| defines_enum(line, name));
        found.retain(|place| *place != "crates/cuda/src/dnn/graph.rs");
        assert_eq!(found, ["crates/program/src/parallel.rs"], "{name}");
    }
}

#[test]
fn functions_are_named_with_verbs() {
    let files = all_code();
    let is_without =
        |line: &str| ["fn of(", "fn of<", "fn at(", "fn at<"].iter().any(|start| line.contains(start));
    let found = lines_with(&files, is_without);
    assert!(found.len() <= WITHOUT_VERBS, "functions named `of` or `at`: {found:#?}");
}

#[test]
fn enums_and_fields_are_found() {
    for line in [
        "pub enum Shard {",
        "enum Shard {",
        "    pub(crate) enum Shard<T> {",
        "pub(in crate::a) enum Shard {",
    ] {
        assert!(defines_enum(line, "Shard"), "{line}");
    }
    assert!(!defines_enum("pub enum Shards {", "Shard") && !defines_enum("use enum Shard", "Shard"));
    let source = "\nstruct Run {\n    /// What it: is.\n    #[rest: 1]\n    a: A<B>,\n    pub b: C,\n}\n";
    assert_eq!(fields(source, "Run"), 2);
}
