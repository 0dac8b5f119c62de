//! All that the program prints passes `terminal/printing.rs`, where control characters are escaped.

use std::fs;
use std::path::{Path, PathBuf};

/// Files that may write to standard output or standard error, and why.
const WRITERS: [(&str, &str); 5] = [
    ("xtrain/src/terminal/printing.rs", "escapes"),
    ("xtrain/src/terminal.rs", "logs with escapes, and draws bars with escaped names"),
    ("xtrain/src/refused.rs", "a fixed line, without allocating"),
    ("distributed/src/launch/output.rs", "passes on what ranks have printed; the log of a supervisor"),
    ("distributed/src/launch/mod.rs", "a line with a rank and a signal"),
];

/// Calls that write there.
const CALLS: [&str; 7] = ["println!", "eprintln!", "print!(", "eprint!(", "dbg!(", "stdout()", "stderr()"];

/// Crates that are part of the program.
const CRATES: [&str; 14] = [
    "checkpoint",
    "config",
    "cuda",
    "data",
    "distributed",
    "lab",
    "model",
    "ops",
    "program",
    "report",
    "runtime",
    "tensor",
    "train",
    "xtrain",
];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The sources below `folder`, each with its path from `crates/`, without tests and comments.
fn sources(folder: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            found.extend(sources(&path));
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let text = fs::read_to_string(&path).expect("a source");
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            let inside = path.strip_prefix(crates()).expect("a path below crates/").display().to_string();
            found.push((inside, lines.collect::<Vec<_>>().join("\n")));
        }
    }
    found
}

/// True if `code` calls `call`, and not something whose name ends like it.
fn calls(code: &str, call: &str) -> bool {
    let is_part_of_a_name = |before: &str| before.ends_with(|c: char| c == '_' || c.is_alphanumeric());
    code.match_indices(call).any(|(at, _)| !is_part_of_a_name(&code[..at]))
}

#[test]
fn only_the_listed_files_write_to_standard_output_and_standard_error() {
    let all: Vec<(String, String)> =
        CRATES.iter().flat_map(|name| sources(&crates().join(name).join("src"))).collect();
    assert!(all.len() > 300, "only {} sources were found", all.len());
    let mut writing: Vec<&str> = all
        .iter()
        .filter(|(_, code)| CALLS.iter().any(|call| calls(code, call)))
        .map(|(file, _)| file.as_str())
        .collect();
    let mut listed = WRITERS.map(|(file, _)| file);
    writing.sort_unstable();
    listed.sort_unstable();
    assert_eq!(
        writing, listed,
        "print with terminal::print, print_generated, print_marked, print_json or print_error"
    );
}

#[test]
fn the_program_prints_paths_with_escapes() {
    let [(helper, _), ..] = WRITERS;
    for (file, code) in sources(&crates().join("xtrain/src")) {
        assert!(file == helper || !code.contains(".display()"), "{file}: a path is printed by shown_path");
    }
}
