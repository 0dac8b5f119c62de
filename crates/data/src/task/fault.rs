//! Faults of a row before its place is known, and values of rows in messages.

use std::path::Path;

use serde_json::{Map, Value};
use xtrain_checkpoint::first_few;

use crate::error::DataError;

/// A fault of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RowFault {
    pub(super) problem: String,
    pub(super) advice: String,
}

impl RowFault {
    pub(super) fn new(problem: impl Into<String>, advice: impl Into<String>) -> RowFault {
        RowFault { problem: problem.into(), advice: advice.into() }
    }

    /// The error for a row of the file `path`.
    pub(super) fn into_error(self, path: &Path, location: String) -> DataError {
        DataError::input(path, location, self.problem, self.advice)
    }
}

/// The result of reading a row.
pub(super) type RowResult<T> = std::result::Result<T, RowFault>;

/// The beginning of a text, quoted, on one line.
pub(super) fn shown(text: &str) -> String {
    const CHARACTERS: usize = 40;
    match text.char_indices().nth(CHARACTERS) {
        Some((end, _)) => format!("{:?}...", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// The keys of an object, quoted.
pub(super) fn keys(row: &Map<String, Value>) -> String {
    const KEYS: usize = 8;
    match row.is_empty() {
        true => "no keys".to_owned(),
        false => first_few(row.keys().map(|key| shown(key)), KEYS),
    }
}

/// The kind of a value, with an article.
pub(super) fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) => format!("the string {}", shown(text)),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}
