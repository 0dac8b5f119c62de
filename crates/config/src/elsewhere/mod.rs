//! Names of settings and values in other programs.
//!
//! `aliases` is the table of names that are just another name of one of our sections, keys or values. The
//! other tables hold everything else: settings with another meaning or unit, settings that several keys take,
//! and those without a counterpart. A name is in one place only. Options of commands (`--gpus`) are in the
//! command line's own table.
//!
//! In the other tables a row's name is `name`, in any section and as an option, or `section.name`, in that
//! section, which may be another program's; with `=value`, that value alone: `=false` is also `no`, `off` and
//! `never`, and `=negative` any number below 0. Case, `-` and `_` do not count. In a text,
//! `` `section.key = value` `` is a setting, which messages about a command line turn into `--set`.

mod aliases;
mod checkpoints;
mod data;
mod model;
mod parallel;
mod precision;
mod tools;
mod training;
mod tuning;

use std::collections::HashMap;
use std::sync::LazyLock;
use xtrain_checkpoint::suggest::plain;

/// The answer to a name.
#[derive(Debug)]
pub(super) enum Answer {
    /// This setting does the same: `section.key = value`.
    Write(&'static str),
    /// There is none that does, for this reason, with what to do instead.
    Why(&'static str),
}

/// Names that have the same answer.
struct AliasRow {
    names: &'static [&'static str],
    answer: Answer,
}

const fn write(names: &'static [&'static str], setting: &'static str) -> AliasRow {
    AliasRow { names, answer: Answer::Write(setting) }
}

const fn why(names: &'static [&'static str], text: &'static str) -> AliasRow {
    AliasRow { names, answer: Answer::Why(text) }
}

/// Aliases of `name`, which is a `section`, `section.key` or `section.key=value` of the run file.
pub(super) fn aliases(name: &str) -> impl Iterator<Item = &'static str> + use<> {
    let row = aliases::ROWS.iter().find(|(own, _)| *own == name);
    row.into_iter().flat_map(|(_, aliases)| aliases.split(' '))
}

/// All rows of the tables with answers.
fn rows() -> impl Iterator<Item = &'static AliasRow> {
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

/// The names of ours that have aliases, as the table writes them.
#[cfg(test)]
pub(super) fn with_aliases() -> impl Iterator<Item = &'static str> {
    aliases::ROWS.iter().map(|(name, _)| *name)
}
