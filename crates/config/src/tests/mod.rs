//! Tests of the run file: accepted files, messages, and resolution.

mod adapters;
mod check;
mod elsewhere;
mod json_schema;
mod precision;
mod properties;
mod reference;
mod resolve;
mod round_trip;
mod rules;
mod syntax;

use std::path::Path;

use super::{Config, ConfigErrors, Parsed};

/// The smallest valid file.
const MINIMAL: &str = "\
[model]
dim = 64
layers = 2
heads = 4
[data]
train = \"a.txt\"
[train]
steps = 1000
";

fn parse(text: &str, sets: &[&str]) -> Result<Parsed, ConfigErrors> {
    Config::parse(Path::new("runs/x.toml"), text.as_bytes(), sets)
}

/// The messages for `text`, one per line.
fn errors(text: &str) -> String {
    parse(text, &[]).expect_err("the file is wrong").to_string()
}

/// The minimal configuration with overrides.
fn minimal(sets: &[&str]) -> Parsed {
    parse(MINIMAL, sets).expect("the file is right")
}

/// The messages for the minimal configuration with `lines` under `section`, the text up to the file's name
/// and line removed.
fn errors_with(section: &str, lines: &str) -> Vec<String> {
    let text = match MINIMAL.contains(&format!("[{section}]\n")) {
        true => MINIMAL.replace(&format!("[{section}]\n"), &format!("[{section}]\n{lines}\n")),
        false => format!("{MINIMAL}[{section}]\n{lines}\n"),
    };
    let errors = parse(&text, &[]).expect_err("the file is wrong");
    errors.errors().iter().map(|error| error.message.clone()).collect()
}
