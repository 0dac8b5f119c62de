//! Names of settings and values in other programs that are not just another name of one of our keys.
//!
//! A key's `x-aliases` are the names of the same setting, counted in the same unit; an alias of a value means
//! that value. Everything else has a row here: settings with another meaning or unit, settings that several
//! keys take, and those without a counterpart. A name is in one place only. Options of commands (`--gpus`)
//! are in the command line's own table.
//!
//! A row's name is `name`, in any section and as an option, or `section.name`, in that section, which may
//! be another program's; with `=value`, that value alone: `=false` is also `no`, `off` and `never`, and
//! `=negative` any number below 0. Case, `-` and `_` do not count. In a text, `` `section.key = value` `` is
//! a setting, which messages about a command line turn into `--set`.

mod checkpoints;
mod data;
mod model;
mod parallel;
mod precision;
mod tools;
mod training;
mod tuning;

use super::suggest::plain;
use std::collections::HashMap;
use std::sync::LazyLock;

/// The answer to a name.
#[derive(Debug)]
pub(super) enum Answer {
    /// This setting does the same: `section.key = value`.
    Write(&'static str),
    /// There is none that does, for this reason, with what to do instead.
    Why(&'static str),
}

/// Names that have the same answer.
struct Row {
    names: &'static [&'static str],
    answer: Answer,
}

const fn write(names: &'static [&'static str], setting: &'static str) -> Row {
    Row { names, answer: Answer::Write(setting) }
}

const fn why(names: &'static [&'static str], text: &'static str) -> Row {
    Row { names, answer: Answer::Why(text) }
}

/// All rows.
fn rows() -> impl Iterator<Item = &'static Row> {
    [
        training::ROWS,
        checkpoints::ROWS,
        model::ROWS,
        tuning::ROWS,
        data::ROWS,
        precision::ROWS,
        parallel::ROWS,
        tools::ROWS,
    ]
    .into_iter()
    .flatten()
}

/// The answer to `name`, as rows write it.
pub(super) fn answer(name: &str) -> Option<&'static Answer> {
    static ANSWERS: LazyLock<HashMap<String, &'static Answer>> = LazyLock::new(|| {
        rows().flat_map(|row| row.names.iter().map(move |name| (plain(name), &row.answer))).collect()
    });
    ANSWERS.get(&plain(name)).copied()
}

/// All names with their answers.
#[cfg(test)]
pub(super) fn all() -> impl Iterator<Item = (&'static str, &'static Answer)> {
    rows().flat_map(|row| row.names.iter().map(move |name| (*name, &row.answer)))
}
